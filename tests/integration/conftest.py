"""Fixtures of the tests with a real daemon: three that all share, one of them for tests that end it, and others.

After every test nothing of it is left: see `nothing_is_left`.
"""

from __future__ import annotations

import os
import re
import runpy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

_REAL = runpy.run_path(str(Path(__file__).with_name("real_daemon.py")))
RealDaemon, until = _REAL["RealDaemon"], _REAL["until"]


@pytest.fixture(scope="session")
def shared_daemon() -> Iterator[RealDaemon]:
    """The daemon that `daemon` lends to one test after another."""
    with shared({"stages": 3}) as running:
        yield running


@pytest.fixture(scope="session")
def shared_machine() -> Iterator[RealDaemon]:
    """The daemon with four CPU workers and two devices that `machine` lends."""
    pipelines = [{"device": "gpu", "stages": 2}, {"stages": 4}]
    with shared({"replicas": pipelines}, workers=4, stand_ins=2) as running:
        yield running


@contextmanager
def shared(strategy: dict[str, Any], **options: object) -> Iterator[RealDaemon]:
    """Its first job of each kind is behind it."""
    running = RealDaemon(**options)
    try:
        running.start()
        running.run(running.spec(strategy=strategy))
        running.until_idle()
        yield running
        assert running.stop() == 0
        running.until_nothing_lives()
        assert list(running.runtime.iterdir()) == []
        assert "Traceback" not in running.log()
    finally:
        running.close()


@pytest.fixture
def daemon(shared_daemon: RealDaemon) -> Iterator[RealDaemon]:
    """The shared daemon, with CPU workers alone."""
    with lent(shared_daemon):
        yield shared_daemon


@pytest.fixture
def machine(shared_machine: RealDaemon) -> Iterator[RealDaemon]:
    """The shared daemon with devices."""
    with lent(shared_machine):
        yield shared_machine


@contextmanager
def lent(running: RealDaemon) -> Iterator[None]:
    """After the test it is as it was: no job, every worker free, nothing more open or mapped (less, where the job of
    the test before had not quite gone)."""
    before = running.footprint()
    yield
    running.cancel_all()
    running.until_idle()
    try:
        until(lambda: not running.footprint() - before, "the daemon's descriptors and mappings")
    except AssertionError:
        assert running.footprint() == before  # tells which


@pytest.fixture(scope="session")
def shared_restarting() -> Iterator[RealDaemon]:
    """The daemon that `restarting` lends. After all its ends nothing of it is left."""
    running = RealDaemon(workers=2)
    try:
        running.start()
        yield running
        running.stop()
        running.until_nothing_lives()
        assert list(running.runtime.iterdir()) == []
    finally:
        running.close()


@pytest.fixture
def restarting(shared_restarting: RealDaemon) -> Iterator[RealDaemon]:
    """A daemon that a test ends, and starts again where it needs it. It leaves no job to the next test."""
    if shared_restarting.process.poll() is not None:
        shared_restarting.start()
    yield shared_restarting
    if shared_restarting.process.poll() is None:
        shared_restarting.cancel_all()
        shared_restarting.until_idle()


@pytest.fixture
def own_daemon() -> Iterator[Callable[..., RealDaemon]]:
    """Starts daemons for this test alone. After it no process of theirs lives, and their runtime directory is empty."""
    started: list[Any] = []

    def start(**options: object) -> RealDaemon:
        started.append(RealDaemon(**{"workers": 2} | options))
        return started[-1].start()

    try:
        yield start
        for running in started:
            running.stop()
            running.until_nothing_lives()
            assert list(running.runtime.iterdir()) == []
    finally:
        for running in started:
            running.close()


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No new thread or descriptor of this process, and no name in /dev/shm, outlives a test."""
    before = _held()
    yield
    until(lambda: _held() <= before, f"the end of {_held() - before}")


def _held() -> set[str]:
    held = {f"thread {thread.name}" for thread in threading.enumerate()}
    held |= {f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if not _is_of_others(name)}
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one that lists them
            held.add(f"descriptor {number}: {os.readlink(f'/proc/self/fd/{number}')}")
    return {each for each in held if "/proc/" not in each}


def _is_of_others(name: str) -> bool:
    """Whether a process has made it that lives, and that this one has not started: the other half of the tests runs
    beside it."""
    found = re.match(r"torch_(\d+)_", name)
    if found is None:
        return False
    with suppress(psutil.NoSuchProcess):
        maker = psutil.Process(int(found[1]))
        return os.getpid() not in [process.pid for process in (maker, *maker.parents())]
    return False
