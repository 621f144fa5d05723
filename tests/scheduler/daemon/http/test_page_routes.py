"""The timeline page's routes over a real socket: files, JSON, events, and who is refused."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from weft.metrics.prometheus.exporter import Exporter
from weft.metrics.views.page_data import MAX_ITERATIONS
from weft.metrics.views.timeline import COLOURS
from weft.plan.kinds import BUSY_MODES, STALL_MODES
from weft.scheduler.daemon.http import page_routes
from weft.scheduler.daemon.http.page_routes import FOLDER
from weft.scheduler.daemon.http.server import MetricsServer

SECONDS = 180.0  # for anything that is awaited: far above what it takes


class OneJob:
    """A source that knows "digits-1", and which iterations it was asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.state = "running"

    async def jobs(self) -> list[dict[str, Any]]:
        return [{"job": "digits-1", "state": self.state, "loss": float("nan")}]

    async def job(self, job: str) -> bytes | None:
        return b'{"job":"digits-1"}' if job == "digits-1" else None

    async def timeline(self, job: str, iterations: int) -> bytes | None:
        self.asked.append(iterations)
        return b'{"iterations":[]}' if job == "digits-1" else None

    def live(self) -> dict[str, Any]:
        return {"jobs": {"digits-1": self.state}, "progress": {}}


@pytest.fixture
def source() -> OneJob:
    return OneJob()


@pytest.fixture
async def url(source: OneJob, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    monkeypatch.setattr(page_routes, "EVENT_SECONDS", 0.01)
    server = MetricsServer(Exporter(), "127.0.0.1", 0, source)
    yield await server.start()
    async with asyncio.timeout(SECONDS):
        await server.stop()


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def get(session: aiohttp.ClientSession, url: str, **headers: str) -> tuple[int, Any, str]:
    """The status, the headers, the text."""
    async with session.get(url, headers=headers) as answer:
        return answer.status, answer.headers, await answer.text()


async def next_event(answer: aiohttp.ClientResponse) -> Any:
    async with asyncio.timeout(SECONDS):
        line = await answer.content.readline()
        assert await answer.content.readline() == b"\n"
    assert line.startswith(b"data: ")
    return json.loads(line.removeprefix(b"data: "))


async def test_the_page_and_each_of_its_files_is_served_with_its_type(url: str, session: aiohttp.ClientSession) -> None:
    status, headers, text = await get(session, f"{url}/")
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert text == (FOLDER / "index.html").read_text()
    types = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8"}
    files = [path for path in FOLDER.iterdir() if path.suffix in types]
    assert len(files) > 3
    for path in files:
        status, headers, text = await get(session, f"{url}/{path.name}")
        assert (status, headers["Content-Type"], text) == (200, types[path.suffix], path.read_text())


@pytest.mark.parametrize("path", ["/", "/page.js", "/api/jobs", "/api/jobs/none", "/nothing", "/api/events"])
async def test_every_answer_says_that_nothing_else_may_be_loaded_or_embed_it(
    path: str, url: str, session: aiohttp.ClientSession
) -> None:
    async with session.get(url + path) as answer:
        policy = answer.headers["Content-Security-Policy"].split("; ")
        assert {"default-src 'self'", "frame-ancestors 'none'", "base-uri 'none'"} <= set(policy)
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert "Access-Control-Allow-Origin" not in answer.headers


@pytest.mark.parametrize("path", ["/none.js", "/..%2fpage.js", "/page_routes.py", "/PAGE.JS", "/api", "/api/jobs/a/b"])
async def test_other_paths_are_not_found(path: str, url: str, session: aiohttp.ClientSession) -> None:
    assert (await get(session, url + path))[0] == 404


async def test_jobs_are_told_as_json_with_null_for_what_is_no_number(url: str, session: aiohttp.ClientSession) -> None:
    status, headers, text = await get(session, f"{url}/api/jobs")
    assert (status, headers["Content-Type"]) == (200, "application/json")
    assert json.loads(text) == {"jobs": [{"job": "digits-1", "state": "running", "loss": None}]}
    assert json.loads((await get(session, f"{url}/api/jobs/digits-1"))[2]) == {"job": "digits-1"}


@pytest.mark.parametrize("path", ["/api/jobs/nobody", "/api/jobs/nobody/timeline", "/api/jobs/%00%2e%2e"])
async def test_an_unknown_job_is_404_with_the_field_and_the_remedy(
    path: str, url: str, session: aiohttp.ClientSession
) -> None:
    status, _, text = await get(session, url + path)
    assert status == 404
    assert json.loads(text)["error"].startswith("job: no job ")
    assert "/api/jobs lists them" in json.loads(text)["error"]


async def test_a_name_that_no_job_can_have_is_400(url: str, session: aiohttp.ClientSession) -> None:
    status, _, text = await get(session, f"{url}/api/jobs/{'a' * 300}")
    assert status == 400
    assert json.loads(text)["error"].startswith("job: ")


async def test_the_number_of_iterations_is_passed_on_and_has_a_default(
    url: str, source: OneJob, session: aiohttp.ClientSession
) -> None:
    for query in ("", "?iterations=1", f"?iterations={MAX_ITERATIONS}"):
        assert (await get(session, f"{url}/api/jobs/digits-1/timeline{query}"))[0] == 200
    assert source.asked == [4, 1, MAX_ITERATIONS]


@pytest.mark.parametrize("given", ["0", "-1", "1.5", "four", "", "65", "9" * 5000, "%D9%A3", "4%20", "1e1", "nan"])
async def test_a_number_of_iterations_out_of_range_is_400_with_the_field_and_the_remedy(
    given: str, url: str, source: OneJob, session: aiohttp.ClientSession
) -> None:
    status, _, text = await get(session, f"{url}/api/jobs/digits-1/timeline?iterations={given}")
    assert status == 400
    assert json.loads(text)["error"].startswith("iterations: ")
    assert f"whole number from 1 to {MAX_ITERATIONS}; give one" in json.loads(text)["error"]
    assert source.asked == []


@pytest.mark.parametrize("host", ["localhost", "localhost:9464", "127.0.0.1:9464", "[::1]:9464", "LOCALHOST:80"])
async def test_a_request_by_a_name_of_the_machine_is_answered(
    host: str, url: str, session: aiohttp.ClientSession
) -> None:
    assert (await get(session, f"{url}/api/jobs", Host=host))[0] == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example:9464", "127.0.0.1.evil.example", "", "[", "::"]
)
@pytest.mark.parametrize("path", ["/", "/api/jobs", "/api/events", "/metrics"])
async def test_a_request_by_another_name_is_refused(
    path: str, host: str, url: str, session: aiohttp.ClientSession
) -> None:
    status, _, text = await get(session, url + path, Host=host)
    assert status == 403
    assert json.loads(text)["error"].startswith("Host: ")
    assert "http://localhost" in json.loads(text)["error"]


async def test_a_server_for_other_machines_lets_a_scraper_name_it_as_it_likes(session: aiohttp.ClientSession) -> None:
    server = MetricsServer(Exporter(), "0.0.0.0", 0, OneJob())
    url = (await server.start()).replace("0.0.0.0", "127.0.0.1")
    assert (await get(session, f"{url}/metrics", Host="trainer.lan:9464"))[0] == 200
    assert (await get(session, f"{url}/", Host="trainer.lan:9464"))[0] == 403
    assert (await get(session, f"{url}/", Host="192.0.2.7:9464"))[0] == 200
    await server.stop()


async def test_events_tell_the_state_now_and_again(url: str, source: OneJob, session: aiohttp.ClientSession) -> None:
    async with session.get(f"{url}/api/events") as answer:
        assert answer.content_type == "text/event-stream"
        assert await next_event(answer) == {"jobs": {"digits-1": "running"}, "progress": {}}
        source.state = "saving"
        while (await next_event(answer))["jobs"] != {"digits-1": "saving"}:
            pass


async def test_the_number_of_listeners_is_bounded_and_one_that_goes_makes_room(
    url: str, session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_routes, "MAX_LISTENERS", 2)
    first, second = [await session.get(f"{url}/api/events") for _ in range(2)]
    await next_event(first)
    await next_event(second)
    status, _, text = await get(session, f"{url}/api/events")
    assert status == 503
    assert "close one" in json.loads(text)["error"]
    first.close()
    async with asyncio.timeout(SECONDS):
        while True:
            async with session.get(f"{url}/api/events") as third:
                if third.status == 200:
                    assert (await next_event(third))["jobs"]
                    break
            await next_event(second)
    second.close()


async def test_a_listener_that_does_not_read_is_dropped(
    url: str, source: OneJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_routes, "SEND_SECONDS", 0.05)
    monkeypatch.setattr(page_routes, "MAX_LISTENERS", 1)
    source.state = "x" * 1_000_000  # fills the buffers of both sides within a few events
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as deaf:
        deaf.sendall(b"GET /api/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        async with aiohttp.ClientSession() as session, asyncio.timeout(SECONDS):
            await asyncio.to_thread(deaf.recv, 1)  # it is a listener now
            while (await get_status(session, f"{url}/api/events")) == 503:
                pass


async def get_status(session: aiohttp.ClientSession, url: str) -> int:
    """Without the body."""
    async with session.get(url) as answer:
        return answer.status


async def test_a_listener_does_not_hold_up_the_end_of_the_server(
    source: OneJob, session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.scheduler.daemon.http.server.SHUTDOWN_SECONDS", 3600.0)  # it must not come to that
    monkeypatch.setattr(page_routes, "EVENT_SECONDS", 3600.0)
    server = MetricsServer(Exporter(), "127.0.0.1", 0, source)
    url = await server.start()
    answer = await session.get(f"{url}/api/events")
    await next_event(answer)
    async with asyncio.timeout(SECONDS):
        await server.stop()
        assert await answer.content.read() == b""


def test_the_pages_files_ask_for_nothing_from_elsewhere() -> None:
    for path in FOLDER.iterdir():
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "://" not in text, path.name
        assert "innerHTML" not in text, path.name


def test_the_page_has_the_colours_of_the_timelines_pictures_and_a_hatching_for_each_cause() -> None:
    script = (FOLDER / "colours.js").read_text()
    found = dict(re.findall(r'^  (\w+): \["(#\w{6})", "#\w{6}"\],$', script, flags=re.MULTILINE))
    assert found.items() >= {kind: colours[0] for kind, colours in COLOURS.items()}.items()
    assert set(found) == set(BUSY_MODES)
    hatched = re.findall(r'^  (\w+): \["(\w+)", "#\w{6}"\],$', script, flags=re.MULTILINE)
    assert {mode for mode, _ in hatched} == set(STALL_MODES)
