"""Schedules: pure functions that give the order of one stage's compute lane. A schedule is a value: print it, check it.

Four microbatches on two stages, forwards as digits and backwards as letters:

    gpipe   stage 0  0 1 2 3 . . a b c d      1f1b   stage 0  0 1 . a 2 b 3 c . d
            stage 1  . 0 1 2 3 a b c d               stage 1  . 0 a 1 b 2 c 3 d

Backwards run in microbatch order in both, so gradients are accumulated in the order of the plain loop.
"""

from __future__ import annotations

from collections.abc import Callable

from weft.plan.kinds import Kind

Order = tuple[tuple[Kind, int], ...]


def gpipe(stage: int, num_stages: int, num_microbatches: int) -> Order:
    """All forwards, then all backwards (Huang et al., GPipe, NeurIPS 2019, section 2.3)."""
    del stage, num_stages  # every stage has the same order
    forwards = [(Kind.FORWARD, m) for m in range(num_microbatches)]
    return (*forwards, *((Kind.BACKWARD, m) for m in range(num_microbatches)))


def one_forward_one_backward(stage: int, num_stages: int, num_microbatches: int) -> Order:
    """Warm-up forwards, then one forward and one backward in turn (Narayanan et al., PipeDream-flush, ICML 2021)."""
    num_warmup = min(num_stages - stage - 1, num_microbatches)
    order = [(Kind.FORWARD, m) for m in range(num_warmup)]
    for m in range(num_microbatches):
        if m + num_warmup < num_microbatches:
            order.append((Kind.FORWARD, m + num_warmup))
        order.append((Kind.BACKWARD, m))
    return tuple(order)


def in_flight(schedule: str, stage: int, num_stages: int, num_microbatches: int) -> int:
    """The most microbatches of a stage whose forward has run and whose backward has not: its slot depth."""
    waiting = most = 0
    for kind, _ in SCHEDULES[schedule](stage, num_stages, num_microbatches):
        waiting += 1 if kind is Kind.FORWARD else -1
        most = max(most, waiting)
    return most


SCHEDULES: dict[str, Callable[[int, int, int], Order]] = {"gpipe": gpipe, "1f1b": one_forward_one_backward}
