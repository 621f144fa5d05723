"""The daemon's side of its processes, with real sockets: what it does while the machine is short of something."""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import logging
import resource
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from weft.machine.crew import make_crew
from weft.machine.oom_kills import OomKills
from weft.machine.proc import STOPPED, state_of
from weft.scheduler.core import back_off
from weft.scheduler.daemon import pool
from weft.scheduler.daemon.link import DIRECTORY, SAVER, Child, Link, socket_pair
from weft.scheduler.daemon.pool import HUNG_LOOKS, MAX_LOOKS, STOPPED_LOOKS, Pool
from weft.spec.settings import Settings
from weft.transport.wire.frames import Message, encode

SECONDS = 180.0  # for anything that is awaited
POLL_SECONDS = 0.001


class Told(logging.Handler):
    """is_enough: set once there are two lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.is_enough = asyncio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        if len(self.lines) > 1:
            self.is_enough.set()


@pytest.fixture
def told() -> Iterator[Told]:
    handler = Told()
    logging.getLogger("weft.pool").addHandler(handler)
    yield handler
    logging.getLogger("weft.pool").removeHandler(handler)


async def test_a_process_that_finds_no_descriptor_waits_for_one(told: Told) -> None:
    """The daemon ended with an OSError where a worker had to be started and it had no descriptor left."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # those that are open stay
    try:
        waiting = asyncio.create_task(socket_pair("cpu-0"))
        await told.is_enough.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    ours, theirs = await waiting
    ours.close()
    theirs.close()
    assert told.lines[0] == "cpu-0 cannot be started yet, and is tried again: Too many open files"


async def test_a_process_that_has_ended_is_heard_to_the_end_though_another_has_its_socket() -> None:
    """One that the job's code had forked kept the stream open: its end never came, nor the next attempt."""
    ours, theirs = socket.socketpair()
    said: list[Message] = []
    closed = asyncio.Event()
    loop = asyncio.get_running_loop()
    _, link = await loop.create_connection(lambda: Link(ours, said.append, closed.set, pytest.fail), sock=ours)
    with theirs, theirs.dup():  # the other's copy is never closed
        messages = [{"type": "output", "text": "x" * 1000, "number": number} for number in range(100)]
        theirs.sendall(b"".join(map(encode, messages)))
        link.finish()
        await closed.wait()
        assert said == messages
        link.finish()
        link.send({"type": "release"})
        assert said == messages


async def test_a_process_that_reads_nothing_is_let_go_with_what_was_to_be_written() -> None:
    """Stopped, it took nothing; what waited for it was not to be written after its end."""
    ours, theirs = socket.socketpair()
    closed = asyncio.Event()
    loop = asyncio.get_running_loop()
    _, link = await loop.create_connection(lambda: Link(ours, lambda message: None, closed.set, pytest.fail), sock=ours)
    with theirs:
        for _ in range(100):
            link.send({"type": "dispatch", "work": "x" * 100_000})
        link.finish()
        await closed.wait()


# --- a link that is of no use any more


class Linked:
    """A pool with one child, of which a test has the other end of the link and its process. garbled, said: in order."""

    def __init__(self, home: Path, process: subprocess.Popen[bytes]) -> None:
        self.said: list[Message] = []
        self.garbled: list[str] = []
        self.lost: list[tuple[int | None, str]] = []
        self.saved: list[tuple[str, Message]] = []
        settings = Settings(runtime_dir=home, state_dir=home, workers=1, gpus=0, metrics="")
        self.pool = Pool(
            settings,
            make_crew(settings, (), (0,), {}),
            {},
            lambda worker, message: self.said.append(message),
            lambda worker, problem: self.garbled.append(problem),
            lambda worker, what, at: None,
            lambda worker, code, shortage: self.lost.append((code, shortage)),
            lambda job, answer: self.saved.append((job, answer)),
            lambda: None,
            lambda: None,
        )
        self.process = process
        self.child = Child("cpu-0", "worker", pid=process.pid)
        self.theirs: socket.socket

    async def link(self) -> None:
        ours, self.theirs = socket.socketpair()
        self.pool._children[self.child.name] = self.child
        loop = asyncio.get_running_loop()
        _, self.child.link = await loop.create_connection(lambda: self.pool._link(self.child, ours), sock=ours)

    async def send(self, data: bytes) -> None:
        """Until the pool has read it: a whole frame behind it would be a part of it."""
        self.theirs.sendall(data)
        await until(lambda: not num_unread(self.theirs))
        await asyncio.sleep(0)

    def looks(self, number: int) -> None:
        for _ in range(number):
            self.pool.look()


def num_unread(connection: socket.socket) -> int:
    """Bytes that the other end has not read yet (unix(7), SIOCOUTQ)."""
    return struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, struct.pack("i", 0)))[0]


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(POLL_SECONDS)


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as running:
        yield running
        running.kill()


@pytest.fixture
async def linked(tmp_path: Path, process: subprocess.Popen[bytes]) -> AsyncIterator[Linked]:
    one = Linked(tmp_path, process)
    await one.link()
    try:
        yield one
    finally:
        one.theirs.close()
        if one.child.link is not None:
            one.child.link.abort()
        await until(lambda: one.child.closed)


async def test_garbage_is_told_once_after_what_came_before_it(linked: Linked) -> None:
    """The loop logged an exception for each chunk, and the worker looked alive."""
    await linked.send(encode({"type": "output"}) + b"\xff" * 100)
    await linked.send(encode({"type": "late"}))
    assert linked.said == [{"type": "output"}]
    assert len(linked.garbled) == 1
    linked.looks(2 * MAX_LOOKS)
    assert len(linked.garbled) == 1


async def test_a_frame_that_does_not_end_is_noticed(linked: Linked) -> None:
    await linked.send((60 << 20).to_bytes(4, "big") + b"\x83")
    for _ in range(MAX_LOOKS - 1):
        linked.looks(1)
        await linked.send(encode({"type": "output"}))  # swallowed
    assert linked.garbled == []
    linked.looks(1)
    assert linked.garbled == ["a frame without an end"]
    assert linked.said == []


async def test_a_link_on_which_frames_end_is_none_of_those(linked: Linked) -> None:
    whole = encode({"type": "output"})
    for _ in range(2 * MAX_LOOKS):
        await linked.send(whole[4:] + whole + whole[:4] if linked.said else whole + whole[:4])
        linked.looks(1)
    assert linked.garbled == []


async def test_a_child_that_lives_without_its_link_is_noticed_unless_it_is_stopped(linked: Linked) -> None:
    """The job's code had closed it: the daemon waited for a process that could not be told anything."""
    linked.theirs.close()
    await until(lambda: linked.child.closed)
    linked.child.is_stopped = True
    linked.looks(2 * MAX_LOOKS)
    assert linked.garbled == []
    linked.child.is_stopped = False
    linked.looks(MAX_LOOKS)
    assert linked.garbled == ["the end of its link"]


async def test_a_directory_that_sends_garbage_is_killed(linked: Linked) -> None:
    linked.child.role, linked.child.name = DIRECTORY, DIRECTORY
    linked.pool._children = {DIRECTORY: linked.child}
    await linked.send(b"\0" * 100)
    assert await asyncio.to_thread(linked.process.wait, 60) == -signal.SIGKILL
    assert linked.garbled == []


# --- those that are no workers


def as_child(linked: Linked, role: str) -> None:
    """What is linked is a saver of job "a", or the directory."""
    name = DIRECTORY if role == DIRECTORY else f"{SAVER} of a"
    linked.child.role, linked.child.name, linked.child.owes = role, name, role == SAVER
    linked.pool._children = {name: linked.child}


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process does nothing: it may be on its way up still."""
    monkeypatch.setattr(pool, "used_by", lambda pid: ("0", "0"))


@pytest.mark.parametrize("role", [DIRECTORY, SAVER])
async def test_one_that_is_stopped_is_told_to_go_on_and_killed_where_it_does_not(linked: Linked, role: str) -> None:
    """A saver was waited for until somebody noticed, and with it every later checkpoint."""
    as_child(linked, role)
    linked.process.send_signal(signal.SIGSTOP)
    await until(lambda: state_of(linked.process.pid) == STOPPED)
    linked.child.is_stopped = True
    linked.looks(STOPPED_LOOKS)
    await until(lambda: state_of(linked.process.pid) == "S")
    linked.looks(STOPPED_LOOKS)  # as if it had been stopped again
    assert await asyncio.to_thread(linked.process.wait, SECONDS) == -signal.SIGKILL


@pytest.mark.parametrize("role", [DIRECTORY, SAVER])
@pytest.mark.usefixtures("quiet")
async def test_one_that_owes_an_answer_and_in_which_nothing_goes_on_is_killed(linked: Linked, role: str) -> None:
    as_child(linked, role)
    linked.looks(HUNG_LOOKS[role])
    assert linked.process.poll() is None
    linked.looks(1)
    assert await asyncio.to_thread(linked.process.wait, SECONDS) == -signal.SIGKILL


@pytest.mark.usefixtures("quiet")
async def test_a_saver_that_is_killed_for_it_has_written_nothing_and_says_why(linked: Linked) -> None:
    as_child(linked, SAVER)
    linked.looks(HUNG_LOOKS[SAVER] + 1)
    linked.theirs.close()
    linked.pool._server_said({"exited": linked.child.name, "pid": linked.process.pid, "code": -9})
    await until(lambda: bool(linked.saved))
    told = f"the process that wrote it was killed: nothing has gone on in it for {HUNG_LOOKS[SAVER]} s"
    assert linked.saved == [("a", {"error": told})]


@pytest.mark.usefixtures("quiet")
async def test_a_directory_that_answers_lives_as_long_as_it_does(linked: Linked) -> None:
    as_child(linked, DIRECTORY)
    for _ in range(3):
        linked.looks(HUNG_LOOKS[DIRECTORY] - 1)
        await linked.send(encode({"type": "there"}))
    assert linked.process.poll() is None
    assert linked.theirs.recv(1 << 16).count(b"arenas") == 3, "it is not asked again before it has answered"


async def test_a_directory_that_has_served_begins_at_once_again(linked: Linked) -> None:
    """Each that was ended by SIGTERM, however long it had served, had jobs wait longer for the next one."""
    as_child(linked, DIRECTORY)
    linked.pool._directory_failures = 7
    await linked.send(encode({"type": "joined"}))
    assert linked.pool._directory_failures == 7, "one that only begins may end in the same way again"
    linked.looks(1)
    await linked.send(encode({"type": "there"}))
    linked.theirs.close()
    linked.pool._server_said({"exited": DIRECTORY, "pid": linked.process.pid, "code": -signal.SIGTERM})
    await until(lambda: not linked.pool.has(DIRECTORY))
    assert back_off.back_off(linked.pool._directory_failures) == 0.0


async def test_one_that_works_without_an_answer_is_left_alone(linked: Linked, monkeypatch: pytest.MonkeyPatch) -> None:
    as_child(linked, SAVER)
    seconds = itertools.count()
    monkeypatch.setattr(pool, "used_by", lambda pid: (str(next(seconds)),))
    linked.looks(2 * HUNG_LOOKS[SAVER])
    assert linked.process.poll() is None


async def test_a_fork_server_that_is_stopped_is_told_to_go_on(linked: Linked) -> None:
    linked.pool._process = linked.process
    linked.process.send_signal(signal.SIGSTOP)
    await until(lambda: state_of(linked.process.pid) == STOPPED)
    linked.looks(STOPPED_LOOKS - 1)
    assert state_of(linked.process.pid) == STOPPED
    linked.looks(1)
    await until(lambda: state_of(linked.process.pid) == "S")


@pytest.mark.parametrize(
    ("told_to_die", "code", "num_kills", "by_the_kernel"),
    [(False, -9, 1, True), (False, -9, 0, False), (True, -9, 1, False), (False, -11, 1, False)],
)
async def test_a_kill_that_the_kernel_counts_is_told_from_others(
    linked: Linked, told_to_die: bool, code: int, num_kills: int, by_the_kernel: bool
) -> None:
    """A worker that had run out of memory was lost as one that an operator had killed."""
    counts = iter([0, num_kills])
    linked.pool._oom_kills = OomKills(lambda: next(counts))
    if told_to_die:
        linked.pool.kill("cpu-0", "the core says so")
    linked.theirs.close()
    linked.pool._server_said({"exited": "cpu-0", "pid": linked.process.pid, "code": code, "peak_bytes": 5 << 20})
    await until(lambda: bool(linked.lost))
    ((told_code, shortage),) = linked.lost
    assert told_code == code
    assert ("killed by the kernel for lack of memory: it had up to 5 MiB" in shortage) == by_the_kernel


def test_the_first_failure_costs_nothing_and_the_others_ever_more() -> None:
    delays = [back_off.back_off(failures) for failures in range(2000)]
    assert delays[:5] == [0.0, 0.0, 0.1, 0.2, 0.4]
    assert delays == sorted(delays)
    assert delays[-1] == back_off.MAX_SECONDS
