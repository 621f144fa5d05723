"""What the plan says of a model: what depends on the batch or on a buffer, where nobody else would say so."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from weft.plan.inspection import Inspection, UnitFacts
from weft.plan.kinds import Kind
from weft.plan.plan import Plan
from weft.scheduler.planning.memory import UNKNOWN_STATE
from weft.scheduler.planning.partition import PlanError
from weft.scheduler.planning.plan_notes import plan_notes
from weft.scheduler.planning.planner import make_plan
from weft.spec.job_spec import JobSpec

MODULES = tuple(f"{number} (BatchNorm2d)" for number in (1, 4, 7, 10))
UNEVEN = [{"microbatches": 1}, {"microbatches": 2}]


def noted(
    inspection_of: Callable[..., Inspection],
    unit_of: Callable[..., UnitFacts],
    spec_of: Callable[..., Any],
    **settings: Any,
) -> list[str]:
    inspection = dataclasses.replace(inspection_of([unit_of(0)]), batch_modules=MODULES)
    return list(plan_notes(spec_of(batch_size=8, **settings), inspection, None))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"microbatches": 4},
            "of each microbatch of 2 samples, not of the batch of 8; microbatches = 1 takes the batch's",
        ),
        ({"microbatches": 3}, "of each microbatch of 2 or 3 samples, not of the batch of 8"),
        ({"replicas": 2}, "of each microbatch of 4 samples, not of the batch of 8; one replica with microbatches = 1"),
        ({"replicas": UNEVEN, "shares": [0.5, 0.5]}, "of each microbatch of 2 or 4 samples, not of the batch of 8"),
    ],
)
def test_a_line_says_over_how_many_samples_batch_statistics_are_taken(
    inspection_of: Callable[..., Inspection],
    unit_of: Callable[..., UnitFacts],
    spec_of: Callable[..., Any],
    settings: dict[str, Any],
    text: str,
) -> None:
    (note,) = noted(inspection_of, unit_of, spec_of, **settings)
    assert note.startswith("batch statistics: 1 (BatchNorm2d), 4 (BatchNorm2d), 7 (BatchNorm2d) and 1 more take means ")
    assert text in note


def test_a_line_says_what_a_step_changes_with_each_microbatch(
    inspection_of: Callable[..., Inspection], unit_of: Callable[..., UnitFacts], spec_of: Callable[..., Any]
) -> None:
    inspection = dataclasses.replace(inspection_of([unit_of(0)]), written=("steps", "teacher.weight"))
    (note,) = plan_notes(spec_of(batch_size=8, microbatches=4), inspection, None)
    assert note.startswith(
        "state: the step itself changes steps, teacher.weight, with each of the 4 microbatches of a "
    )
    assert list(plan_notes(spec_of(batch_size=8, microbatches=1), inspection, None)) == []
    assert list(plan_notes(spec_of(batch_size=8, microbatches=1, replicas=2), inspection, None)) == []  # one of each


LOST = {
    "scheduler": ["Workload.rate.calls"],
    "optimizer": ["Workload.step.calls"],
    "sampler": ["Workload.train: its sampler, a Own"],
}


def test_a_line_says_what_a_scheduler_or_a_sampler_forgets(
    inspection_of: Callable[..., Inspection], unit_of: Callable[..., UnitFacts], spec_of: Callable[..., Any]
) -> None:
    inspection = dataclasses.replace(inspection_of([unit_of(0)]), lost_beside=LOST)
    of_scheduler, of_optimizer, of_sampler = plan_notes(spec_of(), inspection, None)
    assert of_scheduler.startswith("scheduler: its rates are asked of a function that changes Workload.rate.calls, ")
    assert of_optimizer.startswith("optimizer: its step, or a hook on it, changes Workload.step.calls, which no ")
    assert of_sampler.startswith("data: Workload.train: its sampler, a Own, gave two orders when it was asked twice ")
    assert list(plan_notes(spec_of(mode="forward"), inspection, None)) == []


def test_a_line_says_what_on_epoch_does_not_find(
    inspection_of: Callable[..., Inspection], unit_of: Callable[..., UnitFacts], spec_of: Callable[..., Any]
) -> None:
    """What is kept in the last stage, or by the step of one replica, it finds."""
    units = [dataclasses.replace(unit_of(number), name=f"{number}.") for number in range(3)]
    kept = {"on_epoch": ("0.history", "2.history", "losses"), "on_epoch_units": ("0.", "2.", "")}
    inspection = dataclasses.replace(inspection_of(units), lost_beside=kept)
    assert list(plan_notes(spec_of(), inspection, None, ((0, 3),))) == []
    (note,) = plan_notes(spec_of(stages=2), inspection, None, ((0, 2), (2, 3)))
    assert note.startswith("on_epoch: it refers to 0.history, which a forward in an earlier stage changes, ")
    (note,) = plan_notes(spec_of(replicas=2), inspection, None, ((0, 3),))
    assert note.startswith("on_epoch: it refers to 0.history, 2.history, losses, which a step changes; of several ")
    (note,) = plan_notes(spec_of(recompute=True), inspection, None, ((0, 3),))
    assert "under recompute each forward may change it twice" in note


def test_nothing_is_said_where_every_batch_is_whole_or_nothing_depends_on_it(
    inspection_of: Callable[..., Inspection],
    unit_of: Callable[..., UnitFacts],
    spec_of: Callable[..., Any],
    plan_of: Callable[..., Plan],
) -> None:
    assert noted(inspection_of, unit_of, spec_of) == []
    assert noted(inspection_of, unit_of, spec_of, stages=1) == []
    assert noted(inspection_of, unit_of, spec_of, replicas=2, shares=[1.0, 0.0]) == []
    assert plan_of(microbatches=4).notes == ()


def test_a_line_names_what_computes_with_buffers_of_each_replica(
    inspection_of: Callable[..., Inspection], unit_of: Callable[..., UnitFacts], spec_of: Callable[..., Any]
) -> None:
    units = [unit_of(0), unit_of(1, kind="Linear", carries_state=True), unit_of(2, kind="Conv2d", carries_state=True)]
    (note,) = plan_notes(spec_of(replicas=2), inspection_of(units), None)
    assert note.startswith("buffers: forward of 1 (Linear), 2 (Conv2d) computes with what the forward before has left")
    assert list(plan_notes(spec_of(replicas=2), inspection_of(units[:1]), None)) == []
    assert list(plan_notes(spec_of(microbatches=4), inspection_of(units), None)) == []


def test_the_note_stands_in_the_plan(
    inspection_of: Callable[..., Inspection], unit_of: Callable[..., UnitFacts], plan_of: Callable[..., Plan]
) -> None:
    plan = plan_of(dataclasses.replace(inspection_of([unit_of(0)]), batch_modules=MODULES[:1]), microbatches=2)
    assert plan.describe()["notes"] == list(plan.notes)
    assert len(plan.notes) == 1


def test_a_line_names_what_is_compiled_or_says_why_nothing_is(
    inspection_of: Callable[..., Inspection], unit_of: Callable[..., UnitFacts], spec_of: Callable[..., Any]
) -> None:
    inspection = dataclasses.replace(inspection_of([unit_of(0)]), compiled=("0", "1", "2", "5"))
    assert list(plan_notes(spec_of(compile=True), inspection, None)) == ["compiled: 0, 1, 2 and 1 more"]
    (note,) = plan_notes(spec_of(compile=True), inspection_of([unit_of(0)]), None)
    assert note.startswith("compiled: nothing, since every unit is a single layer of torch's own")


@pytest.mark.parametrize(
    ("span", "length", "is_told"),
    [
        (10, {"epochs": 10}, True),
        (8, {"steps": 80}, True),
        (3, {"steps": 80, "steps_per_epoch": 20}, True),
        (11, {"epochs": 10}, False),
        (80, {"epochs": 10}, False),
        (10, {"epochs": 10, "steps_per_epoch": 1}, False),
    ],
)
def test_a_line_asks_whether_a_scheduler_is_meant_by_epochs(
    inspection_of: Callable[..., Inspection],
    unit_of: Callable[..., UnitFacts],
    spec_of: Callable[..., Any],
    span: int,
    length: dict[str, int],
    is_told: bool,
) -> None:
    inspection = dataclasses.replace(inspection_of([unit_of(0)]), scheduler_span=span, num_train=80)
    spec = spec_of(batch_size=8)
    job = spec.to_wire()["job"] | {"epochs": None, "steps": None} | length
    notes = list(plan_notes(JobSpec.parse(spec.to_wire() | {"job": job}), inspection, None))
    assert [f"is written for {span}; if these are epochs, say so by" in note for note in notes] == [True] * is_told


@pytest.mark.parametrize(
    ("settings", "is_told"),
    [({}, False), ({"stages": 2}, True), ({"replicas": 2}, True), ({"clip_norm": 1.0}, True)],
)
def test_a_line_says_that_an_optimizer_goes_by_all_that_it_updates(
    inspection_of: Callable[..., Inspection],
    unit_of: Callable[..., UnitFacts],
    spec_of: Callable[..., Any],
    settings: dict[str, Any],
    is_told: bool,
) -> None:
    inspection = dataclasses.replace(inspection_of([unit_of(0)]), joint_optimizer=True)
    notes = list(plan_notes(spec_of(**{"stages": 1} | settings), inspection, None))
    assert ["depends on the others that it updates" in note for note in notes] == [True] * is_told


def test_a_line_says_that_a_loss_is_no_mean(
    inspection_of: Callable[..., Inspection], unit_of: Callable[..., UnitFacts], spec_of: Callable[..., Any]
) -> None:
    inspection = dataclasses.replace(inspection_of([unit_of(0)]), loss_in_parts=(13.744, 9.28))
    (note,) = plan_notes(spec_of(batch_size=8, microbatches=4), inspection, None)
    assert note.startswith("loss: 13.74 of some samples together, and 9.28 as the mean of two parts")
    assert note.endswith("a step of 4 microbatches is not that of the whole batch")
    assert not list(plan_notes(spec_of(batch_size=8), inspection, None))


def test_a_compiled_unit_has_no_backward_in_two_parts(plan_of: Callable[..., Plan]) -> None:
    how: dict[str, Any] = {"stages": 2, "microbatches": 2, "compile": True}
    for schedule, title in ("zero-bubble", "zero-bubble"), ("F0 F1 B0 B1\nF0 I0 F1 I1 W0 W1\n", "a grid"):
        with pytest.raises(PlanError, match=f"and strategy.schedule = '{title}' has it in two parts; use schedule ="):
            plan_of(schedule=schedule, **how)
    assert plan_of(schedule="1f1b", **how)
    programs = plan_of(schedule="measured", **how).graph.tasks
    assert Kind.INPUT not in {task.kind for task in programs}


def test_a_line_says_that_batches_of_one_size_are_not_of_one_shape(
    inspection_of: Callable[..., Inspection], unit_of: Callable[..., UnitFacts], spec_of: Callable[..., Any]
) -> None:
    inspection = dataclasses.replace(inspection_of([unit_of(0)]), varying_shapes=((8, 12), (8, 17), (8, 9)))
    assert list(plan_notes(spec_of(batch_size=8), inspection, None)) == [
        "shapes: a tensor of the batch came as (8, 12), (8, 17) and (8, 9) in microbatches of one size; slots have "
        "room for the largest of the first batches, and grow where a larger one comes"
    ]


@pytest.mark.parametrize(
    ("data_bytes", "device_bytes", "note"),
    [
        (
            None,
            None,
            ["data: not resident on GPUs, since they are no tensors, or the workload collates or samples them itself"],
        ),
        (1 << 30, None, []),
        (1 << 27, 1 << 30, []),
        (
            (1 << 27) + (1 << 20),
            1 << 30,
            [
                "data: not resident on GPUs, since their 129 MiB are more than an eighth (128 MiB) of a GPU's free "
                "1024 MiB"
            ],
        ),
    ],
)
def test_small_data_of_tensors_are_resident_where_that_is_asked_for_and_else_the_plan_says_why_not(
    inspection_of: Callable[..., Inspection],
    unit_of: Callable[..., UnitFacts],
    spec_of: Callable[..., Any],
    data_bytes: int | None,
    device_bytes: int | None,
    note: list[str],
) -> None:
    inspection = dataclasses.replace(inspection_of([unit_of(0)]), data_bytes=data_bytes, device_bytes=device_bytes)
    replicas = [{"device": "gpu"}, {"device": "cpu"}]
    spec = spec_of(replicas=replicas, resident=True)
    assert list(plan_notes(spec, inspection, None)) == note
    plan = make_plan(spec, inspection, shared_bytes_free=1 << 40)
    assert [replica.resident for replica in plan.replicas] == [not note, False]
    fetches = [plan.task_seconds[task.id] for task in plan.graph.tasks if task.kind is Kind.FETCH]
    assert (max(fetches) == 0.0) is not bool(note)
    assert list(plan_notes(spec_of(replicas=replicas), inspection, None)) == []
    assert not any(
        each.resident for each in make_plan(spec_of(replicas=replicas), inspection, shared_bytes_free=1 << 40).replicas
    )


def test_a_line_says_why_nothing_is_copied_unless_somebody_wanted_it_so(
    spec_of: Callable[..., JobSpec], inspection_of: Callable[..., Inspection]
) -> None:
    inspection = inspection_of([])
    assert list(plan_notes(spec_of(), inspection, "Adam keeps a secret")) == [
        "snapshots: none, since Adam keeps a secret; after a lost worker the job begins again"
    ]
    assert list(plan_notes(spec_of(recovery="off"), inspection, "strategy.recovery is 'off'")) == []
    assert list(plan_notes(spec_of(mode="forward"), inspection, "Adam keeps a secret")) == []


def test_what_a_copy_of_each_iteration_takes_is_said_before_the_job_runs(
    inspection_of: Callable[..., Inspection], unit_of: Callable[..., UnitFacts], spec_of: Callable[..., Any]
) -> None:
    inspection = dataclasses.replace(
        inspection_of([unit_of(0, parameter_bytes=10 << 20)]), copy_bytes_per_second=float(1 << 30)
    )
    (note,) = plan_notes(spec_of(recovery="iteration"), inspection, None)
    mib = 10 * (1 + UNKNOWN_STATE)
    assert note == (
        f"snapshots: each iteration is copied, {mib}.0 MiB in all, which would take a lane that had all of it "
        f"{mib / 1024 * 1e3:.3g} ms more"
    )
    assert list(plan_notes(spec_of(recovery="snapshot"), inspection, None)) == []
    (note,) = plan_notes(spec_of(recovery="iteration"), inspection, "nothing can be copied")
    assert note == "snapshots: none, since nothing can be copied; after a lost worker the job begins again"
