"""Descriptors run out: what is short is a refusal, never a failed job nor the daemon's end, and all come back."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from weft.client.client import DaemonUnreachable, RequestRefused

_REAL = runpy.run_path(str(Path(__file__).with_name("real_daemon.py")))
RealDaemon, until = _REAL["RealDaemon"], _REAL["until"]

# Holds so many connections to a port, as another user where it may, until its stdin ends.
STRANGER = """
import os, socket, sys
"".encode("idna")  # loads what that user may not read
if os.geteuid() == 0:
    os.setuid(65534)
held = []
for _ in range(int(sys.argv[2])):
    held.append(socket.create_connection(("127.0.0.1", int(sys.argv[1]))))
    held[-1].sendall(b"GET /metrics HTTP/1.1\\r\\n")
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def limited() -> Iterator[Callable[[int], Any]]:
    """Starts a daemon under `ulimit -n`, soft and hard."""
    started: list[Any] = []

    class Limited(RealDaemon):  # type: ignore[misc, valid-type]  # runpy tells no types
        def __init__(self, limit: int) -> None:
            super().__init__(workers=1, drain_seconds=0.5)
            self.limit = limit

        def command(self, **changes: object) -> list[str]:
            return ["bash", "-c", f'ulimit -n {self.limit} && exec "$@"', "bash", *super().command(**changes)]

    def start(limit: int) -> Any:
        started.append(Limited(limit))
        return started[-1].start()

    try:
        yield start
        for daemon in started:
            assert daemon.stop() == 0
            daemon.until_nothing_lives()
            assert "Traceback" not in daemon.log()
    finally:
        for daemon in started:
            daemon.close()


def states(daemon: Any) -> dict[str, str]:
    return {job["job"]: job["state"] for job in daemon.client.jobs()}


def start_again(daemon: Any) -> None:
    """After a kill, with jobs that are unfinished."""
    with (daemon.home / "daemon.log").open("ab") as log:
        daemon.process = subprocess.Popen(
            daemon.command(), stdout=log, stderr=log, env=daemon.environment, start_new_session=True
        )
    until(lambda: answers(daemon), "its answer")


def answers(daemon: Any) -> bool:
    try:
        daemon.client.status()
    except (DaemonUnreachable, RequestRefused):  # it is starting, or has not closed yet what others have left
        return False
    return True


def queued_jobs_are_kept(daemon: Any, num_jobs: int) -> None:
    gate = daemon.gate()
    spec = daemon.spec(args={"planning_gate": str(gate)}, steps=1)
    jobs = [daemon.submit(spec) for _ in range(num_jobs)]
    assert set(states(daemon)) == set(jobs)
    assert not {"failed", "cancelled"} & set(states(daemon).values())
    daemon.kill()
    start_again(daemon)
    assert set(states(daemon).values()) <= {"planning", "queued"}
    assert set(states(daemon)) == set(jobs)
    gate.open()
    assert [daemon.client.wait(job)["state"] for job in jobs[:3]] == ["completed"] * 3
    for job in jobs[3:]:
        daemon.client.cancel(job)
    assert not {"failed"} & set(states(daemon).values())
    daemon.until_idle()


@pytest.mark.days(3)
@pytest.mark.slow(seconds=6)
def test_queued_jobs_hold_no_descriptors_over_a_restart(limited: Callable[[int], Any]) -> None:
    # 120 queued jobs under `ulimit -n 200` failed 33 acknowledged jobs, and then the daemon.
    queued_jobs_are_kept(limited(200), 120)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_thousand_queued_jobs_under_a_limit_of_1024(limited: Callable[[int], Any]) -> None:
    queued_jobs_are_kept(limited(1024), 1000)


@pytest.mark.slow(seconds=3)
def test_when_descriptors_are_short_clients_and_submits_are_refused_and_what_runs_goes_on(
    limited: Callable[[int], Any],
) -> None:
    daemon = limited(160)
    daemon.run(daemon.spec(steps=1))
    daemon.until_idle()
    before = daemon.footprint()
    gate = daemon.gate()
    job = daemon.submit(daemon.spec(args={"gate": str(gate), "gate_at": 6}))
    daemon.until_logged(job, "at the gate")
    spec = daemon.spec(steps=1).to_wire()
    with ExitStack() as stack:
        first = stack.enter_context(daemon.connected())
        refusal: dict[str, Any] = {}
        for _ in range(200):
            client = stack.enter_context(daemon.connected(hello=False))
            client.send({"hello": {"protocol": 1, "version": "0"}})
            answer = client.receive()
            if "hello" not in answer:
                refusal = answer
                break
        assert refusal["error"]["code"] == "too-many-connections"
        assert "160 that it may have; start it under a higher `ulimit -n`" in refusal["error"]["message"]
        until(lambda: first.ask("submit", spec=spec).get("error"), "a refusal")
        refused = first.ask("submit", spec=spec)["error"]
        assert (refused["code"], "hardly a descriptor" in refused["message"]) == ("queue-full", True)
        with pytest.raises(RequestRefused, match="hardly a descriptor"):
            daemon.client.status()
        gate.open()
        assert first.ask("wait", job=job)["ok"]["result"]["state"] == "completed"
    until(lambda: answers(daemon), "an answer to a newcomer")
    daemon.until_idle()
    until(lambda: not daemon.footprint() - before, "its descriptors")  # one that just closes may be among the first
    assert daemon.run(daemon.spec(steps=1))["state"] == "completed"


@contextmanager
def strangers(port: int, num_connections: int) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", STRANGER, str(port), str(num_connections)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def port_of(daemon: Any) -> int:
    return int(daemon.client.status()["metrics"].rpartition(":")[2])


@pytest.mark.slow(seconds=2)
def test_connections_that_a_stranger_holds_cost_a_bounded_number_of_descriptors(daemon: Any) -> None:
    held = psutil.Process(daemon.process.pid).num_fds()
    with strangers(port_of(daemon), 300):
        until(lambda: psutil.Process(daemon.process.pid).num_fds() <= held + 64, "no more than 64 of them")
        assert daemon.run(daemon.spec(steps=1))["state"] == "completed"
    until(lambda: psutil.Process(daemon.process.pid).num_fds() <= held, "its descriptors")


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_thousand_idle_connections_of_another_user_are_dropped_and_submits_answered(
    own_daemon: Callable[..., Any],
) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can play another user")
    daemon = own_daemon()
    process = psutil.Process(daemon.process.pid)
    port, spec = port_of(daemon), daemon.spec(steps=1)
    for _ in range(3):
        with strangers(port, 1000):
            pass
    daemon.run(spec)
    daemon.until_idle()
    held, resident = process.num_fds(), process.memory_info().rss
    slowest = 0.0
    for _ in range(5):
        with strangers(port, 1000):
            for _ in range(10):
                began = time.monotonic()
                job = daemon.submit(spec)
                slowest = max(slowest, time.monotonic() - began)
                daemon.client.cancel(job)
            until(lambda: process.num_fds() <= held, "descriptors, while they are still held at the other end")
    daemon.until_idle()
    assert slowest < 1.0
    assert process.num_fds() <= held
    assert process.memory_info().rss < resident + (8 << 20)
