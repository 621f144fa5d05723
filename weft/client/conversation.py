"""Conversation: the client's half of the daemon's socket, sans-IO. Both clients perform what is decided here.

A call is a *script*: a generator that yields steps (connect, send, receive, close, pause, deliver) and is resumed with
the bytes received, or with the OSError that the step met. Building requests, reading replies, naming errors and
outliving a daemon's restart are therefore written once, and tested without a socket.

    script    Connect ─▶ Send(hello) ─▶ Receive ─▶ Send(request) ─▶ Receive … ─▶ Deliver(event) … ─▶ end
    on loss                                          Close ─▶ Pause ─▶ Connect ─▶ … resumed at the last byte offset

Each call has a connection of its own: nothing is shared, so clients need no lock, and no call meets a stale connection.
It must never know: sockets, event loops, and what the daemon does with a request.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.transport.wire.frames import (
    MAX_CLIENT_FRAME_BYTES,
    MAX_REPLY_BYTES,
    PROTOCOL,
    ErrorCode,
    FrameReader,
    Message,
    WireError,
    encode,
)
from weft.version import __version__

SILENCE_SECONDS = 30.0  # of a follower: then it connects anew, which proves that the daemon still answers
WAIT_SLICE_SECONDS = 30.0  # of one `wait` request, so that a daemon that hangs is noticed
PAUSE_SECONDS = 600.0  # the daemon answers once the iterations that its workers have begun are over
CANCEL_SECONDS = 30.0  # the daemon answers once the job has ended: its workers finish, or are killed
SAVE_SECONDS = 60.0  # for a checkpoint that is still being written
REPLACE_SECONDS = 240.0  # the other Weft is looked at, what is under way is finished, and it starts
REMOVE_SECONDS = 900.0  # of one job's files, of which there may be millions, behind another job's
RECONNECT_SECONDS = 60.0  # a daemon restarts in about a second; systemd waits longer between later attempts
FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS = 0.05, 2.0

_TRANSIENT = (ErrorCode.DRAINING, ErrorCode.TOO_MANY_CONNECTIONS)  # of a daemon that is about to restart, or busy
START = "start the daemon with `weft daemon` or `systemctl --user start weft`"


class DaemonUnreachable(Exception):
    """No daemon answers at the socket. The text names the socket and the remedy."""

    def __init__(self, socket_path: Path, problem: str, remedy: str = START) -> None:
        super().__init__(f"{socket_path}: {problem}; {remedy}")
        self.socket_path = socket_path


class _Unanswered(DaemonUnreachable):
    """The daemon holds the connection and says nothing."""


class _Crowded(DaemonUnreachable):
    """So many connect at once that the kernel takes no more of them for now."""


class RequestRefused(Exception):
    """The daemon answered no. `code` is one of `ErrorCode` (or a newer daemon's), `message` says what to do."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class UntrustedSocket(PermissionError):
    """What a Connect met: the socket, or its directory, is another user's. The text names it and the remedy."""


@dataclass(frozen=True, slots=True)
class Connect:
    """To a socket that is ours: nothing is to be sent to anybody else's."""

    path: Path
    timeout: float


@dataclass(frozen=True, slots=True)
class Send:
    data: bytes
    timeout: float


@dataclass(frozen=True, slots=True)
class Receive:
    """Answered with at least one byte, or with b"" at the end of the stream."""

    timeout: float


@dataclass(frozen=True, slots=True)
class Close:
    pass


@dataclass(frozen=True, slots=True)
class Pause:
    seconds: float


@dataclass(frozen=True, slots=True)
class Deliver:
    """Hands one event, or the reply, to the caller."""

    item: Any


Step = Connect | Send | Receive | Close | Pause | Deliver
Script = Generator[Step, bytes, None]
_Part = Generator[Step, bytes, Any]


class _Outage:
    """How long a lost daemon is awaited. Before the first success nothing is awaited: the daemon isn't there."""

    def __init__(self, seconds: float, clock: Callable[[], float], deadline: float = float("inf")) -> None:
        self._seconds = seconds
        self._clock = clock
        self._deadline = deadline
        self._give_up_at: float | None = None  # None: the daemon has never answered
        self._pause = FIRST_PAUSE_SECONDS

    def met(self) -> None:
        """It has greeted, and is awaited from now on; to greet again and again gains it nothing."""
        self._give_up_at = self._give_up_at or self._clock() + self._seconds

    def over(self) -> None:
        self._give_up_at = self._clock() + self._seconds
        self._pause = FIRST_PAUSE_SECONDS

    def pause_after(self, error: Exception) -> float:
        """Seconds to the next attempt; raises the error when there is to be none."""
        if isinstance(error, RequestRefused) and error.code not in _TRANSIENT:
            raise error
        pause = self._pause
        if self._give_up_at is None or self._clock() + pause > min(self._give_up_at, self._deadline):
            raise error
        self._pause = min(2 * pause, LAST_PAUSE_SECONDS)
        return pause


class Conversation:
    """Scripts for every verb. `timeout` is in seconds, for each answer of the daemon."""

    def __init__(
        self,
        socket_path: Path,
        timeout: float = 10.0,
        reconnect_seconds: float = RECONNECT_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.socket_path = socket_path
        self._timeout = timeout
        self._reconnect_seconds = reconnect_seconds
        self._clock = clock

    def submit(self, spec: Mapping[str, Any], job: str | None, priority: int | None) -> Script:
        reply = yield from self._call("submit", {"spec": dict(spec), "job": job, "priority": priority})
        yield Deliver(reply)

    def jobs(self, ended_before: float | None = None) -> Script:
        fields = {} if ended_before is None else {"ended_before": ended_before}
        reply = yield from self._call("ps", fields)
        rows = reply["jobs"]
        if ended_before is not None:  # an older daemon does not know the field, and sends all
            rows = [row for row in rows if row["ended_at"] is not None and row["ended_at"] < ended_before]
        yield Deliver(rows)

    def listing(self) -> Script:
        yield Deliver((yield from self._call("ps", {})))

    def show(self, job: str, path: bool = False) -> Script:
        yield Deliver((yield from self._call("show", {"job": job, "path": path})))

    def record(self, job: str) -> Script:
        reply = yield from self._call("record", {"job": job})
        yield Deliver(reply["path"])

    def cancel(self, job: str, discard: bool) -> Script:
        reply = yield from self._call("cancel", {"job": job, "discard": discard}, extra_seconds=CANCEL_SECONDS)
        yield Deliver(reply["state"])

    def pause(self, job: str) -> Script:
        reply = yield from self._call("pause", {"job": job}, extra_seconds=PAUSE_SECONDS)
        yield Deliver(reply["state"])

    def resume(self, job: str) -> Script:
        yield Deliver((yield from self._call("resume", {"job": job}, extra_seconds=SAVE_SECONDS)))

    def restart(self, job: str) -> Script:
        yield Deliver((yield from self._call("restart", {"job": job})))

    def remove(self, job: str) -> Script:
        reply = yield from self._call("remove", {"job": job}, extra_seconds=REMOVE_SECONDS)
        yield Deliver(reply["job"])

    def replace(self, executable: str) -> Script:
        yield Deliver((yield from self._call("replace", {"executable": executable}, extra_seconds=REPLACE_SECONDS)))

    def status(self) -> Script:
        yield Deliver((yield from self._call("status", {})))

    def wait(self, job: str, timeout: float | None) -> Script:
        """Delivers the result; refused with `timed-out` after `timeout` seconds."""
        deadline = float("inf") if timeout is None else self._clock() + timeout
        outage = _Outage(self._reconnect_seconds, self._clock, deadline)

        def attempt() -> _Part:
            while True:
                left = max(0.0, min(WAIT_SLICE_SECONDS, deadline - self._clock()))
                try:
                    return (yield from self._call("wait", {"job": job, "timeout": left}, left, outage))
                except RequestRefused as refusal:
                    if (code := refusal.code) != ErrorCode.TIMED_OUT:
                        raise
                if self._clock() >= deadline:  # the daemon tells of the last slice
                    raise RequestRefused(code, f"{job} has not ended within {timeout:g} s")
                outage.over()

        yield Deliver((yield from self._persist(attempt, outage))["result"])

    def log(self, job: str) -> Script:
        """Delivers the text of the log so far, in parts. Refused with `nothing-recorded` where it cannot be read."""
        connection = yield from self._open()
        yield from connection.send("follow", {"job": job, "offset": 0, "progress": False, "live": False})
        while "event" in (message := _refused((yield from connection.next(self._timeout)))):
            if "notice" in message["event"]:
                raise RequestRefused(ErrorCode.NOTHING_RECORDED, message["event"]["notice"])
            yield Deliver(message["event"].get("log", ""))

    def follow(self, job: str, offset: int, progress: bool) -> Script:
        """Delivers {"log", "offset"} and {"progress"} events, at last {"result"}; resumes after a lost connection."""
        outage = _Outage(self._reconnect_seconds, self._clock)
        latest: Message | None = None

        def attempt() -> _Part:
            nonlocal offset, latest
            connection = yield from self._open(outage)
            yield from connection.send("follow", {"job": job, "offset": offset, "progress": progress})
            while True:
                message = yield from _next_of_stream(connection, outage)
                if (event := message.get("event")) is None:
                    return _ok(message)
                offset = event.get("offset", offset)
                if "progress" not in event or event != latest:  # a new connection begins with the newest progress
                    yield Deliver(event)
                latest = event if "progress" in event else latest

        yield Deliver({"result": (yield from self._persist(attempt, outage))["result"]})

    def _persist(self, attempt: Callable[[], _Part], outage: _Outage) -> _Part:
        while True:
            try:
                return (yield from attempt())
            except (DaemonUnreachable, RequestRefused) as error:
                pause = outage.pause_after(error)
            yield Close()
            yield Pause(pause)

    def _call(self, verb: str, fields: Message, extra_seconds: float = 0.0, outage: _Outage | None = None) -> _Part:
        connection = yield from self._open(outage)
        yield from connection.send(verb, fields)
        message = yield from connection.next(self._timeout + extra_seconds)
        yield Close()
        return _ok(message)

    def _open(self, outage: _Outage | None = None) -> _Part:
        connection = _Connection(self.socket_path, self._timeout, self._clock)
        yield from connection.open()
        if outage is not None:
            outage.met()
        return connection


class _Connection:
    """One connection of one script: the handshake, frames in both directions, and what their failures mean."""

    def __init__(self, socket_path: Path, timeout: float, clock: Callable[[], float]) -> None:
        self._socket_path = socket_path
        self._timeout = timeout
        self._clock = clock
        self._messages: deque[Message] = deque()
        self._reader = FrameReader(MAX_REPLY_BYTES)

    def open(self) -> _Part:
        yield from self._connect()
        yield from self._write(encode({"hello": {"protocol": PROTOCOL, "version": __version__}}))
        hello = _refused((yield from self.next(self._timeout))).get("hello")
        if not isinstance(hello, dict):
            raise self._unreachable("what answers there is no weft daemon")
        if hello.get("protocol") != PROTOCOL:
            raise RequestRefused(
                ErrorCode.WRONG_PROTOCOL,
                f"{self._socket_path}: the daemon speaks protocol {hello.get('protocol')}, this client {PROTOCOL}; "
                "restart the daemon after an upgrade",
            )

    def _connect(self) -> _Part:
        deadline = self._clock() + self._timeout
        while True:
            try:
                return (yield from self._step(Connect(self._socket_path, self._timeout)))
            except _Crowded:
                if self._clock() >= deadline:
                    raise
            yield Close()
            yield Pause(FIRST_PAUSE_SECONDS)

    def send(self, verb: str, fields: Message) -> _Part:
        try:
            frame = encode({"id": 1, "verb": verb, **fields})
        except (ValueError, TypeError, OverflowError) as error:
            if isinstance(error, UnicodeEncodeError) and fields.keys() & {"job", "spec"} == {"job"}:
                why = f"no job {fields['job']!r:.140}; `weft ps --all` lists them"
                raise RequestRefused(ErrorCode.NO_SUCH_JOB, why) from None
            why = f"{verb}: cannot be sent ({error}); use numbers, strings, lists and maps only"
            raise RequestRefused(ErrorCode.BAD_FIELD, why) from None
        if len(frame) > MAX_CLIENT_FRAME_BYTES:
            raise RequestRefused(
                ErrorCode.FRAME_TOO_LARGE,
                f"{verb}: {len(frame)} bytes, at most {MAX_CLIENT_FRAME_BYTES} are taken; keep data out of job.args",
            )
        yield from self._write(frame)

    def next(self, seconds: float) -> _Part:
        """The next message, within so many seconds."""
        deadline = self._clock() + seconds
        while not self._messages:
            data = yield from self._step(Receive(deadline - self._clock()))
            if not data:
                remedy = "it is stopping, or has too few descriptors for one more client: try again"
                raise DaemonUnreachable(self._socket_path, "the daemon closed the connection", remedy)
            try:
                self._messages.extend(self._reader.feed(data))
            except WireError as error:
                raise self._unreachable(f"what answers there is no weft daemon: {error.message}") from None
        return self._messages.popleft()

    def _write(self, frame: bytes) -> _Part:
        try:
            yield from self._step(Send(frame, self._timeout))
        except _Unanswered:
            raise
        except DaemonUnreachable:
            pass  # a daemon that refuses says why and closes: the reason is there to be read, or the end of the stream

    def _step(self, step: Connect | Send | Receive) -> _Part:
        """Performs one step; its OSError becomes the error that the caller understands."""
        try:
            return (yield step)
        except TimeoutError:
            remedy = "it is stopped or very busy: try again, or start it anew"
            raise _Unanswered(self._socket_path, "the daemon does not answer in time", remedy) from None
        except BlockingIOError:
            raise _Crowded(self._socket_path, "too many clients connect at once", "try again") from None
        except FileNotFoundError:
            raise self._unreachable("no such socket") from None
        except ConnectionRefusedError:
            raise self._unreachable("nobody listens there") from None
        except UntrustedSocket as error:
            raise RequestRefused(ErrorCode.NOT_YOURS, str(error)) from None
        except PermissionError:
            raise RequestRefused(
                ErrorCode.NOT_YOURS, f"{self._socket_path}: another user's daemon; set WEFT_RUNTIME_DIR to your own"
            ) from None
        except OSError as error:
            raise self._unreachable(error.strerror or f"{error}, set WEFT_RUNTIME_DIR to a shorter one") from None

    def _unreachable(self, problem: str) -> DaemonUnreachable:
        return DaemonUnreachable(self._socket_path, problem)


def _refused(message: Message) -> Message:
    error = message.get("error")
    if isinstance(error, dict):
        raise RequestRefused(str(error.get("code", "")), str(error.get("message", "")))
    return message


def _ok(message: Message) -> Message:
    reply: Message = _refused(message).get("ok", {})
    return reply


def _next_of_stream(connection: _Connection, outage: _Outage) -> _Part:
    try:
        message = yield from connection.next(SILENCE_SECONDS)
    except _Unanswered:
        outage.over()  # the connection stood all that time; connecting anew shows whether anyone is there
        raise
    outage.over()
    return message
