"""The runtime directory: where one daemon's lock and socket are, and who may have them.

    RUNTIME_DIR/            0700, ours, no link
    RUNTIME_DIR/daemon.lock flock held while the daemon lives; holds its pid
    RUNTIME_DIR/weft.sock   0600, listening
    RUNTIME_DIR/directory.sock, RUNTIME_DIR/directory-PID.sock   of the directory, while the daemon lives; those of one
                            that was killed, until the next begins

The order is what keeps a second daemon from taking over a live one's socket: the lock is taken before the socket is
looked at, and a socket is removed only under the lock and only if nothing answers on it. The kernel drops the lock
however the daemon dies, so a stale lock file needs no cleaning.

Cleaners of /tmp, and people, remove the directory of a daemon that runs: no client reaches it then. What another daemon
has made in its place meanwhile is that one's, and stays.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import stat
from pathlib import Path
from typing import Self

LOCK_NAME = "daemon.lock"
SOCKET_NAME = "weft.sock"
MAX_SOCKET_PATH_BYTES = 107  # sun_path has 108, the last one is NUL
DIRECTORY_SOCKETS = "directory*.sock"
LONGEST_SOCKET = "directory-4194304.sock"  # Linux has no pid above it
MAX_PATH_BYTES = MAX_SOCKET_PATH_BYTES - len("/" + LONGEST_SOCKET)  # of the directory
BACKLOG = 128  # connections not yet accepted; beyond it a client's connect waits
MAX_PID_CHARS = 20

_log = logging.getLogger("weft.daemon")


class RuntimeDirectoryError(RuntimeError):
    """The runtime directory, its lock or its socket cannot be had. The text names the path and the remedy."""


class RuntimeDirectory:
    """A directory made, locked and listening. `listener` is a non-blocking Unix stream socket."""

    def __init__(self, path: Path, lock_fd: int, listener: socket.socket, *, owns_socket: bool) -> None:
        self.path = path
        self.listener = listener
        self.lock_fd = lock_fd
        self.owns_socket = owns_socket
        name = listener.getsockname()
        self._socket = Path(name) if name and isinstance(name, str) else None  # else its name is in no file system
        self._meant = None if self._socket is None else _file_at(self._socket)
        if self._socket is not None and self._meant is None and not owns_socket:
            _log.warning("%s: the socket that was inherited is not there; start its unit again", self._socket)

    @classmethod
    def open(cls, path: Path, inherited_fd: int | None = None) -> Self:
        """Makes the directory, takes its lock, binds its socket; or uses `inherited_fd`, a socket that listens already.

        Raises RuntimeDirectoryError, and leaves everything as it was, if another daemon has the directory or something
        else is in its place. The inherited socket is owned from then on, also after an error.
        """
        path = path.absolute()
        with contextlib.ExitStack() as undo:
            _check_length(path)
            if inherited_fd is not None:
                inherited = undo.enter_context(_inherit(inherited_fd))
            _make(path)
            lock_fd = _lock(path / LOCK_NAME)
            undo.callback(os.close, lock_fd)
            undo.callback(os.unlink, path / LOCK_NAME)
            if inherited_fd is None:
                _clear(path / SOCKET_NAME)
                listener = _bind(path / SOCKET_NAME)
            else:
                listener = inherited
            listener.setblocking(False)
            undo.pop_all()
        return cls(path, lock_fd, listener, owns_socket=inherited_fd is None)

    @classmethod
    def inherit(cls, path: Path, lock_fd: int, listener_fd: int, *, owns_socket: bool) -> Self:
        """What this process had before it became another program: the lock was never free."""
        listener = _inherit(listener_fd)
        listener.setblocking(False)
        return cls(path.absolute(), lock_fd, listener, owns_socket=owns_socket)

    def check(self) -> None:
        """Raises RuntimeDirectoryError where clients do not find the socket any more."""
        if self._is_found() or (self._meant is None and not self.owns_socket):
            return
        what = "is gone" if self._socket is None or _file_at(self._socket) is None else "is another one"
        again = "it" if self.owns_socket else "its socket's unit"
        raise RuntimeDirectoryError(
            f"{self._socket}: the socket of this daemon (pid {os.getpid()}) {what}, so that no client can reach it; it "
            f"ends, and its jobs go on in the next one: start {again} again, and let nothing clean {self.path}, or "
            "give another runtime_dir"
        )

    def _is_found(self) -> bool:
        return self._socket is not None and self._meant is not None and _file_at(self._socket) == self._meant

    def make_again(self) -> None:
        """The directory and the lock, where they are gone: for the sockets of the daemon's own processes while it ends.

        Raises RuntimeDirectoryError if another daemon has the directory by now, or something else is in its place.
        """
        _make(self.path)
        if not _is_at(self.lock_fd, self.path / LOCK_NAME):
            before, self.lock_fd = self.lock_fd, _lock(self.path / LOCK_NAME)
            os.close(before)

    def close(self) -> None:
        """Stops listening, unlinks the sockets (but for one that was inherited) and the lock, unlocks. May be called
        twice."""
        if self.lock_fd < 0:
            return
        if self.owns_socket and self._is_found() and self._socket is not None:
            self._socket.unlink(missing_ok=True)
        self.listener.close()  # till here no other file can have its inode
        lock = self.path / LOCK_NAME
        is_ours = _is_at(self.lock_fd, lock)
        if is_ours or not lock.exists():
            for each in self.path.glob(DIRECTORY_SOCKETS):
                each.unlink(missing_ok=True)
        if is_ours:
            lock.unlink(missing_ok=True)
        os.close(self.lock_fd)
        self.lock_fd = -1


def _make(path: Path) -> None:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        problem = "is a symbolic link" if path.is_symlink() else f"cannot be made ({error.strerror})"
        raise RuntimeDirectoryError(f"{path}: {problem}; give another runtime_dir") from error
    try:
        status = os.fstat(fd)
        if status.st_uid != os.geteuid():
            raise RuntimeDirectoryError(
                f"{path}: belongs to uid {status.st_uid}, not to {os.geteuid()}; give a runtime_dir of your own"
            )
        if status.st_mode & 0o077:
            _narrow(fd, path)
    finally:
        os.close(fd)


def _narrow(fd: int, path: Path) -> None:
    # Only if it is the daemon's alone: runtime_dir = "/tmp", given to root, must not close /tmp to everyone.
    others = sorted(set(os.listdir(fd)) - {LOCK_NAME, SOCKET_NAME})
    if others or os.fstat(fd).st_mode & stat.S_ISVTX:
        raise RuntimeDirectoryError(
            f"{path}: open to other users, and not Weft's alone; chmod it to 0700, or give another runtime_dir"
        )
    try:
        os.fchmod(fd, 0o700)
    except OSError as error:
        raise RuntimeDirectoryError(
            f"{path}: open to other users, and cannot be made 0700 ({error.strerror}); give another runtime_dir"
        ) from error


def _lock(path: Path) -> int:
    """The descriptor that holds the lock, with our pid in the file."""
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise RuntimeDirectoryError(
                f"{path}: cannot be opened ({error.strerror}); move away what is there"
            ) from error
        with contextlib.ExitStack() as undoing:
            undoing.callback(os.close, fd)
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise RuntimeDirectoryError(f"{path}: not a regular file; move away what is there")
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pid = os.pread(fd, MAX_PID_CHARS, 0).decode(errors="replace").strip() or "unknown"
                raise RuntimeDirectoryError(
                    f"{path}: a daemon (pid {pid}) has this directory; use it, stop it, or give another runtime_dir "
                    "(one that is told to stop drains first, and has it until its jobs end, at most drain_seconds)"
                ) from None
            if _is_at(fd, path):  # otherwise a daemon that was ending unlinked the file meanwhile: lock the new one
                _write_pid(fd, path)
                undoing.pop_all()
                return fd


def _write_pid(fd: int, path: Path) -> None:
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise RuntimeDirectoryError(
            f"{path}: cannot be written ({error.strerror}); make room, or give another runtime_dir"
        ) from error


def _is_at(fd: int, path: Path) -> bool:
    held = os.fstat(fd)
    return _file_at(path) == (held.st_dev, held.st_ino)


def _file_at(path: Path) -> tuple[int, int] | None:
    """Its device and inode."""
    try:
        found = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino


def _clear(path: Path) -> None:
    """Removes a stale socket. Only under the lock."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise RuntimeDirectoryError(f"{path}: something that is not a socket stands there; move it away")
    if not is_refused(path):
        raise RuntimeDirectoryError(
            f"{path}: something answers there, although {LOCK_NAME} is free; stop it, or give another runtime_dir"
        )
    path.unlink()


def is_refused(path: Path) -> bool:
    """Whether nobody is behind the socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:  # a full backlog (EAGAIN) is a sign of life too
            pass
    return False


def _bind(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # bind gives the file the mode of the socket (less the umask, which belongs to the whole process).
        os.fchmod(listener.fileno(), 0o600)
        listener.bind(str(path))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise RuntimeDirectoryError(f"{path}: cannot be bound ({error.strerror}); give another runtime_dir") from error
    return listener


def _check_length(path: Path) -> None:
    num_bytes = len(os.fsencode(path))
    if num_bytes > MAX_PATH_BYTES:
        raise RuntimeDirectoryError(
            f"{path}: {num_bytes} bytes, and at most {MAX_PATH_BYTES} leave room for the paths of the sockets in it; "
            "give a shorter runtime_dir"
        )


def _inherit(fd: int) -> socket.socket:
    problem = f"inherited descriptor {fd} is not a listening Unix stream socket; write ListenStream=<path> in its unit"
    try:
        listener = socket.socket(fileno=fd)
    except OSError as error:
        raise RuntimeDirectoryError(problem) from error
    is_stream = listener.family == socket.AF_UNIX and listener.type == socket.SOCK_STREAM
    if not is_stream or not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        listener.close()
        raise RuntimeDirectoryError(problem)
    return listener
