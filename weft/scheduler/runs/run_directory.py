"""A job's run directory as the daemon writes it: two files that grow, and files that are written whole.

    event loop     log, step, keep ──▶ what waits (bounded)
    writer             │ flush              └──▶ open, append, close          weft/machine/run_file.py

What a disk does not take waits, up to a bound, and is tried again at the next flush: when there is space once more, the
file goes on where it stopped. What the bound does not hold is lost, counted, and told in the log; the training goes on.
No descriptor is held between two writes, so a job that waits in the queue has none.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Final

from weft.machine.checkpoint_files import remove_unfinished
from weft.machine.run_file import FileFull, append, claim_again, load, read, remove_partial, replace
from weft.metrics.recording.recording import FILE as RECORDING
from weft.metrics.recording.recording import PROFILED_FILE
from weft.metrics.recording.step_log import FILE as METRICS
from weft.metrics.recording.step_log import MAX_BYTES as MAX_METRICS_BYTES
from weft.scheduler.runs.run_writer import RunWriter

LOG: Final = "job.log"
CODE: Final = "code.json"  # digests of the job's files of code, as its first worker has loaded them
MODEL: Final = "model.safetensors"  # that a worker writes
_LARGE: Final = (MODEL, RECORDING, PROFILED_FILE)  # it takes a while to write them
MAX_CODE_BYTES: Final = 16 << 20  # of that; a file takes some 150
MAX_LOG_BYTES: Final = 64 << 20  # of a job's log: a print in an inner loop must not fill the disk
MAX_WAITING_BYTES: Final = 8 << 20  # of lines of one file that no disk takes, or none in time on a busy machine
LOG_CHUNK_BYTES: Final = 1 << 16  # of a log in one event: hundreds of clients may each be sent one
WRITE_BYTES: Final = 1 << 16  # of metrics, from which on they are written before the next flush
_LOG_IS_FULL: Final = b"the log is full; nothing more is kept\n"

_log = logging.getLogger("weft.run_directory")


class RunsDirectoryError(RuntimeError):
    """The directory of the run directories cannot be had. The text names it and the remedy."""


class RunDirectory:
    """Errors: none. What cannot be written is told by the daemon's own log, and counted by the writer's troubles."""

    def __init__(self, job: str, path: Path, writer: RunWriter) -> None:
        self.path = path
        self._job = job
        self._writer = writer
        self._lock = threading.Lock()  # over what waits
        self._log = _Lines(LOG)
        self._metrics = _Lines(METRICS)
        self._whole: dict[str, bytes] = {}
        self._is_put = False  # a write is on its way and will take what waits now
        self.closed = False  # nothing more comes
        self._failing: set[str] = set()  # files; the writer's alone

    # --- for the event loop

    def log(self, text: str) -> None:
        """Lines, each with the time of day."""
        stamp = time.strftime("%H:%M:%S")
        self.log_output("".join(f"{stamp} {line}\n" for line in text.rstrip("\n").split("\n")))

    def log_output(self, text: str) -> None:
        """What the user's code printed, as it is."""
        with self._lock:
            if not self.closed:
                self._log.add(text.encode("utf-8", "replace"))
        self.flush()

    def step(self, line: str) -> None:
        """A line of the step log, which may wait for the next flush."""
        with self._lock:
            if not self.closed:
                self._metrics.add(line.encode())
            is_much = len(self._metrics.waiting) >= WRITE_BYTES
        if is_much:
            self.flush()

    def start_over(self) -> None:
        """Of the step log: what comes next is its first line."""
        with self._lock:
            self._metrics.start_over()

    def keep(self, name: str, text: str) -> None:
        """A whole file, in the place of the one before."""
        with self._lock:
            if not self.closed:
                self._whole[name] = text.encode()
        self.flush()

    def flush(self) -> None:
        """Hands what waits to the writer."""
        with self._lock:
            if self._is_put or not (self._whole or self._log.waits or self._metrics.waits):
                return
            self._is_put = True
        self._writer.put(self._write)

    async def written(self) -> None:
        """Returns when what came before is in the files, or no disk took it."""
        self.flush()
        await self._writer.settled()

    def close(self) -> None:
        """Nothing comes any more: what is not written by the end of the next write is lost."""
        with self._lock:
            self.closed = True
        self._writer.put(self._write_last)

    # --- for any thread but the event loop's

    def save(self, name: str, encode: Callable[[], bytes]) -> None:
        """A whole file, at once. Errors: OSError, counted here."""
        claim_again(self.path, self._job)
        try:
            replace(self.path / name, encode())
        except OSError as error:
            self._writer.troubles.add(error)
            raise

    # --- the writer's thread

    def _write(self) -> None:
        with self._lock:
            self._is_put = False
            whole = dict(self._whole)
        for name, data in whole.items():
            self._attempt(name, partial(self._write_whole, name, data))
        self._attempt(METRICS, self._write_metrics)
        self._attempt(LOG, self._write_log)

    def _attempt(self, file: str, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            self._writer.troubles.add(error)
            if file not in self._failing:
                self._failing.add(file)
                _log.warning("%s: %s; what belongs there waits", self._job, error)
        else:
            if file in self._failing:
                self._failing.discard(file)
                _log.info("%s: %s is written again", self._job, file)

    def _write_whole(self, name: str, data: bytes) -> None:
        claim_again(self.path, self._job)
        replace(self.path / name, data)
        with self._lock:
            if self._whole.get(name) is data:
                del self._whole[name]

    def _write_metrics(self) -> None:
        try:
            self._write_lines(self._metrics, MAX_METRICS_BYTES)
        except FileFull as full:
            self._note(f"{full}; later steps are not in it\n")
        if lost := self._take_lost(self._metrics):
            self._note(f"{lost} lines of {METRICS} are lost: they could not be written in time\n")

    def _write_log(self) -> None:
        try:
            self._write_lines(self._log, MAX_LOG_BYTES, _LOG_IS_FULL)
            if lost := self._take_lost(self._log):
                self._note(f"{lost} lines of this log are lost: they could not be written in time\n")
                self._write_lines(self._log, MAX_LOG_BYTES, _LOG_IS_FULL)
        except FileFull:
            pass  # its last line says so

    def _note(self, text: str) -> None:
        """A line of ours for the log, however much waits there."""
        with self._lock:
            self._log.waiting += text.encode()

    def _write_lines(self, lines: _Lines, max_bytes: int, notice: bytes = b"") -> None:
        while True:
            with self._lock:
                generation, anew, data = lines.generation, lines.anew, bytes(lines.waiting)
            if not data and not anew:
                return
            claim_again(self.path, self._job)
            try:
                done = append(self.path / lines.name, data, max_bytes=max_bytes, notice=notice, anew=anew)
            except FileFull:
                with self._lock:
                    lines.end()
                raise
            with self._lock:
                lines.is_written(generation, done)

    def _take_lost(self, lines: _Lines) -> int:
        with self._lock:
            lost, lines.num_lost = lines.num_lost, 0
        if lost:
            self._writer.troubles.add_lost(lines.name, lost)
        return lost

    def _write_last(self) -> None:
        self._write()
        remove_partial(self.path / MODEL)  # of a worker that was killed for a cancel
        for lines in (self._metrics, self._log):
            with self._lock:
                lines.give_up()
            if lost := self._take_lost(lines):
                _log.warning("%s: %d lines of %s are lost", self._job, lost, lines.name)
        with self._lock:
            self._whole.clear()


class _Lines:
    """Of a file that grows: what is not written yet."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.waiting = bytearray()
        self.anew = False  # the file begins with them
        self.generation = 0  # how often it has started over: what was written of the one before is nothing of this one
        self.num_lost = 0  # lines for which there was no room among those that wait
        self._is_full = False

    @property
    def waits(self) -> bool:
        return bool(self.waiting) or self.anew

    def add(self, data: bytes) -> None:
        if self._is_full:
            return
        if self.waiting and len(self.waiting) + len(data) > MAX_WAITING_BYTES:
            self.num_lost += max(1, data.count(b"\n"))
        else:
            self.waiting += data

    def start_over(self) -> None:
        self.waiting.clear()
        self.anew, self._is_full, self.num_lost = True, False, 0
        self.generation += 1

    def is_written(self, generation: int, num_bytes: int) -> None:
        if generation == self.generation:
            del self.waiting[:num_bytes]
            self.anew = False

    def end(self) -> None:
        """The file is full."""
        self.waiting.clear()
        self.anew, self._is_full = False, True

    def give_up(self) -> None:
        self.num_lost += self.waiting.count(b"\n")
        self.waiting.clear()
        self.anew = False


def make_runs_directory(path: Path) -> None:
    """Before a job finds out."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        problem = "" if os.access(path, os.W_OK | os.X_OK) else "not writable"
    except OSError as error:
        problem = error.strerror or "unknown"
    if problem:
        raise RunsDirectoryError(
            f"{path}: run directories cannot be made there ({problem}); give a --runs-dir that you can write"
        )


def tidy(directories: Iterable[Path]) -> None:
    """Run directories in which nobody writes yet, or any more: what a killed writer has left half there goes."""
    for directory in directories:
        remove_unfinished(directory)
        for name in _LARGE:
            remove_partial(directory / name)


def read_code(directory: Path) -> dict[str, str]:
    """The digests of a job's code, by file; none of one that no worker has loaded yet, or whose file is damaged."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        found = json.loads(load(directory / CODE, MAX_CODE_BYTES, owner=os.geteuid()))
        if isinstance(found, dict) and all(isinstance(digest, str) for digest in found.values()):
            return found
    return {}


def read_log(directory: Path, offset: int) -> bytes:
    """Of a job's log, for a follower: a chunk from a byte offset on, of whole lines where it can; b"" where there is
    nothing. Errors: RunFileError."""
    left = MAX_LOG_BYTES + len(_LOG_IS_FULL) - offset  # what a job's code puts behind it is not read for ever
    try:
        data = read(directory / LOG, max(0, min(LOG_CHUNK_BYTES, left)), offset=offset, owner=os.geteuid())
    except FileNotFoundError:
        return b""
    if len(data) == LOG_CHUNK_BYTES and b"\n" in data:
        data = data[: data.rindex(b"\n") + 1]
    return data
