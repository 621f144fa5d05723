"""What a job file may say, all of it at once and by chance, computes what the plain loop computes; disturbed on the
way, and of models by chance, too. What the planner refuses it refuses with the remedy."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import re
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest

from weft.reference import loop as reference
from weft.spec.job_spec import JobSpec
from weft.workload.faults import NonFiniteLoss

HERE = Path(__file__).parent
_REPLICAS = runpy.run_path(str(HERE / "test_replicas.py"))
check, steps_of, metrics_rows, FLOAT64 = (_REPLICAS[name] for name in ("check", "steps_of", "metrics_rows", "FLOAT64"))
_JOBS = runpy.run_path(str(HERE.parent / "any_jobs.py"))
any_job, any_models_job = _JOBS["any_job"], _JOBS["any_models_job"]
CLASSES = runpy.run_path(str(HERE / "test_any_model.py"))["IN_FLOAT64"]
_DISTURBANCES = runpy.run_path(str(HERE / "disturbances.py"))
disturb, to_disturb, DISTURBANCES = (_DISTURBANCES[name] for name in ("disturb", "to_disturb", "DISTURBANCES"))
MODELS = [name for name in runpy.run_path(str(HERE / "replica_jobs.py"))["MODELS"] if name != "pausing"]

NUM_JOBS, NUM_MODELS, JOBS_OF_A_DAY = 200, 400, 5
TOLD = {  # by a job's log, where it was disturbed in time
    "a worker is killed": " was killed; the job ",
    "the directory is killed": "the directory process was lost",
    "it is paused": "asked to pause",
    "it is preempted": "preempted by ",
    "it is cancelled": "cancelled",
}


def as_chosen(spec: JobSpec, run_dir: Path) -> JobSpec:
    """With the strategy that the planner has come to, where that was left to it."""
    chosen = run_dir / "strategy.json"
    return JobSpec.parse(spec.to_wire() | {"strategy": json.loads(chosen.read_text())}) if chosen.exists() else spec


def check_job(machine: Any, spec: JobSpec, disturbed: int | None) -> None:
    """disturbed: by which chance it is."""
    if disturbed is None:
        job = machine.submit(spec)
        check_result(machine, spec, job, job)
        return
    chance = random.Random(disturbed)
    spec = to_disturb(spec, chance)
    first = machine.submit(spec)
    check_result(machine, spec, first, disturb(machine, first, chance))


def check_result(machine: Any, spec: JobSpec, first: str, job: str) -> None:
    """job: as which `first` has gone on."""
    result = machine.client.wait(job, timeout=_REPLICAS["SECONDS"])
    if result["state"] == "failed" and result["reason"] in ("invalid-plan", "invalid-workload"):
        assert "; " in result["error"], result["error"]
        assert not (Path(result["run_dir"]) / "metrics.jsonl").exists(), "it can be told before"
        return
    if result["reason"] == "non-finite-loss":
        with pytest.raises(NonFiniteLoss, match=re.escape(result["error"])):
            reference.train(as_chosen(spec, Path(result["run_dir"])))
        return
    assert result["state"] == "completed", machine.log_of(job)
    if "only one replica computes what the plain loop does" in machine.log_of(job):
        return
    if job != first:
        result |= {"run_dir": in_one_run_directory(machine, first, result["run_dir"])}
    rows = steps_of(result)
    shares = [row["shares"] for row in rows if "shares" in row]  # which running statistics depend on
    chosen = as_chosen(spec, Path(result["run_dir"]))
    expected = reference.train(chosen, shares=shares.__getitem__ if shares and not chosen.strategy.steals else None)
    if "noisy" in str(spec.job.args):
        expected = up_to_adapted_shares(expected, result, machine.log_of(job))
    if spec.job.mode == "train":
        check(result, expected, 1000 * FLOAT64, 1.0)
        return
    measured = [row["measured"] for row in rows]
    assert measured == [pytest.approx(means, rel=1000 * FLOAT64, abs=0) for means in expected.measured]


def up_to_adapted_shares(expected: Any, result: dict[str, Any], log: str) -> Any:
    """Of a model that draws where it is evaluated, too, by microbatch: the plain loop is not told which samples those
    of a validation have once shares are adapted, so from there on what the job has measured stands for it."""
    changed = [int(step) for step in re.findall(r"shares from .*?(\d+) on: ", log)]
    rows = [row for row in metrics_rows(result["run_dir"]) if "validation" in row]
    assert len(rows) == len(expected.validations)
    known = sum(row["step"] < min(changed, default=math.inf) for row in rows)
    validations = [*expected.validations[:known], *(row["validation"] for row in rows[known:])]
    return dataclasses.replace(expected, validations=validations)


def in_one_run_directory(machine: Any, first: str, run_dir: str) -> str:
    """What a job has told up to where another has gone on from it, and what that one has told."""
    later = metrics_rows(run_dir)
    begins = later[0]["step"] if later else math.inf
    known = {(row["step"], "validation" in row) for row in later}
    told = Path(machine.client.show(first)["run_dir"], "metrics.jsonl")
    earlier = metrics_rows(told.parent) if told.exists() else []
    rows = [row for row in earlier if row["step"] <= begins and (row["step"], "validation" in row) not in known]
    made = machine.home / f"{first}, whole"
    shutil.copytree(run_dir, made)
    (made / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in [*rows, *later]))
    return str(made)


@pytest.mark.slow
@pytest.mark.pairs(NUM_JOBS // JOBS_OF_A_DAY, number=range(NUM_JOBS), disturbed=("", "disturbed"))
def test_any_job_computes_what_the_plain_loop_computes_or_is_refused_with_the_remedy(
    machine: Any, number: int, disturbed: str
) -> None:
    check_job(machine, any_job(number, MODELS, CLASSES), number if disturbed else None)


@pytest.mark.slow
@pytest.mark.pairs(NUM_MODELS // JOBS_OF_A_DAY, number=range(NUM_MODELS), disturbed=("", "disturbed"))
def test_any_models_job_does_so_too(machine: Any, number: int, disturbed: str) -> None:
    check_job(machine, any_models_job(number), number if disturbed else None)


@pytest.mark.slow
@pytest.mark.pairs(how=tuple(DISTURBANCES))  # one a day
def test_a_job_is_disturbed_before_it_ends_and_goes_on(machine: Any, how: str) -> None:
    """Workers were once looked for where they are not told, and none was killed for weeks."""
    args = {"file": "replica_jobs.py", "args": {"model": "mlp"}, "milliseconds": 50}
    how_long = {"entry": "slow_jobs.py:workload", "args": args, "batch_size": 8, "epochs": 24, "seed": 3}
    strategy = {"stages": 2, "recovery": "iteration"}
    spec = JobSpec.parse({"job": how_long, "strategy": strategy, "directory": str(HERE)})
    first = machine.submit(spec)
    job = disturb(machine, first, random.Random(0), how)
    check_result(machine, spec, first, job)
    assert TOLD.get(how, "") in machine.log_of(first)


@pytest.mark.slow
@pytest.mark.days(3)
@pytest.mark.parametrize("number", [237, 313])
def test_a_worker_keeps_nothing_of_a_stage_that_ends_under_a_checkpoint(machine: Any, number: int) -> None:
    """What it recalls of skipped calls was in a circle that Python does not see, and four mappings more stayed for good
    with each such job: the fixture looks."""
    check_job(machine, any_models_job(number), None)
