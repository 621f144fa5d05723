"""Share table: which shares of a batch the replicas have in which iteration. The same in the daemon and every worker.

first iteration   0           120          180
shares            0.5 0.5     0.65 0.35    0.7 0.3        iteration 150 has 0.65 and 0.35
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.iteration_table import IterationTable


class ShareTable(IterationTable[tuple[float, ...]]):
    """shares: at the start, one number for each replica."""

    def __init__(self, shares: Sequence[float]) -> None:
        super().__init__(tuple(shares))

    def set(self, first: int, shares: Sequence[float]) -> None:
        """From iteration `first` on; it must lie behind all that were set before."""
        super().set(first, tuple(shares))
