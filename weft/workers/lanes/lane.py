"""A lane: takes its tasks in order, waits for their inputs, runs them, posts them, stamps every instant.

    queue ─▶ [wait for each input] ─▶ run ─▶ post ─▶ next         on the host: weft.workers.lanes.host_lane
             stall_<cause>            <kind>                      on an accelerator: weft.workers.lanes.stream_lane
                                                                  in no fixed order: weft.workers.lanes.arrivals

The lane reports in batches: when most of what it was sent is over or all of it (the daemon must send more), and
otherwise every REPORT_SECONDS, so that a fast job does not spend its cores on messages. Where each iteration is copied,
also behind each. However it ends, it reports what was over.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from weft.plan.schedules.dynamic import PassOrder
from weft.transport.memory.board import Aborted
from weft.workers.lanes.account import ADJUSTED_REPORT_SECONDS, REPORT_SECONDS, Account, Send
from weft.workers.lanes.arrivals import Arrivals
from weft.workers.lanes.attempt import Attempt
from weft.workers.lanes.operation import Operation, Wait
from weft.workers.lanes.queue import LAST_PART, LAST_PART_STEALING, Inbox, Interrupted, TaskQueue


class Observer(Protocol):
    """Who looks at the lanes of a worker as they run: weft.workers.profiling.profiler."""

    def reach(self, iteration: int) -> bool:
        """Called before each task of the main lane; whether it has kept the lane waiting."""

    def through(self, lane: str, run: Callable[..., None]) -> Callable[..., None]:
        """What the lane is to run in the place of this."""

    def within(self, lane: str) -> contextlib.AbstractContextManager[object]:
        """For what the lane computes behind a task."""


class LaneLoop(ABC):
    """stamps: see Account. order: of a lane whose passes begin as they are ready."""

    _may_owe = False  # a report that asks for more, until it waits for another lane

    def __init__(
        self,
        name: str,
        attempt: Attempt,
        operations: Mapping[int, Operation],
        send: Send,
        *,
        stamps: bool = True,
        observer: Observer | None = None,
        is_main: bool = False,
        order: PassOrder | None = None,
    ) -> None:
        if observer is not None:
            operations = {
                task: dataclasses.replace(each, run=observer.through(name, each.run))
                for task, each in operations.items()
            }
        self._name = name
        self._attempt = attempt
        self._board = attempt.boards[name]
        self._operations = operations
        self._program = tuple(operations)
        self._queue = TaskQueue(LAST_PART_STEALING if attempt.course.steals else LAST_PART)
        seconds = ADJUSTED_REPORT_SECONDS if attempt.is_adjusted else REPORT_SECONDS
        self._account = Account(name, attempt.measured[name], send, seconds=seconds, stamps=stamps)
        self._reports_iterations = attempt.reports_iterations
        self._owes_report = False  # that is due, but comes right behind another
        self._awaited: int | None = None  # the task of another lane that it sleeps for
        self._inbox: Inbox  # set by run
        attempt.goes_on[name] = self.go_on
        self._reach = observer.reach if observer is not None and is_main else None
        self._behind_a_task = contextlib.nullcontext() if observer is None else observer.within(name)
        self._arrivals: Arrivals | None = None
        if order is not None:
            self._arrivals = Arrivals(order, self._board, self._queue, self._account, self._first_missing)
            self._may_owe = False  # these wait elsewhere

    def run(self, inbox: Inbox) -> None:
        """Runs what the inbox brings, until it brings None or the attempt is aborted. Raises what user code raises."""
        try:
            self._run_all(inbox)
        finally:
            if not self._board.stranded:  # its parent reports
                self._account.report_rest(self._queue.done)

    def _run_all(self, inbox: Inbox) -> None:
        queue, run_task = self._queue, self._run_task if self._reach is None else self._run_reached
        tasks, arrivals = queue.tasks, self._arrivals
        self._inbox = inbox
        with contextlib.suppress(Aborted, Interrupted):
            queue.take(inbox)
            self._account.begin()
            while True:
                if not tasks or not inbox.empty():
                    queue.take(inbox)
                run_task(*(tasks.popleft() if arrivals is None else arrivals.take(inbox)))

    def _run_reached(self, index: int, task: int, taken_ns: int) -> None:
        assert self._reach is not None
        if self._owes_report:  # it may be kept waiting there
            self._report()
        self._run_task(index, task, time.monotonic_ns() if self._reach(index) else taken_ns)

    @abstractmethod
    def _run_task(self, index: int, task: int, taken_ns: int) -> None:
        """taken_ns: when it came; until then the lane had nothing to do but for the daemon."""

    def go_on(self) -> None:
        """From inside a task: it is over, and what is left of its call is the next one's. Errors: Aborted, and those of
        TaskQueue."""
        self._end_task()
        if not self._queue.tasks or not self._inbox.empty():
            self._queue.take(self._inbox)
        self._begin_task(*self._queue.tasks.popleft())

    @abstractmethod
    def _begin_task(self, index: int, task: int, taken_ns: int) -> bool:
        """Until its inputs are there. Whether there is anything to run."""

    @abstractmethod
    def _end_task(self) -> None:
        """Of the one that was begun last."""

    def progress(self) -> dict[str, Any]:
        """For another thread: how far the lane is. done, taken: tasks of the endless program. seconds: since anything
        of it ended. task: the next one, begun or not; None where it was sent none. waits_for: what that has to wait for
        first; None where the lane is in it."""
        before = self._attempt.course.begins * len(self._program)
        done, taken, stamp = before + self._queue.done, before + self._queue.taken, self._account.stamp
        task, waits_for = self._at(done) if done < taken else (None, None)
        return {
            "lane": self._name,
            "done": done,
            "taken": taken,
            "seconds": max(0, time.monotonic_ns() - stamp) / 1e9 if stamp else 0.0,
            "task": task,
            "waits_for": waits_for,
        }

    def _at(self, done: int) -> tuple[int, int | None]:
        """Of the task after so many: which it is, and one of its inputs that is not there."""
        if self._arrivals is not None and self._arrivals.at is not None:
            return self._arrivals.at
        index, place = divmod(done, len(self._program))
        if (awaited := self._awaited) is not None:
            return self._program[place], awaited
        missing = self._first_missing(index, self._program[place])
        return self._program[place], None if missing is None else missing[0]

    def _first_missing(self, index: int, task: int) -> Wait | None:
        operation, iteration = self._operations[task], self._attempt.iteration(index)
        if not operation.runs(iteration):
            return None
        words, waits = self._board.words, operation.waits_in(iteration)
        return next((wait for wait in waits if words[1 + wait[0]] < index - wait[1]), None)

    def _over(self, now: int) -> None:
        """One more task is."""
        queue, account = self._queue, self._account
        queue.done += 1
        left = queue.taken - queue.done
        is_due = left == 0 or now > account.due_ns
        if not is_due and left <= queue.low:
            self._owes_report = self._may_owe and now < account.asks_ns
            is_due = not self._owes_report
        if is_due or (self._reports_iterations and queue.done % len(self._program) == 0):
            self._report()

    def _report(self) -> None:
        queue = self._queue
        self._owes_report = False
        self._account.report(queue.done)
        queue.set_low()
