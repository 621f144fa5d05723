"""Interval accounting: where the seconds of one job's lanes went, from the rows that its workers stamp.

A row says that a lane was in one mode from start_ns to end_ns (CLOCK_MONOTONIC). The rows of a lane come in order and
never overlap, so of a lane's wall time every nanosecond is either in exactly one mode or in none:

    compute  ├ forward ┤├ stall_gradient ┤├ backward ┤··gap··├ idle ┤
             └──────────────────────── wall ────────────────────────┘     residual = wall - rows = the gaps

Sums are whole nanoseconds, so nothing is lost to rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Final, NoReturn, TypedDict

from weft.plan.kinds import FIRST_STALL, MODE_INDEX, MODES, is_compute_lane
from weft.plan.rows import Row

NANOSECONDS: Final = 1_000_000_000

_DATA: Final = MODE_INDEX["stall_data"]
_NUM_MODES: Final = len(MODES)

LaneSeconds = dict[str, dict[str, float]]


class AccountingError(ValueError):
    """Rows that cannot be a lane's history: a bug of whoever stamped them. The text tells the lane and both rows."""


class Percents(TypedDict):
    """Percent of the compute lanes' time in an interval: in any stall, and in waiting for data alone."""

    stall_percent: float
    data_percent: float


class JobAccount:
    """One job's lanes. Lanes are named `<worker>/<lane>`, for example "0/compute".

    Each `take_` method has a baseline of its own, so a counter and a follower don't disturb each other.
    """

    def __init__(self) -> None:
        self._lanes: dict[str, _LaneAccount] = {}

    def add(self, lane: str, rows: Iterable[Row]) -> None:
        """Accounts for rows as they lie in a report.

        Raises AccountingError at the first row that overlaps the one before, goes backwards or has no known mode; the
        rows before it are counted.
        """
        account = self._lanes.get(lane)
        if account is None:
            rows = iter(rows)
            first = next(rows, None)
            if first is None:
                return  # a lane without rows is not there
            account = self._lanes[lane] = _LaneAccount(lane)
            rows = chain([first], rows)
        account.add(rows)

    def lane_seconds(self) -> LaneSeconds:
        """Seconds by lane and mode since the job began; modes that a lane was never in are absent."""
        return {name: account.seconds() for name, account in self._lanes.items()}

    def mode_ns(self, lane: str) -> Sequence[int]:
        """Nanoseconds since the job began, by a mode's index in MODES; all 0 for a lane without rows."""
        account = self._lanes.get(lane)
        return account.mode_ns if account is not None else (0,) * len(MODES)

    def wall_seconds(self, lane: str) -> float:
        """From the lane's first start to its last end. Raises KeyError for a lane without rows."""
        return self._lanes[lane].wall_ns() / NANOSECONDS

    def residual_seconds(self, lane: str) -> float:
        """The part of wall_seconds that no row covers. Raises KeyError for a lane without rows."""
        account = self._lanes[lane]
        return (account.wall_ns() - sum(account.mode_ns)) / NANOSECONDS

    def take_seconds(self) -> LaneSeconds:
        """What lane_seconds has grown by since the last call, for counters; what did not grow is absent."""
        grown = {name: account.take_seconds() for name, account in self._lanes.items()}
        return {name: seconds for name, seconds in grown.items() if seconds}

    def take_interval(self) -> Percents | None:
        """Shares of the compute lanes' time since the last call; None where no row has come since."""
        interval_ns = [0] * len(MODES)
        for account in self._lanes.values():
            if account.is_compute:
                interval_ns = [a + b for a, b in zip(interval_ns, account.take_interval_ns(), strict=True)]
        total_ns = sum(interval_ns)
        if total_ns == 0:
            return None
        return {
            "stall_percent": 100 * sum(interval_ns[FIRST_STALL:]) / total_ns,
            "data_percent": 100 * interval_ns[_DATA] / total_ns,
        }


class _LaneAccount:
    """Sums of one lane, by a mode's index in MODES. last_row is the last row accounted for, None before the first."""

    __slots__ = ("_interval_ns", "_taken_ns", "first_ns", "is_compute", "last_row", "mode_ns", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_compute = is_compute_lane(name)
        self.first_ns = 0
        self.last_row: Row | None = None
        self.mode_ns = [0] * len(MODES)
        self._taken_ns = [0] * len(MODES)
        self._interval_ns = [0] * len(MODES)

    def add(self, rows: Iterable[Row]) -> None:
        rows = iter(rows)
        last = self.last_row
        if last is None:
            last = next(rows, None)
            if last is None:
                return
            self._begin(last)
        mode_ns, num_modes, last_end = self.mode_ns, _NUM_MODES, last[5]
        for row in rows:  # the daemon's hottest loop: some 0.2 µs a row
            mode, _, _, _, start, end = row
            if not last_end <= start <= end or not 0 <= mode < num_modes:
                self.last_row = last
                self._refuse(row)
            mode_ns[mode] += end - start
            last_end = end
            last = row
        self.last_row = last

    def _begin(self, row: Row) -> None:
        mode, _, _, _, start, end = row
        if start > end or not 0 <= mode < _NUM_MODES:
            self._refuse(row)
        self.first_ns = start
        self.mode_ns[mode] += end - start
        self.last_row = row

    def _refuse(self, row: Row) -> NoReturn:
        mode, _, _, _, start, end = row
        if not 0 <= mode < _NUM_MODES:
            problem = f"has a mode that is none of {', '.join(MODES)}"
        elif start > end:
            problem = f"ends {start - end} ns before it starts"
        else:
            assert self.last_row is not None
            problem = f"starts {self.last_row[5] - start} ns before {_story(self.last_row)} ended"
        raise AccountingError(
            f"lane {self.name}: {_story(row)} {problem}; a lane's rows are in order and don't overlap"
        )

    def seconds(self) -> dict[str, float]:
        return {mode: ns / NANOSECONDS for mode, ns in zip(MODES, self.mode_ns, strict=True) if ns}

    def wall_ns(self) -> int:
        if self.last_row is None:
            raise KeyError(self.name)
        return self.last_row[5] - self.first_ns

    def take_seconds(self) -> dict[str, float]:
        grown = zip(MODES, self.mode_ns, self._taken_ns, strict=True)
        seconds = {mode: (ns - taken) / NANOSECONDS for mode, ns, taken in grown if ns > taken}
        self._taken_ns = self.mode_ns.copy()
        return seconds

    def take_interval_ns(self) -> list[int]:
        interval_ns = [ns - taken for ns, taken in zip(self.mode_ns, self._interval_ns, strict=True)]
        self._interval_ns = self.mode_ns.copy()
        return interval_ns


def _story(row: Row) -> str:
    mode, task, iteration, waited_for, start, end = row
    name = MODES[mode] if 0 <= mode < _NUM_MODES else repr(mode)
    waited = f" (waited for task {waited_for})" if waited_for >= 0 else ""
    return f"{name} of task {task} in iteration {iteration}{waited} from {start} to {end} ns"
