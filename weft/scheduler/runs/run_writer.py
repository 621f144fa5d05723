"""The run writer: the daemon's one thread that writes below run directories, and the count of what went wrong there.

    event loop ──put──▶ one write after another, in the order in which they were put ──▶ settled

A run directory puts a write only when none of its own waits, so the queue is no longer than the list of jobs.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

from weft.machine.run_file import ForeignFile, RunFileError, check_room, claim_again, make_directory
from weft.metrics.prometheus.exporter import Exporter

T = TypeVar("T")

_REASONS = {
    errno.ENOSPC: "no-space",
    errno.EDQUOT: "no-space",
    errno.EIO: "io",
    errno.EMFILE: "descriptors",
    errno.ENFILE: "descriptors",
}

_log = logging.getLogger("weft.run_writer")


class Troubles:
    """What could not be written, until somebody takes the counts. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._errors: Counter[str] = Counter()  # by reason
        self._lost: Counter[str] = Counter()  # lines, by file

    def add(self, error: OSError) -> None:
        reason = "foreign" if isinstance(error, ForeignFile) else _REASONS.get(error.errno or 0, "other")
        with self._lock:
            self._errors[reason] += 1

    def add_lost(self, file: str, num_lines: int) -> None:
        with self._lock:
            self._lost[file] += num_lines

    def publish(self, exporter: Exporter) -> None:
        """Since the last call. In the thread that the exporter is for."""
        with self._lock:
            errors, self._errors = self._errors, Counter()
            lost, self._lost = self._lost, Counter()
        for reason, count in errors.items():
            exporter.add("weft_run_directory_errors_total", count, reason=reason)
        for file, num_lines in lost.items():
            exporter.add("weft_run_directory_lost_lines_total", num_lines, file=file)


class RunWriter:
    """In a thread of its own. For the event loop's thread."""

    def __init__(self) -> None:
        self.troubles = Troubles()
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="run-writer")
        self._newest: Future[None] | None = None  # of what was put

    def put(self, write: Callable[[], None]) -> None:
        self._newest = self._executor.submit(write)
        self._newest.add_done_callback(_tell_of_bug)

    @property
    def is_idle(self) -> bool:
        """All that was put is done."""
        return self._newest is None or self._newest.done()

    async def run(self, work: Callable[[], T]) -> T:
        """Done in its turn. Errors: as the work's."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    async def settled(self) -> None:
        """Returns when all that was put before is done."""
        await self.run(lambda: None)

    async def check_room(self, runs: Path) -> None:
        """That a new job's directory has room. Errors: RunFileError, where the disk is short of something."""
        error = await self.run(partial(self._error_of, check_room, runs))
        if error is not None and error.is_shortage:  # anything else is that job's end, with a reason
            raise error

    async def make_directory(self, path: Path) -> RunFileError | None:
        """Why it cannot be made: for good, or for a shortage of which the job need not know."""
        return await self.run(partial(self._error_of, _make_claimed, path))

    async def close(self) -> None:
        """Returns when everything is written and the thread has ended."""
        await asyncio.to_thread(self._executor.shutdown)

    def _error_of(self, work: Callable[[Path], None], path: Path) -> RunFileError | None:
        try:
            work(path)
        except RunFileError as error:
            self.troubles.add(error)
            return error
        return None


def _make_claimed(path: Path) -> None:
    """A run directory, which has the name of its job. Errors: RunFileError."""
    claim_again(path, path.name)
    make_directory(path)


def _tell_of_bug(write: Future[None]) -> None:
    """Errors of the disk are dealt with where they happen; anything else is ours."""
    if (error := write.exception()) is not None:
        _log.error("a write below a run directory failed", exc_info=error)
