"""Lane state: how far a lane of a running job has come, and what it may be sent. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class LaneState:
    worker: str
    name: str
    program: tuple[int, ...]  # its tasks of one iteration; the endless program is that of iteration 0, of 1, ...
    total: int  # tasks of the job
    sent: int = 0  # tasks of the endless program
    finished: int = 0
    allowed: int | None = None  # to be sent so far; None where the window alone says it
    ahead: int = 0  # tasks that it may be sent beyond those that are finished
    heard: float = 0.0  # when the daemon heard of the newest of those that are finished, in seconds

    @property
    def done(self) -> int:
        """Iterations, of the job."""
        return self.finished // len(self.program)


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
