"""What the worker at one position of a plan is sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from weft.plan.kinds import Cause
from weft.plan.plan import Plan
from weft.plan.worker_view import WorkerView

PlanOf = Callable[..., Plan]


def test_a_worker_is_told_whom_each_task_waits_for_and_whom_it_wakes(plan_of: PlanOf) -> None:
    plan = plan_of(stages=2, microbatches=1)
    names = {str(task): task.id for task in plan.graph.tasks}
    view = WorkerView.of(plan, 1)
    (stage,) = view.stages
    assert (stage.replica, stage.stage, stage.first, stage.last) == (0, 1, 1, 2)
    forward, backward, update = (names[name] for name in ("FORWARD(1,0)", "BACKWARD(1,0)", "UPDATE(1)"))
    snapshot = names["SNAPSHOT(1)"]
    assert [task.id for task in view.programs["compute"]] == [forward, backward, update, snapshot]
    assert {(edge.source, edge.distance, edge.cause) for edge in view.waits[forward]} == {
        (names["LOAD(0,0)"], 0, Cause.DATA),
        (names["FORWARD(0,0)"], 0, Cause.ACTIVATION),
    }
    assert forward not in view.wakes, "its backward runs on the same lane"
    assert backward in view.wakes
    assert update not in view.waits
    assert snapshot not in view.waits, "it stands behind the update"


def test_the_last_update_of_the_first_stage_tells_the_learning_rate(plan_of: PlanOf) -> None:
    plan = plan_of(replicas=2, stages=2)
    reporters = {WorkerView.of(plan, position).reporter for position in range(len(plan.workers))}
    assert len(reporters) == 1
    assert WorkerView.of(plan_of(stages=2), 0).reporter is None, "each stage updates its own"


@pytest.mark.parametrize(("num_bytes", "stage"), [((4, 4), 1), ((4, 0), 0), ((0, 0), 1)])
def test_without_buckets_the_last_stage_with_parameters_tells_it(
    plan_of: PlanOf, num_bytes: tuple[int, int], stage: int
) -> None:
    view = WorkerView.of(plan_of(stages=2), 0)
    stages = tuple(replace(each, parameter_bytes=size) for each, size in zip(view.first_stages, num_bytes, strict=True))
    assert replace(view, first_stages=stages).last_updated_stage == stage


def test_who_loads_data_has_nothing_of_the_model(plan_of: PlanOf) -> None:
    """It read the whole snapshot, to no end, where a job went on after a lost worker."""
    plan = plan_of(replicas=2, stages=2)
    loading = [name for position, name in enumerate(plan.workers) if WorkerView.of(plan, position).loads_only]
    assert loading
    assert all(name.startswith("loader") for name in loading)
