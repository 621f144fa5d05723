"""The fork server: imports torch once, then forks workers that are ready in milliseconds.

A process of its own, started by the daemon as `python -m weft.workers`. It has one thread, computes with no other and
makes no CUDA context, so its children are whole. Over the inherited socket:

    daemon → {"fork": name, "role": ROLE, "config": {...}, "job": ...}    with the child's socket as a descriptor
             ROLE: "worker", "directory" or "saver"; job: empty, or that goes on with the worker, by its blocks' name
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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch._dynamo  # noqa: F401  (what the first optimizer of a process imports, for seconds)

from weft.machine.tether import adopt_orphans, tie_to, untie
from weft.plan.worker_view import WorkerView
from weft.transport.memory.blocks import SHARED_MEMORY
from weft.transport.memory.directory import DirectoryServer
from weft.transport.wire.frames import MAX_WORKER_FRAME_BYTES, FrameReader, Message, encode
from weft.workers.process.saver import run_saver
from weft.workers.process.spare import Spares, make_channel, received
from weft.workers.process.warm_up import warm_up_server
from weft.workers.process.worker import run_worker
from weft.workers.process.worker_config import WorkerConfig

MAX_DESCRIPTORS_PER_MESSAGE = 16  # the daemon sends one with each fork; several may arrive together


@dataclass(slots=True)
class _Child:
    name: str
    pid: int
    config: dict[str, Any]
    channel: socket.socket | None  # to a worker and its spare
    spare: int = 0  # its pid
    spares_job: str = ""


class ForkServer:
    """One loop over the daemon's socket, the ends of children, and what their spares say."""

    def __init__(self, daemon: socket.socket) -> None:
        self._daemon = daemon
        self._reader = FrameReader(MAX_WORKER_FRAME_BYTES)
        self._descriptors: list[int] = []
        self._selector = selectors.EpollSelector()
        self._children: dict[int, _Child] = {}  # by pid
        self._gone: dict[str, _Child] = {}  # by name: workers that have ended, and have left a spare
        self._modules = dict(sys.modules)
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
                        self._changed.recv(1 << 12)
                        self._tell_stops()
                        self._reap()
                    else:
                        self._hear(key.data)
        finally:
            self._end_children()

    def _receive(self) -> bool:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._daemon, 1 << 16, MAX_DESCRIPTORS_PER_MESSAGE)
        except ConnectionError:
            return False
        self._descriptors += descriptors
        for message in self._reader.feed(data):
            descriptor = self._descriptors.pop(0)
            if not self._hand_over(message, descriptor):
                self._fork(message, descriptor)
            os.close(descriptor)
        return bool(data)

    def _fork(self, message: Message, descriptor: int) -> None:
        server, ends = os.getpid(), list[socket.socket]()
        try:
            if message["role"] == "worker":
                ends += make_channel()
            pid = os.fork()
        except OSError as error:  # no more processes: the daemon asks again, later each time
            print(f"{message['fork']} cannot be forked: {error.strerror}", file=sys.stderr, flush=True)
            for end in ends:
                end.close()
            self._send({"exited": message["fork"], "pid": 0, "code": 1})
            return
        channel, theirs = ends or (None, None)
        if pid == 0:
            _run_child(message, server, self._inherited(channel), descriptor, theirs, self._modules)
        if theirs is not None:
            theirs.close()
        self._adopt(_Child(message["fork"], pid, message["config"], channel))

    def _adopt(self, child: _Child) -> None:
        self._children[child.pid] = child
        if child.channel is not None:
            self._selector.register(child.channel, selectors.EVENT_READ, child)
        self._send({"forked": child.name, "pid": child.pid})

    def _inherited(self, channel: socket.socket | None) -> list[int]:
        """Descriptors that are not the child's business: it must not keep the daemon's socket open, nor may the job's
        code find another process's in its own."""
        children = (child.channel for child in (*self._children.values(), *self._gone.values()))
        sockets = (self._daemon, self._changed, self._wakeup, channel, *children)
        return [*(each.fileno() for each in sockets if each), self._selector.fileno(), *self._descriptors]

    # --- spares

    def _hear(self, child: _Child) -> bool:
        """A worker's spare, or the end of both. Whether there may be more. The job's code may say anything here; who
        says it the kernel tells."""
        if child.channel is None:  # closed by what was heard a moment ago
            return False
        try:
            told, sender = received(child.channel)
        except BlockingIOError:
            return False
        except OSError:
            told, sender = b"", 0
        if not told:
            self._close(child)
        elif sender not in self._children:
            child.spare, child.spares_job = sender, told.decode(errors="replace")
        return bool(told)

    def _close(self, child: _Child) -> None:
        if child.channel is not None:
            with contextlib.suppress(KeyError):  # it waits in `_gone`
                self._selector.unregister(child.channel)
            child.channel.close()
        child.channel = None

    def _hand_over(self, message: Message, descriptor: int) -> bool:
        """Whether the spare of the one before is now what is asked for."""
        if (gone := self._gone.pop(message["fork"], None)) is None:
            return False
        assert gone.channel is not None
        if gone.config == message["config"] and gone.spares_job == message["job"]:
            with contextlib.suppress(OSError):  # it has just ended
                socket.send_fds(gone.channel, [b"\0"], [descriptor])
                self._adopt(_Child(gone.name, gone.spare, gone.config, gone.channel))
                return True
        os.kill(gone.spare, signal.SIGKILL)
        self._close(gone)
        return False

    # --- ends

    def _reap(self) -> None:
        """Who has ended: children, spares whose workers have ended, and what jobs' code has left behind, all of whom
        become this process's children then."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if (child := self._children.pop(ended.si_pid, None)) is not None:
                    self._reap_child(child)
                    continue
                os.waitpid(ended.si_pid, 0)
                for gone in [each for each in self._gone.values() if each.spare == ended.si_pid]:
                    self._close(self._gone.pop(gone.name))

    def _reap_child(self, child: _Child) -> None:
        _end_group(child.pid)
        _, status, used = os.wait4(child.pid, 0)
        _remove_counters(child.pid)
        while self._hear(child):
            pass
        if child.channel is not None and child.spare and _is_ours(child.spare):
            self._selector.unregister(child.channel)
            self._gone[child.name] = child
        else:
            self._close(child)
        code, peak_bytes = os.waitstatus_to_exitcode(status), used.ru_maxrss * 1024
        self._send({"exited": child.name, "pid": child.pid, "code": code, "peak_bytes": peak_bytes})

    def _tell_stops(self) -> None:
        """Of every child that was stopped or goes on."""
        with contextlib.suppress(ChildProcessError):
            while (change := os.waitid(os.P_ALL, 0, os.WSTOPPED | os.WCONTINUED | os.WNOHANG)) is not None:
                what = "continued" if change.si_code == os.CLD_CONTINUED else "stopped"
                if (child := self._children.get(change.si_pid)) is not None:
                    self._send({what: child.name, "pid": child.pid, "at": time.monotonic_ns()})

    def _end_children(self) -> None:
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)
        for child in self._children.values():
            _end_group(child.pid)
            os.waitpid(child.pid, 0)
            _remove_counters(child.pid)
        for child in (*self._children.values(), *self._gone.values()):
            if child.spare and _is_ours(child.spare):
                os.kill(child.spare, signal.SIGKILL)
                os.waitpid(child.spare, 0)

    def _send(self, message: Message) -> None:
        with contextlib.suppress(ConnectionError):  # the daemon has gone: the end of its stream is the next to be read
            self._daemon.sendall(encode(message))


def _is_ours(pid: int) -> bool:
    """A child of this process that has not ended."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False


def _end_group(leader: int) -> None:
    """What a child has started and left behind. Before the child is reaped: its number is nobody else's until then."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it died before it led any; it holds another's
        os.killpg(leader, signal.SIGKILL)


def _remove_counters(pid: int) -> None:
    """torch counts who has opened a process's GPU memory in files with names, the only ones that it leaves there while
    the process lives; one that is killed leaves them for ever."""
    for path in SHARED_MEMORY.glob(f"torch_{pid}_*"):
        path.unlink(missing_ok=True)


def _run_child(
    message: Message,
    server: int,
    inherited: list[int],
    descriptor: int,
    channel: socket.socket | None,
    modules: Mapping[str, ModuleType],
) -> None:
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
            assert channel is not None
            config = WorkerConfig(**{**config, "cores": tuple(config["cores"])})
            run_worker(connection, config, modules, Spares(channel, server))
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
                    if message.get("listens_again"):
                        try:
                            directory.listen_again()
                        except OSError:  # who does not reach it says so
                            traceback.print_exc()
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
    adopt_orphans()
    untie()  # the end of the socket is noticed at once from here on, and children leave files that a kill would not
    ForkServer(daemon).run()
