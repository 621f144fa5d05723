"""A daemon whose ledger is lost does not start as if there had never been a job."""

from __future__ import annotations

import sqlite3
import subprocess
from collections.abc import Callable
from typing import Any

import pytest


def started(daemon: Any, *options: str) -> None:
    with (daemon.home / "daemon.log").open("ab") as log:
        command = [*daemon.command(), *options]
        daemon.process = subprocess.Popen(command, stdout=log, stderr=log, env=daemon.environment)
    daemon.until_idle()


@pytest.mark.days(3)
@pytest.mark.slow(seconds=8)
def test_a_lost_ledger_is_refused_until_its_loss_is_accepted(own_daemon: Callable[..., Any]) -> None:
    # One without the log of a killed daemon was opened as it was, and the job was forgotten without a word.
    daemon = own_daemon(workers=1)
    job = daemon.submit(daemon.spec(steps=1))
    assert daemon.client.wait(job)["state"] == "completed"
    daemon.kill()
    daemon.until_nothing_lives()
    (daemon.state / "ledger.sqlite-wal").unlink()
    done = subprocess.run(daemon.command(), env=daemon.environment, capture_output=True, text=True, timeout=180.0)
    assert done.returncode == 1
    (told,) = done.stderr.splitlines()
    assert told.startswith(f"weft: {daemon.state}/ledger.sqlite: it")
    assert "start with --accept-empty-ledger" in told
    started(daemon, "--accept-empty-ledger")
    assert daemon.client.jobs() == []
    assert daemon.submit(daemon.spec(steps=1)) == "line-2"  # the run directory of the first is still there
    daemon.until_idle()
    daemon.kill()
    started(daemon)
    assert [each["job"] for each in daemon.client.jobs()] == ["line-2"]


@pytest.mark.days(3)
@pytest.mark.slow(seconds=8)
def test_a_row_that_makes_no_sense_is_named_and_the_others_run(own_daemon: Callable[..., Any]) -> None:
    daemon = own_daemon(workers=1)
    for job in ("spoilt", "sound"):
        daemon.submit(daemon.spec(steps=1), job=job)
        daemon.client.wait(job)
    daemon.stop()
    connection = sqlite3.connect(daemon.state / "ledger.sqlite")
    with connection:
        connection.execute("UPDATE jobs SET state = 'queued', spec = x'c1' WHERE job = 'spoilt'")
        connection.execute("UPDATE jobs SET state = 'queued' WHERE job = 'sound'")
    connection.close()
    started(daemon)
    assert daemon.client.wait("sound")["state"] == "completed"
    listed = daemon.weft("ps", "--all")
    assert "weft: the ledger's row of spoilt cannot be read; it is left as it is" in listed.stderr
    assert "sound" in listed.stdout
    assert daemon.log().count("the row of job spoilt cannot be read") == 1
    assert daemon.client.status()["ledger"]["unreadable"] == ["spoilt"]
