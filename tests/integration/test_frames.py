"""Every message of the protocol: every field made wrong in every way, cut at every byte, its bytes changed by chance.

The daemon answers each of them, by name; it answers others meanwhile, and is afterwards as it was.
"""

from __future__ import annotations

import os
import random
import runpy
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import msgpack
import psutil
import pytest

from weft.client.client import Client, RequestRefused
from weft.spec.job_spec import JobSection, ProfileSection
from weft.spec.strategy import Strategy
from weft.transport.wire.frames import MAX_CLIENT_FRAME_BYTES, PROTOCOL, encode

_REAL = runpy.run_path(str(Path(__file__).with_name("real_daemon.py")))
RealDaemon, until = _REAL["RealDaemon"], _REAL["until"]

MIB = 1 << 20
FAILING = "def workload(**arguments): raise KeyError('lost')"
HELLO = {"hello": {"protocol": PROTOCOL, "version": "0"}}
MISSING, TWICE = object(), object()
Path_ = tuple[str, ...]


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


VALUES: list[Any] = [MISSING, TWICE, None, True, False, [], [1], [[[]]], nested(20), nested(60), {}, {"a": 1}, {"": {}}]
VALUES += [0, 1, -1, 7, 2**15, 2**31, 2**32, 2**44, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -(2**31), -(2**63)]
VALUES += [0.0, -0.0, 0.5, -1.5, 5e-324, 1e300, float("inf"), float("-inf"), float("nan")]
VALUES += ["", "x", "\0", "a\nb", "../../etc", "/", "/dev/zero", "ünï☃", "x" * 100_000, "\x1b[2J", b"", b"\xff\xfe"]


def messages(ended: str, spec: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """A good request of every verb, with every field that it has. ended: a job that has ended."""
    return {
        "submit": {"spec": dict(spec), "job": "mutant", "priority": 3},
        "ps": {"ended_before": 1e9},
        "show": {"job": ended, "path": True},
        "record": {"job": ended},
        "follow": {"job": ended, "offset": 0, "live": True, "progress": True},
        "wait": {"job": ended, "timeout": 0.0},
        "cancel": {"job": ended, "discard": True},
        "pause": {"job": ended},
        "restart": {"job": ended},
        "resume": {"job": ended},
        "remove": {"job": "nobody"},
        "replace": {"executable": "/nobody/python"},
        "status": {},
    }


def mutants(message: Mapping[str, Any], places: list[Path_]) -> Iterator[tuple[str, bytes]]:
    """Frames with one field made wrong, each with what was done."""
    for place in places:
        for value in VALUES:
            told = {MISSING: "missing", TWICE: "twice"}.get(value if value.__hash__ else None, f"{value!r:.40}")
            yield f"{'.'.join(place)}: {told}", framed(packed(message, place, value))


def packed(message: Mapping[str, Any], place: Path_, value: Any) -> bytes:
    """The map in msgpack, with the value at that place."""
    name, *deeper = place
    pairs = []
    for key, old in message.items() if name in message else [*message.items(), (name, {} if deeper else 1)]:
        as_it_is = msgpack.packb(key) + msgpack.packb(old)
        if key != name:
            pairs.append(as_it_is)
        elif deeper:
            pairs.append(msgpack.packb(key) + packed(old, tuple(deeper), value))
        elif value is TWICE:
            pairs += [as_it_is, as_it_is]
        elif value is not MISSING:
            pairs.append(msgpack.packb(key) + msgpack.packb(value))
    return msgpack.Packer().pack_map_header(len(pairs)) + b"".join(pairs)


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


def places_of(verb: str, fields: Mapping[str, Any]) -> list[Path_]:
    places = [(name,) for name in ("id", "verb", "unknown", *fields)]
    if verb == "submit":
        places += [("spec", name) for name in ("job", "strategy", "profile", "directory", "unknown")]
        places += [("spec", "job", name) for name in (*JobSection.model_fields, "unknown")]
        places += [("spec", "strategy", name) for name in (*Strategy.model_fields, "unknown")]
        places += [("spec", "profile", name) for name in ProfileSection.model_fields]
    return places


class Line:
    """A connection that is made anew whenever the daemon has ended it."""

    def __init__(self, daemon: RealDaemon) -> None:
        self._daemon = daemon
        self._stack = ExitStack()
        self._client: Any = None

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *_: object) -> None:
        self.drop()

    def drop(self) -> None:
        self._stack.close()
        self._client = None

    def answer_to(self, frame: bytes) -> dict[str, Any]:
        """Events passed over."""
        if self._client is None:
            self._client = self._stack.enter_context(self._daemon.connected())
        self._client.socket.sendall(frame)
        while "event" in (answer := self._client.receive()):
            pass
        if "id" not in answer:  # such an error ends the connection
            assert self._client.receive() == {}
            self.drop()
        assert answer, "the connection ended without an answer"
        return dict(answer)


@pytest.fixture
def ended(daemon: RealDaemon) -> str:
    job: str = daemon.submit(daemon.spec(FAILING))
    assert daemon.client.wait(job, 60.0)["state"] == "failed"
    return job


def known_verbs(daemon: RealDaemon) -> set[str]:
    with daemon.connected() as client:
        text = client.ask("?")["error"]["message"]
    return set(text.partition("this daemon knows ")[2].split(", "))


@pytest.mark.slow(seconds=4)
def test_every_field_of_every_message_made_wrong_in_every_way_is_answered_by_name(
    daemon: RealDaemon, ended: str
) -> None:
    table = messages(ended, daemon.spec(FAILING).to_wire())
    assert set(table) == known_verbs(daemon)
    codes: Counter[str] = Counter()
    with Line(daemon) as line, daemon.connected() as honest:
        for verb, fields in table.items():
            for told, frame in mutants({"id": 1, "verb": verb, **fields}, places_of(verb, fields)):
                answer = line.answer_to(frame)
                error = answer.get("error", {"code": "ok", "message": "ok"})
                codes[error["code"]] += 1
                assert error["code"] != "internal-error", f"{verb}: {told}: {error}\n{daemon.log()[-3000:]}"
                assert error["message"]
            assert honest.ask("status")["ok"]["pid"] == daemon.process.pid
    assert codes.total() > 2000
    assert {"ok", "bad-field", "invalid-spec", "no-such-job", "unknown-verb"} <= codes.keys()
    assert "Traceback" not in daemon.log()


@pytest.mark.slow(seconds=4)
def test_every_message_cut_at_every_byte_is_closed_cleanly(daemon: RealDaemon, ended: str) -> None:
    """B3: nothing is answered, nothing is reset, and nothing stays."""
    for verb, fields in messages(ended, daemon.spec(FAILING).to_wire()).items():
        frame = encode({"id": 1, "verb": verb, **fields} | ({"job": "cut"} if verb == "submit" else {}))
        for cut in range(len(frame)):
            with daemon.connected() as client:
                client.socket.sendall(frame[:cut])
                client.socket.shutdown(1)
                assert client.receive() == {}
    assert "cut" not in {job["job"] for job in daemon.client.jobs()}


@pytest.mark.days(3)
@pytest.mark.slow(seconds=4)
def test_500_clients_with_64_descriptors_each_leave_none_of_them(daemon: RealDaemon) -> None:
    import array
    import socket

    passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0] * 64))]
    before = daemon.footprint()
    for number in range(500):
        with daemon.connected() as client:
            frame = encode({"id": number, "verb": "ps"})
            client.socket.sendmsg([frame if number % 2 else frame[:5]], passed)
            if number % 2:
                assert client.receive()["id"] == number
                assert daemon.footprint()["descriptors of daemon"] < before["descriptors of daemon"] + 16
    assert daemon.client.status()["pid"] == daemon.process.pid


# --- B1: frames by chance


class Chance:
    """Frames that are nearly right, and some that are not."""

    def __init__(self, seed: int, ended: str, spec: Mapping[str, Any]) -> None:
        self._random = random.Random(seed)
        self._good = [encode({"id": 1, "verb": verb, **fields}) for verb, fields in messages(ended, spec).items()]

    def frame(self) -> bytes:
        chance = self._random
        frame = bytearray(chance.choice(self._good))
        match chance.randrange(10):
            case 0:
                return chance.randbytes(chance.randint(4, 200))
            case 1:
                return framed(chance.randbytes(chance.randint(0, 200)))
            case 2:
                return framed(bytes(frame[4 : chance.randint(4, len(frame))]))
            case 3:
                frame[chance.randrange(4)] ^= 1 << chance.randrange(8)
            case 4:
                place = chance.randrange(4, len(frame))
                return framed(bytes(frame[4:place] + chance.randbytes(chance.randint(1, 9)) + frame[place:]))
            case _:
                for _ in range(chance.randint(1, 3)):
                    frame[chance.randrange(4, len(frame))] ^= 1 << chance.randrange(8)
        return bytes(frame)


def is_whole(frame: bytes) -> bool:
    """The daemon has all that it needs to answer. What comes behind a frame would be another one."""
    length = int.from_bytes(frame[:4], "big")
    return length == 0 or length > MAX_CLIENT_FRAME_BYTES or len(frame) >= 4 + length


class Honest:
    """Submits one job after another until it is told to stop. slowest: seconds that an answer took."""

    def __init__(self, daemon: RealDaemon) -> None:
        self.answered = 0
        self.slowest = 0.0
        self.failures: list[str] = []
        self._daemon = daemon
        self._spec = daemon.spec(FAILING)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="honest")

    def __enter__(self) -> Honest:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        client = Client(self._daemon.socket, timeout=180.0)
        while not self._stop.wait(0.2):
            began = time.monotonic()
            try:
                job = client.submit(self._spec)["job"]
                self.slowest = max(self.slowest, time.monotonic() - began)
                self.answered += 1
                client.cancel(job)
                client.remove(job)
            except Exception as error:  # whatever keeps an honest client from its answer
                self.failures.append(repr(error))


@pytest.mark.slow(seconds=4)
@pytest.mark.days(3)
@pytest.mark.parametrize(
    "number", [20_000, pytest.param(200_000, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])], ids=str
)
def test_frames_by_chance_are_answered_and_the_daemon_lives(own_daemon: Any, number: int) -> None:
    seed = int(os.environ.get("WEFT_TEST_SEED", "0")) or random.SystemRandom().randrange(1, 2**32)
    print(f"seed {seed}: set WEFT_TEST_SEED to run the same frames again")
    daemon = own_daemon(workers=1)
    job = daemon.submit(daemon.spec(FAILING))
    daemon.client.wait(job, 60.0)
    gone = daemon.spec(FAILING)
    gone.entry_file.unlink()  # so that hardly any submit is taken
    chance = Chance(seed, job, gone.to_wire())
    before = psutil.Process(daemon.process.pid).memory_info().rss
    codes: Counter[str] = Counter()
    deaths: list[bytes] = []
    with Line(daemon) as line, Honest(daemon) as honest:
        while codes.total() < number:
            frame = chance.frame()
            try:
                if not is_whole(frame):
                    line.drop()
                    continue
                codes[line.answer_to(frame).get("error", {"code": "ok"})["code"]] += 1
                if len(frame) > 4 + int.from_bytes(frame[:4], "big"):
                    line.drop()  # what is left is the beginning of another one
            except (OSError, AssertionError):
                line.drop()
                with suppress(subprocess.TimeoutExpired):
                    daemon.process.wait(5.0)  # its sockets close before it is reaped
                if daemon.process.poll() is None:
                    raise
                deaths.append(frame)
                daemon.start()
    print(
        f"{number} answered, {len(deaths)} deaths, {codes}; {honest.answered} submits, slowest {honest.slowest:.3f} s"
    )
    assert deaths == []
    assert honest.failures == []
    assert honest.answered > 0
    assert codes["internal-error"] == 0, daemon.log()[-3000:]
    assert "Traceback" not in daemon.log()
    until(lambda: psutil.Process(daemon.process.pid).memory_info().rss < before + 16 * MIB, "the daemon's memory")


CHATTY = """
def workload(**arguments):
    for _ in range(64):
        print("x" * 65536, flush=True)
    raise KeyError('lost')
"""


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_500_clients_that_never_read_are_cut_and_leave_nothing(own_daemon: Any) -> None:
    daemon = own_daemon(workers=1)
    job = daemon.submit(daemon.spec(CHATTY))
    assert daemon.client.wait(job, 60.0)["state"] == "failed"
    assert len(daemon.log_of(job)) > 4 * MIB
    process = psutil.Process(daemon.process.pid)
    descriptors, memory = process.num_fds(), process.memory_info().rss
    with ExitStack() as stack, Honest(daemon) as honest:
        for _ in range(500):
            deaf = stack.enter_context(daemon.connected(hello=False))
            with suppress(OSError):  # those that came before give way
                deaf.socket.sendall(encode(HELLO) + encode({"id": 1, "verb": "follow", "job": job, "offset": 0}))
        most = process.memory_info().rss
        until(lambda: process.num_fds() <= descriptors + 8, "the end of the deaf ones, who keep their own ends", 120.0)
    until(lambda: process.num_fds() == descriptors, "the daemon's descriptors")
    after = process.memory_info().rss
    print(
        f"{honest.answered} submits, slowest {honest.slowest:.3f} s; "
        f"{memory / MIB:.0f} MiB before, {most / MIB:.0f} MiB at most, {after / MIB:.0f} MiB after"
    )
    assert (honest.failures, honest.answered > 50) == ([], True)
    assert after < memory + 32 * MIB
    with pytest.raises(RequestRefused):
        daemon.client.show("nobody")
