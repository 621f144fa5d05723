"""The gate: holds all lanes of a worker between two tasks, for a moment in which none may compute.

    lane       ... run ─┐             ┌─ run ...        what waits for inputs may go on waiting
    lane       ... run ──────┐        ├─ run ...
    who asks        closes   ▲ quiet ─┘ opens

Lanes go through it only where somebody may ask for such a moment, so it costs the others nothing.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

PATIENCE_SECONDS = 5.0  # for tasks to end, while the lanes whose tasks have ended are held
PAUSE_SECONDS = 1.0  # then, in which they go on: a task may wait for what another lane is still to do


class Gate:
    """lanes: those that are held, by name; others pass."""

    def __init__(self, lanes: Iterable[str]) -> None:
        self._running = {lane: threading.RLock() for lane in lanes}  # a task may end another from inside
        self._opened = threading.Event()
        self._opened.set()

    @property
    def is_open(self) -> bool:
        return self._opened.is_set()

    def through(self, lane: str, run: Callable[..., None]) -> Callable[..., None]:
        """The same, which does not begin while the lanes are held."""
        running = self._running.get(lane)
        return run if running is None else functools.partial(self._run, running, run)

    def within(self, lane: str) -> contextlib.AbstractContextManager[object]:
        """Something short of the lane behind a task, which is not held."""
        return self._running.get(lane) or contextlib.nullcontext()

    def _run(self, running: threading.RLock, run: Callable[..., None], *args: Any) -> None:
        self._opened.wait()
        with running:
            run(*args)

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """No lane computes within it."""
        while True:
            self._opened.clear()
            with contextlib.ExitStack() as held, contextlib.ExitStack() as opening:
                opening.callback(self._opened.set)
                until = time.monotonic() + PATIENCE_SECONDS
                if all(_take(held, lock, until) for lock in self._running.values()):
                    yield
                    return
            time.sleep(PAUSE_SECONDS)


def _take(held: contextlib.ExitStack, lock: threading.RLock, until: float) -> bool:
    if not lock.acquire(timeout=max(0.0, until - time.monotonic())):
        return False
    held.callback(lock.release)
    return True
