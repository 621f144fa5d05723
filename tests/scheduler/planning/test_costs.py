"""Costs: what each task of a plan is expected to take."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.plan.inspection import Inspection, Threaded, UnitFacts, ValueFacts
from weft.plan.kinds import KINDS, Kind
from weft.plan.plan import Plan
from weft.scheduler.planning.costs import CROWDED, PlannedJob
from weft.scheduler.planning.crossing import Handovers
from weft.scheduler.planning.measured_costs import MeasuredCosts
from weft.spec.job_spec import JobSpec
from weft.spec.workers_needed import Host

PlanOf = Callable[..., Plan]
InspectionOf = Callable[..., Inspection]
UnitOf = Callable[..., UnitFacts]
SecondsOf = Callable[..., dict[str, float]]

CPU, GPU = {"device": "cpu"}, {"device": "gpu"}


@pytest.fixture
def seconds_of(plan_of: PlanOf, inspection_of: InspectionOf, unit_of: UnitOf) -> SecondsOf:
    """By task, of a model of one unit with 1024 bytes of parameters; a second copies 1024 bytes, two update them."""

    def seconds(link: float | None = None, **settings: Any) -> dict[str, float]:
        facts = {"load_seconds": 6.0, "update_seconds": 2.0, "copy_bytes_per_second": 1024.0, "num_train": 840}
        inspection = inspection_of([unit_of(0, parameter_bytes=1024)], link_bytes_per_second=link, **facts)
        plan = plan_of(inspection, **settings)
        return {str(task): plan.task_seconds[task.id] for task in plan.graph.tasks}

    return seconds


def test_a_microbatch_costs_its_part_of_the_largest_which_was_measured(seconds_of: SecondsOf) -> None:
    """A batch of 12: eight samples in two microbatches, and four in one."""
    replicas = [CPU | {"microbatches": 2}, CPU | {"microbatches": 2}]
    seconds = seconds_of(batch_size=12, replicas=replicas, shares=[2.0, 1.0])
    assert (seconds["LOAD(0,0)"], seconds["FORWARD(0,0)"], seconds["BACKWARD(0,1)"]) == (6.0, 1.0, 2.0)
    assert (seconds["LOAD(r1,0,0)"], seconds["FORWARD(r1,0,0)"], seconds["BACKWARD(r1,0,1)"]) == (3.0, 0.5, 1.0)


def test_a_replica_without_a_share_costs_no_computation(seconds_of: SecondsOf) -> None:
    seconds = seconds_of(replicas=2, shares=[1.0, 0.0])
    assert seconds["FORWARD(r1,0,0)"] == seconds["BACKWARD(r1,0,0)"] == seconds["LOAD(r1,0,0)"] == 0.0


def test_the_owners_of_a_bucket_share_its_reduction_and_its_update(seconds_of: SecondsOf) -> None:
    """A sum of two reads both and writes one: one and a half times the copy of its range."""
    seconds = seconds_of(replicas=2)
    assert seconds["SYNC(o0,b0)"] == seconds["SYNC(o1,b0)"] == 0.5 * 1.5
    assert seconds["UPDATE(o0,b0)"] == seconds["UPDATE(o1,b0)"] == 1.0
    assert seconds["GRAD(0,b0)"] == 0.0


def test_what_goes_to_a_device_and_back_is_copied_whole(seconds_of: SecondsOf) -> None:
    seconds = seconds_of(replicas=[GPU, CPU])
    assert seconds["DOWN(0,b0)"] == seconds["UP(0,b0)"] == 1.0
    assert seconds["UPDATE(0,b0)"] == seconds["UPDATE(o0,b0)"] == 2.0, "each updates its own parameters, all of them"
    largest_slots = 2 * 3 * 4 + 2 * 8
    assert seconds["FETCH(0,0)"] == largest_slots / 1024


def test_what_goes_over_a_link_takes_as_long_as_the_link_was_measured_to_take(seconds_of: SecondsOf) -> None:
    seconds, linked = (seconds_of(link=link, replicas=[GPU], update="cpu") for link in (None, 4096.0))
    for task in ("DOWN(0,b0)", "UP(0,b0)", "FETCH(0,0)"):
        assert linked[task] == seconds[task] / 4, task
    assert linked["SYNC(o0,b0)"] == seconds["SYNC(o0,b0)"], "the host's own memory"


def test_a_job_that_only_runs_forward_has_free_backwards(seconds_of: SecondsOf) -> None:
    seconds = seconds_of(replicas=2, mode="forward", recompute=True)
    assert seconds["FORWARD(0,0)"] == 1.0
    assert seconds["BACKWARD(0,0)"] == 0.0


@pytest.mark.parametrize("recompute", [False, True])
def test_a_split_backward_takes_what_was_found_out_and_of_a_first_stage_all_is_the_parameters(
    plan_of: PlanOf, inspection_of: InspectionOf, unit_of: UnitOf, recompute: bool
) -> None:
    units = [unit_of(0, input_part=0.5, weight_part=0.75), unit_of(1, input_part=0.75, weight_part=0.5)]
    grid = "F0 I0 W0\nF0 I0 W0\n"
    inspection = inspection_of(units, copy_bytes_per_second=math.inf)
    plan = plan_of(inspection, stages=2, microbatches=1, schedule=grid, recompute=recompute)
    seconds = {str(task): plan.task_seconds[task.id] for task in plan.graph.tasks}
    again = 1.0 if recompute else 0.0
    assert (seconds["INPUT(1,0)"], seconds["WEIGHT(1,0)"]) == (again + 1.5, 1.0)
    assert (seconds["INPUT(0,0)"], seconds["WEIGHT(0,0)"]) == (again, 2.0)


@pytest.mark.parametrize("recompute", [False, True])
def test_what_is_around_the_units_of_a_stage_is_there_once_for_each_stage_and_pass(
    plan_of: PlanOf, inspection_of: InspectionOf, unit_of: UnitOf, recompute: bool
) -> None:
    around = {f"around_{kind}_seconds": n for n, kind in enumerate(("forward", "backward", "input", "weight"), 10)}
    units = [unit_of(n, input_part=0.5, weight_part=0.75, **around) for n in range(4)]
    inspection = inspection_of(units, copy_bytes_per_second=math.inf)
    grid = "F0 F1 B0 B1\nF0 I0 W0 F1 B1\n"
    plan = plan_of(inspection, stages=2, split=[1], microbatches=2, schedule=grid, recompute=recompute)
    seconds = {str(task): plan.task_seconds[task.id] for task in plan.graph.tasks}
    again, again_behind = (10 + 1.0, 10 + 3.0) if recompute else (0.0, 0.0)
    assert (seconds["FORWARD(0,0)"], seconds["BACKWARD(0,0)"]) == (10 + 1.0, 11 + 2.0 + again)
    assert (seconds["FORWARD(1,0)"], seconds["BACKWARD(1,1)"]) == (10 + 3.0, 11 + 6.0 + again_behind)
    assert (seconds["INPUT(1,0)"], seconds["WEIGHT(1,0)"]) == (12 + 3.0 + again_behind, 13 + 4.5)


def test_validation_of_a_speculative_update_is_expected_to_find_it_right(
    plan_of: PlanOf, inspection_of: InspectionOf, unit_of: UnitOf
) -> None:
    plan = plan_of(inspection_of([unit_of(0), unit_of(1)]), replicas=2, stages=2, clip_norm=1.0)
    seconds = [plan.task_seconds[task.id] for task in plan.graph.tasks if task.kind is Kind.VALIDATE]
    assert seconds
    assert not any(seconds)


def test_a_replica_and_its_updates_take_what_its_own_kind_of_device_was_measured_to_take(
    plan_of: PlanOf, inspection_of: InspectionOf, unit_of: UnitOf
) -> None:
    """A device computes and updates ten times as fast as the host."""
    inspection = inspection_of(
        [unit_of(0, parameter_bytes=1024)],
        update_seconds=2.0,
        device_units=(unit_of(0, 0.1, 0.2, parameter_bytes=1024),),
        device_update_seconds=0.2,
    )
    plan = plan_of(inspection, replicas=[CPU, GPU], update="local")
    seconds = {str(task): plan.task_seconds[task.id] for task in plan.graph.tasks}
    assert (seconds["FORWARD(0,0)"], seconds["BACKWARD(0,0)"], seconds["UPDATE(o0,b0)"]) == (1.0, 2.0, 2.0)
    assert (seconds["FORWARD(r1,0,0)"], seconds["BACKWARD(r1,0,0)"], seconds["UPDATE(r1,0,b0)"]) == (0.1, 0.2, 0.2)


@pytest.mark.parametrize("replica", [CPU, GPU])
def test_a_job_that_was_inspected_on_one_kind_of_device_has_the_times_of_that_one(
    plan_of: PlanOf, inspection_of: InspectionOf, unit_of: UnitOf, replica: dict[str, str]
) -> None:
    plan = plan_of(inspection_of([unit_of(0, parameter_bytes=1024)], update_seconds=2.0), replicas=[replica])
    seconds = {str(task.kind): plan.task_seconds[task.id] for task in plan.graph.tasks}
    assert (seconds["forward"], seconds["backward"], seconds["update"]) == (1.0, 2.0, 2.0)


def test_a_device_alone_has_nothing_to_add_up(seconds_of: SecondsOf) -> None:
    seconds = seconds_of(replicas=[GPU], update="local")
    assert (seconds["SYNC(o0,b0)"], seconds["UPDATE(o0,b0)"]) == (0.0, 2.0)


def test_where_several_cores_compute_each_takes_more_than_it_took_alone(
    plan_of: PlanOf, inspection_of: InspectionOf, unit_of: UnitOf
) -> None:
    """The more of the machine's cores do, the more; a device's own do not, and who has all of them was timed so."""

    def forward(workers: int, **settings: Any) -> float:
        """Of a unit."""
        times = ((1.0, 2.0, 0.0, 0.0),) * 2
        threaded = Threaded(threads=workers, seconds=times, update_seconds=1.0, copy_bytes_per_second=1e9)
        facts = {"host": Host(workers=workers), "threaded": threaded, "link_bytes_per_second": 1e9}
        facts |= {"copy_bytes_per_second": math.inf}  # so what crosses takes nothing
        plan = plan_of(inspection_of([unit_of(0), unit_of(1)], **facts), **settings)
        (task,) = (task for task in plan.graph.tasks if str(task) == "FORWARD(0,0)")
        return plan.task_seconds[task.id] / (2 // settings.get("stages", 1))

    assert forward(2) == forward(2, threads="all") == forward(4, replicas=[GPU, CPU]) == 1.0
    assert forward(2, stages=2) == forward(2, replicas=2) == forward(4, replicas=4) == 1.0 + CROWDED
    assert 1.0 < forward(8, stages=2) < forward(4, stages=2) < forward(4, replicas=3) < 1.0 + CROWDED


HANDED = 512  # bytes, of a value for the largest microbatch


@pytest.mark.parametrize(
    ("replica", "facts", "forwards", "backwards"),
    [
        (CPU, {}, [1.5, 1.0], [2.0, 2.5]),
        (GPU, {}, [1.25, 1.25], [2.25, 2.25]),  # through the host's memory
        (GPU, {"peer_access": True}, [1.0, 1.25], [2.25, 2.0]),
        (GPU | {"gpus": 1}, {}, [1.0, 1.0], [2.0, 2.0]),
    ],
)
def test_stages_take_their_time_to_pass_values_on_and_gradients_back(
    plan_of: PlanOf,
    inspection_of: InspectionOf,
    unit_of: UnitOf,
    value_of: Callable[..., ValueFacts],
    spec_of: Callable[..., JobSpec],
    replica: dict[str, Any],
    facts: dict[str, Any],
    forwards: list[float],
    backwards: list[float],
) -> None:
    """A core copies what it sends; a device what it sends and what it gets."""
    value = value_of(0, shapes={1: (HANDED // 8,), 2: (HANDED // 4,)})
    rates = {"copy_bytes_per_second": HANDED / 0.5, "link_bytes_per_second": HANDED / 0.25, "host": Host(workers=1)}
    inspection = inspection_of([unit_of(0), unit_of(1)], values=(value,), **rates, **facts)
    spec = {"batch_size": 4, "replicas": [replica | {"stages": 2, "microbatches": 2}]}
    plan = plan_of(inspection, **spec)
    seconds = {str(task): plan.task_seconds[task.id] for task in plan.graph.tasks}
    assert [seconds[f"FORWARD({stage},0)"] for stage in (0, 1)] == forwards
    assert [seconds[f"BACKWARD({stage},0)"] for stage in (0, 1)] == backwards
    measured = MeasuredCosts(PlannedJob(spec_of(**spec), plan), inspection, {})
    again = measured.of(PlannedJob(spec_of(**spec), plan))
    for task in plan.graph.tasks:
        if task.kind in (Kind.FORWARD, Kind.BACKWARD):
            assert again[task.id] == pytest.approx(plan.task_seconds[task.id], abs=1e-4), task


@given(
    sizes=st.lists(st.integers(1, 20), min_size=5, max_size=5),
    skips=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), max_size=3),
    cuts=st.sets(st.integers(1, 5), min_size=1, max_size=3),
)
def test_the_cut_counts_for_a_stage_what_its_tasks_do(
    plan_of: PlanOf,
    inspection_of: InspectionOf,
    unit_of: UnitOf,
    value_of: Callable[..., ValueFacts],
    spec_of: Callable[..., JobSpec],
    sizes: list[int],
    skips: list[tuple[int, int]],
    cuts: set[int],
) -> None:
    """Of six units on cores, some of which hand something on to later ones, too."""
    values = [value_of(n, shapes={1: (16 * size,)}) for n, size in enumerate(sizes)]
    values += [
        value_of(maker, maker + 1, 5, name=f"skip {n}", shapes={1: (16 * size,)})
        for n, (maker, size) in enumerate(skips)
    ]
    inspection = inspection_of([unit_of(n) for n in range(6)], values=tuple(values), copy_bytes_per_second=64.0)
    axes: dict[str, Any] = {"batch_size": 2, "stages": len(cuts) + 1, "split": sorted(cuts), "microbatches": 2}
    plan = plan_of(inspection, **axes)
    job, bounds = PlannedJob(spec_of(**axes), plan), [0, *sorted(cuts), 6]
    between = Handovers(values, inspection.copy_seconds(1), 0.0, [True] * (len(cuts) + 1)).between(bounds)
    for stage in range(len(cuts) + 1):
        own = [task for task in plan.graph.tasks if (task.holder.stage, task.microbatch) == (stage, 0)]
        handing = sum(job.handing(task, inspection)[1] for task in own if KINDS[task.kind].computes)
        assert handing == pytest.approx(between(stage, stage, stage + 1))


@pytest.mark.parametrize("of", [CPU, GPU])
def test_a_slower_worker_takes_longer_for_what_it_computes_and_updates(
    plan_of: PlanOf, inspection_of: InspectionOf, unit_of: UnitOf, spec_of: Callable[..., JobSpec], of: dict[str, Any]
) -> None:
    """And not for what it copies. A job on others is planned as if there were none; what was measured is corrected by
    its own speed once."""
    facts = {"copy_bytes_per_second": math.inf, "update_seconds": 2.0, "host": Host(workers=1)}
    units = [unit_of(n, 1.0, 2.0, parameter_bytes=1024) for n in range(2)]
    axes: dict[str, Any] = {"batch_size": 2, "replicas": [of | {"stages": 2, "microbatches": 2, "split": [1]}]}
    alike = inspection_of(units, **facts)
    inspection = inspection_of(units, slowness={of["device"]: (1.0, 3.0)}, **facts)
    before, after = (plan_of(each, **axes) for each in (alike, inspection))
    _, second = (worker for worker, kind in enumerate(after.workers) if kind == of["device"])
    for task, own, slower in zip(after.graph.tasks, before.task_seconds, after.task_seconds, strict=True):
        slows = task.lane.worker == second and task.kind in (Kind.FORWARD, Kind.BACKWARD, Kind.UPDATE)
        assert slower == pytest.approx(own * (3.0 if slows else 1.0)), task
    job = PlannedJob(spec_of(**axes), after)
    took = {task.id: 2 * after.task_seconds[task.id] for task in after.graph.tasks}
    one = PlannedJob(spec_of(batch_size=2, microbatches=2), plan_of(inspection, batch_size=2, microbatches=2))
    costs = MeasuredCosts(job, inspection, took).of(one)
    for task in one.plan.graph.tasks:
        if task.kind is Kind.FORWARD:
            assert costs[task.id] == pytest.approx(2 * one.plan.task_seconds[task.id], rel=1e-3)


@pytest.mark.parametrize("passed", [None, 1e-4])
def test_a_position_that_had_no_microbatch_takes_what_the_replicas_others_take(
    plan_of: PlanOf, inspection_of: InspectionOf, unit_of: UnitOf, spec_of: Callable[..., JobSpec], passed: float | None
) -> None:
    """By its kind of device alone, the slow replica would be as fast there as all are in the middle. passed: what a
    position took in a run in which it had none; None where it has no row."""
    inspection = inspection_of([unit_of(0, parameter_bytes=1024)])
    settings = {"replicas": 2, "microbatches": 6, "share": "stealing"}
    plan = plan_of(inspection, **settings)
    job = PlannedJob(spec_of(**settings), plan)
    took: dict[int, float] = {}
    for task in plan.graph.tasks:
        each = (1.0, 4.0)[task.replica or 0] * {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0}.get(task.kind, 0.0)
        had_one = task.microbatch is None or task.microbatch < (5, 2)[task.replica]
        if each and (had_one or passed):
            took[task.id] = each if had_one else passed or 0.0
    costs = MeasuredCosts(job, inspection, took).of(job)
    for replica, speed in ((0, 1.0), (1, 4.0)):
        for kind, seconds in ((Kind.FORWARD, 1.0), (Kind.BACKWARD, 2.0)):
            own = [task.id for task in plan.graph.tasks if (task.replica, task.kind) == (replica, kind)]
            assert [costs[task] for task in own] == pytest.approx([seconds * speed] * 6)
