"""The connections of the HTTP side, bounded: anybody on this machine can open them, and each costs a descriptor.

    made ──▶ idle ──a request's last header──▶ busy ──its handler returns──▶ sending ──▶ closed, or busy again
             │ HEADER_SECONDS                  (the handler's own limits)    │ SEND_SECONDS
             ▼                                                              ▼
          dropped                                                        dropped

At MAX_CONNECTIONS a new one takes the place of the one that has idled longest: whoever holds connections open keeps
nobody out. Where all are busy, or the process is short of descriptors, the new one is refused.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler, Middleware

from weft.machine.descriptors import is_among_the_last
from weft.metrics.prometheus.exporter import Exporter

MAX_CONNECTIONS = 64  # a scraper or two, and pages: a browser opens up to six
HEADER_SECONDS = 10.0  # for a request to be asked
SEND_SECONDS = 30.0  # for an answer to be taken, and the next request to be asked; scrapes come more often
LOG_SECONDS = 10.0  # between two lines about requests that went wrong
_AT_ONCE = struct.pack("ii", 1, 0)  # struct linger: on, 0 seconds
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class HttpConnections:
    """Of one server: makes the protocol of each connection around aiohttp's own."""

    def __init__(self, exporter: Exporter) -> None:
        self._exporter = exporter
        self._open: dict[Any, _Connection] = {}  # by transport, the oldest first

    def factory(self, make: Callable[[], asyncio.Protocol]) -> Callable[[], asyncio.Protocol]:
        return lambda: _Connection(self, make())

    def middleware(self) -> Middleware:
        """Knows when a request has been asked in full, and when its answer is on its way."""

        @web.middleware
        async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
            connection = self._open.get(request.transport)
            if connection is None:
                return await handler(request)
            connection.busy()
            try:
                return await handler(request)
            finally:
                connection.idle(SEND_SECONDS)

        return middleware

    def admit(self, connection: _Connection, transport: asyncio.Transport) -> bool:
        full = len(self._open) >= MAX_CONNECTIONS
        waiting = next((each for each in self._open.values() if not each.is_busy), None)
        if (full and waiting is None) or is_among_the_last(transport.get_extra_info("socket").fileno()):
            self._refused("full")
            return False
        if full and waiting is not None:
            waiting.drop("replaced")
        self._open[transport] = connection
        self._exporter.set("weft_http_connections", len(self._open))
        return True

    def forget(self, transport: asyncio.Transport, why: str | None = None) -> None:
        if self._open.pop(transport, None) is not None:
            self._exporter.set("weft_http_connections", len(self._open))
            if why is not None:
                self._refused(why)

    def _refused(self, why: str) -> None:
        self._exporter.add("weft_http_dropped_connections_total", reason=why)


class _Connection(asyncio.Protocol):
    """Passes everything on to aiohttp's protocol, once the connection is admitted."""

    def __init__(self, connections: HttpConnections, inner: asyncio.Protocol) -> None:
        self.is_busy = False
        self._connections = connections
        self._inner = inner
        self._transport: asyncio.Transport
        self._timer: asyncio.TimerHandle | None = None
        self._is_admitted = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self._is_admitted = self._connections.admit(self, self._transport)
        if self._is_admitted:
            self.idle(HEADER_SECONDS)
            self._inner.connection_made(transport)
        else:
            self._transport.write(_FULL)
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        if self._is_admitted:
            self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received() if self._is_admitted else None

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._connections.forget(self._transport)
        if self._is_admitted:
            self._inner.connection_lost(exc)

    def busy(self) -> None:
        self._stop_timer()
        self.is_busy = True

    def idle(self, seconds: float) -> None:
        self._stop_timer()
        self.is_busy = False
        if not self._transport.is_closing():
            self._timer = asyncio.get_running_loop().call_later(seconds, self.drop, "idle")

    def drop(self, why: str) -> None:
        self._connections.forget(self._transport, why)
        if self._transport.get_write_buffer_size():  # the kernel, too, keeps nothing for who takes nothing
            with suppress(OSError):
                self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
        self._transport.abort()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class SparingFilter(logging.Filter):
    """Of aiohttp's logger: one line now and then, with how many were left out; no traceback for a client's fault."""

    def __init__(self) -> None:
        super().__init__()
        self._silent_until = 0.0
        self._num_left_out = 0

    def filter(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        if now < self._silent_until:
            self._num_left_out += 1
            return False
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            what = " ".join(error.message.split())
            record.msg, record.args = f"a bad HTTP request: {what!r:.200}", ()
            record.exc_info, record.levelno, record.levelname = None, logging.INFO, "INFO"
        if self._num_left_out:
            record.msg = f"{record.msg} (and {self._num_left_out} lines left out before)"
        self._silent_until, self._num_left_out = now + LOG_SECONDS, 0
        return True
