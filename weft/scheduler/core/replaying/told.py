"""What is told of a replay, to the core and by it. Values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayDue:
    """Enough time has passed since the last one for another one to cost little."""

    job: str
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskDigested:
    """A worker's task has told what it has made, or found, in the iteration that is run again."""

    job: str
    attempt: int
    iteration: int
    task: int
    replica: int | None  # whose gradient a SYNC has found; None: what the task itself has made
    digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordReplay:
    """It is over."""

    job: str
    is_same: bool  # all runs of it had the same bits
    message: str  # for the job's log
    seconds: float  # that it took, from the end of the first run on
