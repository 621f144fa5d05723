"""A stream lane: a lane of an accelerator, which launches its tasks and learns from events when they are over.

    launcher   queue ─▶ [inputs launched? wait for their events] ─▶ launch ─▶ record ─▶ next
    finisher                                              event has happened ─▶ numbers ─▶ post ─▶ stamp ─▶ next

An input from another lane of the same device is an event that the stream waits for; the launcher only waits until that
event has been recorded. An input from elsewhere is a word of the board, and the launcher waits for it. So does a task
that reads on the host what its inputs have computed. Where what is launched is over at once, as on a stand-in, the
launcher finishes it too.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from weft.plan.error_places import within
from weft.plan.itinerary import Iteration
from weft.workers.devices.device import Accelerator, Act, Event
from weft.workers.lanes.account import Send
from weft.workers.lanes.attempt import Attempt
from weft.workers.lanes.lane import LaneLoop
from weft.workers.lanes.launched import Launched
from weft.workers.lanes.operation import Operation
from weft.workers.lanes.queue import Inbox

Ended = tuple[Event | int, int, int]  # what ends it, or when it had ended; the stall's mode; the task waited for


@dataclass(slots=True)
class _Entry:
    """A task that was launched."""

    operation: Operation
    iteration: int
    taken_ns: int = 0
    runs: bool = False  # there is something to launch
    waits: list[Ended] = field(default_factory=list)
    begun: Event | None = None
    launch_ns: int = 0  # see Accelerator.take_launch_ns
    ended: Event | None = None  # where nothing was launched there is none
    acts: list[Act] = field(default_factory=list)
    is_milestone: bool = False  # a hook has ended it early
    last: _Entry | None = None  # what its call is of at the end, if the lane has gone on inside of it


class StreamLane(LaneLoop):
    def __init__(
        self,
        name: str,
        attempt: Attempt,
        operations: Mapping[int, Operation],
        send: Send,
        *,
        device: Accelerator,
        launched: Launched,
        **observed: Any,
    ) -> None:
        """observed: further arguments of LaneLoop."""
        super().__init__(name, attempt, operations, send, **observed)
        self._device = device
        self._launched = launched
        self._stream = device.stream(name)
        self._told: Event | None = None  # behind the last task of this lane that a host reads from
        self._now: _Entry  # the task that has begun
        self._first: _Entry  # the task that was called last
        self._latest: Event | None = None  # behind the last task of this lane that had something to launch
        self._entries: queue.SimpleQueue[_Entry | None] = queue.SimpleQueue()
        for task, operation in operations.items():
            if operation.is_milestone:
                attempt.milestones[task] = self.post_milestone

    def _run_all(self, inbox: Inbox) -> None:
        """And until all that was launched is over."""
        if self._device.finishes_at_once:
            super()._run_all(inbox)
            return
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"{self._name}-finisher") as pool:
            finishing = pool.submit(self._finish_all, inbox)
            try:
                super()._run_all(inbox)
            finally:
                self._entries.put(None)
        finishing.result()  # raises what it has raised: a kernel that failed, a loss that is nan

    # --- launching

    def _run_task(self, index: int, task: int, taken_ns: int) -> None:
        if self._begin_task(index, task, taken_ns):
            operation, iteration = self._operations[task], self._attempt.iteration(index)
            entry = self._first = self._now

            def work() -> None:
                self._device.take_launch_ns()
                operation.run(iteration)
                self._take_told(entry.last or entry)

            with within(lambda: operation.place_in(iteration)):
                self._stream.launch(work)
        self._end_task()

    def go_on(self) -> None:
        self._take_told(self._now)
        super().go_on()
        self._first.last = self._now

    def _begin_task(self, index: int, task: int, taken_ns: int) -> bool:
        operation = self._operations[task]
        iteration = self._attempt.iteration(index)
        entry = self._now = _Entry(operation, index, taken_ns, runs=operation.runs(iteration))
        if entry.runs:
            entry.waits = self._wait_for_inputs(operation, iteration)
            if not self._device.finishes_at_once:  # otherwise launching is a part of the task
                entry.begun = self._stream.record()
        return entry.runs

    def _take_told(self, entry: _Entry) -> None:
        """In the thread that has launched it."""
        entry.launch_ns, entry.acts = self._device.take_launch_ns(), self._device.take_acts()

    def _end_task(self) -> None:
        entry = self._now
        if entry.runs:
            entry.ended = self._latest = self._stream.record()
            if entry.operation.is_read_on_host:
                self._told = entry.ended
        # who waits for one that passes waits for those before it, too
        self._launched.post(entry.operation.task, entry.iteration, self._latest)
        self._enter(entry)

    def _wait_for_inputs(self, operation: Operation, iteration: Iteration) -> list[Ended]:
        waits: list[Ended] = []
        if operation.reads_on_host and self._told is not None:
            self._told.wait()  # within a lane there are no edges
        for source, distance, stall in operation.waits_in(iteration):
            needed = iteration.index - distance
            if needed < 0:
                continue
            on_device = source in self._launched.tasks and not operation.reads_on_host
            board = self._launched.board if on_device else self._board
            late = board.words[1 + source] < needed
            if late:
                board.wait(source, needed)
            event = self._launched.event(source) if on_device else None
            if event is not None:
                self._stream.wait_for(event)
            if event is not None and not self._device.finishes_at_once:
                waits.append((event, stall, source))
            elif late:
                waits.append((time.monotonic_ns(), stall, source))
        return waits

    def post_milestone(self, task: int, iteration: int) -> None:
        """From inside a task, in the thread that computes it: what this lane has launched so far ends another task."""
        if self._launched.board.words[1 + task] >= iteration:
            return  # launched as a task of the lane, before the work that this comes from was run
        event = self._device.record_here()
        self._launched.post(task, iteration, event)
        self._enter(_Entry(self._operations[task], iteration, ended=event, is_milestone=True))

    def _enter(self, entry: _Entry) -> None:
        if self._device.finishes_at_once:
            self._finish(entry)
        else:
            self._entries.put(entry)

    # --- finishing

    def _finish_all(self, inbox: Inbox) -> None:
        """The finisher's thread. Where it fails the launcher ends, too."""
        has_ended = False
        try:
            while (entry := self._entries.get()) is not None:
                self._finish(entry)
            has_ended = True
        finally:
            if not has_ended:
                self._attempt.abort()
                inbox.put(None)

    def _finish(self, entry: _Entry) -> None:
        operation = entry.operation
        if entry.ended is not None:
            entry.ended.wait()
        with self._behind_a_task, within(lambda: operation.place_in(self._attempt.iteration(entry.iteration))):
            for act in entry.acts:
                act()
        (self._board.post if operation.wakes else self._board.post_quietly)(operation.task, entry.iteration)
        if entry.is_milestone:
            return
        if entry.ended is not None:
            self._stamp(entry, entry.ended.at_ns())
        self._over(time.monotonic_ns())

    def _stamp(self, entry: _Entry, end: int) -> None:
        """Rows of what the stream waited for before the task, one after another, and of the task."""
        account, operation = self._account, entry.operation
        account.stall(entry.taken_ns)
        for ended, stall, source in entry.waits:
            at = ended if isinstance(ended, int) else ended.at_ns()
            account.stall(at, stall, operation.task, entry.iteration, source)
        if entry.begun is not None:
            begin = max(entry.begun.at_ns(), entry.launch_ns)  # an idle stream is there before the host launches
            account.stall(min(begin, end))  # the host was late
        account.row(operation.mode, operation.task, entry.iteration, -1, max(end, account.stamp))
