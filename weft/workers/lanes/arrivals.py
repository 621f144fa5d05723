"""Arrivals: the next task of a lane whose passes begin as they are ready, see weft.plan.schedules.dynamic.

    queue ─▶ those that it may begin ─▶ [wait until an input of one is there] ─▶ the first that lacks none

There are two of them at most, so a wait is for either of two words of the board.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from weft.plan.schedules.dynamic import PassOrder
from weft.transport.memory.board import Board
from weft.workers.lanes.account import Account
from weft.workers.lanes.operation import Wait
from weft.workers.lanes.queue import Inbox, TaskQueue

Missing = Callable[[int, int], Wait | None]  # of an iteration's task, the first of its inputs that is not there


class Arrivals:
    def __init__(self, order: PassOrder, board: Board, queue: TaskQueue, account: Account, missing: Missing) -> None:
        self._order = order
        self._board = board
        self._queue = queue
        self._account = account
        self._missing = missing
        # For another thread: the task that was begun last, or that the lane waits to begin; and what that waits for.
        self.at: tuple[int, int | None] | None = None

    def take(self, inbox: Inbox) -> tuple[int, int, int]:
        """Iteration, task, when it came; its inputs are there. There is something in the queue. Errors: Aborted, and
        those of TaskQueue."""
        tasks = self._queue.tasks
        while True:
            waits = []
            for place in self._order.places(tasks):
                index, task, taken_ns = tasks[place]
                wait = self._missing(index, task)
                if wait is None:
                    del tasks[place]
                    self._order.begin(task)
                    self.at = task, None
                    return index, task, taken_ns
                waits.append((index, task, wait))
            self._wait(waits, came_ns=tasks[0][2])
            if not inbox.empty():
                self._queue.take(inbox)

    def _wait(self, waits: list[tuple[int, int, Wait]], came_ns: int) -> None:
        """And tells what the wait was for."""
        if came_ns > self._account.stamp:
            self._account.stall(came_ns)
        _, task, (source, _, _) = waits[0]
        self.at = task, source
        needed = [(source, index - distance) for index, _, (source, distance, _) in waits]
        came = self._board.wait_any(needed)
        if came is not None:
            index, task, (source, _, stall) = waits[came]
            self._account.row(stall, task, index, source, time.monotonic_ns())
