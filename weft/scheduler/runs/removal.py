"""The removal of a run directory, whatever the job's code has put into it. Shell; for a thread.

It removes only a directory that Weft has made for that job, which `weft/machine/run_file.py` says by a mark in it: a
user may give a job the name of a directory that was there before, whose files are none of Weft's. It follows no symlink
and needs a handful of descriptors however deep the tree is, since it empties a directory after moving its directories
up:

    RUN/a/b/c/file  ─▶  RUN/a  RUN/<token>-1 (was b)  ─▶  RUN/<token>-2 (was c)  ─▶  file is unlinked, all are empty

The mark goes last, so that what could not be finished can be begun again.
"""

from __future__ import annotations

import os
import secrets
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path

from weft.machine.run_file import MARK

MAX_MARK_BYTES = 256
BATCH = 1000  # entries of a directory in memory at once
REMOVE_SECONDS = 600.0  # then something still writes there
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_PLAIN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # a FIFO in its place must not hold us


class NotRemoved(RuntimeError):
    """The directory, or a part of it, is still there. The text says why, and what to do."""


def remove(directory: Path, job: str, runs_path: Path, stop: threading.Event) -> None:
    """Removes the job's run directory; one that has gone already is removed. Gives up once `stop` is set.

    Errors: NotRemoved.
    """
    try:
        os.lstat(directory)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise NotRemoved(f"{directory}: {error.strerror}; remove it yourself, then try again") from None
    if directory.parent != runs_path.absolute() or directory.name != job:
        raise NotRemoved(
            f"{directory} is not in this daemon's runs_dir, {runs_path}; remove it yourself, then try again"
        )
    try:
        with _opened(str(runs_path)) as parent, _opened(job, parent) as top:
            _check_mark(top, directory, job)
            _Emptying(top, stop).run()
            with suppress(FileNotFoundError):
                os.unlink(MARK, dir_fd=top)
            os.rmdir(job, dir_fd=parent)
    except OSError as error:
        where = f" ({os.fspath(error.filename)!r:.200})" if error.filename is not None else ""
        raise NotRemoved(
            f"{directory} cannot be removed whole: {error.strerror}{where}; remove it yourself, then try again"
        ) from None


def _check_mark(top: int, directory: Path, job: str) -> None:
    marked = b""
    with suppress(OSError):
        descriptor = os.open(MARK, _PLAIN_FILE, dir_fd=top)
        try:
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                marked = os.read(descriptor, MAX_MARK_BYTES)
        finally:
            os.close(descriptor)
    if marked != f"{job}\n".encode():
        raise NotRemoved(
            f"{directory} was not made for this job: it has no {MARK} that says so; "
            "look whether you still need what is there, remove it yourself, then try again"
        )


class _Emptying:
    """Everything in a directory but the mark goes."""

    def __init__(self, top: int, stop: threading.Event) -> None:
        self._top = top
        self._stop = stop
        self._deadline = time.monotonic() + REMOVE_SECONDS
        self._token = secrets.token_hex(8)
        self._num_moved = 0

    def run(self) -> None:
        while entries := self._entries(self._top):
            for name, is_directory in entries:
                if is_directory:
                    self._clear(name)
                else:
                    self._unlink(name, self._top)

    def _clear(self, name: str) -> None:
        """Removes a directory of the top; its own ones move up to the top."""
        with _opened(name, self._top) as directory:
            while entries := self._entries(directory):
                for inner, is_directory in entries:
                    if is_directory:
                        self._move_up(inner, directory)
                    else:
                        self._unlink(inner, directory)
        os.rmdir(name, dir_fd=self._top)

    def _move_up(self, name: str, directory: int) -> None:
        self._num_moved += 1
        new_name = f"{self._token}-{self._num_moved}"
        try:
            os.rename(name, new_name, src_dir_fd=directory, dst_dir_fd=self._top)
        except PermissionError:  # a directory that moves is written to: its parent is another one
            os.chmod(name, 0o700, dir_fd=directory)
            os.rename(name, new_name, src_dir_fd=directory, dst_dir_fd=self._top)

    def _unlink(self, name: str, directory: int) -> None:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=directory)

    def _entries(self, directory: int) -> list[tuple[str, bool]]:
        if self._stop.is_set():
            raise NotRemoved("the daemon ends; try again once it is back")
        if time.monotonic() > self._deadline:
            raise NotRemoved(f"not empty after {REMOVE_SECONDS:.0f} s; does a process of the job still write there?")
        with os.scandir(directory) as entries:
            kept = (entry for entry in entries if directory != self._top or entry.name != MARK)
            return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in islice(kept, BATCH)]


@contextmanager
def _opened(name: str, parent: int | None = None) -> Iterator[int]:
    """A directory that is no symlink (save the first one, which the settings name), made ours to change."""
    flags = _DIRECTORY if parent is not None else _DIRECTORY & ~os.O_NOFOLLOW
    try:
        descriptor = os.open(name, flags, dir_fd=parent)
    except PermissionError:
        if parent is None:
            raise
        os.chmod(name, 0o700, dir_fd=parent)
        descriptor = os.open(name, flags, dir_fd=parent)
    try:
        if parent is not None and os.fstat(descriptor).st_mode & 0o700 != 0o700:
            os.fchmod(descriptor, 0o700)
        yield descriptor
    finally:
        os.close(descriptor)
