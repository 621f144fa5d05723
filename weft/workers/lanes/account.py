"""Account: where a lane's time went, as rows, and its reports.

Stamps are contiguous: one row ends where the next one starts. What is neither a task nor a wait for an input is
reporting, or waiting for the daemon: stall_dispatch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from weft.plan.kinds import MODE_INDEX
from weft.plan.rows import pack
from weft.workers.compute.measured import Measured

REPORT_SECONDS = 0.5  # what `weft top` and a follower can see; each report takes its core from a lane for a moment
ADJUSTED_REPORT_SECONDS = 0.1  # of a job whose shares or ways follow from what is reported
LEAST_REPORT_NS = 1_000_000  # between two that ask for more: tasks that take no time are told of together, and not each
# half of what is left of them
MIN_STALL_NS = 2_000  # a shorter wait is the cost of looking, and stays with the task
DISPATCH = MODE_INDEX["stall_dispatch"]

Send = Callable[[dict[str, Any]], None]


class Account:
    """seconds: between reports. stamps: False makes no rows, so nobody knows where the time went: for measuring what
    rows cost."""

    def __init__(
        self, lane: str, measured: Measured, send: Send, *, seconds: float = REPORT_SECONDS, stamps: bool = True
    ) -> None:
        self._lane = lane
        self._measured = measured
        self._send = send
        self._every = int(seconds * 1e9)
        self._stamps = stamps
        self._rows: list[int] = []
        self._reported = 0  # tasks
        self.due_ns = 0  # when to report at the latest
        self.asks_ns = 0  # from when on more may be asked for
        self.stamp = 0  # the end of the last row

    def begin(self) -> None:
        """With the first work: the wait for it was for other workers' set-up."""
        self.stamp = time.monotonic_ns()
        self.due_ns = self._next_due(self.stamp)

    def row(self, mode: int, task: int, iteration: int, waited_for: int, end: int) -> None:
        if self._stamps:
            self._rows += (mode, task, iteration, waited_for, self.stamp, end)
        self.stamp = end

    def stall(self, end: int, mode: int = DISPATCH, task: int = -1, iteration: int = -1, waited_for: int = -1) -> None:
        if end - self.stamp >= MIN_STALL_NS:
            self.row(mode, task, iteration, waited_for, end)

    def report(self, done: int) -> None:
        """Tells the daemon of the tasks that are over, so many in all, and what they measured."""
        count, self._reported = done - self._reported, done
        records, values = pack(self._rows), self._measured.take()
        self._send({"type": "report", "lane": self._lane, "count": count, "records": records, "values": values})
        self._rows.clear()
        now = time.monotonic_ns()
        self.asks_ns, self.due_ns = now + LEAST_REPORT_NS, self._next_due(now)

    def report_rest(self, done: int) -> None:
        """Where more are over than were told of."""
        if done > self._reported:
            self.report(done)

    def _next_due(self, now: int) -> int:
        """The same moment in all workers, so that the daemon wakes once for all lanes."""
        return (now // self._every + 1) * self._every
