"""`weft restart` and `weft rm`: a job that has ended runs once more as another one, or goes with all that it left."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from weft.client.client import RequestRefused

_REAL = runpy.run_path(str(Path(__file__).with_name("real_daemon.py")))
RealDaemon, until = _REAL["RealDaemon"], _REAL["until"]

FAILING = "def workload(**arguments): raise KeyError('lost')"


def ended(daemon: RealDaemon, **options: Any) -> dict[str, Any]:
    """What is shown of a job that failed at once."""
    job = daemon.submit(daemon.spec(FAILING, args={"width": 7}), **options)
    assert daemon.client.wait(job, 60.0)["state"] == "failed"
    shown: dict[str, Any] = daemon.client.show(job)
    return shown


def page_of(daemon: RealDaemon, job: str) -> dict[str, Any]:
    url = daemon.client.status()["metrics"]
    with urllib.request.urlopen(f"{url}/api/jobs/{job}", timeout=180.0) as answer:
        told: dict[str, Any] = json.load(answer)
    return told


@pytest.mark.slow
def test_a_removed_job_is_gone_with_its_directory_and_its_id_is_free(daemon: RealDaemon) -> None:
    first = ended(daemon, job="mine")
    assert page_of(daemon, "mine")["submitted_at"] == first["submitted_at"]
    done = daemon.weft("rm", "mine")
    assert (done.returncode, done.stdout, done.stderr) == (0, "mine\n", "")
    assert not Path(first["run_dir"]).exists()
    assert "mine" not in {job["job"] for job in daemon.client.jobs()}
    for verb in ("show", "rm", "restart", "resume", "logs"):
        assert daemon.weft(verb, "mine").returncode == 4
    second = ended(daemon, job="mine")  # another directory, another spec
    assert page_of(daemon, "mine")["submitted_at"] == second["submitted_at"] != first["submitted_at"]
    assert daemon.client.remove("mine") == "mine"


@pytest.mark.slow
def test_a_job_that_runs_or_waits_is_neither_removed_nor_restarted(daemon: RealDaemon) -> None:
    gate = daemon.gate()
    job = daemon.submit(daemon.spec(args={"gate": str(gate), "gate_at": 6}))
    try:
        daemon.until_logged(job, "at the gate")
        for verb in ("rm", "restart", "resume"):
            done = daemon.weft(verb, job)
            assert (done.returncode, done.stdout) == (75, "")
            assert done.stderr == f"weft: {job} is running; end it first with `weft cancel {job}`, then try again\n"
        assert Path(daemon.client.show(job)["run_dir"], "job.log").exists()
    finally:
        gate.open()
    assert daemon.client.wait(job, 60.0)["state"] == "completed"


@pytest.mark.slow
def test_a_restart_is_a_new_job_with_the_same_spec_and_priority(daemon: RealDaemon) -> None:
    old = daemon.submit(daemon.spec(), job="again", priority=5)
    ran = daemon.client.wait(old, 60.0)
    done = daemon.weft("restart", "again")
    new = done.stdout.strip()
    assert (done.returncode, done.stderr) == (0, "")
    assert new.startswith("line-")
    result = daemon.client.wait(new, 60.0)
    assert (result["state"], result["loss"]) == ("completed", ran["loss"])
    before, after = daemon.client.show("again"), daemon.client.show(new)
    assert (before["state"], before["spec"]) == ("completed", after["spec"])
    assert (before["priority"], after["priority"]) == (5, 5)
    assert before["run_dir"] != after["run_dir"]
    shutil.rmtree(before["spec"]["directory"])
    done = daemon.weft("restart", "again")
    assert (done.returncode, done.stdout) == (2, "")
    assert "line.py' is not a file" in done.stderr


@pytest.mark.slow
def test_what_cannot_be_removed_stays_in_the_list_until_it_can(daemon: RealDaemon) -> None:
    shown = ended(daemon, job="stuck")
    moved = Path(shown["run_dir"]).rename(Path(shown["run_dir"] + "-moved"))
    Path(shown["run_dir"]).symlink_to(moved)
    done = daemon.weft("rm", "stuck", "--json")
    assert done.returncode == 74
    (kept,) = json.loads(done.stdout)["kept"]
    assert (kept["job"], kept["code"]) == ("stuck", "not-removed")
    assert kept["message"].startswith(f"stuck stays: {shown['run_dir']} ")
    assert (moved / "job.log").exists()
    assert daemon.client.show("stuck")["state"] == "failed"
    os.unlink(shown["run_dir"])
    assert daemon.weft("rm", "stuck").stdout == "stuck\n"
    shutil.rmtree(moved)


@pytest.mark.slow
def test_a_run_directory_that_was_somebodys_before_is_left_alone(daemon: RealDaemon) -> None:
    source = daemon.state / "runs" / "src"
    source.mkdir(parents=True)
    (source / "work").write_text("of years")
    ended(daemon, job="src")
    assert daemon.weft("rm", "src").returncode == 74
    assert (source / "work").read_text() == "of years"
    shutil.rmtree(source)
    assert daemon.client.remove("src") == "src"


@pytest.mark.days(3)
@pytest.mark.slow
def test_old_jobs_go_at_once_and_stay_gone_after_a_restart_of_the_daemon(own_daemon: Any) -> None:
    daemon = own_daemon(workers=1)
    jobs = [ended(daemon)["job"] for _ in range(3)]
    assert daemon.weft("rm", "--older-than", "1h").stdout == ""
    assert daemon.weft("rm", "--older-than", "0s", "--dry-run").stdout.split() == jobs
    assert len(daemon.client.jobs()) == 3
    assert daemon.weft("rm", "--older-than", "0s").stdout.split() == jobs
    assert list((daemon.state / "runs").iterdir()) == []
    assert daemon.stop() == 0
    daemon.start()
    assert daemon.client.jobs() == []
    assert ended(daemon)["job"] == "line-4"  # an id that was made up is never made up again
    with pytest.raises(RequestRefused):
        daemon.client.show(jobs[0])
