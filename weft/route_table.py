"""Route table: which buckets devices update themselves in which iteration. The same in the daemon and every worker.

first iteration    0         140        300
buckets            0 1       1          none        iteration 200: devices update bucket 1, the host all others
"""

from __future__ import annotations

from collections.abc import Iterable

from weft.iteration_table import IterationTable


class RouteTable(IterationTable[frozenset[int]]):
    """local: the buckets at the start."""

    def __init__(self, local: Iterable[int]) -> None:
        super().__init__(frozenset(local))
