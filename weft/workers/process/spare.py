"""Spares: a copy of a worker that is prepared for a job, forked before its lanes begin, that takes its place once it is
gone.

    worker   prepared ──fork──▶ lanes run ─── ✗
    spare                 └──── waits ──────────▶ is handed the next worker's connection by the fork server, and joins

What the job's function has made and what is mapped is there in both. Parameters lie in shared memory, and other pages
are shared until one of the two writes. A spare goes on as workers do that have lived: it rewinds to a snapshot.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import struct
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from weft.machine.tether import tie_to
from weft.workers.process.footprint import trim

MAX_PACKET_BYTES = 1 << 10
MOST_BYTES = 256 << 20  # that a worker has made for the job, of its own: what a spare could come to take
_OUR_THREADS = 2  # main and control
_ENDING_SECONDS, _LOOK_SECONDS = 0.2, 1e-3  # for threads that end: each needs a core once, which others may have
_OMP_PAUSE_HARD = 2  # omp.h
_CREDENTIALS = struct.Struct("3i")  # struct ucred, of which the first is the pid


class Spares:
    """Of one worker: at most one at a time. channel: to the fork server, one packet a message; of the worker and its
    spare, which has it alone once the worker is gone. server: the fork server's pid."""

    def __init__(self, channel: socket.socket, server: int) -> None:
        self._channel, self._server = channel, server
        self._own_bytes = _own_bytes()  # before any job
        self._could_be = len(_threads()) <= _OUR_THREADS  # a device may have some of its own from the beginning
        self._pid, self._pidfd = 0, -1
        self.is_forking = False

    def make(self, job: str, begin: Callable[[], None]) -> socket.socket | None:
        """In the worker None, at once, whether or not there is a spare now. In the spare its connection to the daemon,
        once it is the worker. job: whose memory it has a part of, by its blocks' name. begin: lets go, in the spare, of
        what is the worker's alone.

        None is made where it would cost much memory, or where anything runs in this process beside the caller and the
        control thread: a fork leaves other threads out, and the job's own processes die with the worker.
        """
        self.end()
        _end_torch_threads()
        try:
            if not _is_soon_alone() or self._has_much():
                return None
            self.is_forking = True
            with warnings.catch_warnings():  # of threads that a child would not have: the control thread alone
                warnings.simplefilter("ignore", DeprecationWarning)
                self._pid = os.fork()
        except OSError:  # no more processes, no memory, no descriptors
            return None
        finally:
            self.is_forking = False
        if self._pid == 0:
            return self._become_worker(job, begin)
        try:
            self._pidfd = os.pidfd_open(self._pid)
        except OSError:  # no more descriptors
            os.kill(self._pid, signal.SIGKILL)
            self._reap()
        return None

    def are_prevented(self) -> bool:
        """Whether a job that is over has left what would keep those behind it from having any: a thread that is not
        Python's, as torch.profiler's, or a process."""
        _end_torch_threads()
        try:
            return self._could_be and not _is_soon_alone()
        except OSError:
            return True

    def _has_much(self) -> bool:
        """What is free is given back before it counts: the job's function has left it, or a larger job before."""
        if _own_bytes() - self._own_bytes <= MOST_BYTES:
            return False
        trim()
        return _own_bytes() - self._own_bytes > MOST_BYTES

    def end(self) -> None:
        """None is left."""
        if self._pid:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            os.close(self._pidfd)
            self._reap()

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):  # the job's code waits for all children
            os.waitpid(self._pid, 0)
        self._pid = 0

    def _become_worker(self, job: str, begin: Callable[[], None]) -> socket.socket:
        """Does not return where nobody wants it any more."""
        try:
            os.setpgid(0, 0)  # the worker's own group dies with it
            begin()
            self._channel.send(job.encode())
            _, descriptors, _, _ = socket.recv_fds(self._channel, MAX_PACKET_BYTES, 1)
        except OSError:
            os._exit(0)
        if not descriptors:  # the fork server is gone
            os._exit(0)
        tie_to(self._server)
        os.set_inheritable(descriptors[0], False)
        return socket.socket(fileno=descriptors[0])


def make_channel() -> tuple[socket.socket, socket.socket]:
    """The fork server's end, and that of a worker and its spare. Errors: OSError."""
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    return ours, theirs


def received(channel: socket.socket) -> tuple[bytes, int]:
    """What was said at the other end, and the pid of who did. Errors: BlockingIOError, where nothing was; OSError."""
    told, about, _, _ = channel.recvmsg(MAX_PACKET_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size), socket.MSG_DONTWAIT)
    pids = [_CREDENTIALS.unpack(data)[0] for _, kind, data in about if kind == socket.SCM_CREDENTIALS]
    return told, pids[0] if pids else 0


def _end_torch_threads() -> None:
    """OpenMP's, which begin anew where they are wanted. They wait for work, and a child would wait for them."""
    with contextlib.suppress(AttributeError):  # another runtime than that of 5.0 and later
        ctypes.CDLL(None).omp_pause_resource_all(_OMP_PAUSE_HARD)


def _is_soon_alone() -> bool:
    """Threads that have been told to end do so in a moment."""
    until = time.monotonic() + _ENDING_SECONDS
    while not (is_alone := _is_alone()) and time.monotonic() < until:
        time.sleep(_LOOK_SECONDS)
    return is_alone


def _is_alone() -> bool:
    """Errors: OSError."""
    threads = _threads()
    return len(threads) == _OUR_THREADS and not any((each / "children").read_text() for each in threads)


def _threads() -> list[Path]:
    """Errors: OSError."""
    return list(Path("/proc/self/task").iterdir())


def _own_bytes() -> int:
    """Of anonymous memory: what a child would share until one of the two writes there."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0
