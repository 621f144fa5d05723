"""/metrics and /healthz over a real socket."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from weft.metrics.prometheus.exporter import Exporter
from weft.scheduler.daemon.http.server import MetricsAddressError, MetricsServer


@pytest.fixture
def exporter() -> Exporter:
    return Exporter()


@pytest.fixture
async def url(exporter: Exporter) -> AsyncIterator[str]:
    server = MetricsServer(exporter, "127.0.0.1", 0)
    yield await server.start()
    await server.stop()


async def get(url: str) -> tuple[int, str, str]:
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return response.status, response.headers["Content-Type"], await response.text()


async def test_metrics_are_served_as_prometheus_reads_them(exporter: Exporter, url: str) -> None:
    exporter.set("weft_job_step", 17, job="digits-1")
    status, content_type, text = await get(f"{url}/metrics")
    assert status == 200
    assert re.fullmatch(r"text/plain; version=[\d.]+; charset=utf-8", content_type)
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert [(sample.labels, sample.value) for sample in families["weft_job_step"].samples] == [
        ({"job": "digits-1"}, 17)
    ]


async def test_a_daemon_that_answers_is_healthy(url: str) -> None:
    status, _, text = await get(f"{url}/healthz")
    assert (status, text) == (200, "ok\n")


async def test_other_paths_and_verbs_are_refused(url: str) -> None:
    assert (await get(f"{url}/"))[0] == 404
    async with aiohttp.ClientSession() as session, session.post(f"{url}/metrics") as response:
        assert response.status == 405


async def test_port_0_picks_a_free_port_and_the_url_tells_it(url: str) -> None:
    assert re.fullmatch(r"http://127\.0\.0\.1:[1-9]\d*", url)


async def test_a_port_in_use_is_refused_with_the_setting_and_the_remedy(exporter: Exporter) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = MetricsServer(exporter, "127.0.0.1", port)
        with pytest.raises(MetricsAddressError, match=rf"settings: metrics: 127\.0\.0\.1:{port} is in use .* port 0"):
            await server.start()


async def test_an_address_of_another_machine_is_refused(exporter: Exporter) -> None:
    with pytest.raises(MetricsAddressError, match=r"192\.0\.2\.1:0 cannot be bound .* HOST:PORT of this machine"):
        await MetricsServer(exporter, "192.0.2.1", 0).start()


async def test_a_stopped_server_leaves_the_port_free_and_no_task(exporter: Exporter) -> None:
    tasks = asyncio.all_tasks()
    first = MetricsServer(exporter, "127.0.0.1", 0)
    url = await first.start()
    await get(f"{url}/healthz")
    await first.stop()
    second = MetricsServer(exporter, "127.0.0.1", int(url.rpartition(":")[2]))
    assert await second.start() == url
    await second.stop()
    assert asyncio.all_tasks() == tasks


async def test_stopping_what_was_never_started_does_nothing(exporter: Exporter) -> None:
    await MetricsServer(exporter, "127.0.0.1", 0).stop()
