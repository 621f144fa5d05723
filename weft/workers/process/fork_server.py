"""The fork server: imports torch once, then forks workers that are ready in milliseconds.

A process of its own, started by the daemon as `python -m weft.workers`. It has one thread, computes with no other and
makes no CUDA context, so its children are whole. Over the inherited socket:

    daemon → {"fork": name, "role": ROLE, "config": {...}}    with the child's socket as a descriptor
             ROLE: "worker", "directory" or "saver"
    server → {"forked": name, "pid": ...}, {"exited": name, "pid": ..., "code": ..., "peak_bytes": ...}
             a pid of 0: it was never forked; the peak is of what was resident, since a job last began in it
             {"stopped": name, "pid": ..., "at": ns of CLOCK_MONOTONIC}, and the same with "continued"

The daemon's end closing, for whatever reason, ends every child by SIGKILL and then the server: nothing of ours outlives
the daemon. Should the server itself be killed, the kernel kills its children. A child leads a process group, and what
its job's code has started there is killed when the child has ended.
"""

from __future__ import annotations

import contextlib
import gc
import os
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import torch._dynamo  # noqa: F401  (what the first optimizer of a process imports, for seconds)

from weft.machine.tether import tie_to, untie
from weft.plan.worker_view import WorkerView
from weft.transport.memory.blocks import SHARED_MEMORY
from weft.transport.memory.directory import DirectoryServer
from weft.transport.wire.frames import MAX_WORKER_FRAME_BYTES, FrameReader, Message, encode
from weft.workers.process.saver import run_saver
from weft.workers.process.warm_up import warm_up_server
from weft.workers.process.worker import WorkerConfig, run_worker

MAX_DESCRIPTORS_PER_MESSAGE = 16  # the daemon sends one with each fork; several may arrive together


class ForkServer:
    """One loop over the daemon's socket and a pidfd for each child."""

    def __init__(self, daemon: socket.socket) -> None:
        self._daemon = daemon
        self._reader = FrameReader(MAX_WORKER_FRAME_BYTES)
        self._descriptors: list[int] = []
        self._selector = selectors.EpollSelector()
        self._children: dict[int, tuple[str, int]] = {}  # pidfd -> name, pid
        self._modules = frozenset(sys.modules)
        self._changed, self._wakeup = socket.socketpair()  # a byte for each SIGCHLD

    def run(self) -> None:
        self._selector.register(self._daemon, selectors.EVENT_READ)
        self._selector.register(self._changed, selectors.EVENT_READ)
        self._wakeup.setblocking(False)
        signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)  # any handler will do: the byte is what wakes us
        try:
            while True:
                for key, _ in self._selector.select():
                    if key.fileobj is self._daemon:
                        if not self._receive():
                            return
                    elif key.fileobj is self._changed:
                        self._tell_stops()
                    else:
                        self._reap(key.fd)
        finally:
            self._end_children()

    def _receive(self) -> bool:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._daemon, 1 << 16, MAX_DESCRIPTORS_PER_MESSAGE)
        except ConnectionError:
            return False
        self._descriptors += descriptors
        for message in self._reader.feed(data):
            self._fork(message, self._descriptors.pop(0))
        return bool(data)

    def _fork(self, message: Message, descriptor: int) -> None:
        server = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:  # no more processes: the daemon asks again, later each time
            print(f"{message['fork']} cannot be forked: {error.strerror}", file=sys.stderr, flush=True)
            os.close(descriptor)
            self._send({"exited": message["fork"], "pid": 0, "code": 1})
            return
        if pid == 0:
            _run_child(message, server, self._inherited(), descriptor, self._modules)
        os.close(descriptor)
        pidfd = os.pidfd_open(pid)
        self._children[pidfd] = (message["fork"], pid)
        self._selector.register(pidfd, selectors.EVENT_READ)
        self._send({"forked": message["fork"], "pid": pid})

    def _inherited(self) -> list[int]:
        """Descriptors that are not the child's business: it must not keep the daemon's socket open, nor may the job's
        code find another process's in its own."""
        ours = (self._daemon, self._changed, self._wakeup)
        return [*(each.fileno() for each in ours), self._selector.fileno(), *self._children, *self._descriptors]

    def _reap(self, pidfd: int) -> None:
        self._selector.unregister(pidfd)
        os.close(pidfd)
        name, pid = self._children.pop(pidfd)
        _end_group(pid)
        _, status, used = os.wait4(pid, 0)
        _remove_counters(pid)
        peak_bytes = used.ru_maxrss * 1024
        self._send({"exited": name, "pid": pid, "code": os.waitstatus_to_exitcode(status), "peak_bytes": peak_bytes})

    def _tell_stops(self) -> None:
        """Of every child that was stopped or goes on. Exits are the pidfds' to tell."""
        self._changed.recv(1 << 12)
        names = {pid: name for name, pid in self._children.values()}
        while names and (change := os.waitid(os.P_ALL, 0, os.WSTOPPED | os.WCONTINUED | os.WNOHANG)) is not None:
            what = "continued" if change.si_code == os.CLD_CONTINUED else "stopped"
            self._send({what: names[change.si_pid], "pid": change.si_pid, "at": time.monotonic_ns()})

    def _end_children(self) -> None:
        for _, pid in self._children.values():
            os.kill(pid, signal.SIGKILL)
        for _, pid in self._children.values():
            _end_group(pid)
            os.waitpid(pid, 0)
            _remove_counters(pid)

    def _send(self, message: Message) -> None:
        with contextlib.suppress(ConnectionError):  # the daemon has gone: the end of its stream is the next to be read
            self._daemon.sendall(encode(message))


def _end_group(leader: int) -> None:
    """What a child has started and left behind. Before the child is reaped: its number is nobody else's until then."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it died before it led any; it holds another's
        os.killpg(leader, signal.SIGKILL)


def _remove_counters(pid: int) -> None:
    """torch counts who has opened a process's GPU memory in files with names, the only ones that it leaves there while
    the process lives; one that is killed leaves them for ever."""
    for path in SHARED_MEMORY.glob(f"torch_{pid}_*"):
        path.unlink(missing_ok=True)


def _run_child(message: Message, server: int, inherited: list[int], descriptor: int, modules: frozenset[str]) -> None:
    """Never returns."""
    code = 1
    try:
        tie_to(server)
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for fd in inherited:
            os.close(fd)
        gc.enable()
        os.set_inheritable(descriptor, False)  # no program that the job's code starts has it
        connection = socket.socket(fileno=descriptor)
        config = message["config"]
        if message["role"] == "directory":
            _run_directory(connection, config)
        elif message["role"] == "saver":
            run_saver(connection, config)
        else:
            run_worker(connection, WorkerConfig(**{**config, "cores": tuple(config["cores"])}), modules)
        code = 0
    finally:  # the last frame of the process: a traceback goes to the daemon's log
        if code:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(code)


def _run_directory(connection: socket.socket, config: dict[str, Any]) -> None:
    directory = DirectoryServer(Path(config["address"]), config["authkey"])

    def obey() -> None:
        reader = FrameReader(MAX_WORKER_FRAME_BYTES)
        with contextlib.suppress(ConnectionError):
            while data := connection.recv(1 << 16):
                for message in reader.feed(data):
                    if message["arenas"] is not None:
                        directory.drop(message["arenas"])
                    else:  # somebody asks whether it hangs
                        directory.pass_calls()
                        connection.sendall(encode({"type": "there"}))
        os._exit(0)

    threading.Thread(target=obey, name="control", daemon=True).start()
    directory.serve(lambda: connection.sendall(encode({"type": "joined"})))


def serve(descriptor: int) -> None:
    """Until the daemon closes the socket at this descriptor, or dies."""
    warm_up_server()
    WorkerView.wire()  # which children have then as well
    gc.freeze()  # shared pages stay shared: the children's collector will not touch what is frozen
    daemon = socket.socket(fileno=descriptor)
    untie()  # the end of the socket is noticed at once from here on, and children leave files that a kill would not
    ForkServer(daemon).run()
