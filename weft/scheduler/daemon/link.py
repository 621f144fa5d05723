"""A link: the daemon's end of one child's socket; and the child at its other end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from weft.machine.oom_kills import OomKills
from weft.scheduler.core.back_off import back_off
from weft.transport.wire.frames import MAX_WORKER_FRAME_BYTES, FrameReader, Message, encode

RECEIVE_BYTES = 1 << 16
RETRY_SECONDS = 0.1  # the least between two tries to get a pair of sockets
DIRECTORY, WORKER, SAVER = "directory", "worker", "saver"  # roles of children

_log = logging.getLogger("weft.pool")


@dataclass(frozen=True, slots=True)
class HeldLink:
    """A link between two daemons: nothing that was said on it is lost, and nothing said twice."""

    descriptor: int
    unread: bytes  # the begin of a frame whose end has not come
    unsent: bytes  # what the socket has not taken yet
    is_deaf: bool


class Link(asyncio.Protocol):
    """The daemon's end of one child's socket: `connection`, of which the event loop makes the transport.

    on_broken: told once, of what is no frame; nothing is heard after it. An exception in here would only be logged by
    the loop, and the child would look alive.
    """

    def __init__(
        self,
        connection: socket.socket,
        on_message: Callable[[Message], None],
        on_closed: Callable[[], None],
        on_broken: Callable[[str], None],
        held: HeldLink | None = None,
    ) -> None:
        """held: of which this one goes on, once it is told to `resume`."""
        self._connection = connection
        self._reader = FrameReader(MAX_WORKER_FRAME_BYTES)
        self._on_message = on_message
        self._on_closed = on_closed
        self._on_broken = on_broken
        self._is_deaf = held is not None and held.is_deaf
        self._unheard = None if held is None else bytearray(held.unread)  # that has come while it is on hold
        self._unsent = b"" if held is None else held.unsent
        self._has_told = False  # a whole frame has come since the last look
        self._waiting = bytearray()  # ends with what the transport has still to send
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's is none by inheritance
        self._write(self._unsent)

    def data_received(self, data: bytes) -> None:
        if self._unheard is not None:
            self._unheard += data
            return
        if self._is_deaf:
            return
        messages, error = self._reader.take(data)
        self._has_told = self._has_told or bool(messages)
        for message in messages:
            if not self._is_deaf:
                self._on_message(message)
        if error is not None and not self._is_deaf:
            self.deafen()
            self._on_broken(error.message)

    def hold(self) -> None:
        """Nothing more is read, until `resume`."""
        if self._is_open:
            cast(asyncio.ReadTransport, self._transport).pause_reading()

    def resume(self) -> None:
        unheard, self._unheard = self._unheard, None
        if unheard:
            self.data_received(bytes(unheard))
        if self._is_open:
            cast(asyncio.ReadTransport, self._transport).resume_reading()

    @property
    def _is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def held(self) -> HeldLink | None:
        """As it is while it is on hold; None where it is closed."""
        if self._transport is None or not self._is_open:
            return None
        unsent = bytes(self._waiting[len(self._waiting) - self._transport.get_write_buffer_size() :])
        return HeldLink(self._connection.fileno(), self._reader.part, unsent, self._is_deaf)

    def deafen(self) -> None:
        """What the child still says is not heard: it is being killed."""
        self._is_deaf = True

    def is_stuck(self) -> bool:
        """Since the last look no frame has ended, and one has begun. One that never ends would swallow all others."""
        has_told, self._has_told = self._has_told, False
        return self._reader.holds_part and not has_told and not self._is_deaf

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._on_closed()

    def send(self, message: Message) -> None:
        """At once, where the socket takes it: a lane may be waiting, and the loop writes only after the callback.

        Nothing if the child is gone: its end is reported otherwise.
        """
        if self._transport is None:
            return
        data = encode(message)
        sent = 0
        if self._transport.get_write_buffer_size() == 0:
            try:
                sent = self._connection.send(data)
            except OSError:  # full, or closed at the other end: the transport waits, or finds it out
                pass
        self._write(data[sent:])

    def _write(self, data: bytes) -> None:
        if data and self._transport is not None:
            del self._waiting[: len(self._waiting) - self._transport.get_write_buffer_size()]
            self._waiting += data
            self._transport.write(data)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def finish(self) -> None:
        """The child has been reaped: hears what it has still said, and closes.

        The end of its stream may never come: a process that the job's code has forked has the socket, too.
        """
        with contextlib.suppress(OSError):
            while self._transport is not None and (data := self._connection.recv(RECEIVE_BYTES, socket.MSG_DONTWAIT)):
                self.data_received(data)
        self.abort()  # nobody takes what is still to be written


@dataclass(slots=True)
class Child:
    """It has ended once it has an exit code and its link is closed."""

    name: str
    role: str
    link: Link | None = None
    pid: int = 0  # 0 until it is forked
    exit_code: int | None = None
    exited: bool = False
    peak_bytes: int | None = None  # the most that was resident, once it has exited
    killed_for: str = ""  # by the daemon: the kernel did not kill it
    closed: bool = False
    is_stopped: bool = False
    answer: Message | None = None  # a saver's
    stands_in_for: str = ""  # a worker, until it is told anything: the job it is started for, by its blocks' name
    num_stopped: int = 0  # looks in a row that found it stopped; of those that are no workers, as the next three
    owes: bool = False  # an answer to the daemon's last question; a saver always, its checkpoint
    used: tuple[str, ...] = ()  # by it, at the last look
    num_quiet: int = 0  # looks in a row in which it owed an answer and nothing went on in it
    num_looks: int = 0  # in a row that found nothing going on at its link


@dataclass(frozen=True, slots=True, kw_only=True)
class Brood:
    """What a pool has, between two daemons."""

    stamp: str  # of the Weft that the fork server was started from
    authkey: bytes
    server_pid: int
    server: HeldLink
    children: tuple[tuple[Child, HeldLink | None], ...]  # without their links
    directory_failures: int
    oom_kills: OomKills

    def descriptors(self) -> list[int]:
        return [link.descriptor for link in (self.server, *(link for _, link in self.children)) if link is not None]


def saver_of(job: str) -> str:
    """The name of its process."""
    return f"{SAVER} of {job}"


async def socket_pair(name: str) -> tuple[socket.socket, socket.socket]:
    """Waits while the process or the machine is short of descriptors, and says so."""
    failures = 0
    while True:
        try:
            return socket.socketpair()
        except OSError as error:
            failures += 1
            _log.warning("%s cannot be started yet, and is tried again: %s", name, error.strerror)
            await asyncio.sleep(max(RETRY_SECONDS, back_off(failures)))
