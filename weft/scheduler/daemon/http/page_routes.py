"""The timeline page's routes: its files, the JSON that it asks for, and events once a second. Changes nothing.

    /                                          the page        /page.css, /*.js     its files
    /api/jobs                                  the newest jobs, newest first
    /api/jobs/JOB                              one job: state, progress, figures, where its time went, curves
    /api/jobs/JOB/timeline?iterations=N        its last iterations (page_data.py)
    /api/events                                server-sent events: the states and progress of jobs that have not ended

Everything here is unauthenticated, as /metrics is. A page of another site cannot read it: no answer allows another
origin, and a request by a name that is none of this machine's is refused (DNS rebinding).
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import math
from pathlib import Path
from typing import Any, Final, Protocol

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from weft.metrics.views.page_data import DEFAULT_ITERATIONS, MAX_ITERATIONS

FOLDER: Final = Path(__file__).parents[3] / "metrics" / "page"
TYPES: Final = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
EVENT_SECONDS = 1.0
SEND_SECONDS = 10.0  # for a client to take an event, before it is dropped
MAX_LISTENERS = 32  # of events at once; each costs a descriptor and a few kB a second
MAX_JOB_BYTES = 256  # of a job's name in a request: above any that the ledger gives

HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}

Json = dict[str, Any]


class SourceUnavailable(Exception):
    """The source cannot look just now. The text says why, and what to do."""


class Source(Protocol):
    """Whoever knows the jobs. Bytes are JSON texts; None is for a job that is not known. Errors: SourceUnavailable."""

    async def jobs(self) -> list[Json]: ...

    async def job(self, job: str) -> bytes | None: ...

    async def timeline(self, job: str, iterations: int) -> bytes | None: ...

    def live(self) -> Json:
        """What an event tells. Called once a second for each listener."""


class Page:
    """The page of one server. It begins to send events when asked and ends that at the server's shutdown."""

    def __init__(self, source: Source, application: web.Application) -> None:
        self._source = source
        self._files = _files()
        self._num_listeners = 0
        self._closing: asyncio.Event | None = None
        application.router.add_get("/", self._file)
        application.router.add_get("/{file:[a-z_]+[.](?:css|js)}", self._file)
        application.router.add_get("/api/jobs", self._jobs)
        application.router.add_get("/api/jobs/{job}", self._job)
        application.router.add_get("/api/jobs/{job}/timeline", self._timeline)
        application.router.add_get("/api/events", self._events)
        application.on_startup.append(self._open)
        application.on_shutdown.append(self._close)

    async def _open(self, _application: web.Application) -> None:
        self._closing = asyncio.Event()

    async def _close(self, _application: web.Application) -> None:
        assert self._closing is not None
        self._closing.set()

    async def _file(self, request: web.Request) -> web.Response:
        found = self._files.get(request.match_info.get("file", "index.html"))
        if found is None:
            raise web.HTTPNotFound
        kind, body = found
        return web.Response(body=body, content_type=kind, charset="utf-8")

    async def _jobs(self, _request: web.Request) -> web.Response:
        return _json(encoded({"jobs": await self._source.jobs()}))

    async def _job(self, request: web.Request) -> web.Response:
        job = _job_of(request)
        return _found(job, await self._source.job(job))

    async def _timeline(self, request: web.Request) -> web.Response:
        job = _job_of(request)
        return _found(job, await self._source.timeline(job, _iterations_of(request)))

    async def _events(self, request: web.Request) -> web.StreamResponse:
        assert self._closing is not None
        if self._num_listeners >= MAX_LISTENERS:
            return refusal(503, f"{MAX_LISTENERS} pages follow this daemon; close one and reload")
        response = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream"})
        self._num_listeners += 1
        try:
            await response.prepare(request)
            while not self._closing.is_set():
                event = b"data: " + encoded(self._source.live()) + b"\n\n"
                async with asyncio.timeout(SEND_SECONDS):
                    await response.write(event)
                await _until_set(self._closing, EVENT_SECONDS)
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
        except ConnectionError:
            pass  # the client has gone
        finally:
            self._num_listeners -= 1
        return response


@web.middleware
async def with_headers(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Puts HEADERS on every answer, on an error too; events get them as they begin."""
    try:
        response = await handler(request)
    except SourceUnavailable as error:
        response = refusal(503, str(error))
    except web.HTTPException as error:
        error.headers.update(HEADERS)
        raise
    if not response.prepared:
        response.headers.update(HEADERS)
    return response


def refuse_strange_hosts(host: str) -> Middleware:
    """A middleware. A browser that a hostile site's name has led here says that name; an address it cannot be led to
    by a name. The port does not matter: a forwarded one (ssh -L) has another number.

    host: the one that is bound. /metrics and /healthz are refused only where that is this machine's own address: else
    a scraper may know the machine by any name.
    """
    is_local = _is_loopback(host)

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        asked = _name_of(request.headers.get("Host", ""))
        exempt = not is_local and request.path in ("/metrics", "/healthz")
        if exempt or asked in ("localhost", host.lower()) or _is_address(asked):
            return await handler(request)
        return refusal(
            403, f"Host: {asked!r:.80} is not this daemon's name; open http://localhost, or an address of the machine"
        )

    return middleware


def refusal(status: int, problem: str) -> web.Response:
    return web.Response(status=status, body=encoded({"error": problem}), content_type="application/json")


def _job_of(request: web.Request) -> str:
    job = request.match_info["job"]
    if len(job.encode("utf-8", "replace")) > MAX_JOB_BYTES:
        problem = f"job: {job[:40]!r}… is longer than {MAX_JOB_BYTES} bytes; no job is called so"
        raise web.HTTPBadRequest(text=json.dumps({"error": problem}), content_type="application/json")
    return job


def _iterations_of(request: web.Request) -> int:
    given = request.query.get("iterations", str(DEFAULT_ITERATIONS))
    if given.isascii() and given.isdigit() and len(given) < 10 and 1 <= int(given) <= MAX_ITERATIONS:
        return int(given)
    problem = f"iterations: {given!r:.40} is no whole number from 1 to {MAX_ITERATIONS}; give one, for example 4"
    raise web.HTTPBadRequest(text=json.dumps({"error": problem}), content_type="application/json")


def _found(job: str, body: bytes | None) -> web.Response:
    if body is None:
        return refusal(404, f"job: no job {job!r:.140}; /api/jobs lists them")
    return _json(body)


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")


def encoded(value: Any) -> bytes:
    """As an answer has it."""
    return json.dumps(_finite(value), separators=(",", ":"), allow_nan=False).encode()


def _finite(value: Any) -> Any:
    """The same with null for nan and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


async def _until_set(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass


def _files() -> dict[str, tuple[str, bytes]]:
    """The page's files by name, each with its type: a few dozen kB, read once."""
    return {
        path.name: (TYPES[path.suffix], path.read_bytes()) for path in sorted(FOLDER.iterdir()) if path.suffix in TYPES
    }


def _name_of(host: str) -> str:
    """Of a Host header, without the port and the brackets of an IPv6 address."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)
