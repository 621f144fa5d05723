"""What a job file may say, all of it at once and by chance, computes what the plain loop computes; with a worker killed
on the way, too, and of models by chance. What the planner refuses it refuses with the remedy."""

from __future__ import annotations

import json
import os
import random
import runpy
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from weft.reference import loop as reference
from weft.spec.job_spec import JobSpec

HERE = Path(__file__).parent
_REPLICAS = runpy.run_path(str(HERE / "test_replicas.py"))
until = _REPLICAS["until"]
check, steps_of, FLOAT64 = (_REPLICAS[name] for name in ("check", "steps_of", "FLOAT64"))
_JOBS = runpy.run_path(str(HERE.parent / "any_jobs.py"))
any_job, any_models_job = _JOBS["any_job"], _JOBS["any_models_job"]
CLASSES = runpy.run_path(str(HERE / "test_any_model.py"))["IN_FLOAT64"]
MODELS = [name for name in runpy.run_path(str(HERE / "replica_jobs.py"))["MODELS"] if name != "pausing"]

NUM_JOBS, NUM_MODELS, JOBS_OF_A_DAY = 200, 400, 10
STEPS = (0, 0, 1, 4, 12)  # at which workers are killed: some jobs are over by then, and others still inspected


def kill_a_worker(machine: Any, job: str, chance: random.Random) -> None:
    """One that has the job once it has come to a step, if any still has it; the crew has another one soon."""
    step = chance.choice(STEPS)

    def has_come() -> bool:
        shown = machine.client.show(job)
        is_over = shown["state"] in ("completed", "failed", "cancelled")
        return is_over or bool(shown.get("workers") and shown["step"] >= step)

    until(has_come, f"step {step} of {job}")
    pids = machine.worker_pids()
    held = [worker for worker in machine.client.show(job).get("workers") or () if worker in pids]
    if held:
        with suppress(ProcessLookupError):
            os.kill(pids[chance.choice(held)], signal.SIGKILL)


def as_chosen(spec: JobSpec, run_dir: Path) -> JobSpec:
    """With the strategy that the planner has come to, where that was left to it."""
    chosen = run_dir / "strategy.json"
    return JobSpec.parse(spec.to_wire() | {"strategy": json.loads(chosen.read_text())}) if chosen.exists() else spec


def check_job(machine: Any, spec: JobSpec, killed: int | None) -> None:
    """killed: by which chance one of its workers is."""
    job = machine.submit(spec)
    if killed is not None:
        kill_a_worker(machine, job, random.Random(killed))
    result = machine.client.wait(job, timeout=_REPLICAS["SECONDS"])
    if result["state"] == "failed" and result["reason"] in ("invalid-plan", "invalid-workload"):
        assert "; " in result["error"], result["error"]
        assert not (Path(result["run_dir"]) / "metrics.jsonl").exists(), "it can be told before"
        return
    assert result["state"] == "completed", machine.log_of(job)
    if "only one replica computes what the plain loop does" in machine.log_of(job):
        return
    rows = steps_of(result)
    shares = [row["shares"] for row in rows if "shares" in row]  # which running statistics depend on
    chosen = as_chosen(spec, Path(result["run_dir"]))
    expected = reference.train(chosen, shares=shares.__getitem__ if shares and not chosen.strategy.steals else None)
    if spec.job.mode == "train":
        check(result, expected, 1000 * FLOAT64, 1.0)
        return
    measured = [row["measured"] for row in rows]
    assert measured == [pytest.approx(means, rel=1000 * FLOAT64, abs=0) for means in expected.measured]


@pytest.mark.slow
@pytest.mark.pairs(NUM_JOBS // JOBS_OF_A_DAY, number=range(NUM_JOBS), killed=("", "killed"))
def test_any_job_computes_what_the_plain_loop_computes_or_is_refused_with_the_remedy(
    machine: Any, number: int, killed: str
) -> None:
    check_job(machine, any_job(number, MODELS, CLASSES), number if killed else None)


@pytest.mark.slow
@pytest.mark.pairs(NUM_MODELS // JOBS_OF_A_DAY, number=range(NUM_MODELS), killed=("", "killed"))
def test_any_models_job_does_so_too(machine: Any, number: int, killed: str) -> None:
    check_job(machine, any_models_job(number), number if killed else None)


@pytest.mark.slow
@pytest.mark.days(3)
@pytest.mark.parametrize("number", [237, 313])
def test_a_worker_keeps_nothing_of_a_stage_that_ends_under_a_checkpoint(machine: Any, number: int) -> None:
    """What it recalls of skipped calls was in a circle that Python does not see, and four mappings more stayed for good
    with each such job: the fixture looks."""
    check_job(machine, any_models_job(number), None)
