"""Clients of the daemon's socket: `Client` blocks, `AsyncClient` awaits; the methods are the same.

    client = weft.Client()
    job = client.submit(weft.JobSpec.load("digits.toml"))["job"]
    for event in client.follow(job):
        ...

Both perform the scripts of `weft.client.conversation`. Every call has a connection of its own, so a client may be
shared by threads (or tasks) and has nothing to close. All raise `DaemonUnreachable` and `RequestRefused`. Nothing here
imports torch or pydantic, and asyncio comes only with the first use of an `AsyncClient`: `weft ps` answers in under 150
ms.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, assert_never

from weft.client.arguments import check_arguments
from weft.client.conversation import (
    RECONNECT_SECONDS,
    Close,
    Connect,
    Conversation,
    DaemonUnreachable,
    Deliver,
    Pause,
    Receive,
    RequestRefused,
    Script,
    Send,
)
from weft.client.signal_handlers import is_of_handler
from weft.client.socket_trust import check_peer, check_socket_path
from weft.transport.wire.frames import Message

if TYPE_CHECKING:
    import asyncio

    from weft.spec.job_spec import JobSpec

__all__ = ["AsyncClient", "Client", "DaemonUnreachable", "RequestRefused", "default_socket_path"]

T = TypeVar("T")
RECEIVE_BYTES = 1 << 16
_LEAST_TIMEOUT_SECONDS = 1e-3  # a socket's timeout of 0 would mean non-blocking


def default_socket_path(environment: Mapping[str, str]) -> Path:
    """`Settings.socket_path` without the 0.1 s that importing pydantic takes; a test holds the two equal.

    Raises SpecError where ./weft.toml cannot be read.
    """
    runtime_dir = environment.get("WEFT_RUNTIME_DIR")
    if runtime_dir is None and os.path.exists("weft.toml"):
        runtime_dir = _runtime_dir_of_file(environment)
    if runtime_dir is None:
        base = environment.get("XDG_RUNTIME_DIR")
        runtime_dir = os.path.join(base, "weft") if base else f"/tmp/weft-{os.getuid()}"
    return Path(runtime_dir, "weft.sock")


def _runtime_dir_of_file(environment: Mapping[str, str]) -> str | None:
    import tomllib

    try:
        with open("weft.toml", "rb") as file:
            runtime_dir = tomllib.load(file).get("daemon", {}).get("runtime_dir")
    except (OSError, ValueError, AttributeError):
        runtime_dir = 0
    if runtime_dir is None or isinstance(runtime_dir, str):
        return runtime_dir
    from weft.spec.settings import load_settings

    return str(load_settings({}, environment, None).runtime_dir)


def _wire_spec(spec: JobSpec | Mapping[str, Any]) -> Mapping[str, Any]:
    return spec if isinstance(spec, Mapping) else spec.to_wire()


def _conversation(socket: Path | str | None, timeout: float, reconnect_seconds: float) -> Conversation:
    check_arguments(socket, timeout, reconnect_seconds)
    path = default_socket_path(os.environ) if socket is None else Path(socket)
    return Conversation(path, timeout, reconnect_seconds)


class Client:
    """A blocking client. socket: the daemon's, by default where the settings say; timeout: seconds for each answer.

    reconnect_seconds: how long `follow` and `wait` look for a daemon that they have lost.
    """

    def __init__(
        self, socket: Path | str | None = None, timeout: float = 10.0, reconnect_seconds: float = RECONNECT_SECONDS
    ) -> None:
        self._conversation = _conversation(socket, timeout, reconnect_seconds)

    @property
    def socket_path(self) -> Path:
        return self._conversation.socket_path

    def submit(
        self, spec: JobSpec | Mapping[str, Any], *, job: str | None = None, priority: int | None = None
    ) -> Message:
        """{"job": id, "created": bool}. `job` names it: submitting the same again returns the first one."""
        return _reply(dict, self._conversation.submit(_wire_spec(spec), job, priority))

    def jobs(self, *, ended_before: float | None = None) -> list[Message]:
        """One map for each job that the daemon keeps, as in `weft ps --all --json`: the newest 1,000.

        ended_before: unix seconds; then the oldest 1,000 of those that ended before.
        """
        return _reply(list, self._conversation.jobs(ended_before))

    def listing(self) -> Message:
        """{"jobs": as `jobs`, "ledger": what is amiss with the daemon's ledger}: see docs/protocol.md."""
        return _reply(dict, self._conversation.listing())

    def show(self, job: str, *, path: bool = False) -> Message:
        """All that is known about the job: state, plan, and the seconds of each lane in each mode.

        path: while it runs, look for the critical path of the last iterations too; once it has ended it is there.
        """
        return _reply(dict, self._conversation.show(job, path))

    def record(self, job: str) -> Path:
        """The job's file of `weft.metrics.recording.recording`, written now where the job runs."""
        return Path(_reply(str, self._conversation.record(job)))

    def follow(self, job: str, *, offset: int = 0, progress: bool = True) -> Iterator[Message]:
        """{"log": str, "offset": int} and {"progress": map} events as they come; the last item is {"result": map}.

        Survives a restart of the daemon: it connects anew and resumes at the last byte offset.
        """
        return _perform(self._conversation.follow(job, offset, progress))

    def log(self, job: str) -> Iterator[str]:
        """The job's log so far, in parts."""
        return _perform(self._conversation.log(job))

    def wait(self, job: str, timeout: float | None = None) -> Message:
        """The result, once the job is terminal; `RequestRefused` with code "timed-out" after `timeout` seconds."""
        return _reply(dict, self._conversation.wait(job, timeout))

    def cancel(self, job: str, *, discard: bool = False) -> str:
        """The job's state after the request. What it had come to is written as a checkpoint, unless `discard`."""
        return _reply(str, self._conversation.cancel(job, discard))

    def pause(self, job: str) -> str:
        """The job's state after the request: paused at an iteration's end, its workers free; or it has ended first."""
        return _reply(str, self._conversation.pause(job))

    def restart(self, job: str) -> Message:
        """{"job": id, "created": True} of a new job with the spec and the priority of one that has ended."""
        return _reply(dict, self._conversation.restart(job))

    def resume(self, job: str) -> Message:
        """One that is paused goes on; else as `restart`, from the newest checkpoint of the job that has ended."""
        return _reply(dict, self._conversation.resume(job))

    def remove(self, job: str) -> str:
        """Forgets a job that has ended, and removes its run directory; returns its id."""
        return _reply(str, self._conversation.remove(job))

    def replace(self, executable: str = sys.executable) -> Message:
        """Has the daemon go on as the Weft of that Python, with its workers and their jobs, in the same process.

        {"version": of the new daemon, "jobs": that run, "problem": why they had to start from the disk, or empty}.
        """
        return _reply(dict, self._conversation.replace(executable))

    def status(self) -> Message:
        """The daemon itself: pid, version, workers, number of jobs in each state, address of the metrics."""
        return _reply(dict, self._conversation.status())


class AsyncClient:
    """`Client` for asyncio: the same arguments, methods and errors."""

    def __init__(
        self, socket: Path | str | None = None, timeout: float = 10.0, reconnect_seconds: float = RECONNECT_SECONDS
    ) -> None:
        self._conversation = _conversation(socket, timeout, reconnect_seconds)

    @property
    def socket_path(self) -> Path:
        return self._conversation.socket_path

    async def submit(
        self, spec: JobSpec | Mapping[str, Any], *, job: str | None = None, priority: int | None = None
    ) -> Message:
        """See `Client.submit`."""
        return await _async_reply(dict, self._conversation.submit(_wire_spec(spec), job, priority))

    async def jobs(self, *, ended_before: float | None = None) -> list[Message]:
        """See `Client.jobs`."""
        return await _async_reply(list, self._conversation.jobs(ended_before))

    async def listing(self) -> Message:
        """See `Client.listing`."""
        return await _async_reply(dict, self._conversation.listing())

    async def show(self, job: str, *, path: bool = False) -> Message:
        """See `Client.show`."""
        return await _async_reply(dict, self._conversation.show(job, path))

    async def record(self, job: str) -> Path:
        """See `Client.record`."""
        return Path(await _async_reply(str, self._conversation.record(job)))

    def follow(self, job: str, *, offset: int = 0, progress: bool = True) -> AsyncIterator[Message]:
        """See `Client.follow`; wrap it in `contextlib.aclosing` to leave it early."""
        return _async_perform(self._conversation.follow(job, offset, progress))

    def log(self, job: str) -> AsyncIterator[str]:
        """See `Client.log`."""
        return _async_perform(self._conversation.log(job))

    async def wait(self, job: str, timeout: float | None = None) -> Message:  # noqa: ASYNC109  (the daemon keeps it)
        """See `Client.wait`."""
        return await _async_reply(dict, self._conversation.wait(job, timeout))

    async def cancel(self, job: str, *, discard: bool = False) -> str:
        """See `Client.cancel`."""
        return await _async_reply(str, self._conversation.cancel(job, discard))

    async def pause(self, job: str) -> str:
        """See `Client.pause`."""
        return await _async_reply(str, self._conversation.pause(job))

    async def restart(self, job: str) -> Message:
        """See `Client.restart`."""
        return await _async_reply(dict, self._conversation.restart(job))

    async def resume(self, job: str) -> Message:
        """See `Client.resume`."""
        return await _async_reply(dict, self._conversation.resume(job))

    async def remove(self, job: str) -> str:
        """See `Client.remove`."""
        return await _async_reply(str, self._conversation.remove(job))

    async def replace(self, executable: str = sys.executable) -> Message:
        """See `Client.replace`."""
        return await _async_reply(dict, self._conversation.replace(executable))

    async def status(self) -> Message:
        """See `Client.status`."""
        return await _async_reply(dict, self._conversation.status())


def _reply(kind: type[T], script: Script) -> T:
    """What the script delivers last."""
    *_, reply = _perform(script)
    assert isinstance(reply, kind)
    return reply


def _perform(script: Script) -> Iterator[Any]:
    line = _Line()
    try:
        step = next(script)
        while True:
            if isinstance(step, Deliver):
                yield step.item
                step = script.send(b"")
                continue
            try:
                data = line.perform(step)
            except OSError as error:
                if is_of_handler(error):
                    raise
                step = script.throw(error)
            else:
                step = script.send(data)
    except StopIteration:
        return
    finally:
        line.close()


class _Line:
    """The blocking socket of one script."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None

    def perform(self, step: Connect | Send | Receive | Close | Pause) -> bytes:
        match step:
            case Connect(path, timeout):
                check_socket_path(path)
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                self._within(timeout).connect(str(path))
                check_peer(path, self._socket)
            case Send(data, timeout):
                self._within(timeout).sendall(data)
            case Receive(timeout):
                return self._within(timeout).recv(RECEIVE_BYTES)
            case Close():
                self.close()
            case Pause(seconds):
                time.sleep(seconds)
            case _:
                assert_never(step)
        return b""

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _within(self, timeout: float) -> socket.socket:
        assert self._socket is not None, "a script connects first"
        self._socket.settimeout(max(timeout, _LEAST_TIMEOUT_SECONDS))
        return self._socket


async def _async_reply(kind: type[T], script: Script) -> T:
    reply = None
    async for item in _async_perform(script):
        reply = item
    assert isinstance(reply, kind)
    return reply


async def _async_perform(script: Script) -> AsyncIterator[Any]:
    line = _AsyncLine()
    try:
        step = next(script)
        while True:
            if isinstance(step, Deliver):
                yield step.item
                step = script.send(b"")
                continue
            try:
                data = await line.perform(step)
            except OSError as error:
                step = script.throw(error)
            else:
                step = script.send(data)
    except StopIteration:
        return
    finally:
        line.close()


class _AsyncLine:
    """The event loop's connection of one script."""

    def __init__(self) -> None:
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter | None = None

    async def perform(self, step: Connect | Send | Receive | Close | Pause) -> bytes:
        import asyncio

        match step:
            case Connect(path, timeout):
                check_socket_path(path)
                async with asyncio.timeout(timeout):
                    self._reader, self._writer = await asyncio.open_unix_connection(sock=_connected(path))
                check_peer(path, self._writer.get_extra_info("socket"))
            case Send(data, timeout):
                assert self._writer is not None, "a script connects first"
                self._writer.write(data)
                async with asyncio.timeout(timeout):
                    await self._writer.drain()
            case Receive(timeout):
                async with asyncio.timeout(timeout):
                    return await self._reader.read(RECEIVE_BYTES)
            case Close():
                self.close()
            case Pause(seconds):
                await asyncio.sleep(seconds)
            case _:
                assert_never(step)
        return b""

    def close(self) -> None:
        if self._writer is not None:
            self._writer.transport.abort()  # nothing is left to send; close() would wait for it
            self._writer = None


def _connected(path: Path) -> socket.socket:
    """A Unix socket connects at once or not at all; asyncio takes a full queue (EAGAIN) for a connection on its way."""
    with ExitStack() as undoing:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        undoing.callback(connection.close)
        connection.connect(str(path))
        undoing.pop_all()
    return connection
