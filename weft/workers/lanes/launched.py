"""Launched: what the lanes of one accelerator have launched, for each other."""

from __future__ import annotations

import torch

from weft.transport.memory.board import Board, num_words
from weft.workers.devices.device import Event


class Launched:
    """Which iteration of each task, and the event behind it.

    The events are of the newest iteration. That is enough: it was launched without the reader, so it happens without
    it, and not before the one that the reader asks for.
    """

    def __init__(self, num_tasks: int, tasks: frozenset[int], begins: int = 0) -> None:
        """tasks: those of this device's lanes. begins: the first iteration."""
        self.tasks = tasks
        self.board = Board(torch.full((num_words(num_tasks),), begins - 1, dtype=torch.int32))
        self._events: dict[int, Event] = {}

    def post(self, task: int, iteration: int, event: Event | None) -> None:
        """event: behind all that the task's lane has launched so far; None where that is nothing."""
        if event is not None:
            self._events[task] = event
        self.board.post(task, iteration)

    def event(self, task: int) -> Event | None:
        """Of one that the board says has been launched."""
        return self._events.get(task)
