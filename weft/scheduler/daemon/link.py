"""A link: the daemon's end of one child's socket."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import cast

from weft.transport.wire.frames import MAX_WORKER_FRAME_BYTES, FrameReader, Message, encode

RECEIVE_BYTES = 1 << 16


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
    ) -> None:
        self._connection = connection
        self._reader = FrameReader(MAX_WORKER_FRAME_BYTES)
        self._on_message = on_message
        self._on_closed = on_closed
        self._on_broken = on_broken
        self._is_deaf = False
        self._has_told = False  # a whole frame has come since the last look
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's is none by inheritance

    def data_received(self, data: bytes) -> None:
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
        if sent < len(data):
            self._transport.write(data[sent:])

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
