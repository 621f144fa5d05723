"""Stops: when a worker's process was stopped (SIGSTOP, a debugger), and its lanes' rows with that time cut out.

The process itself stamps nothing while it is stopped; its parent sees both ends. A row that spans a stop is one of the
task before it, `idle`, and one of the task after it:

    ├──────────── backward ────────────┤   ▶   ├ backward ┤├──── idle ────┤├ backward ┤
               stopped ^        ^ continued
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from weft.plan.kinds import MODE_INDEX
from weft.plan.rows import Row

IDLE: Final = MODE_INDEX["idle"]
KEPT: Final = 64  # stops of a worker; rows come within a second or so of their end


class Stops:
    """Of one job's workers. Times are nanoseconds of CLOCK_MONOTONIC."""

    def __init__(self) -> None:
        self._spans: dict[str, list[tuple[int, int | None]]] = {}

    def stop(self, worker: str, at: int) -> None:
        spans = self._spans.setdefault(worker, [])
        if not spans or spans[-1][1] is not None:
            spans.append((at, None))
            del spans[:-KEPT]

    def resume(self, worker: str, at: int) -> None:
        """Nothing where the stop was too short to be seen."""
        spans = self._spans.get(worker, [])
        if spans and spans[-1][1] is None:
            spans[-1] = spans[-1][0], at

    def cut(self, worker: str, rows: list[Row]) -> list[Row]:
        """The same list where nothing is to be cut out. A stop that still lasts ends with the rows."""
        spans = self._spans.get(worker)
        if not spans or not rows or (spans[-1][1] or rows[-1][5]) <= rows[0][4]:
            return rows
        closed = [(start, rows[-1][5] if end is None else end) for start, end in spans]
        return [part for row in rows for part in _parts(row, closed)]


def _parts(row: Row, spans: Sequence[tuple[int, int]]) -> list[Row]:
    mode, task, iteration, waited_for, start, end = row
    parts: list[Row] = []
    for stopped, resumed in spans:
        first, last = max(stopped, start), min(resumed, end)
        if first < last:
            if start < first:
                parts.append((mode, task, iteration, waited_for, start, first))
            parts.append((IDLE, task, iteration, -1, first, last))
            start = last
    if start < end or not parts:
        parts.append((mode, task, iteration, waited_for, start, end))
    return parts
