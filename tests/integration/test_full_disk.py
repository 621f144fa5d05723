"""A real file system that is really full, below a real daemon's ledger; where the tests may mount one."""

from __future__ import annotations

import os
import runpy
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from weft.client.client import RequestRefused

_REAL = runpy.run_path(str(Path(__file__).with_name("real_daemon.py")))
RealDaemon, until = _REAL["RealDaemon"], _REAL["until"]
BYTES = 4 << 20


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Any]:
    """Its state directory is a file system of its own, of a few MB."""
    running = RealDaemon(workers=1, runs_dir=tmp_path / "runs")
    running.state.mkdir(mode=0o700)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={BYTES},mode=0700", "tmpfs", str(running.state)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        running.state.rmdir()
        running.home.rmdir()
        pytest.skip("no file system can be mounted here")
    try:
        yield running.start()
        assert running.stop() == 0
        running.until_nothing_lives()
    finally:
        running.process.kill()
        running.process.wait()
        subprocess.run(["umount", "-l", str(running.state)], check=True)
        running.close()


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):  # to the last byte
            try:
                while file.write(bytes(size)):
                    pass
            except OSError:
                continue


def submit_on(daemon: Any) -> None:
    """The ledger has pages that it uses again: some submits are still taken."""
    spec = daemon.spec(steps=1)
    while True:
        daemon.client.cancel(daemon.submit(spec))


@pytest.mark.days(2)
@pytest.mark.slow(seconds=6)
def test_a_full_disk_costs_no_acknowledged_job(daemon: Any) -> None:
    gate = daemon.gate()
    job = daemon.submit(daemon.spec(args={"gate": str(gate), "gate_at": 6}))
    daemon.until_logged(job, "at the gate")
    filler = daemon.state / "filler"
    fill(filler)
    with pytest.raises(RequestRefused, match="not full") as refusal:
        submit_on(daemon)
    assert refusal.value.code == "ledger-unavailable"
    gate.open()
    result = daemon.client.wait(job)
    assert result["state"] == "completed"
    acknowledged = {each["job"]: each["state"] for each in daemon.client.jobs()}
    filler.unlink()
    until(lambda: not daemon.client.listing()["ledger"]["unwritten"], "the ledger's writing")
    daemon.kill()
    daemon.start()
    assert {each["job"]: each["state"] for each in daemon.client.jobs()} == acknowledged
    assert daemon.client.wait(job) == result
