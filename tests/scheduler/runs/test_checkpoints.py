"""What a job goes on with beside parameters: what its checkpoint's manifest tells of shares and ways."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from weft.machine.checkpoint_files import write_checkpoint
from weft.plan.plan import Plan
from weft.plan.tables import Adjustment
from weft.scheduler.planning.partition import PlanError
from weft.scheduler.runs.checkpoints import adjusted_behind, come_to, find_checkpoint, training_of
from weft.scheduler.runs.run import Run
from weft.scheduler.runs.run_directory import RunDirectory
from weft.spec.job_spec import JobSpec

WriteAtOnce = runpy.run_path(str(Path(__file__).parents[2] / "write_at_once.py"))["WriteAtOnce"]
STEP = 5


def run_in(home: Path, **job: Any) -> Run:
    job = {"entry": "job.py:workload", "batch_size": 8, "steps": 60, **job}
    spec = JobSpec.parse({"job": job, "directory": str(home)})
    return Run(job="a", spec=spec, files=RunDirectory("a", home / "runs" / "a", WriteAtOnce()))


def save(run: Path, plan: Plan, adjusted: dict[str, Any], **job: Any) -> None:
    training = training_of(run_in(run, **job).spec, plan)
    write_checkpoint(run, STEP, training, lambda path: (), keep=1, adjusted=adjusted)


@pytest.fixture
def plan(plan_of: Callable[..., Plan]) -> Plan:
    return plan_of(replicas=2, microbatches=4, steps=60, batch_size=8, share="adaptive", shares=[3, 1])


def test_what_holds_behind_a_checkpoint_is_kept_and_gone_on_with(tmp_path: Path, plan: Plan) -> None:
    run = run_in(tmp_path)
    attempt = run.begin(plan, ("cpu-0", "cpu-1", "loader-0"))
    run.adjust(STEP, Adjustment(shares=(1.0, 2.0)))
    run.adjust(STEP + 1, Adjustment(shares=(1.0, 9.0)))
    iteration = plan.itinerary.update_of(STEP)
    adjusted = adjusted_behind(attempt, iteration)
    assert adjusted == {"shares": [1.0, 2.0]}
    assert adjusted_behind(attempt, iteration - 1) == {"shares": list(plan.shares)}
    save(run.files.path, plan, adjusted)
    found = find_checkpoint(run, plan)
    assert found.checkpoint is not None
    assert found.checkpoint.adjusted == ((iteration, Adjustment(shares=(1.0, 2.0))),)
    assert found.refused == []
    run.files.close()


def test_what_a_job_has_come_to_is_told_by_its_newest_checkpoint_and_the_line_of_that_step(
    tmp_path: Path, plan: Plan
) -> None:
    assert come_to(tmp_path) is None
    save(tmp_path, plan, {})
    assert come_to(tmp_path) == (STEP, None), "its line is lost"
    line = {"epoch": 0, "lr": 0.1, "grad_norm": None, "samples": 8, "seconds": 0.1}
    lines = [json.dumps({**line, "step": step, "loss": step / 4}) for step in range(1, STEP + 3)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 8, "lo']))
    assert come_to(tmp_path) == (STEP, STEP / 4)
    damaged = tmp_path / "checkpoints" / "step-00000007"
    damaged.mkdir()
    assert come_to(tmp_path) == (STEP, STEP / 4), "another attempt begins there, too"


def test_a_job_that_draws_from_a_stream_without_a_length_may_go_on_with_more_steps(
    tmp_path: Path, plan_of: Callable[..., Plan]
) -> None:
    """Its one epoch is as long as its steps, so more of them were refused as other data."""
    plan = plan_of(steps=60, batch_size=8)
    shorter, longer = (
        replace(plan, itinerary=replace(plan.itinerary, num_train=steps * 8, steps=steps)) for steps in (STEP, 60)
    )
    before = run_in(tmp_path, steps=STEP)
    save(before.files.path, replace(shorter, endless=True), {})
    going_on = run_in(tmp_path / "other", resume_from=str(before.files.path))
    found = find_checkpoint(going_on, replace(longer, endless=True))
    assert found.checkpoint is not None
    with pytest.raises(PlanError, match=r"with num_train = 'as many as its steps need', and this job has 480"):
        find_checkpoint(going_on, longer)
    before.files.close()
    going_on.files.close()


def test_a_job_whose_shares_are_fixed_keeps_none(tmp_path: Path, plan_of: Callable[..., Plan]) -> None:
    plan = plan_of(replicas=2, microbatches=4, steps=60, batch_size=8, shares=[3, 1])
    run = run_in(tmp_path)
    assert adjusted_behind(run.begin(plan, ("cpu-0", "cpu-1", "loader-0")), 4) == {}
    save(run.files.path, plan, {})
    found = find_checkpoint(run, plan)
    assert found.checkpoint is not None
    assert found.checkpoint.adjusted == ()
    run.files.close()


def test_another_jobs_checkpoint_leaves_the_strategy_as_it_is_written(tmp_path: Path, plan: Plan) -> None:
    other = tmp_path / "other"
    save(other, plan, {"shares": [1.0, 2.0]})
    run = run_in(tmp_path, resume_from=str(other))
    found = find_checkpoint(run, plan)
    assert found.checkpoint is not None
    assert found.checkpoint.adjusted == ()
    run.files.close()


@pytest.mark.parametrize(
    "adjusted",
    [
        {"shares": [0.0, 0.0]},
        {"shares": [1.0, -1.0]},
        {"shares": [float("nan"), 1.0]},
        {"shares": {"0": 1.0}},
        {"shares": 3},
        {"local": ["0"]},
        {"local": [-1]},
        {"local": None},
    ],
)
def test_what_is_no_shares_and_no_buckets_is_told_and_left(tmp_path: Path, plan: Plan, adjusted: Any) -> None:
    run = run_in(tmp_path)
    save(run.files.path, plan, adjusted)
    found = find_checkpoint(run, plan)
    assert found.checkpoint is not None
    assert found.checkpoint.adjusted == ()
    assert [line.partition(": ")[2] for line in found.refused] == [
        "it does not say how the job was adjusted; it adapts anew"
    ]
    run.files.close()
