"""The daemon's side of its processes, with real sockets: what it does while the machine is short of something."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from collections.abc import Iterator

import pytest

from weft.scheduler import back_off, pool
from weft.scheduler.pool import Link
from weft.transport.wire import Message, encode


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
        waiting = asyncio.create_task(pool._socket_pair("cpu-0"))
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


def test_the_first_failure_costs_nothing_and_the_others_ever_more() -> None:
    delays = [back_off.back_off(failures) for failures in range(2000)]
    assert delays[:5] == [0.0, 0.0, 0.1, 0.2, 0.4]
    assert delays == sorted(delays)
    assert delays[-1] == back_off.MAX_SECONDS
