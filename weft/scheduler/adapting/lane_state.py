"""Lane state: how far a lane of a running job has come, and what it may be sent. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class LaneState:
    """sent, finished: tasks of the lane's endless program (its tasks of iteration 0, of iteration 1, ...). allowed: how
    many of them may be sent so far; None where the window alone says it."""

    worker: str
    name: str
    program: tuple[int, ...]
    total: int
    sent: int = 0
    finished: int = 0
    allowed: int | None = None


def work_between(program: tuple[int, ...], first: int, last: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Positions first .. last - 1 of the lane's endless program, by iteration."""
    length = len(program)
    iteration, start = divmod(first, length)
    if last <= (iteration + 1) * length:
        return ((iteration, program[start : start + last - first]),)
    runs = []
    while first < last:
        iteration, start = divmod(first, length)
        taken = program[start : start + last - first]
        runs.append((iteration, taken))
        first += len(taken)
    return tuple(runs)
