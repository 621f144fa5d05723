"""In which order lanes take the buckets, and where a forward is in parts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from weft.plan.graph import Lane
from weft.plan.inspection import Inspection, ParameterFacts, UnitFacts
from weft.plan.kinds import KINDS, MODE_INDEX, Kind
from weft.plan.plan import Plan
from weft.plan.rows import Row
from weft.plan.schedules.planned import grid_of_rows, planned_grid
from weft.scheduler.planning.outlook import gradient_milestones
from weft.scheduler.planning.simulator import simulate

PlanOf = Callable[..., Plan]
InspectionOf = Callable[..., Inspection]
UnitOf = Callable[..., UnitFacts]
ParameterOf = Callable[..., ParameterFacts]

GPU = {"device": "gpu"}
SIZE = 0.004  # MiB: as one unit's parameters
LINK = 1 << 30  # bytes a second: a GPU's, which has memory of its own


@pytest.fixture
def plan_of(plan_of: PlanOf) -> PlanOf:
    return partial(plan_of, waits="layer")


@pytest.fixture
def six_of(inspection_of: InspectionOf, unit_of: UnitOf) -> Callable[..., Inspection]:
    """Six like units, each with a bucket: a second of forward, two of backward. Copies take next to nothing."""
    units = [unit_of(number, 1.0, 2.0, parameter_bytes=4000) for number in range(6)]
    return lambda **facts: inspection_of(units, **facts)


def order(plan: Plan, kind: Kind, lane: str) -> list[int | None]:
    """Buckets, in that of the lane's tasks of the kind."""
    programs = {str(each): program for each, program in plan.graph.programs.items()}
    tasks = [plan.graph.tasks[task] for task in programs[lane]]
    return [task.bucket for task in tasks if task.kind is kind]


def forwards(plan: Plan) -> dict[str, list[str]]:
    """Of the first stage, the parts of its first forward, and what each waits for of the iteration before."""
    graph = plan.graph
    return {
        str(task): [str(graph.tasks[edge.source]) for edge in graph.inputs(task.id) if edge.distance == 1]
        for task in graph.tasks
        if task.kind is Kind.FORWARD and task.holder == (0, 0) and task.microbatch == 0
    }


def test_an_owner_takes_buckets_as_they_come_while_it_keeps_up_and_then_what_is_read_first(
    plan_of: PlanOf, six_of: Callable[..., Inspection]
) -> None:
    """Gradients come every two seconds. One of two seconds is done when the next one comes; of four, a second one is
    there by then."""
    told = {"replicas": [GPU], "update": "cpu", "bucket_mib": SIZE}
    fast, slow = (plan_of(six_of(update_seconds=s, link_bytes_per_second=LINK), **told) for s in (11.0, 24.0))
    assert order(fast, Kind.UPDATE, "0/sync") == [0, 1, 2, 3, 4, 5]
    assert list(forwards(fast)) == ["FORWARD(0,0)"], "when the last is there all are"
    assert order(slow, Kind.UPDATE, "0/sync") == order(slow, Kind.UP, "1/h2d") == [0, 2, 4, 5, 3, 1]
    assert forwards(slow) == {
        "FORWARD(0,0,b3)": ["UP(0,b5)", "UP(0,b4)"],
        "FORWARD(0,0,b1)": ["UP(0,b3)", "UP(0,b2)"],
        "FORWARD(0,0)": ["UP(0,b1)", "UP(0,b0)"],
    }


def test_one_that_wants_the_memory_of_the_backward_takes_more_of_them_as_they_come(
    plan_of: PlanOf, six_of: Callable[..., Inspection]
) -> None:
    plan = plan_of(six_of(update_seconds=24.0), replicas=[GPU], update="cpu", bucket_mib=SIZE)
    assert order(plan, Kind.UPDATE, "0/sync") == [0, 1, 2, 4, 5, 3]


@pytest.mark.parametrize("pace", [1.0, 1.5, 2.0, 2.5, 3.0])
def test_that_gains_too_where_a_backward_takes_longer_beside_updates_than_it_was_told(
    plan_of: PlanOf, inspection_of: InspectionOf, unit_of: UnitOf, pace: float
) -> None:
    """The wide layers of benchmarks/overlap.py: of 44 ms of backward in place of 19 the owner stood for 20, waiting for
    what it was to take first, and an iteration took 9 % longer than without parts."""
    units = [unit_of(number, 1.1, 2.4, parameter_bytes=4000) for number in range(8)]
    inspection = inspection_of(units, update_seconds=72.0)
    seconds = {}
    for waits in ("stage", "layer"):
        plan = plan_of(inspection, replicas=[GPU], update="cpu", bucket_mib=SIZE, waits=waits)
        parts = zip(plan.graph.tasks, plan.task_seconds, strict=True)
        takes = [each * pace if task.kind is Kind.BACKWARD else each for task, each in parts]
        milestones = gradient_milestones(plan, inspection)
        seconds[waits] = simulate(plan, takes, milestones=milestones).iteration_seconds
    assert seconds["layer"] < 0.98 * seconds["stage"]


def test_updates_that_wait_for_the_norm_come_in_the_order_of_reading(
    plan_of: PlanOf, six_of: Callable[..., Inspection]
) -> None:
    plan = plan_of(six_of(update_seconds=1.0), replicas=2, clip_norm=1.0, bucket_mib=SIZE)
    assert order(plan, Kind.SYNC, "0/sync") == [0, 1, 2, 3, 4, 5]
    assert order(plan, Kind.UPDATE, "0/sync") == order(plan, Kind.UPDATE, "1/sync") == [5, 4, 3, 2, 1, 0]
    assert forwards(plan)["FORWARD(0,0,b2)"] == ["UPDATE(o0,b3)", "UPDATE(o1,b3)"]


def test_what_a_validate_ends_is_all_there_at_once_and_its_copies_come_in_the_order_of_reading(
    plan_of: PlanOf, six_of: Callable[..., Inspection]
) -> None:
    told = {"clip_norm": 1.0, "bucket_mib": SIZE}
    pipeline = plan_of(six_of(update_seconds=24.0), replicas=2, stages=2, split=[3], **told)
    assert list(forwards(pipeline)) == ["FORWARD(0,0)"]
    copied = six_of(update_seconds=24.0, link_bytes_per_second=4000)  # a bucket a second
    offload = plan_of(copied, replicas=[GPU], update="cpu", **told)
    assert order(offload, Kind.UPDATE, "0/sync") == [0, 1, 2, 3, 4, 5]
    assert order(offload, Kind.UP, "1/h2d") == [5, 4, 3, 2, 1, 0]
    assert len(forwards(offload)) == 6


def test_a_bucket_without_elements_has_no_owner_and_its_copy_nothing_to_wait_for(
    plan_of: PlanOf, inspection_of: InspectionOf, unit_of: UnitOf
) -> None:
    """Of a unit whose only parameter is empty: such a model was refused with a failure of the planner's."""
    units = [unit_of(number, 1.0, 2.0, parameter_bytes=size) for number, size in enumerate((4000, 0, 4000))]
    plan = plan_of(inspection_of(units, update_seconds=24.0), replicas=[GPU], update="cpu", bucket_mib=1e-6)
    assert order(plan, Kind.UP, "1/h2d")[0] == 1


BY_STAGE: list[dict[str, Any]] = [
    {"waits": "stage"},
    {"sync": "coarse"},
    {"staleness": 1},
    {"share": "stealing", "microbatches": 2},
    {"schedule": "dynamic", "stages": 2, "split": [3], "microbatches": 2},
]


@pytest.mark.parametrize("told", BY_STAGE, ids=str)
def test_where_a_forward_waits_for_all_lanes_take_buckets_as_they_come(
    plan_of: PlanOf, six_of: Callable[..., Inspection], told: dict[str, Any]
) -> None:
    plan = plan_of(six_of(update_seconds=24.0), replicas=2, clip_norm=1.0, bucket_mib=SIZE, **told)
    assert not any(task.goes_on for task in plan.graph.tasks)
    for lane in plan.graph.programs:
        buckets = order(plan, Kind.UPDATE, str(lane))
        assert buckets == sorted(buckets, key=int)  # type: ignore[arg-type]  # each has a bucket


def test_no_part_is_shorter_than_a_task_is_worth_and_none_begins_where_the_model_is_not_cut(
    plan_of: PlanOf, inspection_of: InspectionOf, unit_of: UnitOf
) -> None:
    """What a part that is too short would have waited for the one before it does; what a unit reads before which the
    model cannot be cut is waited for where it can be."""
    units = [unit_of(n, 1e-6 if n == 2 else 1.0, 2.0, parameter_bytes=4000) for n in range(6)]
    inspection = inspection_of(units, update_seconds=24.0, cut_problems={5: "it is beside the fourth"})
    plan = plan_of(inspection, replicas=2, clip_norm=1.0, bucket_mib=SIZE)
    own = {name: [each for each in sources if "o0" in each] for name, sources in forwards(plan).items()}
    assert own == {
        "FORWARD(0,0,b4)": ["UPDATE(o0,b5)"],
        "FORWARD(0,0,b3)": ["UPDATE(o0,b4)"],
        "FORWARD(0,0,b1)": ["UPDATE(o0,b3)", "UPDATE(o0,b2)"],
        "FORWARD(0,0)": ["UPDATE(o0,b1)", "UPDATE(o0,b0)"],
    }


def test_a_parameter_of_several_units_is_waited_for_where_the_first_reads_it(
    plan_of: PlanOf, six_of: Callable[..., Inspection], parameter_of: ParameterOf
) -> None:
    own = [parameter_of(number, num_elements=1000) for number in range(1, 5)]
    inspection = six_of(update_seconds=24.0, parameters=(parameter_of(0, 5, num_elements=1000), *own))
    plan = plan_of(inspection, replicas=2, clip_norm=1.0, bucket_mib=SIZE)
    assert plan.synchronisation is not None
    (tied,) = [part for part in plan.synchronisation.buckets if part.places[0].parameter == 0]
    assert forwards(plan)["FORWARD(0,0,b3)"][0] == f"UPDATE(o0,b{tied.index})"


@pytest.mark.parametrize("told", [{"clip_norm": 1.0, "replicas": 2}, {"replicas": [GPU], "update": "cpu"}], ids=str)
def test_the_simulator_has_the_next_forward_beside_the_updates_of_later_layers(
    plan_of: PlanOf, six_of: Callable[..., Inspection], told: dict[str, Any]
) -> None:
    inspection = six_of(update_seconds=24.0, link_bytes_per_second=LINK)
    by_stage, by_layer = (plan_of(inspection, bucket_mib=SIZE, waits=waits, **told) for waits in ("stage", "layer"))
    took, takes = (simulate(each, milestones=gradient_milestones(each, inspection)) for each in (by_stage, by_layer))
    assert takes.iteration_seconds < 0.9 * took.iteration_seconds
    assert by_layer.limit_seconds < by_stage.limit_seconds
    assert sum(by_layer.task_seconds) == pytest.approx(sum(by_stage.task_seconds)), "parts are no more work"


# --- where the job does not say

GPU_OF_HOST: dict[str, Any] = {"replicas": [GPU], "update": "cpu", "bucket_mib": SIZE}


def is_by_layer(plan: Plan) -> bool:
    told = [note for note in plan.notes if note.startswith("waits: by layer")]
    is_in_parts = any(task.goes_on for task in plan.graph.tasks)
    assert bool(told) is is_in_parts
    return is_in_parts


def test_by_default_a_forward_is_in_parts_where_another_workers_updates_would_hold_it_up(
    plan_of: PlanOf, six_of: Callable[..., Inspection]
) -> None:
    clipped = GPU_OF_HOST | {"clip_norm": 1.0}
    slow_updates, fast = (six_of(update_seconds=seconds, link_bytes_per_second=LINK) for seconds in (24.0, 1.0))
    slow_copies = six_of(update_seconds=1.0, link_bytes_per_second=4000)
    for inspection, told in ((slow_updates, GPU_OF_HOST), (slow_copies, clipped)):
        by_default, by_layer = (plan_of(inspection, waits=waits, **told) for waits in (None, "layer"))
        assert is_by_layer(by_default)
        assert by_default.graph == by_layer.graph
        assert by_default.predicted_iteration_seconds == by_layer.predicted_iteration_seconds
    assert "12% less" in plan_of(slow_updates, waits=None, **GPU_OF_HOST).notes[-1]
    assert not is_by_layer(plan_of(fast, waits=None, **GPU_OF_HOST)), "all are there in time"
    assert not is_by_layer(plan_of(slow_updates, waits=None, **clipped)), "all come at once"


BY_STAGE_BY_DEFAULT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "who updates beside its own forward": (
        {},
        {"replicas": [{"device": "gpu"}, {"device": "cpu"}], "clip_norm": 1.0, "bucket_mib": SIZE},
    ),
    "replicas of the host": (
        {"link_bytes_per_second": None},
        {"replicas": 2, "clip_norm": 1.0, "bucket_mib": SIZE},
    ),
    "a stand-in": ({"link_bytes_per_second": None}, GPU_OF_HOST),
    "a parameter in other hands": ({"loose_parameter": "0.weight"}, GPU_OF_HOST),
    "compiled units": ({}, GPU_OF_HOST | {"compile": True}),
    "asked for": ({}, GPU_OF_HOST | {"waits": "stage"}),
}


@pytest.mark.parametrize("name", BY_STAGE_BY_DEFAULT)
def test_by_default_it_is_whole_where_parts_would_gain_nothing_or_a_read_might_not_be_seen(
    plan_of: PlanOf, six_of: Callable[..., Inspection], name: str
) -> None:
    facts, told = BY_STAGE_BY_DEFAULT[name]
    inspection = six_of(update_seconds=24.0, **{"link_bytes_per_second": LINK} | facts)
    assert not any(task.goes_on for task in plan_of(inspection, **{"waits": None} | told).graph.tasks)
    if told.get("waits") != "stage":
        assert any(task.goes_on for task in plan_of(inspection, **told | {"waits": "layer"}).graph.tasks)


def test_a_schedule_and_its_grid_have_a_forward_in_parts_as_one_pass(
    plan_of: PlanOf, six_of: Callable[..., Inspection]
) -> None:
    told = {"replicas": 2, "clip_norm": 1.0, "bucket_mib": SIZE, "microbatches": 2}
    by_stage, by_layer = (plan_of(six_of(update_seconds=24.0), waits=waits, **told) for waits in ("stage", "layer"))
    assert any(task.goes_on for task in by_layer.graph.tasks)
    assert planned_grid(by_layer) == planned_grid(by_stage)
    rows: dict[Lane, list[Row]] = {lane: [] for lane in by_layer.graph.programs}
    for task in by_layer.graph.tasks:
        mode = MODE_INDEX[KINDS[task.kind].mode]
        rows[task.lane].append((mode, task.id, 3, -1, task.id, task.id + 1))
    assert grid_of_rows(by_layer, rows) == planned_grid(by_stage)
