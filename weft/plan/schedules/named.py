"""Named schedules: a function for each, from the numbers of stages and of microbatches to a schedule.

Four microbatches on two stages, forwards as digits and backwards as letters:

    model-parallel  stage 0  0 . . a 1 . . b ...     1f1b        stage 0  0 1 . a 2 b 3 c . d
                    stage 1  . 0 a . . 1 b .                     stage 1  . 0 a 1 b 2 c 3 d
    gpipe           stage 0  0 1 2 3 . . a b c d     last-stage  stage 0  0 1 2 a 3 b . c . d
                    stage 1  . 0 1 2 3 a b c d                   stage 1  . 0 a 1 b 2 c 3 d

Backwards run in microbatch order in all of them, so gradients are accumulated in the order of the plain loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from weft.plan.kinds import Kind
from weft.plan.schedules.schedule import Pass, Schedule


def model_parallel(num_stages: int, num_microbatches: int) -> Schedule:
    """One microbatch after the other, forward and back: one stage computes at a time."""
    return _each_stage(num_stages, lambda stage: _in_turns(stage, num_microbatches, warmup=0))


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards (Huang et al., GPipe, NeurIPS 2019, section 2.3)."""
    return _each_stage(num_stages, lambda stage: _in_turns(stage, num_microbatches, warmup=num_microbatches))


def one_forward_one_backward(num_stages: int, num_microbatches: int) -> Schedule:
    """Warm-up forwards, as many as stages follow, then one forward and one backward in turn (Narayanan et al.,
    PipeDream-flush, ICML 2021)."""
    return _each_stage(num_stages, lambda s: _in_turns(s, num_microbatches, warmup=num_stages - s - 1))


def last_stage(num_stages: int, num_microbatches: int) -> Schedule:
    """A microbatch that reaches the last stage goes back at once, and an earlier stage computes what has arrived until
    the first comes back (Ye et al., Hippie, ICPP 2021). On its way there and back a microbatch is two passes for each
    stage that follows: so many more have arrived by then. After that, one comes for each that goes."""
    return _each_stage(num_stages, lambda s: _in_turns(s, num_microbatches, warmup=2 * (num_stages - s - 1)))


def zero_bubble(num_stages: int, num_microbatches: int) -> Schedule:
    """As 1F1B, but a backward is two passes: the part that the stage before waits for runs at once, and the parameters'
    part of a microbatch as many microbatches later as stages stand before, where the stage would have waited (ZB-H1 of
    Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024). No stage has more in flight than the first, for which
    nobody waits: its backwards are whole."""

    def program(stage: int) -> Iterable[Pass]:
        for each in _in_turns(stage, num_microbatches, warmup=num_stages - stage - 1):
            if each.kind is Kind.FORWARD or stage == 0:
                yield each
                continue
            yield each._replace(kind=Kind.INPUT)
            if each.microbatch >= stage:
                yield Pass(stage, Kind.WEIGHT, each.microbatch - stage)
        for m in range(max(num_microbatches - stage, 0), num_microbatches) if stage else ():
            yield Pass(stage, Kind.WEIGHT, m)

    return _each_stage(num_stages, program)


SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {
    "model-parallel": model_parallel,
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "last-stage": last_stage,
    "zero-bubble": zero_bubble,
}


def _each_stage(num_stages: int, program: Callable[[int], Iterable[Pass]]) -> Schedule:
    """A worker for each."""
    return Schedule(tuple(tuple(program(stage)) for stage in range(num_stages)))


def _in_turns(stage: int, num_microbatches: int, warmup: int) -> Iterable[Pass]:
    """So many forwards, then a forward and a backward in turn while there are any."""
    for m in range(min(warmup, num_microbatches)):
        yield Pass(stage, Kind.FORWARD, m)
    for m in range(num_microbatches):
        if m + warmup < num_microbatches:
            yield Pass(stage, Kind.FORWARD, m + warmup)
        yield Pass(stage, Kind.BACKWARD, m)
