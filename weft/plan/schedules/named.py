"""Named schedules: a function for each, from the numbers of stages and of microbatches to a schedule; from the number
of workers, too, where these have several stages.

Four microbatches on two stages, forwards as digits and backwards as letters:

    model-parallel  stage 0  0 . . a 1 . . b ...     1f1b        stage 0  0 1 . a 2 b 3 c . d
                    stage 1  . 0 a . . 1 b .                     stage 1  . 0 a 1 b 2 c 3 d
    gpipe           stage 0  0 1 2 3 . . a b c d     last-stage  stage 0  0 1 2 a 3 b . c . d
                    stage 1  . 0 1 2 3 a b c d                   stage 1  . 0 a 1 b 2 c 3 d

Backwards run in microbatch order in all of them, so gradients are accumulated in the order of the plain loop.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count

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


def interleaved(num_workers: int, num_stages: int, num_microbatches: int) -> Schedule:
    """Worker w of p has the stages w, w + p, ..., so a microbatch passes each worker several times, and what a worker
    waits for at the start and at the end of an iteration is a stage and no longer all that it has (Narayanan et al.,
    Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM, SC 2021, section 2.2). p
    microbatches go through one stage of a worker before the next one's turn. Of a last group of fewer the others are
    left out."""
    num_groups = -(-num_microbatches // num_workers)

    def in_groups(kind: Kind, stages: Sequence[int]) -> list[Pass]:
        groups = (range(group * num_workers, (group + 1) * num_workers) for group in range(num_groups))
        return [Pass(stage, kind, m) for group in groups for stage in stages for m in group]

    def program(worker: int) -> Iterable[Pass]:
        stages = range(worker, num_stages, num_workers)
        there, back = in_groups(Kind.FORWARD, stages), in_groups(Kind.BACKWARD, stages[::-1])
        warmup = 2 * (num_workers - worker - 1) + (len(stages) - 1) * num_workers
        yield from there[:warmup]
        for place, each in enumerate(back):
            yield from there[warmup + place : warmup + place + 1]
            yield each

    return _of_each_worker(num_workers, program, num_microbatches)


def zero_bubble_v(num_workers: int, num_stages: int, num_microbatches: int) -> Schedule:
    """Worker w of p has the stages w and 2p - 1 - w, so the first and the last stage are one worker's, and backwards
    are in two parts. Where a forward and each part of a backward take as long, no worker waits between its first pass
    and its last, and none keeps more than the first one does under 1F1B (ZB-V of Qi et al., Zero Bubble Pipeline
    Parallelism, ICLR 2024, section 6). That takes 2p - 1 microbatches; of fewer the others are left out. For the
    first stage's backwards nobody waits: they are whole."""
    enough = max(num_microbatches, 2 * num_workers - 1)

    def program(worker: int) -> Iterable[Pass]:
        return _there_and_back(worker, num_workers, enough) if num_stages > 1 else _in_turns(0, enough, warmup=0)

    return _of_each_worker(num_workers, program, num_microbatches)


def _there_and_back(worker: int, num_workers: int, num_microbatches: int) -> Iterable[Pass]:
    """0: the worker's stage on the way to the last worker. 1: the one on the way from there."""
    stages, following = (worker, 2 * num_workers - 1 - worker), num_workers - worker
    f0, i0, w0 = ((stages[0], kind) for kind in (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT))
    f1, i1, w1 = ((stages[1], kind) for kind in (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT))
    back0 = [i0, w0] if worker else [(0, Kind.BACKWARD)]
    steps = [
        *[f0] * (2 * following - 1),
        *[f1, f0] * worker,
        *[f1, i1, w1] * following,
        *[f0, *back0, f1, i1, w1] * (num_microbatches - num_workers - following + 1),
        *[*back0, f1, i1, w1] * (following - 1),
        *[i0, i1] * worker,
        *back0 * following,
        *[w1] * worker,
        *[w0] * worker,
    ]
    numbers: defaultdict[tuple[int, Kind], Iterator[int]] = defaultdict(count)
    return [Pass(*step, next(numbers[step])) for step in steps]


SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {
    "model-parallel": model_parallel,
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "last-stage": last_stage,
    "zero-bubble": zero_bubble,
}
SEVERAL_STAGES: dict[str, Callable[[int, int, int], Schedule]] = {  # in a worker; how many may be asked for or not
    "interleaved": interleaved,
    "zero-bubble-v": zero_bubble_v,
}


def _each_stage(num_stages: int, program: Callable[[int], Iterable[Pass]]) -> Schedule:
    """A worker for each."""
    return Schedule(tuple(tuple(program(stage)) for stage in range(num_stages)))


def _of_each_worker(num_workers: int, program: Callable[[int], Iterable[Pass]], num_microbatches: int) -> Schedule:
    """Without the microbatches that are not there."""
    return Schedule(
        tuple(
            tuple(each for each in program(worker) if each.microbatch < num_microbatches)
            for worker in range(num_workers)
        )
    )


def _in_turns(stage: int, num_microbatches: int, warmup: int) -> Iterable[Pass]:
    """So many forwards, then a forward and a backward in turn while there are any."""
    for m in range(min(warmup, num_microbatches)):
        yield Pass(stage, Kind.FORWARD, m)
    for m in range(num_microbatches):
        if m + warmup < num_microbatches:
            yield Pass(stage, Kind.FORWARD, m + warmup)
        yield Pass(stage, Kind.BACKWARD, m)
