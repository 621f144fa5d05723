"""A spare of this process: made, told of, ended. What workers do with theirs is seen of real daemons."""

from __future__ import annotations

import errno
import os
import select
import socket
import threading
from collections.abc import Iterator

import psutil
import pytest

from weft.workers.process import spare
from weft.workers.process.spare import Spares, make_channel, received

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


@pytest.fixture
def channel() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = make_channel()
    with ours, theirs:
        yield ours, theirs


def heard(channel: socket.socket) -> tuple[bytes, int]:
    waiting = select.poll()  # the tests before may have opened more descriptors than `select` knows
    waiting.register(channel, select.POLLIN)
    waiting.poll()
    return received(channel)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever threads the tests have: none of them matters to a child that waits and ends."""
    monkeypatch.setattr(spare, "_is_alone", lambda: True)
    monkeypatch.setattr(spare, "MOST_BYTES", 1 << 40)


@pytest.mark.usefixtures("alone")
def test_a_spare_tells_its_pid_and_its_job_and_ends_when_it_is_told_to(
    channel: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = channel
    spares = Spares(theirs, os.getpid())
    assert spares.make("digits@1", ours.close) is None
    told, pid = heard(ours)
    assert told == b"digits@1"
    assert psutil.Process(pid).ppid() == os.getpid()
    spares.end()
    assert not psutil.pid_exists(pid)
    spares.end()


@pytest.mark.usefixtures("alone")
def test_another_one_takes_the_place_of_the_one_before(channel: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = channel
    spares = Spares(theirs, os.getpid())
    pids = []
    for job in ("a@1", "a@2"):
        assert spares.make(job, ours.close) is None
        pids.append(heard(ours)[1])
    assert [psutil.pid_exists(pid) for pid in pids] == [False, True]
    spares.end()


@pytest.mark.usefixtures("alone")
def test_where_there_is_no_descriptor_for_it_there_is_none(
    channel: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = channel
    made: list[int] = []

    def refuse(pid: int) -> int:
        made.append(pid)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "pidfd_open", refuse)
    spares = Spares(theirs, os.getpid())
    assert spares.make("digits@1", ours.close) is None
    assert not psutil.pid_exists(made[0])
    spares.end()


def test_beside_a_thread_of_the_jobs_code_none_is_made(channel: tuple[socket.socket, socket.socket]) -> None:
    _, theirs = channel
    over = threading.Event()
    threads = [threading.Thread(target=over.wait) for _ in range(2)]
    for each in threads:
        each.start()
    spares = Spares(theirs, os.getpid())
    assert spares.make("digits@1", pytest.fail) is None
    over.set()
    for each in threads:
        each.join()
    spares.end()
