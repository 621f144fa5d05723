"""What strangers can do to a daemon: broken requests, clients that never read, connections that say nothing.

    strangers ──200,000 requests, each a valid one with one thing wrong──▶ daemon      answered? alive?
              ──500 followers of a long log that never read a byte──────▶              descriptors, memory: back?
              ──1,000 HTTP connections of another user, silent──────────▶              descriptors, memory: back?
    an honest client ──a submit every half second, all the while────────▶              how long did the worst one take?

A request counts when it is answered: by a result, a named error, or an error that ends its connection. A daemon that
dies is counted and started again; the seed that it died with goes to stderr.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
from measure import Result, main, value_result

from weft.client.client import Client, DaemonUnreachable
from weft.spec.job_spec import JobSpec
from weft.transport.wire.frames import MAX_CLIENT_FRAME_BYTES, PROTOCOL, FrameReader, Message, WireError, encode

SEED = 11
REQUESTS, QUICK_REQUESTS = 200_000, 5_000
SEED_REQUESTS = 500  # in one conversation's plan: what is to be repeated after a death
NEVER_READ, QUICK_NEVER_READ = 500, 60
IDLE, QUICK_IDLE = 1_000, 100
LOG_BYTES = 8 << 20  # of the job that is followed: far above what sockets and the daemon hold for a client
SUBMIT_EVERY = 0.5
BACK_SECONDS = 120.0  # for descriptors and memory to be back; a client that does not read is cut after 30
ANSWER_SECONDS = 30.0
NOBODY = 65534

JOB = """
import os, torch, weft

def workload(gate=""):
    if gate:
        open(gate).close()  # waits for a writer, who never comes
    inputs = torch.linspace(-1, 1, 8).reshape(8, 1)
    return weft.Workload(model=torch.nn.Linear(1, 1), loss=torch.nn.functional.mse_loss, train=(inputs, inputs),
                         optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
"""
HELLO = {"hello": {"protocol": PROTOCOL, "version": "strangers"}}
NASTY: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**44, 2**63 - 1, 2**64 - 1, -(2**63)),
    *(0.0, -0.0, 1e308, float("nan"), float("inf"), "", "x" * 5000, "../../etc/passwd", "a\0b", "a\nb", "-", "é" * 200),
    *(b"", b"\xff\xfe", [], [[[]]], {}, {"a": {"b": {}}}, [None] * 1000),
)


class Victim:
    """A daemon with one CPU worker in a directory of its own, a finished job with a long log, and one that waits for
    ever, behind which every submitted one queues."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.client = Client(home / "r" / "weft.sock", reconnect_seconds=1.0)
        self.num_deaths = 0
        self._file = home / "job.py"
        self._file.write_text(JOB, encoding="utf-8")
        os.mkfifo(home / "gate")
        self.process: subprocess.Popen[bytes]
        self.start()
        self.long_job = self.client.submit(self.spec())["job"]
        log = Path(self.client.wait(self.long_job)["run_dir"], "job.log")
        with log.open("ab") as file:
            file.write(
                b"a line of a long log, of a hundred bytes or so, which a client may follow, or not at all\n" * 90_000
            )
            file.truncate(LOG_BYTES)
        self.client.submit(self.spec(gate=str(home / "gate")), job="gated")

    def spec(self, **arguments: Any) -> JobSpec:
        job = {"entry": "job.py:workload", "steps": 1, "batch_size": 8, "args": arguments}
        return JobSpec.parse({"job": job, "directory": str(self.home)})

    def start(self) -> None:
        command = [sys.executable, "-m", "weft", "daemon", "--workers", "1", "--gpus", "0", "--metrics", "127.0.0.1:0"]
        command += ["--runtime-dir", str(self.home / "r"), "--state-dir", str(self.home / "s")]
        with (self.home / "daemon.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        until(self._answers, "the daemon answers")

    def _answers(self) -> bool:
        if self.process.poll() is not None:
            raise SystemExit(f"the daemon does not start:\n{(self.home / 'daemon.log').read_text()[-2000:]}")
        with contextlib.suppress(DaemonUnreachable):
            return bool(self.client.status())
        return False

    def is_over_or_answers(self) -> bool:
        with contextlib.suppress(DaemonUnreachable):
            return self.process.poll() is not None or bool(self.client.status())
        return False

    def restart_if_dead(self, what: str) -> None:
        if self.process.poll() is not None:
            self.num_deaths += 1
            print(f"the daemon died of {what} (exit code {self.process.returncode})", file=sys.stderr)
            self.start()

    def stop(self) -> None:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):  # the second one: no wait for the gated job
            if self.process.poll() is None:
                self.process.send_signal(number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(20.0 if number == signal.SIGKILL else 5.0)

    def num_descriptors(self) -> int:
        return psutil.Process(self.process.pid).num_fds()

    def mebibytes(self) -> float:
        return psutil.Process(self.process.pid).memory_info().rss / 2**20


class HonestClient(threading.Thread):
    """Submits all the while; seconds: that each took."""

    def __init__(self, victim: Victim) -> None:
        super().__init__(name="honest client")
        self.seconds: list[float] = []
        self._victim = victim
        self._ended = threading.Event()
        self._client = Client(victim.home / "r" / "weft.sock", reconnect_seconds=1.0)

    def run(self) -> None:
        while not self._ended.wait(SUBMIT_EVERY):
            started = time.perf_counter()
            with contextlib.suppress(DaemonUnreachable):  # it died, which others count
                job = self._client.submit(self._victim.spec())["job"]
                self.seconds.append(time.perf_counter() - started)
                self._client.cancel(job)  # the queue stays short

    def end(self) -> None:
        self._ended.set()
        self.join()


def until(condition: Callable[[], Any], what: str, seconds: float = 60.0) -> bool:
    """Whether the condition came true in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    print(f"not within {seconds:.0f} s: {what}", file=sys.stderr)
    return False


# --- broken requests


def valid_requests(victim: Victim) -> tuple[Message, ...]:
    """One of each verb, such as it comes from an honest client."""
    job = victim.long_job
    return (
        {"verb": "ps"},
        {"verb": "status"},
        {"verb": "show", "job": job, "path": False},
        {"verb": "record", "job": job},
        {"verb": "wait", "job": job, "timeout": 0.0},
        {"verb": "follow", "job": job, "offset": LOG_BYTES - 100, "live": False, "progress": True},
        {"verb": "cancel", "job": job},
        {"verb": "submit", "spec": victim.spec().to_wire(), "priority": 3, "job": "gated"},
    )


def broken(random_: random.Random, request: Message) -> bytes:
    """The request with one thing wrong, somewhere between its fields and its bytes."""
    request = {"id": random_.randrange(1 << 31), **request}
    kind = random_.randrange(8)
    if kind == 0:
        data = bytearray(encode(request))
        for _ in range(random_.randint(1, 4)):
            data[random_.randrange(len(data))] = random_.randrange(256)
        data[:4] = (len(data) - 4).to_bytes(4, "big")  # whole, so that it can be answered
        return bytes(data)
    if kind == 1:
        body = random_.randbytes(random_.randint(1, 200))
        return len(body).to_bytes(4, "big") + body
    table = request
    if kind == 2 and isinstance(request.get("spec"), dict):
        table = request["spec"] = {**request["spec"], "job": dict(request["spec"]["job"])}
        table = table["job"] if random_.random() < 0.7 else table
    name = random_.choice([*table, "unknown"])
    if kind == 3:
        table.pop(name, None)
    else:
        table[name] = random_.choice(NASTY)
    return encode(request)


class Conversation:
    """One connection of a stranger that waits for each answer."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(ANSWER_SECONDS)
        self._reader = FrameReader(64 * MAX_CLIENT_FRAME_BYTES)
        self._waiting: list[Message] = []
        self._socket.connect(str(path))
        self._socket.sendall(encode(HELLO))
        self._next()

    def _next(self) -> Message | None:
        """None at the end of the connection."""
        while not self._waiting:
            data = self._socket.recv(1 << 16)
            if not data:
                return None
            self._waiting = self._reader.feed(data)
        return self._waiting.pop(0)

    def ask(self, data: bytes) -> tuple[bool, bool]:
        """(whether it was answered, whether the connection goes on)."""
        self._socket.sendall(data)
        while (message := self._next()) is not None:
            if "event" not in message:
                return True, "id" in message
        return False, False

    def close(self) -> None:
        self._socket.close()


def count_answered(victim: Victim, seed: int, wanted: int) -> int:
    """How many requests were answered, from the seed's plan on."""
    answered = 0
    valid = valid_requests(victim)
    while answered < wanted:
        answered += _one_plan(victim, seed, valid)
        victim.restart_if_dead(f"requests of seed {seed}")
        seed += 1
    return answered


def _one_plan(victim: Victim, seed: int, valid: tuple[Message, ...]) -> int:
    random_ = random.Random(seed)
    answered, conversation, request = 0, None, b""
    try:
        for _ in range(SEED_REQUESTS):
            conversation = conversation or Conversation(victim.home / "r" / "weft.sock")
            request = broken(random_, random_.choice(valid))
            was_answered, goes_on = conversation.ask(request)
            answered += was_answered
            if not goes_on:
                conversation.close()
                conversation = None
    except (OSError, WireError) as error:
        print(f"a conversation of seed {seed} broke off at {request[:200]!r}: {error!r}", file=sys.stderr)
        until(victim.is_over_or_answers, "the daemon answers again, or is over")
    finally:
        if conversation is not None:
            conversation.close()
    return answered


# --- connections that take, and give nothing back


@contextlib.contextmanager
def never_reading(victim: Victim, count: int) -> Iterator[None]:
    """So many followers of the long log, whose sockets take as little as the kernel allows. Those whom the daemon turns
    away stay as well."""
    request = encode(HELLO) + encode({"id": 1, "verb": "follow", "job": victim.long_job, "offset": 0, "live": True})
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            connection = stack.enter_context(socket.socket(socket.AF_UNIX))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            connection.settimeout(ANSWER_SECONDS)
            with contextlib.suppress(OSError):  # a full backlog, a connection that was cut at once
                connection.connect(str(victim.home / "r" / "weft.sock"))
                connection.sendall(request)
        yield


SILENT = """
import os, socket, sys
uid, host, port, count = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
if os.getuid() == 0:
    os.setgid(int(uid))
    os.setuid(int(uid))
connections = []
for _ in range(count):
    connection = socket.socket()
    connection.settimeout(5.0)
    try:
        connection.connect((host, port))
    except OSError:
        continue
    connections.append(connection)
print(len(connections), flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def idle_http(victim: Victim, count: int) -> Iterator[None]:
    """So many connections to the page's port, of another user where we may become one."""
    url = str(victim.client.status()["metrics"])
    host, port = url.removeprefix("http://").split(":")
    command = [sys.executable, "-c", SILENT, str(NOBODY), host, port, str(count)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as silent:
        assert silent.stdout is not None
        assert silent.stdin is not None
        silent.stdout.readline()
        yield
        silent.stdin.close()


def left_behind(victim: Victim, holding: contextlib.AbstractContextManager[None]) -> tuple[float, float]:
    """(descriptors, MiB) above the start, a while after they came and while they still hold on."""
    descriptors, mebibytes = victim.num_descriptors(), victim.mebibytes()
    with holding:
        until(lambda: victim.num_descriptors() <= descriptors, "descriptors back at their start", BACK_SECONDS)
        return max(0, victim.num_descriptors() - descriptors), max(0.0, victim.mebibytes() - mebibytes)


def collect(quick: bool) -> list[Result]:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with tempfile.TemporaryDirectory(prefix="ws-", dir="/tmp") as home:  # short: a socket's path has 107 bytes
        os.chmod(home, 0o755)
        victim = Victim(Path(home))
        honest = HonestClient(victim)
        try:
            honest.start()
            return _measured(victim, honest, quick)
        finally:
            honest.end()
            victim.stop()


def _measured(victim: Victim, honest: HonestClient, quick: bool) -> list[Result]:
    answered = count_answered(victim, SEED, QUICK_REQUESTS if quick else REQUESTS)
    count = QUICK_NEVER_READ if quick else NEVER_READ
    unread = left_behind(victim, never_reading(victim, count))
    idle_count = QUICK_IDLE if quick else IDLE
    idle = left_behind(victim, idle_http(victim, idle_count))
    victim.restart_if_dead("clients that never read, or idle connections")
    honest.end()
    return [
        value_result(
            "answered_requests",
            [answered],
            "requests",
            goal=None if quick else f">= {REQUESTS}",
            how=f"requests with one thing wrong that were answered; plans from seed {SEED} on",
        ),
        value_result("deaths", [victim.num_deaths], "daemons", goal="<= 0", how="daemons that ended meanwhile"),
        *_left("never_read", unread, f"{count} clients that follow a log of 8 MiB and never read, and hold on"),
        *_left("idle_http", idle, f"{idle_count} HTTP connections that say nothing, and hold on"),
        value_result(
            "submit",
            honest.seconds,
            "s",
            how=f"an honest submit, every {SUBMIT_EVERY} s throughout; the next row has the worst",
        ),
        value_result("worst_submit", [max(honest.seconds)], "s", goal="<= 1", how="the longest of them"),
    ]


def _left(name: str, left: tuple[float, float], what: str) -> list[Result]:
    return [
        value_result(
            f"{name}_descriptors", [left[0]], "descriptors", goal="<= 0", how=f"above the start, after {what}"
        ),
        value_result(f"{name}_memory", [left[1]], "MiB", goal="<= 16", how=f"resident above the start, after {what}"),
    ]


if __name__ == "__main__":
    main("strangers", collect)
