"""Values that cross: what goes from which stage to which, over one that does not look at it too, and back."""

from __future__ import annotations

import random
import runpy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.plan.inspection import Inspection, ParameterFacts, UnitFacts, ValueFacts
from weft.plan.kinds import Kind
from weft.plan.plan import Plan, Ring, Role
from weft.plan.schedules.named import SCHEDULES
from weft.plan.worker_view import WorkerView
from weft.scheduler.planning.crossing import by_hop, crossing_values, tied_parameters

race = runpy.run_path(str(Path(__file__).with_name("racing_lanes.py")))["race"]

PlanOf = Callable[..., Plan]
InspectionOf = Callable[..., Inspection]
UnitOf = Callable[..., UnitFacts]
ValueOf = Callable[..., ValueFacts]
ParameterOf = Callable[..., ParameterFacts]

CUTS = ((0, 2), (2, 3), (3, 5), (5, 6))


@pytest.fixture
def skipping(inspection_of: InspectionOf, unit_of: UnitOf, value_of: ValueOf) -> Callable[..., Inspection]:
    """Three units; the last one reads what the first has made, too, and a mask of it."""

    def inspection(**changes: Any) -> Inspection:
        mask = value_of(0, 2, name="mask", dtype="bool", itemsize=1, differentiable=False)
        values = (value_of(0, 1, 2), mask, value_of(1, 2))
        return inspection_of([unit_of(number) for number in range(3)], values=values, **changes)

    return inspection


def rings_of(plan: Plan) -> dict[str, Ring]:
    return {ring.name: ring for ring in plan.rings if ring.crosses}


def test_a_value_crosses_to_the_stages_of_its_readers_but_its_makers_own(value_of: ValueOf) -> None:
    values = [value_of(0, 1), value_of(1, 2, 3, 4, 5), value_of(3, 4), value_of(4, 5), value_of(2, 5)]
    found = [(value.facts.maker, value.writer, value.readers) for value in crossing_values(values, CUTS)]
    assert found == [(1, 0, (1, 2, 3)), (4, 2, (3,)), (2, 1, (3,))]


def test_a_gradient_goes_from_reader_to_reader_down_to_the_maker(value_of: ValueOf) -> None:
    values = [value_of(1, 2, 5), value_of(1, 5, name="mask", differentiable=False), value_of(3, 5)]
    crossing = crossing_values(values, CUTS)
    assert [value.hops for value in crossing] == [[(3, 1), (1, 0)], [], [(3, 2)]]
    into: list[dict[int, list[str]]] = [{}, {}, {}, {}]
    for (source, target), found in by_hop(crossing).items():
        into[target][source] = [value.facts.name for value in found]
    assert into == [{1: ["1"]}, {3: ["1"]}, {3: ["3"]}, {}]


def test_the_gradient_of_a_parameter_goes_from_user_to_user_down_to_the_first(parameter_of: ParameterOf) -> None:
    """Not of one that a single stage uses, or that is not trained."""
    parameters = [parameter_of(0, 1, 3, 5), parameter_of(3, 4), parameter_of(0, 5, trained=False), parameter_of(2, 3)]
    tied = tied_parameters(parameters, CUTS)
    assert [(parameter.number, parameter.stages) for parameter in tied] == [(0, (0, 2, 3)), (3, (1, 2))]
    between = {hop: [parameter.number for parameter in found] for hop, found in by_hop(tied).items()}
    assert between == {(2, 0): [0], (2, 1): [3], (3, 2): [0]}


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_all_that_a_stage_makes_for_others_stands_in_one_ring_and_gradients_in_one_for_each_hop(
    plan_of: PlanOf, skipping: Callable[..., Inspection], schedule: str
) -> None:
    plan = plan_of(skipping(), stages=3, schedule=schedule, microbatches=4)
    assert {
        name: ([value.name for value in ring.values], ring.writer, ring.stages) for name, ring in rings_of(plan).items()
    } == {
        "activation-0-0": (["0", "mask"], 0, (1, 2)),
        "gradient-0-0": (["0"], 1, (0,)),
        "activation-0-1": (["1"], 1, (2,)),
        "gradient-0-1": (["0", "1"], 2, (1,)),
    }
    made = SCHEDULES[schedule](3, 4)
    assert {name: ring.depth for name, ring in rings_of(plan).items()} == {
        "activation-0-0": made.activation_slots(0, [1, 2]),
        "gradient-0-0": made.gradient_slots(1, 0),
        "activation-0-1": made.activation_slots(1, [2]),
        "gradient-0-1": made.gradient_slots(2, 1),
    }


def test_values_stand_in_a_slot_one_behind_the_other_each_with_the_stages_that_read_it(
    plan_of: PlanOf, skipping: Callable[..., Inspection]
) -> None:
    ring = rings_of(plan_of(skipping(), stages=3))["activation-0-0"]
    assert [(value.name, value.offset, value.num_bytes, value.stages) for value in ring.values] == [
        ("0", 0, 64, (1, 2)),
        ("mask", 64, 64, (2,)),
    ]
    assert ring.slot_bytes == 128


def test_a_gradient_that_jumps_a_stage_has_a_ring_beside_its_neighbours(
    plan_of: PlanOf, inspection_of: InspectionOf, unit_of: UnitOf, value_of: ValueOf
) -> None:
    values = (value_of(0, 1), value_of(0, 2, name="skipped"), value_of(1, 2))
    plan = plan_of(inspection_of([unit_of(number) for number in range(3)], values=values), stages=3)
    gradients = [ring for ring in plan.rings if ring.role is Role.GRADIENT]
    assert [(ring.name, [value.name for value in ring.values], ring.writer) for ring in gradients] == [
        ("gradient-0-0", ["0"], 1),
        ("gradient-0-0-2", ["skipped"], 2),
        ("gradient-0-1", ["1"], 2),
    ]


def test_integers_have_no_ring_of_gradients_and_the_stages_wait_for_one_another_all_the_same(
    plan_of: PlanOf, inspection_of: InspectionOf, unit_of: UnitOf, value_of: ValueOf
) -> None:
    values = (value_of(0, 1, dtype="int64", itemsize=8, differentiable=False),)
    plan = plan_of(inspection_of([unit_of(0), unit_of(1)], values=values), stages=2)
    assert list(rings_of(plan)) == ["activation-0-0"]
    (backward,) = [task.id for task in plan.graph.tasks if str(task) == "BACKWARD(0,0)"]
    assert {str(plan.graph.tasks[edge.source]) for edge in plan.graph.inputs(backward)} >= {"BACKWARD(1,0)"}


def test_a_slot_is_free_once_every_reader_is_done_with_it(plan_of: PlanOf, skipping: Callable[..., Inspection]) -> None:
    """In training the lowest reader is the last; in validation, where backwards wait for nothing, it may be any."""
    plan = plan_of(skipping(), stages=3, schedule="gpipe", microbatches=1)
    (forward,) = [task.id for task in plan.graph.tasks if str(task) == "FORWARD(0,0)"]
    waits = {(str(plan.graph.tasks[edge.source]), edge.distance) for edge in plan.graph.inputs(forward)}
    assert waits >= {("BACKWARD(1,0)", 1), ("BACKWARD(2,0)", 1)}


@pytest.mark.parametrize(
    ("replica", "peer_access", "memory"),
    [
        ({"stages": 3}, False, {"shared"}),
        ({"device": "gpu", "stages": 3, "gpus": 1}, True, {"device"}),
        ({"device": "gpu", "stages": 3}, True, {"peer"}),
        ({"device": "gpu", "stages": 3}, False, {"shared"}),
        ({"device": "gpu", "working_window": 1}, False, {"device"}),
    ],
)
def test_values_that_jump_stages_are_planned_on_every_kind_of_device(
    plan_of: PlanOf,
    skipping: Callable[..., Inspection],
    replica: dict[str, Any],
    peer_access: bool,
    memory: set[str],
) -> None:
    """make_plan has simulated each of them with its real depths, so none of them waits for itself."""
    for schedule in SCHEDULES:
        for microbatches in (1, 3, 5):
            settings = {"schedule": schedule, "microbatches": microbatches, "update": "cpu"}
            settings |= {} if replica.get("device") else {"update": "local"}
            plan = plan_of(skipping(peer_access=peer_access), replicas=[replica], **settings)
            rings = rings_of(plan)
            assert {ring.memory for ring in rings.values()} == memory
            assert rings["activation-0-0"].stages == (1, 2)


def test_what_two_devices_read_stands_on_none_but_the_writers(
    plan_of: PlanOf, skipping: Callable[..., Inspection]
) -> None:
    """Stages 0 and 1 are on one GPU, and stage 2, which reads from both, on another."""
    plan = plan_of(skipping(peer_access=True), replicas=[{"device": "gpu", "stages": 3, "gpus": 2}], update="cpu")
    position = {stage.stage: stage.worker for stage in plan.stages}
    assert position[0] == position[1] != position[2]
    assert {name: (ring.memory, ring.lender) for name, ring in rings_of(plan).items()} == {
        "activation-0-0": ("peer", position[0]),
        "gradient-0-0": ("device", None),
        "activation-0-1": ("peer", position[1]),
        "gradient-0-1": ("peer", position[2]),
    }


def test_every_stage_that_writes_or_reads_a_ring_has_it_in_its_view(
    plan_of: PlanOf, skipping: Callable[..., Inspection]
) -> None:
    plan = plan_of(skipping(), stages=3)
    for position in range(3):
        view = WorkerView.from_wire(WorkerView.of(plan, position).to_wire())
        expected = [ring for ring in rings_of(plan).values() if position in (ring.writer, *ring.stages)]
        assert [ring for ring in view.rings if ring.crosses] == expected


@st.composite
def values_between(draw: st.DrawFn, num_units: int) -> list[tuple[int, list[int], bool]]:
    """Maker, readers, whether it is differentiable."""
    values = []
    for maker in range(num_units - 1):
        for _ in range(draw(st.integers(0, 2))):
            readers = draw(st.sets(st.integers(maker + 1, num_units - 1), min_size=1))
            values.append((maker, sorted(readers), draw(st.booleans())))
    return values


def slots_of(rings: Sequence[Ring], kind: Kind, stage: int | None, *, training: bool) -> tuple[list[str], list[str]]:
    """(rings that a task reads, rings that it writes) as a worker does it."""
    activations = [ring for ring in rings if ring.role is Role.ACTIVATION]
    read = [ring.name for ring in activations if stage in ring.stages]
    gradients = [ring for ring in rings if ring.role is Role.GRADIENT]
    match kind:
        case Kind.FORWARD:
            return read, [ring.name for ring in activations if ring.writer == stage]
        case Kind.BACKWARD | Kind.INPUT | Kind.WEIGHT if training:
            came = [ring.name for ring in gradients if stage in ring.stages]
            written = [ring.name for ring in gradients if ring.writer == stage and kind is not Kind.WEIGHT]
            return [*read, *came], written
    return [], []


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    stages=st.integers(2, 5),
    microbatches=st.integers(1, 4),
    schedule=st.sampled_from(sorted(SCHEDULES)),
    phases=st.lists(st.booleans(), min_size=3, max_size=7),
    rng=st.randoms(use_true_random=False),
)
def test_every_reader_finds_its_own_microbatch_in_the_slot_however_the_lanes_race(
    plan_of: PlanOf,
    inspection_of: InspectionOf,
    unit_of: UnitOf,
    value_of: ValueOf,
    data: st.DataObject,
    stages: int,
    microbatches: int,
    schedule: str,
    phases: list[bool],
    rng: random.Random,
) -> None:
    values = tuple(
        value_of(maker, *readers, name=f"{number}", differentiable=differentiable)
        for number, (maker, readers, differentiable) in enumerate(data.draw(values_between(stages)))
    )
    inspection = inspection_of([unit_of(number) for number in range(stages)], values=values)
    plan = plan_of(inspection, stages=stages, microbatches=microbatches, schedule=schedule)
    rings = list(rings_of(plan).values())
    race(plan, phases, rng, lambda task, training: slots_of(rings, task.kind, task.stage, training=training))
