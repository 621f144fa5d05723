"""The reception, on a real socket and uvloop as in the daemon, with verbs that misbehave in every way there is."""

from __future__ import annotations

import array
import asyncio
import os
import runpy
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import uvloop

from weft.metrics.prometheus.exporter import Exporter
from weft.scheduler.daemon.guard import MAX_TRACEBACKS
from weft.scheduler.daemon.reception import Bounds, Caller, Reception
from weft.scheduler.runs.run import Changed
from weft.transport.wire.frames import (
    MAX_CLIENT_FRAME_BYTES,
    MAX_ERROR_CHARS,
    MAX_REPLY_BYTES,
    PROTOCOL,
    ErrorCode,
    FrameReader,
    Message,
    WireError,
    encode,
    field,
)

_RAW = runpy.run_path(str(Path(__file__).parents[2] / "raw_client.py"))
RawClient, SECONDS = _RAW["RawClient"], _RAW["SECONDS"]
MIB = 1 << 20
HELLO = {"hello": {"protocol": PROTOCOL, "version": "0"}}
PATIENT = Bounds(talking=8, sockets=12, hello_seconds=SECONDS, send_seconds=SECONDS, stalling_seconds=SECONDS)
BUGS: dict[str, BaseException] = {
    "ValueError": ValueError("no such thing"),
    "OSError": OSError(22, "Invalid argument"),
    "IsADirectoryError": IsADirectoryError(21, "Is a directory"),
    "ConnectionResetError": ConnectionResetError(),
    "TimeoutError": TimeoutError(),
    "RecursionError": RecursionError(),
    "MemoryError": MemoryError(),
    "AssertionError": AssertionError("a story"),
    "ExceptionGroup": ExceptionGroup("several", [KeyError("a"), KeyError("b")]),
    "StopAsyncIteration": StopAsyncIteration(),
    "StopIteration": StopIteration(),
}
UNSENDABLE: dict[str, Any] = {
    "an object": object(),
    "a set": {1},
    "a number above 64 bits": 2**64,
    "text with a lone surrogate": "odd-\udcff",
    "what holds itself": [],
    "what no client takes": bytes(MAX_REPLY_BYTES),
}
UNSENDABLE["what holds itself"].append(UNSENDABLE["what holds itself"])


class Verbs:
    """What a test's reception can do."""

    def __init__(self) -> None:
        self.never = Changed()

    def table(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("echo", "fail", "unsendable", "flood", "hold", "refuse", "say")}

    async def echo(self, request: Message, caller: Caller) -> Message:
        return {"text": request.get("text")}

    async def fail(self, request: Message, caller: Caller) -> Message:
        raise BUGS[request["bug"]]

    async def unsendable(self, request: Message, caller: Caller) -> Message:
        if request["how"] == "event":
            await caller.send({"value": UNSENDABLE[request["value"]]})
        return {"value": UNSENDABLE[request["value"]]}

    async def flood(self, request: Message, caller: Caller) -> Message:
        for _ in range(256):
            await caller.send({"log": "x" * MIB})
        return {}

    async def hold(self, request: Message, caller: Caller) -> Message:
        await caller.send({"log": "held"})
        while True:
            await caller.wait_for(self.never)

    async def refuse(self, request: Message, caller: Caller) -> Message:
        raise WireError(ErrorCode.NO_SUCH_JOB, request["text"] + ("\udcff" if request.get("odd") else ""))

    async def say(self, request: Message, caller: Caller) -> Message:
        return {"text": "x" * field(request, "size", int)}


class Desk:
    """A reception in a thread with a loop of its own. log: what the loop's exception handler was told."""

    def __init__(self, path: Path, bounds: Bounds) -> None:
        self.path = path
        self.exporter = Exporter()
        self.verbs = Verbs()
        self.unhandled: list[Any] = []
        self.num_tasks = 0
        self._bounds = bounds
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: uvloop.run(self._serve()), name="desk", daemon=True)

    def __enter__(self) -> Desk:
        self._thread.start()
        assert self._ready.wait(SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(SECONDS)
        assert self.unhandled == []

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._loop.set_exception_handler(lambda _, context: self.unhandled.append(context))
        reception = Reception(self.verbs.table(), self.exporter, self._bounds)
        async with asyncio.TaskGroup() as group:

            def spawn(work: Any, name: str) -> asyncio.Task[None]:
                task = group.create_task(work, name=name)
                self.num_tasks += 1
                task.add_done_callback(lambda _: setattr(self, "num_tasks", self.num_tasks - 1))
                return task

            server = await asyncio.start_unix_server(
                lambda reader, writer: reception.accept(spawn, reader, writer), self.path
            )
            self._ready.set()
            await self._stop.wait()
            server.close()
            reception.close()
        self.path.unlink(missing_ok=True)

    def connection(self) -> Any:
        return RawClient(self.path)

    def guest(self) -> Any:
        """One that has said hello."""
        guest = RawClient(self.path)
        guest.send(HELLO)
        assert "hello" in guest.receive()
        return guest

    def num_refused(self, code: str) -> float:
        for line in self.exporter.render().decode().splitlines():
            if line.startswith(f'weft_control_rejected_frames_total{{reason="{code}"}}'):
                return float(line.split()[-1])
        return 0.0


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    with Desk(tmp_path / "s", PATIENT) as desk:
        yield desk


def bounded(tmp_path: Path, **bounds: Any) -> Desk:
    return Desk(tmp_path / "s", Bounds(**bounds))


def until(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, what
        threading.Event().wait(0.01)


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# --- a conversation is a boundary


@pytest.mark.parametrize("bug", BUGS)
def test_whatever_a_verb_raises_is_an_error_of_that_request_alone(
    desk: Desk, bug: str, caplog: pytest.LogCaptureFixture
) -> None:
    """`follow` with an offset of 2**44 raised an OSError, and the daemon ended with every job that ran."""
    with desk.guest() as guest, desk.guest() as honest:
        answer = guest.ask("fail", bug=bug)
        assert (answer["id"], answer["error"]["code"]) == (1, "internal-error")
        assert guest.ask("echo", text="on")["ok"] == {"text": "on"}
        assert honest.ask("echo", text="too")["ok"] == {"text": "too"}
    assert desk.num_refused("internal-error") == 1
    assert "Traceback" in caplog.text


@pytest.mark.parametrize("how", ["answer", "event"])
@pytest.mark.parametrize("value", UNSENDABLE)
def test_an_answer_that_cannot_be_sent_is_an_error_of_that_request_alone(desk: Desk, value: str, how: str) -> None:
    with desk.guest() as guest:
        answer = guest.ask("unsendable", value=value, how=how)
        assert (answer["id"], answer["error"]["code"]) == (1, "internal-error")
        assert guest.ask("echo", text="on")["ok"] == {"text": "on"}


def test_a_thousand_faults_write_a_few_tracebacks(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    with desk.guest() as guest:
        for _ in range(1000):
            assert guest.ask("fail", bug="OSError")["error"]["code"] == "internal-error"
    assert caplog.text.count("Traceback") == MAX_TRACEBACKS
    assert desk.num_refused("internal-error") == 1000


def test_a_refusal_may_quote_what_no_frame_can_hold_and_more_than_anybody_reads(desk: Desk) -> None:
    with desk.guest() as guest:
        told = guest.ask("refuse", text="odd", odd=True)["error"]
        assert told == {"code": "no-such-job", "message": "odd?"}
        told = guest.ask("refuse", text="x" * (MIB // 2))["error"]
        assert told == {"code": "no-such-job", "message": "x" * MAX_ERROR_CHARS}


ENVELOPES: dict[str, tuple[Message, int | None, str]] = {
    "nothing": ({}, None, "'id' is missing"),
    "no verb": ({"id": 7}, 7, "'verb' is missing"),
    "no id": ({"verb": "echo"}, None, "'id' is missing"),
    "a text as id": ({"id": "7", "verb": "echo"}, None, "'id' is str"),
    "nil as id": ({"id": None, "verb": "echo"}, None, "'id' is NoneType"),
    "true as id": ({"id": True, "verb": "echo"}, None, "'id' is bool"),
    "half a number as id": ({"id": 0.5, "verb": "echo"}, None, "'id' is float"),
    "a number as verb": ({"id": 7, "verb": 5}, 7, "'verb' is int"),
    "nil as verb": ({"id": 7, "verb": None}, 7, "'verb' is NoneType"),
    "a list as verb": ({"id": 7, "verb": ["echo"]}, 7, "'verb' is list"),
    "a map as verb": ({"id": 7, "verb": {}}, 7, "'verb' is dict"),
    "an unknown verb": ({"id": 7, "verb": "launch"}, 7, "no verb 'launch'"),
    "a verb of a mebibyte": ({"id": 7, "verb": "x" * (MIB - 99)}, 7, "no verb 'xxx"),
    "the least id": ({"id": -(2**63), "verb": "launch"}, -(2**63), "no verb"),
    "the greatest id": ({"id": 2**64 - 1, "verb": "launch"}, 2**64 - 1, "no verb"),
}


@pytest.mark.parametrize("name", ENVELOPES)
def test_a_request_of_the_wrong_shape_is_answered_and_the_connection_goes_on(desk: Desk, name: str) -> None:
    request, number, told = ENVELOPES[name]
    with desk.guest() as guest:
        guest.send(request)
        answer = guest.receive()
        assert answer["id"] == number
        assert answer["error"]["code"] == ("unknown-verb" if "no verb" in told else "bad-field")
        assert told in answer["error"]["message"]
        assert len(answer["error"]["message"]) < 300
        assert guest.ask("echo", text="on")["ok"] == {"text": "on"}


# --- an error that ends a connection is read before its end


@pytest.mark.parametrize("more", [0, 1, 1 << 16, MIB])
@pytest.mark.parametrize("hello", [True, False], ids=["after hello", "instead of hello"])
def test_why_a_connection_ends_is_read_however_much_was_sent_behind_it(desk: Desk, hello: bool, more: int) -> None:
    """The kernel answers with a reset where bytes are unread at a close, and the error was lost."""
    with desk.guest() if hello else desk.connection() as guest:
        guest.socket.sendall(b"\0\0\0\0" + bytes(more))
        assert guest.receive()["error"]["code"] == "empty-frame"
        assert guest.receive() == {}


@pytest.mark.parametrize("hello", [(), (HELLO,)], ids=["after hello", "with hello"])
def test_requests_before_a_bad_frame_are_answered_however_they_came(desk: Desk, hello: tuple[Message, ...]) -> None:
    """Those that were read at once with it were neither run nor answered."""
    with desk.connection() if hello else desk.guest() as guest:
        requests = ({"id": number, "verb": "echo", "text": "on"} for number in (1, 2))
        guest.socket.sendall(b"".join(map(encode, (*hello, *requests))) + b"\0\0\0\0")
        if hello:
            assert "hello" in guest.receive()
        assert [guest.receive() for _ in range(2)] == [{"id": number, "ok": {"text": "on"}} for number in (1, 2)]
        assert guest.receive()["error"]["code"] == "empty-frame"
        assert guest.receive() == {}


def test_a_frame_above_the_limit_is_told_so_to_a_client_that_sends_all_of_it_first(desk: Desk) -> None:
    with desk.guest() as guest:
        guest.send({"id": 1, "verb": "echo", "text": bytes(MAX_CLIENT_FRAME_BYTES)})
        assert guest.receive()["error"]["code"] == "frame-too-large"
        assert guest.receive() == {}


STRANGER = """
import os, socket, sys, time
connection = socket.socket(socket.AF_UNIX)
os.setresuid(65534, 65534, 65534)
connection.connect(sys.argv[1])
connection.settimeout(60)
data = sys.stdin.buffer.read()
try:
    connection.sendall(data)
except OSError as error:
    print(error, file=sys.stderr)
received = b""
while part := connection.recv(65536):
    received += part
sys.stdout.buffer.write(received)
"""


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
@pytest.mark.parametrize("sent", [b"", encode(HELLO), encode(HELLO) + encode({"id": 1, "verb": "echo"}) * 5000])
def test_another_user_reads_that_the_daemon_is_not_theirs(short_path: Path, sent: bytes) -> None:
    with Desk(short_path / "s", PATIENT) as desk:
        short_path.chmod(0o711)
        desk.path.chmod(0o666)
        command = [sys.executable, "-c", STRANGER, str(desk.path)]
        done = subprocess.run(command, input=sent, capture_output=True, timeout=SECONDS, check=False)
        (answer,) = FrameReader(MIB).feed(done.stdout)
        assert answer["error"]["code"] == "not-yours"
        assert desk.num_refused("not-yours") == 1


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A directory that other users can be let into: pytest's own lie in one that only its user may search."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="wr-", dir="/tmp") as path:
        yield Path(path)


def test_a_client_that_was_refused_and_goes_on_sending_is_cut(tmp_path: Path) -> None:
    with bounded(tmp_path, linger_bytes=1 << 20) as desk, desk.guest() as guest:
        with pytest.raises(ConnectionError):
            guest.socket.sendall(bytes(64 * MIB))
        until(lambda: desk.num_tasks == 0, "the end of its conversation")


# --- what clients cost


def test_clients_that_never_read_are_cut_with_all_that_they_were_to_be_sent(tmp_path: Path) -> None:
    """A close waits until its client has read: descriptors and memory stayed for as long as the client did."""
    with bounded(tmp_path, talking=64, send_seconds=0.5) as desk, ExitStack() as stack:
        tracemalloc.start()
        stack.callback(tracemalloc.stop)
        with desk.guest() as honest:
            assert honest.ask("echo")["ok"]
        until(lambda: desk.num_tasks == 0, "the end of the honest one")
        descriptors, memory = num_descriptors(), tracemalloc.get_traced_memory()[0]
        deaf = [stack.enter_context(desk.guest()) for _ in range(32)]
        for guest in deaf:
            guest.deafen()
            guest.send({"id": 1, "verb": "flood"})
        until(lambda: desk.num_tasks == 0, "the end of the deaf ones")
        assert num_descriptors() == descriptors + len(deaf)  # their own ends, which they keep
        assert tracemalloc.get_traced_memory()[0] - memory < 2 * MIB


def test_a_client_that_sends_and_closes_its_half_is_answered_to_the_end(desk: Desk) -> None:
    with desk.guest() as guest:
        guest.send(*({"id": number, "verb": "say", "size": 1 << 15} for number in range(30)))
        guest.socket.shutdown(socket.SHUT_WR)
        assert [len(guest.receive()["ok"]["text"]) for _ in range(30)] == [1 << 15] * 30
        assert guest.receive() == {}


def test_one_that_closed_its_half_and_never_reads_is_cut(tmp_path: Path) -> None:
    with bounded(tmp_path, send_seconds=0.2) as desk, desk.guest() as guest:
        guest.deafen()
        guest.send(*({"id": number, "verb": "say", "size": 1 << 12} for number in range(60)))
        guest.socket.shutdown(socket.SHUT_WR)
        until(lambda: desk.num_tasks == 0, "the end of its conversation")


def test_who_left_while_it_waited_is_noticed_even_behind_requests_that_nobody_has_read(desk: Desk) -> None:
    """The end of a stream is seen only once all before it is read, and a verb that waits reads nothing."""
    with desk.guest() as guest:
        guest.send({"id": 1, "verb": "hold"})
        assert "event" in guest.receive()
        with suppress(TimeoutError):
            guest.socket.settimeout(0.2)
            guest.send(*({"id": number, "verb": "echo"} for number in range(50_000)))
    until(lambda: desk.num_tasks == 0, "the end of its conversation")


def test_whoever_says_no_hello_is_cut_in_time(tmp_path: Path) -> None:
    with bounded(tmp_path, hello_seconds=0.2) as desk, desk.connection() as silent, desk.connection() as slow:
        slow.socket.sendall(encode(HELLO)[:5])
        assert (silent.receive(), slow.receive()) == ({}, {})


@pytest.mark.parametrize("how", ["silent", "in half a frame", "deaf"])
def test_one_that_keeps_the_daemon_waiting_gives_its_place_to_a_newcomer(tmp_path: Path, how: str) -> None:
    """500 followers that never read took every place, and a submit was refused until they were cut."""
    patience = dict.fromkeys(("hello_seconds", "send_seconds"), SECONDS)
    with bounded(tmp_path, talking=4, stalling_seconds=0.05, **patience) as desk, ExitStack() as stack:
        for _ in range(12):
            guest = stack.enter_context(desk.connection() if how == "silent" else desk.guest())
            if how == "in half a frame":
                guest.socket.sendall(b"\0")
            elif how == "deaf":
                guest.deafen()
                guest.send({"id": 1, "verb": "flood"})
        with desk.guest() as honest:
            assert honest.ask("echo", text="on")["ok"] == {"text": "on"}


@pytest.mark.parametrize("how", ["idle", "waiting"])
def test_one_that_the_daemon_does_not_wait_for_keeps_its_place(tmp_path: Path, how: str) -> None:
    with bounded(tmp_path, talking=4, stalling_seconds=0.0) as desk, ExitStack() as stack:
        guests = [stack.enter_context(desk.guest()) for _ in range(4)]
        if how == "waiting":
            for guest in guests:
                guest.send({"id": 1, "verb": "hold"})
                assert "event" in guest.receive()
        with desk.connection() as one_more:
            assert one_more.receive()["error"]["code"] == "too-many-connections"
        if how == "idle":
            assert all("ok" in guest.ask("echo") for guest in guests)
    assert desk.num_refused("too-many-connections") == 1


def test_there_is_a_bound_for_those_that_wait_for_a_place_too(tmp_path: Path) -> None:
    with bounded(tmp_path, talking=2, sockets=4, stalling_seconds=SECONDS) as desk, ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(desk.guest())
        for _ in range(2):
            stack.enter_context(desk.connection())
        until(lambda: desk.num_tasks == 4, "two that wait")
        before = num_descriptors()
        one_more = stack.enter_context(desk.connection())
        with suppress(ConnectionResetError):
            assert one_more.receive() == {}
        assert num_descriptors() == before + 1


def test_descriptors_that_a_client_passes_are_not_kept(desk: Desk) -> None:
    reading, writing = os.pipe()
    try:
        passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [writing] * 64))]
        with desk.guest() as guest:
            before = num_descriptors()
            for number in range(50):
                frame = encode({"id": number, "verb": "echo"})
                assert guest.socket.sendmsg([frame], passed) == len(frame)
                assert guest.receive()["id"] == number
            assert num_descriptors() == before
            frame = encode({"id": 1, "verb": "echo"})
            guest.socket.sendmsg([frame[:5]], passed)  # and with half of a frame
    finally:
        os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        assert pipe.read() == b""  # the end: nobody holds the other one
