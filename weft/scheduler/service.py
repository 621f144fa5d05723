"""The service: clients of the daemon's socket and what each verb answers.

Every connection is one task that lives in the daemon's task group. A client's mistake ends its request with a named
error, a broken frame its connection; neither reaches anybody else.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from weft import __version__
from weft.metrics.exporter import Exporter
from weft.metrics.recording import FILE
from weft.run_file import RunFileError, size
from weft.scheduler.core import Core
from weft.scheduler.driver import Changed, Driver, Spawn
from weft.scheduler.events import CancelRequested
from weft.scheduler.job_id import InvalidJobId
from weft.scheduler.job_recording import keep_recording
from weft.scheduler.job_result import DETAILS, add_critical_path, details_of, model_of, result_of
from weft.scheduler.job_summary import summary_of
from weft.scheduler.ledger import AsyncLedger, IdTaken, JobRow, Ledger
from weft.scheduler.pool import Pool
from weft.scheduler.run_directory import read_log
from weft.settings import Settings
from weft.spec import JobSpec, SpecError
from weft.transport.wire import (
    MAX_CLIENT_FRAME_BYTES,
    PROTOCOL,
    ErrorCode,
    FrameReader,
    Message,
    WireError,
    encode,
    field,
)

MAX_CONNECTIONS = 256  # of clients at once; each costs a descriptor and a few kB
HELLO_SECONDS = 10.0  # for a client to say hello
SEND_SECONDS = 30.0  # for a client to take what was sent to it
PROGRESS_SECONDS = 1.0
MAX_JOBS_LISTED = 1000
MAX_WAIT_SECONDS = 86_400.0  # of one `wait` request; event loops refuse times far above
MAX_PRIORITY = 1000  # as in a spec, and below
MAX_OFFSET = 2**63 - 1  # a file's largest


class Stream:
    """What a verb that takes its time says before it answers, and whether anybody still listens."""

    def __init__(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._number = number
        self._reader = reader
        self._writer = writer

    async def send(self, event: Message) -> None:
        await _send(self._writer, {"id": self._number, "event": event})

    async def wait_for(self, changed: Changed) -> None:
        """Returns on a change, or after a while without one. Errors: ConnectionResetError if the client has gone."""
        if self._reader.at_eof():
            raise ConnectionResetError
        try:
            async with asyncio.timeout(PROGRESS_SECONDS):
                await changed.wait()
        except TimeoutError:
            pass


class Service:
    """Answers clients. Errors that a verb raises as WireError go to the client; others are bugs and end the daemon."""

    def __init__(self, settings: Settings, driver: Driver, ledger: AsyncLedger, exporter: Exporter, pool: Pool) -> None:
        self._settings = settings
        self._driver = driver
        self._ledger = ledger
        self._exporter = exporter
        self._pool = pool
        self._num_connections = 0
        self._metrics_url: str | None = None
        self._clients: set[asyncio.Task[None]] = set()
        self._verbs: dict[str, Callable[[Message, Stream], Awaitable[Message]]] = {
            "submit": self._submit,
            "ps": self._ps,
            "show": self._show,
            "record": self._record,
            "follow": self._follow,
            "wait": self._wait,
            "cancel": self._cancel,
            "status": self._status,
        }

    @property
    def _core(self) -> Core:
        return self._driver.core

    def announce_metrics(self, url: str) -> None:
        self._metrics_url = url

    def accept(self, spawn: Spawn, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Begins to serve a new connection, in a task of the daemon's group."""
        task = spawn(self._serve_client(reader, writer), "client")
        self._clients.add(task)
        task.add_done_callback(self._clients.discard)

    def close(self) -> None:
        """Cuts every connection."""
        for task in self._clients:
            task.cancel()

    async def _serve_client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection from hello to end; never raises for what a client does."""
        self._num_connections += 1
        self._exporter.set("weft_control_connections", self._num_connections)
        try:
            await self._converse(reader, writer)
        except WireError as error:
            self._exporter.add("weft_control_rejected_frames_total", reason=str(error.code))
            await _send(writer, {"error": error.to_wire()}, suppress=True)
        except (ConnectionError, TimeoutError):
            pass  # the client is gone, or does not take what it asked for
        finally:
            self._num_connections -= 1
            self._exporter.set("weft_control_connections", self._num_connections)
            writer.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._num_connections > MAX_CONNECTIONS:
            raise WireError(ErrorCode.TOO_MANY_CONNECTIONS, f"{MAX_CONNECTIONS} clients are connected; try again")
        _check_peer(writer)
        frames = FrameReader(MAX_CLIENT_FRAME_BYTES, strict=True)
        waiting: list[Message] = []
        async with asyncio.timeout(HELLO_SECONDS):
            while not waiting:
                data = await reader.read(1 << 16)
                if not data:
                    return
                waiting = frames.feed(data)
        _check_hello(waiting.pop(0))
        await _send(writer, {"hello": {"protocol": PROTOCOL, "version": __version__, "pid": os.getpid()}})
        while True:
            for request in waiting:
                await self._answer(request, reader, writer)
            data = await reader.read(1 << 16)
            if not data:
                return
            waiting = frames.feed(data)

    async def _answer(self, request: Message, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = field(request, "id", int)
        verb = field(request, "verb", str)
        stream = Stream(number, reader, writer)
        try:
            handler = self._verbs.get(verb)
            if handler is None:
                known = ", ".join(sorted(self._verbs))
                raise WireError(ErrorCode.UNKNOWN_VERB, f"no verb {verb!r}; this daemon knows {known}")
            reply = {"ok": await handler(request, stream)}
        except WireError as error:
            reply = {"error": error.to_wire()}
        await _send(writer, {"id": number, **reply})

    # --- verbs

    async def _submit(self, request: Message, stream: Stream) -> Message:
        if self._core.draining:
            raise WireError(
                ErrorCode.DRAINING, "the daemon is shutting down and takes no jobs; submit after its restart"
            )
        if len(self._driver.runs) >= self._settings.max_queued:
            raise WireError(
                ErrorCode.QUEUE_FULL,
                f"{len(self._driver.runs)} jobs wait or run, the most that max_queued allows; try again when one ends",
            )
        try:
            spec = JobSpec.parse(field(request, "spec", dict))
            spec.check_files()
        except SpecError as error:
            raise WireError(ErrorCode.INVALID_SPEC, str(error)) from None
        priority = field(request, "priority", (int, type(None)), None)
        if priority is not None and not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
            raise WireError(ErrorCode.BAD_FIELD, f"priority is {priority}; give {-MAX_PRIORITY} to {MAX_PRIORITY}")
        try:
            await self._driver.writer.check_room(self._settings.runs_path)
            submission = await self._ledger.run(
                Ledger.add,
                spec.to_wire(),
                uid=os.getuid(),
                priority=spec.job.priority if priority is None else priority,
                submitted_at=time.time(),
                job=field(request, "job", (str, type(None)), None),
            )
        except InvalidJobId as error:
            raise WireError(ErrorCode.BAD_FIELD, str(error)) from None
        except IdTaken as error:
            raise WireError(ErrorCode.ID_TAKEN, str(error)) from None
        except RunFileError as error:
            raise WireError(ErrorCode.NO_ROOM, f"{error}; the job was not taken: make room and submit again") from None
        if submission.is_new:
            self._driver.adopt(submission.row, attempt=1)
        return {"job": submission.row.job, "created": submission.is_new}

    async def _ps(self, request: Message, stream: Stream) -> Message:
        rows = await self._ledger.run(Ledger.jobs, limit=MAX_JOBS_LISTED)
        return {"jobs": [summary_of(row, self._driver) for row in rows]}

    async def _show(self, request: Message, stream: Stream) -> Message:
        row = await self._row(request)
        run = self._driver.runs.get(row.job)
        details: dict[str, Any] = row.result or {}
        if run is not None:
            details = details_of(run, None)
            if details["time"] is not None and field(request, "path", bool, False):
                await add_critical_path(run, details)
        return {
            **summary_of(row, self._driver),
            **{key: details.get(key) for key in DETAILS},
            "exit_code": row.exit_code,
            "spec": row.spec,
            "run_dir": row.run_dir,
            "model": await model_of(row),
            "error": row.error,
        }

    async def _record(self, request: Message, stream: Stream) -> Message:
        """A job that has ended has its recording; one that runs gets a new one."""
        row = await self._row(request)
        run = self._driver.runs.get(row.job)
        path = Path(row.run_dir, FILE)
        if run is not None and run.plan is not None:
            try:
                await keep_recording(run)
            except OSError as error:
                raise WireError(ErrorCode.NOTHING_RECORDED, str(error)) from None
            return {"path": str(path)}
        try:
            await asyncio.to_thread(size, path, owner=os.geteuid())
        except FileNotFoundError:
            nothing = f"{row.job} has run no iteration; there is nothing to look at"
            raise WireError(ErrorCode.NOTHING_RECORDED, nothing) from None
        except OSError as error:
            raise WireError(ErrorCode.NOTHING_RECORDED, str(error)) from None
        return {"path": str(path)}

    async def _wait(self, request: Message, stream: Stream) -> Message:
        timeout = field(request, "timeout", (int, float, type(None)), None)
        if timeout is not None and not 0 <= timeout <= MAX_WAIT_SECONDS:  # refuses nan, too
            raise WireError(ErrorCode.BAD_FIELD, f"timeout is {timeout}; give 0 to {MAX_WAIT_SECONDS:.0f} seconds")
        row = await self._row(request)
        try:
            async with asyncio.timeout(timeout):
                await self._until_ended(row.job, stream)
        except TimeoutError:
            raise WireError(ErrorCode.TIMED_OUT, f"{row.job} has not ended within {timeout} s") from None
        return {"result": await result_of(await self._row(request))}

    async def _until_ended(self, job: str, stream: Stream) -> None:
        while (changed := self._driver.changed.get(job)) is not None:
            await stream.wait_for(changed)

    async def _follow(self, request: Message, stream: Stream) -> Message:
        row = await self._row(request)
        offset = field(request, "offset", int, 0)
        live = field(request, "live", bool, True)
        with_progress = field(request, "progress", bool, False)
        sent_at = 0.0
        log = _FollowedLog(Path(row.run_dir), offset)
        while True:
            changed = self._driver.changed.get(row.job)
            seen = changed.num_times if changed else 0
            if (run := self._driver.runs.get(row.job)) is not None:
                await run.written()
            await log.send_new(stream)
            if changed is None or not live:
                return {"result": await result_of(await self._row(request))}
            if with_progress and time.monotonic() - sent_at >= PROGRESS_SECONDS:
                sent_at = time.monotonic()
                if (progress := self._driver.progress(row.job)) is not None:
                    await stream.send({"progress": progress})
            if changed.num_times == seen:  # nothing has come while this was sent
                await stream.wait_for(changed)

    async def _cancel(self, request: Message, stream: Stream) -> Message:
        row = await self._row(request)
        if row.job in self._core.jobs:
            self._driver.feed(CancelRequested(job=row.job))
            await self._until_ended(row.job, stream)
        return {"state": (await self._row(request)).state}

    async def _status(self, request: Message, stream: Stream) -> Message:
        counts = await self._ledger.run(Ledger.counts_by_state)
        return {
            "pid": os.getpid(),
            "version": __version__,
            "workers": [
                {
                    "worker": worker.name,
                    "kind": worker.kind,
                    "device": self._driver.crew[worker.name].model,
                    "state": "down" if not worker.up else "busy" if worker.job else "free",
                    "pid": self._pool.pid(worker.name),
                    "job": worker.job,
                }
                for worker in self._core.workers.values()
            ],
            "jobs": {str(state): count for state, count in counts.items()},
            "metrics": self._metrics_url,
        }

    # --- shared

    async def _row(self, request: Message) -> JobRow:
        name = field(request, "job", str)
        row = await self._ledger.run(Ledger.job, name)
        if row is None:
            raise WireError(ErrorCode.NO_SUCH_JOB, f"no job {name!r:.140}; `weft ps --all` lists them")
        return row


async def _send(writer: asyncio.StreamWriter, message: Message, *, suppress: bool = False) -> None:
    try:
        if writer.is_closing():  # the client is gone: uvloop raises RuntimeError for a write, not ConnectionError
            raise ConnectionResetError
        writer.write(encode(message))
        async with asyncio.timeout(SEND_SECONDS):
            await writer.drain()
    except (ConnectionError, TimeoutError):
        if not suppress:
            raise


class _FollowedLog:
    """A job's log from a byte offset on, as a follower has it."""

    def __init__(self, directory: Path, offset: int) -> None:
        if not 0 <= offset <= MAX_OFFSET:
            raise WireError(ErrorCode.BAD_FIELD, f"offset is {offset}; it counts the bytes of the log from 0")
        self._directory = directory
        self._offset = offset
        self._noticed = ""

    async def send_new(self, stream: Stream) -> None:
        """To its end. Where it cannot be read the follower is told so once, and still gets what comes after it."""
        try:
            while data := await asyncio.to_thread(read_log, self._directory, self._offset):
                self._offset += len(data)
                await stream.send({"log": data.decode("utf-8", "replace"), "offset": self._offset})
        except RunFileError as error:
            if self._noticed != str(error):
                self._noticed = str(error)
                await stream.send({"notice": self._noticed})


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


def _check_peer(writer: asyncio.StreamWriter) -> None:
    """Only the daemon's own user may talk to it (and root, whom nothing here could stop)."""
    connection = writer.get_extra_info("socket")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    if uid not in (os.getuid(), 0):
        raise WireError(ErrorCode.NOT_YOURS, f"this daemon belongs to uid {os.getuid()}; start your own")
