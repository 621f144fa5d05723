"""Launcher: what an accelerator knows of the tasks that its lanes' threads launch, until they are over."""

from __future__ import annotations

import threading
import time

from weft.workers.devices.device import Act


class _Task(threading.local):
    """Of the thread that looks."""

    def __init__(self) -> None:
        self.acts: list[Act] = []
        self.launch_ns = 0


class Launcher:
    """The part of an accelerator that is the same in all of them."""

    def __init__(self) -> None:
        self._task = _Task()

    def launching(self) -> None:
        if not self._task.launch_ns:
            self._task.launch_ns = time.monotonic_ns()

    def take_launch_ns(self) -> int:
        at_ns, self._task.launch_ns = self._task.launch_ns, 0
        return at_ns

    def after(self, act: Act) -> None:
        self._task.acts.append(act)

    def take_acts(self) -> list[Act]:
        acts, self._task.acts = self._task.acts, []
        return acts

    def forget_tasks(self) -> None:
        """What one that failed has left."""
        self._task = _Task()
