"""A stream lane: a lane of an accelerator, which launches its tasks and learns from events when they are over.

    launcher   queue ─▶ [inputs launched? wait for their events] ─▶ launch ─▶ record ─▶ next
    finisher                                              event has happened ─▶ numbers ─▶ post ─▶ stamp ─▶ next

An input from another lane of the same device is an event that the stream waits for; the launcher only waits until that
event has been recorded. An input from elsewhere is a word of the board, and the launcher waits for it. So does a task
that reads on the host what its inputs have computed. Where what is launched is over at once, as on a stand-in, the
launcher finishes it too.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from weft.plan.error_places import within
from weft.plan.kinds import MODE_INDEX
from weft.transport.memory.board import RUNNING, Aborted, Board, num_words
from weft.workers.devices.device import Accelerator, Act, Event
from weft.workers.lanes.attempt import Attempt
from weft.workers.lanes.lane import MIN_STALL_NS, REPORT_SECONDS, Interrupted, Send, Work, report_of
from weft.workers.lanes.operation import Operation

_DISPATCH = MODE_INDEX["stall_dispatch"]

Wait = tuple[Event | int, int, int]  # what ends it, or when it had ended; the stall's mode; the task waited for


class Launched:
    """What the lanes of one device have launched: which iteration of each task, and the event behind it.

    The events are of the newest iteration. That is enough: it was launched without the reader, so it happens without
    it, and not before the one that the reader asks for.
    """

    def __init__(self, num_tasks: int, tasks: frozenset[int]) -> None:
        """tasks: those of this device's lanes."""
        self.tasks = tasks
        self.board = Board(torch.full((num_words(num_tasks),), RUNNING, dtype=torch.int32))
        self._events: dict[int, Event] = {}

    def post(self, task: int, iteration: int, event: Event | None) -> None:
        """event: behind all that the task's lane has launched so far; None where that is nothing."""
        if event is not None:
            self._events[task] = event
        self.board.post(task, iteration)

    def event(self, task: int) -> Event | None:
        """Of one that the board says has been launched."""
        return self._events.get(task)


@dataclass(slots=True)
class _Entry:
    """A task that was launched. ended is None where nothing was. launch_ns: see Device.launching. milestone: of a
    task that a hook has ended early."""

    task: int
    iteration: int
    mode: int
    taken_ns: int
    waits: list[Wait] = field(default_factory=list)
    begun: Event | None = None
    launch_ns: int = 0
    ended: Event | None = None
    acts: list[Act] = field(default_factory=list)
    milestone: bool = False


class StreamLane:
    """As weft.workers.lanes.lane.Lane, and with its rows and reports."""

    def __init__(
        self,
        name: str,
        attempt: Attempt,
        operations: Mapping[int, Operation],
        send: Send,
        *,
        device: Accelerator,
        launched: Launched,
        stamps: bool = True,
        reach: Callable[[int], bool] | None = None,
    ) -> None:
        self._name = name
        self._reach = reach
        self._attempt = attempt
        self._board = attempt.boards[name]
        self._operations = operations
        self._send = send
        self._stamps = stamps
        self._device = device
        self._launched = launched
        self._stream = device.stream(name)
        self._stalls = {op.task: tuple(MODE_INDEX[f"stall_{c}"] for _, _, c in op.waits) for op in operations.values()}
        self._queue: deque[tuple[int, int, int]] = deque()  # iteration, task, when it was taken
        self._told: Event | None = None  # behind the last task of this lane that a host reads from
        self._latest: Event | None = None  # behind the last task of this lane that had something to launch
        self._entries: queue.SimpleQueue[_Entry | None] = queue.SimpleQueue()
        self._taken = 0
        self._done = 0
        self._low = 0
        self._rows: list[int] = []
        self._unreported = 0
        self._stamp = 0
        self._reported_at = 0
        for task, operation in operations.items():
            if operation.is_milestone:
                attempt.milestones[task] = self.post_milestone

    def run(self, inbox: queue.SimpleQueue[Work | None]) -> None:
        """Runs what the inbox brings, until it brings None or the attempt is aborted; then until all that was launched
        is over. Raises what user code raises."""
        if self._device.finishes_at_once:
            self._launch_all(inbox)
            return
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"{self._name}-finisher") as pool:
            finishing = pool.submit(self._finish_all, inbox)
            try:
                self._launch_all(inbox)
            finally:
                self._entries.put(None)
        finishing.result()  # raises what it has raised: a kernel that failed, a loss that is nan

    # --- launching

    def _launch_all(self, inbox: queue.SimpleQueue[Work | None]) -> None:
        with contextlib.suppress(Aborted, Interrupted):
            self._take(inbox)
            self._stamp = self._reported_at = time.monotonic_ns()  # the account begins with the first work
            launch = self._launch if self._reach is None else self._launch_reached
            while True:
                if not self._queue or not inbox.empty():
                    self._take(inbox)
                launch(*self._queue.popleft())

    def _take(self, inbox: queue.SimpleQueue[Work | None]) -> None:
        """Empties the inbox into the queue, waiting only if there is nothing to launch."""
        while not self._queue or not inbox.empty():
            work = inbox.get()
            if work is None:
                raise Interrupted
            now = time.monotonic_ns()
            for iteration, tasks in work:
                self._queue.extend((iteration, task, now) for task in tasks)
                self._taken += len(tasks)
        self._low = (self._taken - self._done) // 2

    def _launch_reached(self, index: int, task: int, taken_ns: int) -> None:
        assert self._reach is not None
        self._launch(index, task, time.monotonic_ns() if self._reach(index) else taken_ns)

    def _launch(self, index: int, task: int, taken_ns: int) -> None:
        operation, attempt = self._operations[task], self._attempt
        iteration = attempt.iteration(index)
        entry = _Entry(task, index, MODE_INDEX[operation.mode], taken_ns)
        if operation.runs(iteration):
            entry.waits = self._wait_for_inputs(operation, index)
            if not self._device.finishes_at_once:  # otherwise launching is a part of the task
                entry.begun = self._stream.record()

            def work() -> None:
                self._device.take_launch_ns()
                operation.run(iteration)
                entry.launch_ns = self._device.take_launch_ns()
                entry.acts = self._device.take_acts()

            with within(lambda: operation.place_in(iteration)):
                self._stream.launch(work)
            entry.ended = self._latest = self._stream.record()
            if operation.is_read_on_host:
                self._told = entry.ended
        self._launched.post(task, index, self._latest)  # who waits for one that passes waits for those before it, too
        self._enter(entry)

    def _wait_for_inputs(self, operation: Operation, index: int) -> list[Wait]:
        iteration = self._attempt.iteration(index)
        skipped = () if operation.skips is None else operation.skips(iteration)
        waits: list[Wait] = []
        if operation.reads_on_host and self._told is not None:
            self._told.wait()  # within a lane there are no edges
        for number, (source, distance, cause) in enumerate(operation.waits):
            needed = index - distance
            if operation.update_needed is not None and cause == "update":
                needed = operation.update_needed(iteration)
            if number in skipped or needed < 0:
                continue
            stall = self._stalls[operation.task][number]
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
        self._enter(_Entry(task, iteration, 0, 0, ended=event, milestone=True))

    def _enter(self, entry: _Entry) -> None:
        if self._device.finishes_at_once:
            self._finish(entry)
        else:
            self._entries.put(entry)

    # --- finishing

    def _finish_all(self, inbox: queue.SimpleQueue[Work | None]) -> None:
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
        operation = self._operations[entry.task]
        if entry.ended is not None:
            entry.ended.wait()
        with within(lambda: operation.place_in(self._attempt.iteration(entry.iteration))):
            for act in entry.acts:
                act()
        (self._board.post if operation.wakes else self._board.post_quietly)(entry.task, entry.iteration)
        if entry.milestone:
            return
        if entry.ended is not None:
            self._account(entry, entry.ended.at_ns())
        self._done += 1
        self._unreported += 1
        if self._taken - self._done <= self._low or time.monotonic_ns() - self._reported_at > REPORT_SECONDS * 1e9:
            self._report()

    def _account(self, entry: _Entry, end: int) -> None:
        """Rows of what the stream waited for before the task, one after another, and of the task."""
        self._stall(entry.taken_ns, _DISPATCH)
        for ended, mode, source in entry.waits:
            at = ended if isinstance(ended, int) else ended.at_ns()
            self._stall(at, mode, entry.task, entry.iteration, source)
        if entry.begun is not None:
            begin = max(entry.begun.at_ns(), entry.launch_ns)  # an idle stream is there before the host launches
            self._stall(min(begin, end), _DISPATCH)  # the host was late
        self._row(entry.mode, entry.task, entry.iteration, -1, max(end, self._stamp))

    def _stall(self, until: int, mode: int, task: int = -1, iteration: int = -1, source: int = -1) -> None:
        if until - self._stamp >= MIN_STALL_NS:
            self._row(mode, task, iteration, source, until)

    def _row(self, mode: int, task: int, iteration: int, waited_for: int, end: int) -> None:
        if self._stamps:
            self._rows += (mode, task, iteration, waited_for, self._stamp, end)
        self._stamp = end

    def _report(self) -> None:
        self._send(report_of(self._name, self._unreported, self._rows, self._attempt))
        self._rows.clear()
        self._unreported = 0
        self._reported_at = time.monotonic_ns()
        self._low = (self._taken - self._done) // 2
