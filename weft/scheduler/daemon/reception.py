"""The reception: clients' connections to the daemon's socket, each from its hello to its end.

    accept ─▶ a place ─▶ hello ─▶ request ─▶ answer ─▶ request … ─▶ close, once the client has taken what was sent
                 │         │         │
                 └─────────┴─────────┴─ what breaks the protocol ─▶ error ─▶ what still comes is dropped ─▶ close

One conversation is a boundary: whatever goes wrong inside one, a bug of ours included, ends its request with a named
error, or its connection where no frame's end can be found any more. It reaches nobody else, and never the daemon.
Clients cost what `Bounds` says and no more: one that does not read is cut, with what it was to be sent.

It knows nothing of what a verb does.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import select
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from weft.machine.descriptors import hardly_one, is_among_the_last
from weft.machine.run_file import RunFileError
from weft.metrics.prometheus.exporter import Exporter
from weft.scheduler.daemon.guard import Complaints, Spawn
from weft.scheduler.runs.run import Changed
from weft.scheduler.runs.run_directory import read_log
from weft.transport.wire.frames import (
    MAX_CLIENT_FRAME_BYTES,
    MAX_REPLY_BYTES,
    PROTOCOL,
    ErrorCode,
    FrameReader,
    Message,
    WireError,
    encode,
    field,
)
from weft.version import __version__

MANY = 64  # visits at once, after which what they took is worth giving back: up to a mebibyte each
LOOK_SECONDS = 1.0  # between two looks at whether a client that waits is still there
READ_BYTES = 1 << 16
BUFFERED_BYTES = 1 << 16  # that wait to be sent to a client before it has to read
MAX_OFFSET = 1 << 40  # far above what a log may have; file systems refuse to look further than 2**43 or so

T = TypeVar("T")
_log = logging.getLogger("weft.reception")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What clients may cost. Tests give smaller ones."""

    talking: int = 256  # at once; each has a descriptor and up to a mebibyte of what it was sent and asks
    sockets: int = 640  # with those that wait for a place or are closing; one more is closed without a word
    hello_seconds: float = 10.0  # for a client to say hello
    send_seconds: float = 30.0  # for a client to take what was sent to it
    stalling_seconds: float = 0.25  # that the daemon waits for a client before that one gives way to a newcomer
    linger_seconds: float = 2.0  # for a client that was refused to read why
    linger_bytes: int = 4 << 20  # that such a client may still send: more than the largest frame


class ClientGone(ConnectionError):
    """The client has closed its end, or does not take what it asked for."""


class Visit:
    """One client's connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, bounds: Bounds) -> None:
        self._reader = reader
        self._writer = writer
        self._bounds = bounds
        self.stalls_since: float | None = time.monotonic()  # waits since then for its hello, frame or reading
        self.verb: str | None = None  # of the request that is being answered
        writer.transport.set_write_buffer_limits(BUFFERED_BYTES)

    async def read(self) -> bytes:
        """What comes next; b"" at the end. Errors: ClientGone."""
        try:
            return await self._reader.read(READ_BYTES)
        except OSError:
            raise ClientGone from None

    async def send(self, message: Message) -> None:
        """Errors: ClientGone; ValueError, TypeError or OverflowError for what no client could take."""
        frame = encode(message)
        if len(frame) > MAX_REPLY_BYTES:
            raise ValueError(f"an answer of {len(frame)} bytes; a client takes {MAX_REPLY_BYTES}")
        if self._writer.is_closing():  # uvloop raises RuntimeError for a write, not ConnectionError
            raise ClientGone
        self.stalls_since = time.monotonic()
        try:
            self._writer.write(frame)
            async with asyncio.timeout(self._bounds.send_seconds):
                await self._writer.drain()
        except OSError:  # TimeoutError is one
            raise ClientGone from None
        self.stalls_since = None

    def has_left(self) -> bool:
        """Its end is closed, whatever it sent before that nobody has read yet."""
        if self._writer.is_closing():
            return True
        poll = select.poll()
        poll.register(self.descriptor(), 0)  # a hang-up is always told
        return bool(poll.poll(0))

    def descriptor(self) -> int:
        number: int = self._writer.get_extra_info("socket").fileno()
        return number

    def peer_uid(self) -> int:
        connection = self._writer.get_extra_info("socket")
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        _, uid, _ = struct.unpack("3i", credentials)
        return int(uid)

    def is_among_the_last(self) -> bool:
        """Whether it has one of the descriptors that are kept for what the daemon has taken on."""
        return is_among_the_last(self.descriptor())

    async def dismiss(self, error: WireError) -> None:
        """Tells why, and closes once the client can have read it.

        A close with bytes unread would take the error with it: the kernel answers the client with a reset.
        """
        with suppress(OSError):
            await self.send({"error": error.to_wire()})
            self.stalls_since = time.monotonic()
            self._writer.write_eof()
            left = self._bounds.linger_bytes
            async with asyncio.timeout(self._bounds.linger_seconds):
                while left > 0 and (data := await self._reader.read(READ_BYTES)):
                    left -= len(data)
        await self.close(self._bounds.linger_seconds)

    async def close(self, seconds: float) -> None:
        """Lets the client take what is left, for so long."""
        self.stalls_since = time.monotonic()
        self._writer.close()
        with suppress(OSError):
            async with asyncio.timeout(seconds):
                await self._writer.wait_closed()

    def cut(self) -> None:
        """At once, with what it was to be sent: a close would wait for the client to read it."""
        self.stalls_since = None
        self._writer.transport.abort()


class Caller:
    """What a verb that takes its time says before it answers, and whether anybody still listens. Errors: ClientGone."""

    def __init__(self, number: int, visit: Visit) -> None:
        self._number = number
        self._visit = visit

    def line(self) -> tuple[int, int]:
        """(the request's id, descriptor of the connection): where somebody else may answer it."""
        return self._number, self._visit.descriptor()

    async def send(self, event: Message) -> None:
        await self._visit.send({"id": self._number, "event": event})

    async def wait_for(self, changed: Changed) -> None:
        """Returns on a change, or after a while without one."""
        if self._visit.has_left():
            raise ClientGone
        try:
            async with asyncio.timeout(LOOK_SECONDS):
                await changed.wait()
        except TimeoutError:
            pass


class FollowedLog:
    """A job's log from a byte offset on, as a follower has it."""

    def __init__(self, directory: Path, offset: int) -> None:
        if not 0 <= offset <= MAX_OFFSET:
            raise WireError(ErrorCode.BAD_FIELD, f"offset is {offset}; it counts the bytes of the log from 0")
        self._directory = directory
        self._offset = offset
        self._noticed = ""

    async def send_new(self, caller: Caller) -> None:
        """To its end. Where it cannot be read the follower is told so once, and still gets what comes after it."""
        try:
            while data := await asyncio.to_thread(read_log, self._directory, self._offset):
                self._offset += len(data)
                await caller.send({"log": data.decode("utf-8", "replace"), "offset": self._offset})
        except RunFileError as error:
            if self._noticed != str(error):
                self._noticed = str(error)
                await caller.send({"notice": self._noticed})


Verb = Callable[[Message, Caller], Awaitable[Message]]


class Reception:
    """Answers clients with the verbs: what one raises as WireError is its refusal, anything else a bug of ours."""

    def __init__(self, verbs: Mapping[str, Verb], exporter: Exporter, bounds: Bounds | None = None) -> None:
        self._verbs = verbs
        self._exporter = exporter
        self._bounds = bounds or Bounds()
        self._visits: dict[asyncio.Task[None], Visit] = {}
        self._talking: set[Visit] = set()
        self._answered = Changed()  # a request
        self._most = 0  # visits at once, since memory was last given back
        self._complaints = Complaints(_log)

    def accept(self, spawn: Spawn, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Begins to serve a new connection, in a task of the daemon's group."""
        visit = Visit(reader, writer, self._bounds)
        if len(self._visits) >= self._bounds.sockets and not self._cut_one_that_stalls(
            self._visits.values(), time.monotonic() - self._bounds.stalling_seconds
        ):
            self._count(ErrorCode.TOO_MANY_CONNECTIONS)
            visit.cut()
            return
        task = spawn(self._serve(visit), "client")
        self._visits[task] = visit
        task.add_done_callback(self._forget)
        self._exporter.set("weft_control_connections", len(self._visits))

    async def until_answered(self, lasting: Collection[str], seconds: float) -> None:
        """Returns when every request is answered, but those with a verb that lasts; or after so many seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while any(visit.verb not in (None, *lasting) for visit in self._visits.values()):
                    await self._answered.wait()

    def close(self) -> None:
        """Cuts every connection."""
        for task in self._visits:
            task.cancel()

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._most = max(self._most, len(self._visits))
        self._visits.pop(task).cut()
        if self._most >= MANY and len(self._visits) <= self._most // 8:
            self._most = len(self._visits)
            _give_back_memory()
        self._exporter.set("weft_control_connections", len(self._visits))

    async def _serve(self, visit: Visit) -> None:
        """One connection from hello to end; never raises, whatever happens in it."""
        try:
            outcome = await self._bounded(self._converse(visit))
            self._talking.discard(visit)
            if isinstance(outcome, WireError):
                self._count(outcome.code)
                await self._bounded(visit.dismiss(outcome))
            else:
                await self._bounded(visit.close(self._bounds.send_seconds))
        except ClientGone:
            pass
        finally:
            self._talking.discard(visit)
            visit.cut()

    async def _bounded(self, work: Awaitable[T]) -> T | WireError:
        """The boundary: what the work comes to, or the error that the client is given for it. Errors: ClientGone."""
        try:
            return await work
        except WireError as error:
            return error
        except ClientGone:
            raise
        except Exception as bug:
            self._complaints.add("a conversation", bug)
            name = type(bug).__name__
            return WireError(
                ErrorCode.INTERNAL_ERROR, f"a fault of the daemon's own ({name}); its log says where, and it goes on"
            )

    async def _converse(self, visit: Visit) -> None:
        if visit.peer_uid() not in (os.getuid(), 0):  # root is let in: nothing here could stop it
            raise WireError(ErrorCode.NOT_YOURS, f"this daemon belongs to uid {os.getuid()}; start your own")
        if visit.is_among_the_last():
            raise WireError(ErrorCode.TOO_MANY_CONNECTIONS, hardly_one())
        await self._take_place(visit)
        frames = FrameReader(MAX_CLIENT_FRAME_BYTES, strict=True)
        waiting: list[Message] = []
        bad: WireError | None = None  # behind what waits, and told once that is answered
        try:
            async with asyncio.timeout(self._bounds.hello_seconds):
                while not waiting:
                    if bad is not None:
                        raise bad
                    if not (data := await visit.read()):
                        return
                    waiting, bad = frames.take(data)
        except TimeoutError:
            raise ClientGone from None
        _check_hello(waiting.pop(0))
        await visit.send({"hello": {"protocol": PROTOCOL, "version": __version__, "pid": os.getpid()}})
        while True:
            for request in waiting:
                await self._answer(request, visit)
            if bad is not None:
                raise bad
            visit.stalls_since = time.monotonic() if frames.holds_part else None
            if not (data := await visit.read()):
                return
            waiting, bad = frames.take(data)

    async def _take_place(self, visit: Visit) -> None:
        """Where all are taken, one who keeps the daemon waiting gives way. It shows in a moment who does."""
        came = time.monotonic()
        if not self._has_place(came - self._bounds.stalling_seconds):
            await asyncio.sleep(self._bounds.stalling_seconds)
            if not self._has_place(came):  # not by the clock: a timer of the loop may be a millisecond early
                raise WireError(
                    ErrorCode.TOO_MANY_CONNECTIONS, f"{self._bounds.talking} clients are connected; try again"
                )
        self._talking.add(visit)

    def _has_place(self, stalls_since: float) -> bool:
        return len(self._talking) < self._bounds.talking or self._cut_one_that_stalls(self._talking, stalls_since)

    def _cut_one_that_stalls(self, visits: Iterable[Visit], stalls_since: float) -> bool:
        """Whether there is one since then or before. It is that which the daemon waits for the longest."""
        stalling = {visit.stalls_since: visit for visit in visits if visit.stalls_since is not None}
        if not stalling or min(stalling) > stalls_since:
            return False
        visit = stalling[min(stalling)]
        self._talking.discard(visit)
        visit.cut()
        return True

    async def _answer(self, request: Message, visit: Visit) -> None:
        number = request.get("id")
        if not isinstance(number, int) or isinstance(number, bool):
            number = None  # the request is refused, and this says that no id was there to answer to
        outcome = await self._bounded(self._perform(request, visit))
        if isinstance(outcome, WireError):
            self._count(outcome.code)
            await visit.send({"id": number, "error": outcome.to_wire()})

    async def _perform(self, request: Message, visit: Visit) -> None:
        number = field(request, "id", int)
        verb = field(request, "verb", str)
        handler = self._verbs.get(verb)
        if handler is None:
            known = ", ".join(sorted(self._verbs))
            raise WireError(ErrorCode.UNKNOWN_VERB, f"no verb {verb!r:.80}; this daemon knows {known}")
        visit.verb = verb
        try:
            await visit.send({"id": number, "ok": await handler(request, Caller(number, visit))})
        finally:
            visit.verb = None
            self._answered.notify()

    def _count(self, code: ErrorCode) -> None:
        if code is not ErrorCode.TIMED_OUT:  # a client that waits long is told so every half minute
            self._exporter.add("weft_control_rejected_frames_total", reason=str(code))


def _give_back_memory() -> None:
    """glibc keeps what lies below something that is still used; asked, it returns whole pages, in milliseconds."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have none
    if trim is not None:
        trim(0)


def _check_hello(message: Message) -> None:
    hello = message.get("hello")
    if not isinstance(hello, dict):
        raise WireError(ErrorCode.NO_HELLO, "the first frame must be {'hello': {'protocol': ...}}")
    protocol = field(hello, "protocol", int)
    if protocol != PROTOCOL:
        raise WireError(
            ErrorCode.WRONG_PROTOCOL,
            f"the client speaks protocol {protocol} and this daemon {PROTOCOL}; use the same version of weft for both",
        )
