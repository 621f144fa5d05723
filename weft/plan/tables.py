"""Iteration table: a value that changes as a job runs, by the first iteration that has it; and what changes it.

One thread may set while others look up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

KEPT = 256  # rows; values change no faster than they are measured, and all since a snapshot may be told at once
NO_MORE = -1  # instead of a microbatch's number: the position and all after it in the iteration have none

Grant = tuple[int, int, int, int]  # replica, iteration, position, number of the microbatch or NO_MORE
Value = TypeVar("Value")


class Adjustment(NamedTuple):
    """What is told of a running job's iterations: one of the nine."""

    shares: Sequence[float] = ()  # of a batch, by replica
    local: Sequence[int] | None = None  # the buckets, of those that may go either way, that devices update themselves
    grants: Sequence[Grant] = ()  # of replicas that steal: the microbatches at their next positions
    snapshot: int | None = None  # the place to which the iteration, which learns, copies what it has come to
    halts: bool = False  # whether the attempt ends behind the iteration, which has a snapshot; the job goes on from it
    ends: int | None = None  # the iterations after which the job ends, fewer than were planned
    compared: bool = False  # whether what the iteration's tasks make is told, to be compared with another run's
    measured: float | None = None  # what schedulers that take a value are stepped with before the iteration's update
    changes: bytes = (
        b""  # what the user's function has changed beside parameters, as weft.workers.epochs.changes packs it
    )


class IterationTable(Generic[Value]):
    def __init__(self, value: Value) -> None:
        """value: at the start."""
        self._rows: tuple[tuple[int, Value], ...] = ((0, value),)  # replaced whole, never changed

    @property
    def newest(self) -> tuple[int, Value]:
        """The value that was set last, behind its first iteration, which may be still to come."""
        return self._rows[-1]

    def set(self, first: int, value: Value) -> None:
        """From iteration `first` on; it must lie behind all that were set before."""
        assert first >= self._rows[-1][0], (first, self._rows[-1])
        self._rows = (*self._rows[1 - KEPT :], (first, value))

    def of(self, iteration: int) -> Value:
        rows = self._rows
        for first, value in reversed(rows):
            if first <= iteration:
                return value
        return rows[0][1]
