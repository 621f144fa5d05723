"""What the other workers of a job do when one is killed: they keep what they have, and the result stays what it was.

The job stands at a gate behind a snapshot, as in test_recovery.py; its function writes down in which process it runs.
"""

from __future__ import annotations

import os
import runpy
import signal
from pathlib import Path
from typing import Any

import pytest

_RECOVERY = runpy.run_path(str(Path(__file__).with_name("test_recovery.py")))
held_behind_a_snapshot, check_is_undisturbed, kill_worker, until, SECONDS = (
    _RECOVERY[name] for name in ("held_behind_a_snapshot", "check_is_undisturbed", "kill_worker", "until", "SECONDS")
)
PIPELINE = _RECOVERY["PIPELINE"]
# Held up by a file "wait", in a process in which the function has not run before.
SOURCE = _RECOVERY["SOURCE"].replace(
    "    torch.manual_seed(5)\n",
    """    torch.manual_seed(5)
    with open("processes", "a") as file:
        print(os.getpid(), file=file)
    while os.path.exists("wait"):
        time.sleep(0.005)
""",
)


def processes_of(spec: Any) -> list[int]:
    """In which the job's function has run, in that order."""
    return [int(line) for line in Path(spec.directory, "processes").read_text().split()]


@pytest.mark.days(3)
@pytest.mark.slow(seconds=7)
@pytest.mark.pairs(
    4, strategy=("pipeline", "recompute", "replicas", "clipped pipeline", "clipped replicas"), victim=("cpu", "loader")
)
def test_the_function_runs_in_the_new_worker_alone(daemon: Any, strategy: str, victim: str) -> None:
    strategies = _RECOVERY["STRATEGIES"]
    with held_behind_a_snapshot(daemon, strategies[strategy], source=SOURCE) as (job, spec, gate):
        before, ran = daemon.worker_pids(job), processes_of(spec)
        kill_worker(daemon, job, victim)
        daemon.until_logged(job, "goes on after step")
        gate.open()  # who stands there lets go of nothing
        until(lambda: len(processes_of(spec)) > len(ran), "the function in another process")
        until(lambda: daemon.client.show(job)["state"] in ("running", "completed"), "the next attempt")
        after = processes_of(spec)[len(ran) :]
        check_is_undisturbed(daemon, job, spec)
    assert len(after) == 1
    assert set(after).isdisjoint(before.values())


@pytest.mark.days(2)
@pytest.mark.slow(seconds=4)
def test_another_that_is_killed_while_the_first_is_prepared_costs_no_more(daemon: Any) -> None:
    with held_behind_a_snapshot(daemon, PIPELINE, source=SOURCE) as (job, spec, gate):
        wait, ran = Path(spec.directory, "wait"), processes_of(spec)
        before = daemon.worker_pids(job)
        wait.touch()
        kill_worker(daemon, job, "cpu")
        until(lambda: len(processes_of(spec)) > len(ran), "the function in another process")
        survivors = [pid for name, pid in daemon.worker_pids(job).items() if before.get(name) == pid]
        os.kill(survivors.pop(), signal.SIGKILL)
        daemon.until_logged(job, "(attempt 3)")
        wait.unlink()
        gate.open()
        until(lambda: daemon.client.show(job)["state"] in ("running", "completed"), "the last attempt")
        ours = processes_of(spec)[len(ran) :]
        check_is_undisturbed(daemon, job, spec)
    assert survivors
    assert set(survivors).isdisjoint(ours), "it is not run in one that has survived both"
    assert "starts again" not in daemon.log_of(job)


@pytest.mark.slow(seconds=2)
def test_a_cancel_while_they_wait_frees_them_all(daemon: Any) -> None:
    with held_behind_a_snapshot(daemon, PIPELINE, source=SOURCE) as (job, spec, _):
        wait, ran = Path(spec.directory, "wait"), processes_of(spec)
        wait.touch()
        kill_worker(daemon, job, "cpu")
        until(lambda: len(processes_of(spec)) > len(ran), "the function in another process")
        daemon.client.cancel(job)
        assert daemon.client.wait(job, SECONDS)["state"] == "cancelled"
        wait.unlink()
    daemon.until_idle()
    result = daemon.run(daemon.spec(strategy=PIPELINE))
    assert result["state"] == "completed", "who has survived takes another job"
