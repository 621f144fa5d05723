"""Run file: one file of a run directory, opened as what it must be and as nothing else.

A job's code runs beside its files and may put anything in their place: a directory, a FIFO that nobody reads, a link to
an endless device or to a file elsewhere. So whoever reads or writes below a run directory does it here:

    run directory ──▶ file        neither is a link; the open never waits; what is open is a regular file, and ours
                                  where that is asked for; no more is read or written than the bound that is given

Nothing stays open between two calls, so a file that was replaced is met as it is now. None of it is for an event loop's
thread: a disk may take its time.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

READ_BYTES: Final = 1 << 20  # at a time
ROOM_BYTES: Final = 1 << 16  # for spec, plan and the first lines of a job
MARK: Final = ".made-for"  # in a run directory that Weft has made: the job's id
PROBE: Final = ".room"  # no job's id begins with a dot
_DIRECTORY: Final = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_PARTIAL: Final = ".partial"  # what a file's name ends with while it is written
_SHORTAGES: Final = frozenset(
    {
        *(errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ENOMEM, errno.EMFILE, errno.ENFILE),
        *(errno.EINTR, errno.EAGAIN, errno.EBUSY, errno.ESTALE, errno.ETIMEDOUT),
    }
)
_KINDS: Final = (
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class RunFileError(OSError):
    """A file of a run directory cannot be read or written. The text names it and says why; errno is the system's."""

    def __str__(self) -> str:
        return str(self.strerror)

    @property
    def is_shortage(self) -> bool:
        """Of space, of descriptors, of a disk that answers: it may be over the next time."""
        return self.errno in _SHORTAGES


class ForeignFile(RunFileError):
    """Something else stands in the file's place."""


class FileFull(RunFileError):
    """The file is as large as it may become; what came last is not in it."""


def read(path: Path, max_bytes: int, *, offset: int = 0, owner: int | None = None) -> bytes:
    """At most max_bytes from the offset on; nothing from behind its end. owner: the uid that it must be of, None for
    anybody's. Errors: FileNotFoundError, RunFileError."""
    with _explained(path, "read"), _opened(path, os.O_RDONLY, owner) as file:
        return _read(file, offset, min(max_bytes, os.fstat(file).st_size - offset))


def load(path: Path, max_bytes: int, *, owner: int | None = None) -> bytes:
    """The whole file. Errors: FileNotFoundError, RunFileError, also where it is larger than max_bytes."""
    with _explained(path, "read"), _opened(path, os.O_RDONLY, owner) as file:
        num_bytes = os.fstat(file).st_size
        if num_bytes > max_bytes:
            why = f"it is larger than {max_bytes >> 20} MiB, as no file of ours"
            raise FileFull(errno.EFBIG, f"{path} cannot be read: {why}")
        return _read(file, 0, num_bytes)


def size(path: Path, *, owner: int | None = None) -> int:
    """In bytes, of a file that can be read. Errors: FileNotFoundError, RunFileError."""
    with _explained(path, "read"), _opened(path, os.O_RDONLY, owner) as file:
        return os.fstat(file).st_size


def append(path: Path, data: bytes, *, max_bytes: int, notice: bytes = b"", anew: bool = False) -> int:
    """How many bytes of the data are in the file now: all of them, or as many as the disk took before it failed.

    anew: the file begins with them. max_bytes: lines that would make it larger are left out, and the notice says so
    once. The file and its directory are made where they are gone. Errors: FileFull, RunFileError.
    """
    with _explained(path, "written"), _opened(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, os.geteuid()) as file:
        if anew:
            os.ftruncate(file, 0)
        room = max_bytes - os.fstat(file).st_size
        if len(data) <= room:
            return _write(file, data)
        if room >= 0:
            _write(file, data[: data.rfind(b"\n", 0, room) + 1] + notice)
        raise FileFull(errno.EFBIG, f"{path} is full: it has {max_bytes >> 20} MiB, the most that is kept")


def cut(path: Path, num_bytes: int) -> None:
    """What is behind so many bytes goes. Errors: FileNotFoundError, RunFileError."""
    with _explained(path, "written"), _opened(path, os.O_WRONLY, os.geteuid()) as file:
        os.ftruncate(file, num_bytes)


def replace(path: Path, data: bytes) -> None:
    """Whole or not at all. The directory is made where it is gone. Errors: RunFileError."""
    partial = f".{path.name}{_PARTIAL}"
    with _explained(path, "written"), _directory_of(path, make=True) as directory:
        _remove_partial(path.with_name(partial))
        file = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE, 0o666, dir_fd=directory)
        try:
            try:
                _write_all(file, data)
            finally:
                os.close(file)
            os.rename(partial, path.name, src_dir_fd=directory, dst_dir_fd=directory)
        except OSError:
            with suppress(OSError):
                os.unlink(partial, dir_fd=directory)
            raise


def replace_by(path: Path, write: Callable[[Path], None]) -> None:
    """As `replace`, of what only a library can write: it is given the path, and the file is on the disk on return.

    Errors: RunFileError, also for an OSError of the library's.
    """
    partial = path.with_name(f".{path.name}{_PARTIAL}")
    with _explained(path, "written"):
        make_directory(path.parent)
        _remove_partial(partial)
        try:
            write(partial)
            with _opened(partial, os.O_RDONLY, os.geteuid()) as file:
                os.fsync(file)
            os.rename(partial, path)
        except OSError:
            with suppress(OSError):
                os.unlink(partial)
            raise


def remove_partial(path: Path) -> None:
    """What `replace` or `replace_by` has left of a file: who wrote it was killed, and nobody writes there now."""
    with suppress(OSError), _directory_of(path, make=False) as directory:
        os.unlink(f".{path.name}{_PARTIAL}", dir_fd=directory)


def make_directory(path: Path) -> None:
    """A directory of ours, with those above it. Errors: RunFileError."""
    with _explained(path, "made"):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            problem = f"what stands at {path.parent} is no directory; remove it, or give another --runs-dir"
            raise RunFileError(error.errno, f"{path} cannot be made: {problem}") from error
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
        found = os.lstat(path)
        if not stat.S_ISDIR(found.st_mode):
            raise _foreign(path, found.st_mode)
        if found.st_uid != os.geteuid():
            raise ForeignFile(errno.EPERM, f"{path} belongs to uid {found.st_uid}; give a runs_dir of your own")


def claim(directory: Path, job: str) -> bool:
    """Makes the run directory, and the mark in it; False: something is there, and is left as it is. Errors: OSError.

    Daemons may have one runs_dir in common, so who makes the directory has the job's id.
    """
    directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        directory.mkdir(mode=0o700)
    except FileExistsError:
        return False
    with suppress(OSError):
        (directory / MARK).write_text(f"{job}\n", encoding="utf-8")
    return True


def claim_again(directory: Path, job: str) -> None:
    """As `claim`, where somebody may have removed it since, or it could not be made. Errors: none; who writes into it
    says what is in the way."""
    with suppress(OSError):
        claim(directory, job)


def unclaim(directory: Path) -> None:
    """Takes back what `claim` has made, where there is to be no job, and nothing else has come into it."""
    with suppress(OSError):
        if os.listdir(directory) == [MARK]:
            os.unlink(directory / MARK)
        os.rmdir(directory)


def check_room(runs: Path) -> None:
    """That a run directory and a file in it can be made there. Errors: RunFileError."""
    probe = runs / PROBE
    try:
        make_directory(probe)
        replace(probe / PROBE, bytes(ROOM_BYTES))
    finally:
        with suppress(OSError):
            os.unlink(probe / PROBE)
        with suppress(OSError):
            os.rmdir(probe)


def sync(path: Path, *, is_read_again: bool = True) -> None:
    """A file, or the names in a directory, are on the disk on return. is_read_again: False for a file whose pages the
    kernel may use for others from then on. Errors: OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
        if not is_read_again:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def is_regular(path: Path) -> bool:
    """Whether a file stands there, and no link to one or to a directory with one."""
    try:
        return stat.S_ISDIR(os.lstat(path.parent).st_mode) and stat.S_ISREG(os.lstat(path).st_mode)
    except OSError:
        return False


# --- opening


@contextmanager
def _opened(path: Path, flags: int, owner: int | None) -> Iterator[int]:
    writes = bool(flags & os.O_CREAT)
    with _directory_of(path, make=writes) as directory:
        file = os.open(path.name, flags | _FILE, 0o666, dir_fd=directory)
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise _foreign(path, found.st_mode)
        if owner is not None and found.st_uid != owner:
            raise ForeignFile(errno.EPERM, f"{path} belongs to uid {found.st_uid} and is no file of ours; remove it")
        if writes and found.st_nlink > 1:
            raise ForeignFile(errno.EMLINK, f"{path} is a hard link: it has another name elsewhere; remove it")
        yield file
    finally:
        os.close(file)


@contextmanager
def _directory_of(path: Path, *, make: bool) -> Iterator[int]:
    try:
        directory = os.open(path.parent, _DIRECTORY)
    except FileNotFoundError:
        if not make:
            raise
        make_directory(path.parent)
        directory = os.open(path.parent, _DIRECTORY)
    try:
        yield directory
    finally:
        os.close(directory)


@contextmanager
def _explained(path: Path, done: str) -> Iterator[None]:
    """A file that is not there is FileNotFoundError, everything else RunFileError."""
    try:
        yield
    except (FileNotFoundError, RunFileError):
        raise
    except OSError as error:
        for standing in (path.parent, path) if done != "made" else ():
            if (foreign := _in_place_of(standing, stat.S_ISREG if standing is path else stat.S_ISDIR)) is not None:
                raise foreign from error
        raise RunFileError(error.errno, f"{path} cannot be {done}: {error.strerror}") from error


def _in_place_of(path: Path, is_right: Callable[[int], bool]) -> ForeignFile | None:
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return None
    return None if is_right(mode) else _foreign(path, mode)


def _foreign(path: Path, mode: int) -> ForeignFile:
    what = next((name for is_kind, name in _KINDS if is_kind(mode)), "a file")
    return ForeignFile(errno.EINVAL, f"{path} is {what}, which Weft has not put there; remove it")


# --- reading and writing


def _read(file: int, offset: int, num_bytes: int) -> bytes:
    """As many, or up to the file's end."""
    parts = []
    while num_bytes > 0 and (part := os.pread(file, min(num_bytes, READ_BYTES), offset)):
        parts.append(part)
        offset += len(part)
        num_bytes -= len(part)
    return b"".join(parts)


def _write(file: int, data: bytes) -> int:
    """What was written before an error counts; the error comes again with the rest."""
    done = 0
    while done < len(data):
        try:
            done += os.write(file, data[done:])
        except OSError:
            if done:
                return done
            raise
    return done


def _remove_partial(path: Path) -> None:
    """Of a writer that was killed, or whatever stands there."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    except OSError:
        if (foreign := _in_place_of(path, stat.S_ISREG)) is not None:
            raise foreign from None
        raise


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
