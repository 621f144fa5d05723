"""A lane: takes its tasks in order, waits on the board for their inputs, runs them, posts them, stamps every instant.

    queue ─▶ [wait for each input] ─▶ run ─▶ post ─▶ next         stamps are contiguous: one row ends, the next starts
             stall_<cause>            <kind>                       what is neither is reporting: stall_dispatch

The lane reports in batches: when its queue runs dry or low (the daemon must send more), and otherwise every
REPORT_SECONDS, so that a fast job does not spend its cores on messages.
"""

from __future__ import annotations

import collections
import contextlib
import queue
import time
from collections.abc import Callable, Mapping
from typing import Any

from weft.plan.error_places import within
from weft.plan.kinds import MODE_INDEX
from weft.plan.rows import pack
from weft.transport.memory.board import Aborted
from weft.workers.lanes.attempt import Attempt
from weft.workers.lanes.operation import Operation

REPORT_SECONDS = 0.1  # what `weft top` and a follower can see; at most ten messages a second from a lane
MIN_STALL_NS = 2_000  # a shorter wait is the cost of looking, and stays with the task

_DISPATCH = MODE_INDEX["stall_dispatch"]

Work = list[tuple[int, list[int]]]
Send = Callable[[dict[str, Any]], None]


class Interrupted(Exception):
    """The control thread has another message for this thread."""


class Lane:
    """inbox of `run`: runs of (iteration, tasks) from the control thread; None when it has something else to do.

    stamps: False makes no rows, so nobody knows where the time went: for measuring what rows cost. reach: see
    weft.workers.profiling.profiler; called before each task.
    """

    def __init__(
        self,
        name: str,
        attempt: Attempt,
        operations: Mapping[int, Operation],
        send: Send,
        *,
        stamps: bool = True,
        reach: Callable[[int], bool] | None = None,
    ) -> None:
        self._name = name
        self._stamps = stamps
        self._reach = reach
        self._attempt = attempt
        self._board = attempt.boards[name]
        self._operations = operations
        self._send = send
        self._stalls = {op.task: tuple(MODE_INDEX[f"stall_{c}"] for _, _, c in op.waits) for op in operations.values()}
        self._queue: collections.deque[tuple[int, int]] = collections.deque()
        self._rows: list[int] = []
        self._finished = 0
        self._stamp = 0
        self._reported_at = 0

    def run(self, inbox: queue.SimpleQueue[Work | None]) -> None:
        """Runs what the inbox brings, until it brings None or the attempt is aborted. Raises what user code raises."""
        with contextlib.suppress(Aborted, Interrupted):
            low = self._take(inbox)
            self._rows.clear()  # the account begins with the first work: the wait for it was for other workers' set-up
            self._reported_at = self._stamp
            run_task = self._run_task if self._reach is None else self._run_reached
            while True:
                if len(self._queue) <= low:
                    if self._finished:
                        self._report()
                    low = self._take(inbox)
                run_task(*self._queue.popleft())
                if self._stamp - self._reported_at > REPORT_SECONDS * 1e9:
                    self._report()

    def _take(self, inbox: queue.SimpleQueue[Work | None]) -> int:
        """Empties the inbox into the queue, waiting only if there is nothing to run. Returns the new low-water mark."""
        while True:
            try:
                work = inbox.get(block=not self._queue)
            except queue.Empty:
                break
            if work is None:
                raise Interrupted
            for iteration, tasks in work:
                self._queue.extend((iteration, task) for task in tasks)
        self._stamp_row(_DISPATCH, -1, -1, -1)
        return len(self._queue) // 2 if len(self._queue) > 1 else 0

    def _run_reached(self, index: int, task: int) -> None:
        assert self._reach is not None
        if self._reach(index):
            self._stamp_row(_DISPATCH, -1, -1, -1)
        self._run_task(index, task)

    def _run_task(self, index: int, task: int) -> None:
        operation = self._operations[task]
        attempt = self._attempt
        iteration = attempt.iteration(index)
        runs = operation.runs(iteration)
        if runs:
            board = self._board
            words = board.words
            skipped = () if operation.skips is None else operation.skips(iteration)
            for number, (source, distance, cause) in enumerate(operation.waits):
                if number in skipped:
                    continue
                needed = index - distance
                if operation.update_needed is not None and cause == "update":
                    needed = operation.update_needed(iteration)
                if words[1 + source] < needed:
                    board.wait(source, needed)
                    self._stamp_row(self._stalls[task][number], task, index, source)
            with within(lambda: operation.place_in(iteration)):
                operation.run(iteration)
        if operation.wakes:
            self._board.post(task, index)
        else:
            self._board.post_quietly(task, index)
        self._finished += 1
        if runs:
            self._stamp_row(MODE_INDEX[operation.mode], task, index, -1)

    def _stamp_row(self, mode: int, task: int, iteration: int, waited_for: int) -> None:
        now = time.monotonic_ns()
        if mode != _DISPATCH or now - self._stamp >= MIN_STALL_NS:
            if self._stamps:
                self._rows += (mode, task, iteration, waited_for, self._stamp, now)
            self._stamp = now

    def _report(self) -> None:
        self._send(report_of(self._name, self._finished, self._rows, self._attempt))
        self._rows.clear()
        self._finished = 0
        self._reported_at = time.monotonic_ns()
        self._stamp_row(_DISPATCH, -1, -1, -1)


def report_of(lane: str, count: int, rows: list[int], attempt: Attempt) -> dict[str, Any]:
    """What the daemon is told of so many tasks that are over, and what they measured."""
    values = attempt.measured[lane].take()
    return {"type": "report", "lane": lane, "count": count, "records": pack(rows), "values": values}
