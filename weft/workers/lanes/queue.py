"""Queue: the tasks that a lane was sent and has not begun, and how many are not over yet."""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable

Work = list[tuple[int, list[int]]]  # iterations, and tasks of each
Call = Callable[[], None]  # of the user's code, while lanes have nothing to do
LAST_PART = 2  # of what a lane was sent, as one of so many: when that begins the daemon must send more
LAST_PART_STEALING = 4  # where that is 20 ms of work and not many times as much; each question takes a lane's core
Inbox = queue.SimpleQueue[Work | Call | None]  # of a lane, from the control thread; None: that has something else to do


class Interrupted(BaseException):
    """The control thread has another message for this thread. No Exception, as Aborted is none."""


class TaskQueue:
    def __init__(self, last_part: int = LAST_PART) -> None:
        """last_part: as LAST_PART."""
        self.tasks: deque[tuple[int, int, int]] = deque()  # iteration, task, when it was taken
        self.taken = 0
        self.done = 0
        self.low = 0  # when no more than this are left the daemon must send more
        self._last_part = last_part

    def take(self, inbox: Inbox) -> None:
        """Empties the inbox into the queue, waiting only if there is nothing to begin. Errors: Interrupted, and those
        of a call."""
        while not self.tasks or not inbox.empty():
            work = inbox.get()
            if work is None:
                raise Interrupted
            if callable(work):
                work()
                continue
            now = time.monotonic_ns()
            for iteration, tasks in work:
                self.tasks.extend((iteration, task, now) for task in tasks)
                self.taken += len(tasks)
        self.set_low()

    def set_low(self) -> None:
        self.low = (self.taken - self.done) // self._last_part
