"""Iteration table: a value that changes as a job runs, by the first iteration that has it.

One thread may set while others look up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

KEPT = 16  # rows; values change no faster than they are measured, so the oldest are long past

Value = TypeVar("Value")


class IterationTable(Generic[Value]):
    def __init__(self, value: Value) -> None:
        """value: at the start."""
        self._rows: tuple[tuple[int, Value], ...] = ((0, value),)  # replaced whole, never changed

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


class ShareTable(IterationTable[tuple[float, ...]]):
    """shares: at the start, one number for each replica."""

    def __init__(self, shares: Sequence[float]) -> None:
        super().__init__(tuple(shares))

    def set(self, first: int, shares: Sequence[float]) -> None:
        """From iteration `first` on; it must lie behind all that were set before."""
        super().set(first, tuple(shares))


class RouteTable(IterationTable[frozenset[int]]):
    """local: the buckets at the start."""

    def __init__(self, local: Iterable[int]) -> None:
        super().__init__(frozenset(local))
