"""The guard: the boundary around what the daemon does for one job, or hears from one worker.

The daemon's tasks live in one group, and an exception in any of them would end it, with every job. A bug of ours, or a
machine that is short of something where nobody thought of it, is to cost no more than the job that met it: what is
done inside a guard may raise what it likes. Its story goes to the daemon's log, and whoever knows what to do about it
is told. Nothing is swallowed: each guard names what it was around, and what comes after it is as if it had failed.

Beside the reception's, which does the same for a client, this is the only place of the scheduler where every exception
is caught.
"""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

MAX_TRACEBACKS = 5  # in the daemon's log, of so many seconds: the same bug may be met a thousand times
TRACEBACK_SECONDS = 60.0
MAX_BUG_CHARS = 500  # of an exception's text, in the reason that a job's owner reads

Then = Callable[[Exception], None]
Spawn = Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]  # a task of that group, and its name


def told_of_bug(bug: Exception) -> str:
    """To a job's owner."""
    told = f"{type(bug).__name__}: {bug}"[:MAX_BUG_CHARS]
    return f"a fault of Weft's own ({told}), not of the job's code; please report it, with the daemon's log"


class Complaints:
    """Bugs as the daemon's log tells them, and no more of it than anybody reads."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._began_at = 0.0
        self._num = 0

    def add(self, what: str, bug: Exception) -> None:
        """what: it happened in."""
        now = time.monotonic()
        if self._num == 0 or now - self._began_at > TRACEBACK_SECONDS:
            if self._num > MAX_TRACEBACKS:
                self._log.error("%d more faults were not logged", self._num - MAX_TRACEBACKS)
            self._began_at, self._num = now, 0
        self._num += 1
        if self._num <= MAX_TRACEBACKS:
            told = "".join(traceback.format_exception(bug))
            self._log.error("a fault in %s; the daemon goes on:\n%s", what, told)


class Guard:
    """Around a `with` block, in a task or in a callback; what is awaited in it may be cancelled as ever."""

    def __init__(self) -> None:
        self._complaints = Complaints(logging.getLogger("weft.guard"))

    def around(self, what: str, then: Then | None = None) -> AbstractContextManager[None]:
        """then: told of what was raised; it raises nothing itself."""
        return _Guarded(self._complaints, what, then)


class _Guarded(AbstractContextManager[None]):
    """Made for every message of a worker: a generator would cost it a microsecond."""

    __slots__ = ("_complaints", "_then", "_what")

    def __init__(self, complaints: Complaints, what: str, then: Then | None) -> None:
        self._complaints = complaints
        self._what = what
        self._then = then

    def __exit__(
        self, kind: type[BaseException] | None, bug: BaseException | None, story: TracebackType | None
    ) -> bool:
        if not isinstance(bug, Exception):
            return False  # nothing, or the end of the task
        self._complaints.add(self._what, bug)
        if self._then is not None:
            self._then(bug)
        return True
