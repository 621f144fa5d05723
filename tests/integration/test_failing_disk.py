"""A disk that is full or fails below the ledger of a real daemon: it lives, and what was acknowledged is kept."""

from __future__ import annotations

import errno
import runpy
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from weft.client.client import RequestRefused

_REAL = runpy.run_path(str(Path(__file__).with_name("real_daemon.py")))
_LAYER = runpy.run_path(str(Path(__file__).with_name("fault_layer.py")))
RealDaemon, until = _REAL["RealDaemon"], _REAL["until"]
FaultLayer, FOR_EVER = _LAYER["FaultLayer"], _LAYER["FOR_EVER"]
SHORT = 4  # of the calls of a job, about so many fail in the suite; all in a soak

pytestmark = pytest.mark.skipif(_LAYER["COMPILER"] is None, reason="no C compiler makes the layer")

Start = Callable[[], Any]


@pytest.fixture
def faults(tmp_path: Path) -> Iterator[Any]:
    layer = FaultLayer(tmp_path)
    yield layer
    layer.close()


@pytest.fixture
def daemon(own_daemon: Callable[..., Any], faults: Any) -> Any:
    return own_daemon(environment=faults.environment, workers=1)


def states(daemon: Any) -> dict[str, str]:
    return {job["job"]: job["state"] for job in daemon.client.jobs()}


def health(daemon: Any) -> dict[str, Any]:
    told: dict[str, Any] = daemon.client.listing()["ledger"]
    return told


def until_written(daemon: Any) -> None:
    until(lambda: health(daemon) == {"problem": None, "unwritten": [], "unreadable": []}, "the ledger's writing")


def restarted(daemon: Any) -> None:
    daemon.kill()
    daemon.start()


@pytest.mark.slow(seconds=4)
def test_a_full_disk_refuses_a_submit_by_name_and_the_command_line_ends_with_74(daemon: Any, faults: Any) -> None:
    spec = daemon.spec()
    with faults.failing(daemon.process.pid, errno.ENOSPC, daemon.state / "ledger"):
        with pytest.raises(RequestRefused, match="check that its disk is there and not full") as refused:
            daemon.submit(spec)
        assert refused.value.code == "ledger-unavailable"
        done = daemon.weft("submit", daemon.spec_file(spec))
        assert (done.returncode, done.stdout) == (74, "")
        assert "not full" in done.stderr
        listed = daemon.weft("ps", "--json")
        assert listed.returncode == 0
        assert "weft: the ledger cannot be used" in listed.stderr
        assert "Until then submits are refused" in listed.stderr
        assert faults.failed
    assert states(daemon) == {}
    until_written(daemon)
    assert daemon.run(spec)["state"] == "completed"


@pytest.mark.days(2)
@pytest.mark.slow(seconds=6)
def test_the_end_of_a_job_is_kept_while_the_disk_is_full_and_written_when_it_is_not(daemon: Any, faults: Any) -> None:
    gate = daemon.gate()
    job = daemon.submit(daemon.spec(args={"gate": str(gate), "gate_at": 6}))
    daemon.until_logged(job, "at the gate")
    with faults.failing(daemon.process.pid, errno.ENOSPC, daemon.state / "ledger"):
        gate.open()
        result = daemon.client.wait(job)
        assert result["state"] == "completed"
        assert health(daemon)["unwritten"] == [job]
        assert states(daemon) == {job: "completed"}
        assert daemon.client.show(job)["ended_at"] is not None
        assert daemon.client.status()["jobs"]["completed"] == 1
        assert f"the newest state of {job} is in the daemon's memory alone" in daemon.weft("ps").stderr
    until_written(daemon)
    restarted(daemon)
    assert states(daemon) == {job: "completed"}
    assert daemon.client.wait(job) == result  # the very end, with its figures


@pytest.mark.days(3)
@pytest.mark.slow(seconds=6)
def test_a_daemon_that_stops_on_a_full_disk_says_which_ends_are_lost_and_those_jobs_run_again(
    daemon: Any, faults: Any
) -> None:
    gate = daemon.gate()
    job = daemon.submit(daemon.spec(args={"gate": str(gate), "gate_at": 6}))
    daemon.until_logged(job, "at the gate")
    with faults.failing(daemon.process.pid, errno.ENOSPC, daemon.state / "ledger"):
        gate.open()
        assert daemon.client.wait(job)["state"] == "completed"
        daemon.signal(signal.SIGTERM)
        daemon.process.wait(180.0)
    assert f"the newest states of {job} are lost; unfinished in the ledger, they run again" in daemon.log()
    daemon.start()
    assert states(daemon) == {job: "completed"}
    assert "the daemon has restarted; the job runs again" in daemon.log_of(job)


def ended_under_fault(daemon: Any, faults: Any, error: int, below: Path, **which: int) -> dict[str, str]:
    """A job that is submitted while the disk fails, and its end; nothing where the submit is refused."""
    with faults.failing(daemon.process.pid, error, below, **which):
        try:
            job = daemon.submit(daemon.spec(steps=1))
        except RequestRefused as refused:
            if refused.code not in ("ledger-unavailable", "no-room"):
                raise
            return {}
        return {job: daemon.client.wait(job)["state"]}


def fail_each(daemon: Any, faults: Any, below: Path, faulty: list[tuple[int, int]], most: int) -> dict[str, str]:
    """Calls of a job's whole way in turn, at most so many; faulty: (error, number of calls that fail from there on).

    The daemon lives after each, and tells what was acknowledged. Returns that: the jobs and their ends.
    """
    daemon.run(daemon.spec(steps=1))  # the first one makes the mark
    acknowledged = states(daemon)
    num_failed = 0
    for error in dict(faulty):
        acknowledged |= ended_under_fault(daemon, faults, error, below, count=0)
        num_calls = faults.seen
        for first in range(0, num_calls, max(1, num_calls // most)):
            for count in [count for each, count in faulty if each == error]:
                acknowledged |= ended_under_fault(daemon, faults, error, below, first=first, count=count)
                num_failed += faults.failed
                until_written(daemon)
                assert states(daemon) == acknowledged
    assert num_failed
    return acknowledged


@pytest.mark.days(3)
def test_writes_of_the_ledger_fail_and_it_equals_what_was_acknowledged(daemon: Any, faults: Any) -> None:
    faulty = [(errno.ENOSPC, 1), (errno.EIO, FOR_EVER)]
    acknowledged = fail_each(daemon, faults, daemon.state / "ledger", faulty, SHORT)
    assert set(acknowledged.values()) == {"completed"}
    restarted(daemon)
    assert states(daemon) == acknowledged


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EMFILE], ids=errno.errorcode.get)
@pytest.mark.parametrize("below", ["ledger", "runs", ""])
def test_every_write_of_the_daemon_fails_and_it_lives(daemon: Any, faults: Any, error: int, below: str) -> None:
    if error == errno.EMFILE and below == "ledger":
        pytest.skip("the ledger opens nothing once it is open")
    acknowledged = fail_each(daemon, faults, daemon.state / below, [(error, 1), (error, FOR_EVER)], FOR_EVER)
    restarted(daemon)
    assert states(daemon) == acknowledged
