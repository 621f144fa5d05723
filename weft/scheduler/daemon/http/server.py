"""The HTTP side of the daemon: GET /metrics for Prometheus, GET /healthz for whoever asks if the daemon lives, and the
timeline page (page_routes.py) where there is a source of jobs."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Sequence

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from weft.metrics.prometheus.exporter import Exporter
from weft.scheduler.daemon.http.connections import HttpConnections, SparingFilter
from weft.scheduler.daemon.http.page_routes import Page, Source, refuse_strange_hosts, with_headers

SHUTDOWN_SECONDS = 1.0  # for a scrape in flight; the daemon's drain has a budget of its own
MAX_BODY_BYTES = 1  # of a request; nothing here takes one, and 0 would mean any size

_log = logging.getLogger("weft.http")


class MetricsAddressError(OSError):
    """The address for /metrics cannot be bound. The text names the setting and the remedy."""


class MetricsServer:
    """Serves an exporter on one address, from the event loop that starts it. Starts once and stops once.

    source: of the jobs that the timeline page shows; without one there is no page. inherited: descriptors of sockets
    that listen on that address already.
    """

    def __init__(
        self, exporter: Exporter, host: str, port: int, source: Source | None = None, inherited: Sequence[int] = ()
    ) -> None:
        self._exporter = exporter
        self._host = host
        self._port = port
        self._rendering = asyncio.Lock()
        self._connections = HttpConnections(exporter)
        middlewares = [self._connections.middleware(), with_headers, refuse_strange_hosts(host)]
        application = web.Application(middlewares=middlewares, client_max_size=MAX_BODY_BYTES)
        application.router.add_get("/metrics", self._metrics)
        application.router.add_get("/healthz", self._healthz)
        if source is not None:
            Page(source, application)
        self._runner = web.AppRunner(application, access_log=None, logger=_log, shutdown_timeout=SHUTDOWN_SECONDS)
        self._inherited = inherited
        self._servers: list[asyncio.Server] = []
        self._sparing = SparingFilter()

    async def start(self) -> str:
        """Binds and serves; returns the base URL, with the port that was picked if port 0 was asked for.

        Raises MetricsAddressError where the address cannot be bound; nothing is then left open.
        """
        await self._runner.setup()
        assert self._runner.server is not None
        factory, loop = self._connections.factory(self._runner.server), asyncio.get_running_loop()
        try:
            if self._inherited:
                listeners = [socket.socket(fileno=descriptor) for descriptor in self._inherited]
                self._servers = [await loop.create_server(factory, sock=listener) for listener in listeners]
            else:
                self._servers = [await loop.create_server(factory, self._host, self._port)]
        except OSError as error:
            await self._runner.cleanup()
            raise _explained(error, self._host, self._port) from error
        _log.addFilter(self._sparing)
        host, port = self._servers[0].sockets[0].getsockname()[:2]
        return f"http://{_bracketed(host)}:{port}"

    def descriptors(self) -> list[int]:
        """Of the sockets that listen."""
        return [listener.fileno() for server in self._servers for listener in server.sockets]

    async def stop(self) -> None:
        """Closes the address and all connections. Does nothing if it was not started."""
        for server in self._servers:
            server.close()
        await self._runner.cleanup()
        _log.removeFilter(self._sparing)

    async def _metrics(self, _request: web.Request) -> web.Response:
        # In a thread, because 9,000 series take some 70 ms that the daemon's loop doesn't have; one scrape at a time.
        async with self._rendering:
            body = await asyncio.to_thread(self._exporter.render)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _healthz(self, _request: web.Request) -> web.Response:
        return web.Response(text="ok\n")


def _explained(error: OSError, host: str, port: int) -> MetricsAddressError:
    address = f"{_bracketed(host)}:{port}"
    if error.errno == errno.EADDRINUSE:
        problem = f"{address} is in use by another process; give another HOST:PORT"
    else:
        problem = f"{address} cannot be bound ({error.strerror}); give a HOST:PORT of this machine"
    return MetricsAddressError(f"settings: metrics: {problem}, port 0 to have one picked, or '' to export nothing")


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
