"""Share table: which shares of a batch the replicas have in which iteration. The same in the daemon and every worker.

first iteration   0           120          180
shares            0.5 0.5     0.65 0.35    0.7 0.3        iteration 150 has 0.65 and 0.35
"""

from __future__ import annotations

from collections.abc import Sequence

KEPT = 16  # rows; shares change no faster than they are measured, so the oldest are long past


class ShareTable:
    """shares: at the start, one number for each replica. One thread may set while others look up."""

    def __init__(self, shares: Sequence[float]) -> None:
        self._rows: tuple[tuple[int, tuple[float, ...]], ...] = ((0, tuple(shares)),)  # replaced whole, never changed

    def set(self, first: int, shares: Sequence[float]) -> None:
        """From iteration `first` on; it must lie behind all that were set before."""
        assert first >= self._rows[-1][0], (first, self._rows[-1])
        self._rows = (*self._rows[1 - KEPT :], (first, tuple(shares)))

    def of(self, iteration: int) -> tuple[float, ...]:
        rows = self._rows
        for first, shares in reversed(rows):
            if first <= iteration:
                return shares
        return rows[0][1]
