"""Clients that err, hang or die: the daemon names the error, lets go of what they held and answers the others."""

from __future__ import annotations

import runpy
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgpack
import pytest

from weft.transport.wire.frames import PROTOCOL, encode

_REAL = runpy.run_path(str(Path(__file__).with_name("real_daemon.py")))
RealDaemon = _REAL["RealDaemon"]

DEATHS = 100
HELLO = {"hello": {"protocol": PROTOCOL, "version": "0"}}
IMPOSSIBLE = {"stages": 2, "split": [77]}  # the model has no such unit: such a job ends as soon as it is inspected


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return value


FRAMES: dict[str, tuple[bytes, str]] = {
    "of length 0": (b"\0\0\0\0", "empty-frame"),
    "of length 2^32 - 1": (b"\xff\xff\xff\xff", "frame-too-large"),
    "a byte above the limit": (((1 << 20) + 1).to_bytes(4, "big"), "frame-too-large"),
    "an HTTP request": (b"GET / HTTP/1.1\r\n\r\n", "frame-too-large"),
    "no msgpack": (framed(b"\xc1"), "not-msgpack"),
    "two values": (framed(b"\x80\x80"), "not-msgpack"),
    "cut short": (framed(b"\x81\xa1a"), "not-msgpack"),
    "an extension type": (framed(b"\x81\xa1a\xd4\x05\x00"), "not-msgpack"),
    "text that is not UTF-8": (framed(b"\x81\xa1a\xa1\xff"), "not-msgpack"),
    "keys that are numbers": (framed(b"\x81\x01\x01"), "not-msgpack"),
    "an array that claims 2^32 - 1 items": (framed(b"\xdd\xff\xff\xff\xff"), "not-msgpack"),
    "nested 5000 deep": (framed(b"\x91" * 5000 + b"\x01"), "not-msgpack"),
    "a list": (framed(msgpack.packb([1])), "not-a-map"),
    "a number": (framed(msgpack.packb(7)), "not-a-map"),
}


@pytest.mark.parametrize("hello", [True, False], ids=["after hello", "instead of hello"])
@pytest.mark.parametrize("name", FRAMES)
def test_a_bad_frame_is_answered_with_its_own_error_and_ends_its_connection_alone(
    daemon: RealDaemon, name: str, hello: bool
) -> None:
    frame, code = FRAMES[name]
    with daemon.connected() as honest, daemon.connected(hello=hello) as bad:
        bad.socket.sendall(frame)
        assert bad.receive()["error"]["code"] == code
        assert bad.receive() == {}
        assert honest.ask("status")["ok"]["pid"] == daemon.process.pid


@pytest.mark.parametrize(
    ("greeting", "code"),
    [
        ({}, "no-hello"),
        ({"hello": 1}, "no-hello"),
        ({"id": 1, "verb": "ps"}, "no-hello"),
        ({b"hello": {"protocol": PROTOCOL}}, "bad-field"),
        ({"hello": {}}, "bad-field"),
        ({"hello": {"protocol": True}}, "bad-field"),
        ({"hello": {"protocol": "1"}}, "bad-field"),
        ({"hello": {"protocol": 999}}, "wrong-protocol"),
        ({"hello": {"protocol": 2**63}}, "wrong-protocol"),
    ],
    ids=str,
)
def test_a_bad_greeting_is_answered_with_its_own_error(daemon: RealDaemon, greeting: dict[Any, Any], code: str) -> None:
    with daemon.connected(hello=False) as bad:
        bad.send(greeting)
        assert bad.receive()["error"]["code"] == code
        assert bad.receive() == {}


@pytest.mark.parametrize(
    "request_",
    [{}, {"id": 1}, {"verb": "ps"}, {"id": "1", "verb": "ps"}, {"id": 1, "verb": 5}, {"id": True, "verb": "ps"}],
    ids=str,
)
def test_a_request_without_id_or_verb_is_answered_with_what_id_there_was(
    daemon: RealDaemon, request_: dict[str, Any]
) -> None:
    with daemon.connected() as bad:
        bad.send(request_)
        answer = bad.receive()
        assert answer["error"]["code"] == "bad-field"
        assert answer["id"] == (1 if request_.get("id") == 1 and request_["id"] is not True else None)
        assert bad.ask("status")["ok"]["pid"] == daemon.process.pid


def job_section(**changes: Any) -> dict[str, Any]:
    return {"job": {"entry": "line.py:workload", "steps": 1, "batch_size": 4} | changes, "strategy": IMPOSSIBLE}


REQUESTS: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown verb": ({"verb": "launch"}, "unknown-verb"),
    "show of nothing": ({"verb": "show"}, "bad-field"),
    "show of a number": ({"verb": "show", "job": 5}, "bad-field"),
    "show of an unknown job": ({"verb": "show", "job": "nobody"}, "no-such-job"),
    "show of a path": ({"verb": "show", "job": "../../etc/passwd"}, "no-such-job"),
    "show of NUL": ({"verb": "show", "job": "a\0b"}, "no-such-job"),
    "show of 100 kB": ({"verb": "show", "job": "x" * 100_000}, "no-such-job"),
    "cancel of an unknown job": ({"verb": "cancel", "job": "nobody"}, "no-such-job"),
    "wait with a text as timeout": ({"verb": "wait", "job": "JOB", "timeout": "1"}, "bad-field"),
    "wait with NaN as timeout": ({"verb": "wait", "job": "JOB", "timeout": float("nan")}, "bad-field"),
    "wait for ever": ({"verb": "wait", "job": "JOB", "timeout": float("inf")}, "bad-field"),
    "wait for 10^300 s": ({"verb": "wait", "job": "JOB", "timeout": 1e300}, "bad-field"),
    "wait for less than no time": ({"verb": "wait", "job": "JOB", "timeout": -1}, "bad-field"),
    "follow from before the log": ({"verb": "follow", "job": "JOB", "offset": -1}, "bad-field"),
    "follow from byte 2^63": ({"verb": "follow", "job": "JOB", "offset": 2**63}, "bad-field"),
    "follow from half a byte": ({"verb": "follow", "job": "JOB", "offset": 0.5}, "bad-field"),
    "submit of nothing": ({"verb": "submit"}, "bad-field"),
    "submit of a text": ({"verb": "submit", "spec": "digits.toml"}, "bad-field"),
    "submit of an empty spec": ({"verb": "submit", "spec": {}}, "invalid-spec"),
    "submit with a text as priority": ({"verb": "submit", "spec": "SPEC", "priority": "high"}, "bad-field"),
    "submit with true as priority": ({"verb": "submit", "spec": "SPEC", "priority": True}, "bad-field"),
    "wait with true as timeout": ({"verb": "wait", "job": "JOB", "timeout": True}, "bad-field"),
    "submit with a priority of 2^63": ({"verb": "submit", "spec": "SPEC", "priority": 2**63}, "bad-field"),
    "submit under a path": ({"verb": "submit", "spec": "SPEC", "job": "../job"}, "bad-field"),
    "submit under no name": ({"verb": "submit", "spec": "SPEC", "job": ""}, "bad-field"),
    "submit under a name with a newline": ({"verb": "submit", "spec": "SPEC", "job": "a\nb"}, "bad-field"),
    "submit under a number": ({"verb": "submit", "spec": "SPEC", "job": 5}, "bad-field"),
    "submit of bytes as an argument": ({"verb": "submit", "spec": job_section(args={"a": b"\xff"})}, "invalid-spec"),
    "submit of a number above 64 bits": (
        {"verb": "submit", "spec": job_section(args={"a": 2**64 - 1})},
        "invalid-spec",
    ),
    "submit of arguments nested deep": ({"verb": "submit", "spec": job_section(args=nested(40))}, "invalid-spec"),
    "submit of a directory with NUL": (
        {"verb": "submit", "spec": {**job_section(), "directory": "/\0"}},
        "invalid-spec",
    ),
    "submit of a directory that is long": (
        {"verb": "submit", "spec": {**job_section(), "directory": "/x" * 5000}},
        "invalid-spec",
    ),
    "submit of a relative directory": ({"verb": "submit", "spec": {**job_section(), "directory": "."}}, "invalid-spec"),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_a_bad_request_is_answered_with_its_own_error_and_the_connection_goes_on(daemon: RealDaemon, name: str) -> None:
    ended = daemon.submit(daemon.spec(strategy=IMPOSSIBLE))
    fields, code = REQUESTS[name]
    fields = {
        key: {"JOB": ended, "SPEC": None}.get(value, value) if isinstance(value, str) else value
        for key, value in fields.items()
    }
    if "spec" in fields and fields["spec"] is None:
        fields["spec"] = daemon.spec(strategy=IMPOSSIBLE).to_wire()
    elif isinstance(fields.get("spec"), dict) and fields["spec"] and "directory" not in fields["spec"]:
        fields["spec"] = {**fields["spec"], "directory": daemon.spec().directory}
    with daemon.connected() as bad:
        answer = bad.ask(**fields)
        assert answer.get("error", answer)["code"] == code
        assert bad.ask("status")["ok"]["pid"] == daemon.process.pid


def test_requests_sent_in_one_piece_are_answered_in_order(daemon: RealDaemon) -> None:
    with daemon.connected(hello=False) as client:
        asked = [encode({"id": number, "verb": "status"}) for number in range(20)]
        client.socket.sendall(encode(HELLO) + b"".join(asked))
        assert "hello" in client.receive()
        assert [client.receive()["id"] for _ in range(20)] == list(range(20))


@pytest.mark.slow
def test_a_hundred_clients_that_die_mid_frame_leave_nothing(daemon: RealDaemon) -> None:
    frame = encode({"id": 1, "verb": "submit", "spec": daemon.spec().to_wire(), "job": "half", "priority": 1})
    for number in range(DEATHS):
        with daemon.connected() as dying:
            dying.socket.sendall(frame[: 1 + number * (len(frame) - 2) // DEATHS])
    assert not [job for job in daemon.client.jobs() if job["job"] == "half"]


@pytest.mark.days(3)
@pytest.mark.slow(seconds=30)
def test_a_hundred_clients_that_die_after_a_submit_leave_a_whole_job_each(daemon: RealDaemon) -> None:
    spec = daemon.spec("raise ValueError('at once')").to_wire()
    names = {f"dying-{number}" for number in range(DEATHS)}
    for name in names:
        with daemon.connected() as dying:
            dying.send({"id": 1, "verb": "submit", "spec": spec, "job": name})
    for name in names:  # what the daemon has not read yet is absent, and may be sent again
        assert daemon.submit(spec, job=name) == name
    daemon.until_idle()
    assert {job["job"] for job in daemon.client.jobs() if job["state"] == "failed"} >= names


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["follow", "wait"])
def test_a_hundred_clients_that_die_while_they_watch_a_job_leave_nothing(daemon: RealDaemon, verb: str) -> None:
    gate = daemon.gate()
    job = daemon.submit(daemon.spec(args={"gate": str(gate), "gate_at": 6}))
    daemon.until_logged(job, "at the gate")
    try:
        with daemon.connected() as honest:
            for _ in range(DEATHS):
                with daemon.connected() as dying:
                    dying.send({"id": 1, "verb": verb, "job": job})
            honest.send({"id": 1, "verb": "wait", "job": job})
            gate.open()
            assert honest.receive()["ok"]["result"]["state"] == "completed"
    finally:
        gate.open()


@pytest.mark.slow
def test_clients_that_never_read_do_not_hold_up_the_others(daemon: RealDaemon) -> None:
    job = daemon.submit(daemon.spec(strategy=IMPOSSIBLE))
    with ExitStack() as stack:
        for _ in range(20):
            deaf = stack.enter_context(daemon.connected())
            deaf.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            deaf.socket.settimeout(0.05)
            try:
                deaf.socket.sendall(encode({"id": 1, "verb": "show", "job": job}) * 2000)
            except TimeoutError:
                pass  # the daemon takes no more requests than it can answer
        assert daemon.client.status()["pid"] == daemon.process.pid
        assert daemon.run(daemon.spec(strategy=IMPOSSIBLE))["reason"] == "invalid-plan"


@pytest.mark.days(3)
@pytest.mark.slow(seconds=10)
def test_connections_that_never_say_hello_are_closed_and_a_submit_among_them_is_answered(daemon: RealDaemon) -> None:
    with ExitStack() as stack:
        idle = [stack.enter_context(daemon.connected(hello=False)) for _ in range(200)]
        slow = stack.enter_context(daemon.connected(hello=False))
        slow.socket.sendall(encode(HELLO)[:5])
        assert daemon.run(daemon.spec(strategy=IMPOSSIBLE))["reason"] == "invalid-plan"
        assert all(client.is_closed() for client in [*idle, slow])
    assert daemon.client.status()["pid"] == daemon.process.pid


@pytest.mark.slow
def test_one_client_too_many_is_told_to_try_again(daemon: RealDaemon) -> None:
    with ExitStack() as stack:
        for _ in range(256):
            stack.enter_context(daemon.connected())
        one_more = stack.enter_context(daemon.connected(hello=False))
        assert one_more.receive()["error"]["code"] == "too-many-connections"
    assert daemon.client.status()["pid"] == daemon.process.pid
