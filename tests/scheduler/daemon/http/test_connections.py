"""Strangers at the HTTP side: connections that say nothing, take nothing, or talk nonsense."""

from __future__ import annotations

import asyncio
import logging
import random
import select
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from typing import Any

import aiohttp
import pytest

from weft.metrics.prometheus.exporter import Exporter
from weft.scheduler.daemon.http import connections as http_connections
from weft.scheduler.daemon.http import page_routes
from weft.scheduler.daemon.http.server import MetricsServer

HELD = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n"  # but for its last line
MOMENT = 0.1  # of what takes seconds elsewhere

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class NoJobs:
    async def jobs(self) -> list[Any]:
        return []

    async def job(self, job: str) -> bytes | None:
        return None

    async def timeline(self, job: str, iterations: int) -> bytes | None:
        return None

    def live(self) -> dict[str, Any]:
        return {}


@pytest.fixture
def exporter() -> Exporter:
    return Exporter()


@pytest.fixture
async def port(exporter: Exporter) -> AsyncIterator[int]:
    server = MetricsServer(exporter, "127.0.0.1", 0, NoJobs())
    url = await server.start()
    yield int(url.rpartition(":")[2])
    await server.stop()


async def get(port: int, path: str = "/healthz") -> int:
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}{path}") as response:
        await response.read()
        return response.status


async def ended(connection: Connection) -> bytes:
    """What came before the server closed."""
    data = b""
    with suppress(ConnectionError):
        async with asyncio.timeout(60.0):
            data = await connection[0].read()
    connection[1].transport.abort()
    return data


def figure(exporter: Exporter, name: str) -> float:
    """0 before it is first set."""
    lines = [line for line in exporter.render().decode().splitlines() if line.startswith(name)]
    return float(lines[0].rpartition(" ")[2]) if lines else 0.0


def dropped(exporter: Exporter, reason: str) -> float:
    return figure(exporter, f'weft_http_dropped_connections_total{{reason="{reason}"}}')


@pytest.mark.parametrize("said", [b"", b"G", HELD, HELD + b"X: " + b"y" * 4000], ids=len)
async def test_a_connection_that_asks_nothing_is_dropped(
    port: int, exporter: Exporter, said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 796 idle connections stood as long as they liked, and took the daemon's descriptors.
    monkeypatch.setattr(http_connections, "HEADER_SECONDS", MOMENT)
    connection = await asyncio.open_connection("127.0.0.1", port)
    connection[1].write(said)
    assert await ended(connection) == b""
    assert dropped(exporter, "idle") == 1
    assert figure(exporter, "weft_http_connections") == 0


async def test_a_connection_that_asks_nothing_more_is_dropped(
    port: int, exporter: Exporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_connections, "SEND_SECONDS", MOMENT)
    connection = await asyncio.open_connection("127.0.0.1", port)
    connection[1].write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert (await ended(connection)).endswith(b"ok\n")
    assert dropped(exporter, "idle") == 1


async def test_a_client_that_takes_no_answer_is_dropped(
    port: int, exporter: Exporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_connections, "SEND_SECONDS", MOMENT)
    for job in range(20_000):  # some MB: more than the kernel keeps for a reader that does not read
        exporter.set("weft_job_step", 1, job=f"{job}-{'x' * 200}")
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        await loop.sock_connect(client, ("127.0.0.1", port))
        await loop.sock_sendall(client, HELD + b"\r\n")
        reset = select.poll()
        reset.register(client, 0)  # of a client that does not read, only the end is told
        assert await asyncio.to_thread(reset.poll, 60_000)
    assert dropped(exporter, "idle") == 1
    assert figure(exporter, "weft_http_connections") == 0


async def test_a_stream_of_events_is_not_taken_for_idle(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HEADER_SECONDS", "SEND_SECONDS"):
        monkeypatch.setattr(http_connections, name, MOMENT)
    monkeypatch.setattr(page_routes, "EVENT_SECONDS", MOMENT)
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/api/events") as response:
        for _ in range(5):
            assert (await response.content.readuntil(b"\n\n")).startswith(b"data: ")


async def test_whoever_holds_connections_open_keeps_nobody_out(port: int, exporter: Exporter) -> None:
    held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3 * http_connections.MAX_CONNECTIONS)]
    assert await get(port) == 200
    assert await get(port, "/metrics") == 200
    assert figure(exporter, "weft_http_connections") <= http_connections.MAX_CONNECTIONS
    assert dropped(exporter, "replaced") >= 2 * http_connections.MAX_CONNECTIONS
    assert await ended(held[0]) == b""  # the oldest went first
    for _, writer in held:
        writer.transport.abort()


async def test_where_all_are_busy_a_new_connection_is_refused(
    port: int, exporter: Exporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_connections, "MAX_CONNECTIONS", 2)
    async with aiohttp.ClientSession() as session, AsyncExitStack() as stack:
        for _ in range(2):
            events = await stack.enter_async_context(session.get(f"http://127.0.0.1:{port}/api/events"))
            await events.content.readuntil(b"\n\n")
        assert await get(port) == 503
        assert dropped(exporter, "full") == 1


async def test_bad_requests_are_answered_and_told_in_a_line_now_and_then(
    port: int, caplog: pytest.LogCaptureFixture
) -> None:
    # Half of 3,000 bad requests wrote a traceback each into the daemon's log.
    random.seed(20_261_122)
    heads = (b"GET / HTTP/1.1\r\n", b"GET /metrics HTTP/9.9\r\n", b"\x16\x03\x01", b"GET \x00 HTTP/1.1\r\n", b"")
    tails = (b"Content-Length: x\r\n\r\n", b"Transfer-Encoding: y\r\n\r\n", b"A" * 20_000, b": \r\n\r\n", b"\r\n\r\n")
    with caplog.at_level(logging.INFO):
        for _ in range(300):
            connection = await asyncio.open_connection("127.0.0.1", port)
            connection[1].write(random.choice(heads) + random.randbytes(20) + random.choice(tails))
            connection[1].write_eof()
            assert (await ended(connection))[:12] in (b"", b"HTTP/1.1 400", b"HTTP/1.0 400", b"HTTP/1.1 403")
    assert len(caplog.records) == 1
    assert caplog.records[0].exc_info is None
    assert caplog.messages[0].startswith("a bad HTTP request: ")
    assert await get(port) == 200


async def test_a_request_with_a_body_gets_an_answer(port: int) -> None:
    url = f"http://127.0.0.1:{port}/metrics"
    async with aiohttp.ClientSession() as session, session.post(url, data=b"x" * (1 << 20)) as response:
        assert response.status == 405


async def test_jobs_that_cannot_be_looked_up_are_an_answer(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(self: NoJobs, *arguments: Any) -> Any:
        raise page_routes.SourceUnavailable("the ledger cannot be used")

    for name in ("jobs", "job", "timeline"):
        monkeypatch.setattr(NoJobs, name, fail)
    for path in ("/api/jobs", "/api/jobs/digits-1", "/api/jobs/digits-1/timeline"):
        async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}{path}") as response:
            assert (response.status, await response.json()) == (503, {"error": "the ledger cannot be used"})
