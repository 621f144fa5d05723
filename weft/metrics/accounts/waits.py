"""Waits: what each lane waited for, by cause and by the task whose output was missing. From the rows of its lanes."""

from __future__ import annotations

from collections.abc import Iterable

from weft.metrics.accounts.accounting import NANOSECONDS
from weft.plan.kinds import FIRST_STALL, MODES
from weft.plan.rows import Row

Key = tuple[str, int, int]  # lane, a mode's index in MODES, the task waited for or -1


class WaitAccount:
    """One job's stalls since it began."""

    def __init__(self) -> None:
        self._ns: dict[Key, int] = {}

    def add(self, lane: str, rows: Iterable[Row]) -> None:
        """Accounts for rows as they lie in a report: modes by their index in MODES."""
        sums = self._ns
        for mode, _, _, waited_for, start, end in rows:
            if mode >= FIRST_STALL:
                key = lane, mode, waited_for
                sums[key] = sums.get(key, 0) + end - start

    def seconds(self) -> list[tuple[str, str, int, float]]:
        """(lane, cause, task waited for or -1, seconds), the longest first."""
        waits = [
            (lane, MODES[mode].removeprefix("stall_"), task, ns / NANOSECONDS)
            for (lane, mode, task), ns in self._ns.items()
        ]
        return sorted(waits, key=lambda wait: (-wait[3], wait[:3]))
