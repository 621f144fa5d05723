"""A lane: takes its tasks in order, waits for their inputs, runs them, posts them, stamps every instant.

    queue ─▶ [wait for each input] ─▶ run ─▶ post ─▶ next         on the host: weft.workers.lanes.host_lane
             stall_<cause>            <kind>                      on an accelerator: weft.workers.lanes.stream_lane

The lane reports in batches: when half of what it was sent is over or all of it (the daemon must send more), and
otherwise every REPORT_SECONDS, so that a fast job does not spend its cores on messages.
"""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

from weft.transport.memory.board import Aborted
from weft.workers.lanes.account import Account, Send
from weft.workers.lanes.attempt import Attempt
from weft.workers.lanes.operation import Operation
from weft.workers.lanes.queue import Inbox, Interrupted, TaskQueue


class LaneLoop(ABC):
    """stamps: see Account. reach: see weft.workers.profiling.profiler; called before each task."""

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
        self._attempt = attempt
        self._board = attempt.boards[name]
        self._operations = operations
        self._queue = TaskQueue()
        self._account = Account(name, attempt.measured[name], send, stamps=stamps)
        self._reach = reach

    def run(self, inbox: Inbox) -> None:
        """Runs what the inbox brings, until it brings None or the attempt is aborted. Raises what user code raises."""
        queue, run_task = self._queue, self._run_task if self._reach is None else self._run_reached
        tasks = queue.tasks
        with contextlib.suppress(Aborted, Interrupted):
            queue.take(inbox)
            self._account.begin()
            while True:
                if not tasks or not inbox.empty():
                    queue.take(inbox)
                run_task(*tasks.popleft())

    def _run_reached(self, index: int, task: int, taken_ns: int) -> None:
        assert self._reach is not None
        self._run_task(index, task, time.monotonic_ns() if self._reach(index) else taken_ns)

    @abstractmethod
    def _run_task(self, index: int, task: int, taken_ns: int) -> None:
        """taken_ns: when it came; until then the lane had nothing to do but for the daemon."""

    def _over(self, now: int) -> None:
        """One more task is."""
        queue = self._queue
        queue.done += 1
        if queue.taken - queue.done <= queue.low or now > self._account.due_ns:
            self._report()

    def _report(self) -> None:
        queue = self._queue
        self._account.report(queue.done)
        queue.low = (queue.taken - queue.done) // 2
