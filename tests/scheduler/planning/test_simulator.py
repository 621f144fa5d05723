"""Plans in virtual time: what is predicted, and which plans are proven not to run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.plan.graph import Edge, Graph, GraphError, Lane
from weft.plan.inspection import Inspection, UnitFacts
from weft.plan.kinds import KINDS, Cause, Kind
from weft.plan.plan import Plan
from weft.scheduler.planning.simulator import Simulation, SimulationError, Span, simulate

PlanOf = Callable[..., Plan]
SHAPES = [(1, 1), (1, 4), (2, 1), (2, 4), (3, 6), (4, 8)]


@pytest.fixture
def even_plan_of(
    plan_of: PlanOf, inspection_of: Callable[..., Inspection], unit_of: Callable[..., UnitFacts]
) -> PlanOf:
    """Of like units, one in each stage, with samples enough for microbatches of one size."""

    def plan(*, stages: int, **settings: Any) -> Plan:
        inspection = inspection_of([unit_of(number) for number in range(stages)], num_train=840)
        return plan_of(inspection, stages=stages, **settings)

    return plan


def orders(simulation: Simulation) -> dict[Lane, list[tuple[int, int]]]:
    return {lane: [(span.iteration, span.task) for span in spans] for lane, spans in simulation.spans.items()}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "microbatches"), SHAPES)
def test_a_balanced_plan_reaches_its_limit(even_plan_of: PlanOf, stages: int, microbatches: int, schedule: str) -> None:
    plan = even_plan_of(stages=stages, microbatches=microbatches, schedule=schedule)
    assert plan.predicted_iteration_seconds == pytest.approx(plan.limit_seconds, rel=1e-9)
    assert plan.limit_seconds == pytest.approx(3 * (microbatches + stages - 1)), "a flush: the bubble is S - 1"


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (1, 4), (2, 4), (3, 6), (4, 8)])
def test_a_plan_with_backwards_in_two_parts_reaches_its_limit_with_the_formulas_bubble(
    even_plan_of: PlanOf, stages: int, microbatches: int
) -> None:
    plan = even_plan_of(stages=stages, microbatches=microbatches, schedule="zero-bubble")
    assert plan.predicted_iteration_seconds == pytest.approx(plan.limit_seconds, rel=1e-9)
    forward, backward, weights = 1, 2, 1
    bubble = (stages - 1) * (forward + backward - 2 * weights)
    assert plan.limit_seconds == pytest.approx(microbatches * (forward + backward) + bubble)


def test_the_slowest_lane_limits_a_plan_whose_data_come_slowly(
    plan_of: PlanOf, inspection_of: Callable[..., Inspection], unit_of: Callable[..., UnitFacts]
) -> None:
    plan = plan_of(inspection_of([unit_of(0)], load_seconds=5.0), microbatches=2)
    assert plan.predicted_iteration_seconds == pytest.approx(10.0)
    assert plan.limit_seconds == pytest.approx(10.0)
    assert plan.limit_cycle == "LOAD(0,0) → LOAD(0,1)"


@pytest.fixture
def loaded_in(
    plan_of: PlanOf, inspection_of: Callable[..., Inspection], unit_of: Callable[..., UnitFacts]
) -> Callable[[float, int, int], Plan]:
    """A plan, by the seconds that a microbatch takes to load, the microbatches and the loaders."""

    def made(seconds: float, microbatches: int, loaders: int) -> Plan:
        inspection = inspection_of([unit_of(0)], load_seconds=seconds)
        return plan_of(inspection, microbatches=microbatches, loaders=loaders, batch_size=6)

    return made


@pytest.mark.parametrize("microbatches", [1, 2, 3])
@pytest.mark.parametrize("loaders", [1, 2, 3, 4, 5])
def test_no_iteration_is_predicted_shorter_than_the_limit_where_loaders_take_turns(
    loaded_in: Callable[[float, int, int], Plan], microbatches: int, loaders: int
) -> None:
    """Four iterations of a job with three loaders took as long as three, since a round's batches come together."""
    plan = loaded_in(60.0, microbatches, loaders)
    assert simulate(plan).iteration_seconds == pytest.approx(plan.limit_seconds, rel=0.02)


@pytest.mark.parametrize(("microbatches", "loaders"), [(2, 2), (1, 2), (3, 2), (2, 3)])
def test_more_loaders_share_what_comes_slowly(
    loaded_in: Callable[[float, int, int], Plan], microbatches: int, loaders: int
) -> None:
    plan = loaded_in(5.0, microbatches, loaders)
    assert plan.limit_seconds == pytest.approx(max(5.0 / loaders, 3.0) * microbatches)
    count = 8 * loaders
    simulation = simulate(plan, iterations=count)
    loads = [span for lane, spans in simulation.spans.items() if lane.name == "load" for span in spans]
    assert sum(span.end > span.start for span in loads) == count * microbatches, "each is loaded once"
    assert simulation.seconds / count < 1.25 * plan.limit_seconds + 1.0


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_window_changes_neither_the_order_nor_the_time(plan_of: PlanOf, schedule: str) -> None:
    settings = {"stages": 3, "microbatches": 4, "schedule": schedule}
    central, ahead = simulate(plan_of(window=1, **settings)), simulate(plan_of(**settings))
    assert orders(central) == orders(ahead)
    assert central.seconds == ahead.seconds
    assert all(orders(ahead).values())


def random_plan(draw: Callable[..., Any], plan_of: PlanOf) -> tuple[Plan, list[float]]:
    plan = plan_of(
        stages=draw(st.integers(1, 3)),
        microbatches=draw(st.integers(1, 4)),
        schedule=draw(st.sampled_from(["gpipe", "1f1b", "zero-bubble"])),
        window=draw(st.none() | st.integers(1, 5)),
    )
    count = len(plan.graph.tasks)
    return plan, draw(st.lists(st.integers(0, 9).map(float), min_size=count, max_size=count))


@settings(max_examples=40)
@given(data=st.data())
def test_every_task_starts_after_its_inputs_and_each_lane_runs_one_at_a_time(
    plan_of: PlanOf, data: st.DataObject
) -> None:
    plan, seconds = random_plan(data.draw, plan_of)
    simulation = simulate(plan, seconds, iterations=5)
    spans = {(span.iteration, span.task): span for lane in simulation.spans.values() for span in lane}
    assert spans.keys() == {(i, task.id) for i in range(5) for task in plan.graph.tasks if not KINDS[task.kind].seldom}
    for lane in simulation.spans.values():
        assert all(a.end <= b.start for a, b in pairwise(lane))
    for (iteration, task), span in spans.items():
        for edge in plan.graph.inputs(task):
            if edge.distance <= iteration:
                assert spans[iteration - edge.distance, edge.source].end <= span.start


@settings(max_examples=40)
@given(data=st.data())
def test_no_slot_is_written_before_its_last_reader_is_done(plan_of: PlanOf, data: st.DataObject) -> None:
    """The edges that hand slots back, checked by what they are for: whatever the tasks cost, no write overtakes."""
    plan, seconds = random_plan(data.draw, plan_of)
    last = len(plan.stages) - 1
    simulation = simulate(plan, seconds, iterations=5)
    ids = {(task.kind, task.stage, task.microbatch): task.id for task in plan.graph.tasks}
    spans = {(span.iteration, span.task): span for lane in simulation.spans.values() for span in lane}

    def span_of(part: Kind, stage: int, number: int) -> Span:
        """part: of a backward in two; of one in one, or of anything else, the whole."""
        iteration, microbatch = divmod(number, plan.microbatches)
        whole = Kind.BACKWARD if part in (Kind.INPUT, Kind.WEIGHT) else part
        return spans[iteration, ids.get((part, stage, microbatch), ids.get((whole, stage, microbatch), -1))]

    for ring in plan.rings:
        name, _, *boundary = ring.name.split("-")
        stage = int(boundary[0]) if boundary else 0
        writer, readers = {
            "input": ((Kind.LOAD, 0), [(Kind.FORWARD, 0), (Kind.WEIGHT, 0)]),
            "target": ((Kind.LOAD, 0), [(Kind.FORWARD, last), (Kind.WEIGHT, last)]),
            "activation": ((Kind.FORWARD, stage), [(Kind.WEIGHT, stage + 1)]),
            "gradient": ((Kind.INPUT, stage + 1), [(Kind.INPUT, stage)]),
        }[name]
        for number in range(ring.depth, 5 * plan.microbatches):
            for reader in readers:
                assert span_of(*reader, number - ring.depth).end <= span_of(*writer, number).start, ring.name


@pytest.mark.parametrize("sync", ["coarse", "fine"])
def test_fine_synchronisation_begins_in_the_bubbles_of_the_pipeline_and_coarse_after_them(
    plan_of: PlanOf, inspection_of: Callable[..., Inspection], unit_of: Callable[..., UnitFacts], sync: str
) -> None:
    """Of two pipelines the last stages' gradients are there a forward and a backward before the first stages' are."""
    inspection = inspection_of([unit_of(n, parameter_bytes=1024) for n in range(2)], copy_bytes_per_second=1024.0)
    plan = plan_of(inspection, replicas=2, stages=2, microbatches=2, bucket_mib=1e-3, sync=sync)
    simulation = simulate(plan, iterations=1)
    spans = {plan.graph.tasks[span.task]: span for lane in simulation.spans.values() for span in lane}
    last_backward = max(span.end for task, span in spans.items() if task.kind is Kind.BACKWARD)
    starts = {task.bucket: span.start for task, span in spans.items() if task.kind is Kind.SYNC}
    assert (starts[0] < last_backward) is (sync == "fine")
    assert starts[1] >= last_backward


def test_staleness_takes_a_slow_update_out_of_the_iteration(
    plan_of: PlanOf, inspection_of: Callable[..., Inspection], unit_of: Callable[..., UnitFacts]
) -> None:
    """A device that computes for 3 s, and a host that updates for 3 s: in turn, or at the same time."""
    inspection = inspection_of([unit_of(0, parameter_bytes=1024)], update_seconds=3.0, copy_bytes_per_second=1e12)
    replicas = [{"device": "gpu"}]
    seconds = [
        plan_of(inspection, replicas=replicas, update="cpu", staleness=staleness).predicted_iteration_seconds
        for staleness in (0, 1)
    ]
    assert seconds == pytest.approx([6.0, 3.0])


def with_a_ring_of_one_slot(plan: Plan) -> Plan:
    """GPipe's first stage must run all its forwards before the second has freed a slot: one slot is too few."""
    ids = {(task.kind, task.stage, task.microbatch): task.id for task in plan.graph.tasks}
    edge = Edge(ids[Kind.BACKWARD, 1, 0], ids[Kind.FORWARD, 0, 1], 0, Cause.SLOT)
    graph = Graph(plan.graph.tasks, (*plan.graph.edges, edge), plan.graph.programs)
    return dataclasses.replace(plan, graph=graph)


def test_a_plan_with_too_few_slots_stops_and_says_who_waits_for_what(plan_of: PlanOf) -> None:
    plan = with_a_ring_of_one_slot(plan_of(stages=2, microbatches=2, schedule="gpipe"))
    with pytest.raises(SimulationError) as caught:
        simulate(plan)
    text = str(caught.value)
    assert text.startswith("the plan stops at 2 s: ")
    assert "0/compute is at FORWARD(0,1) and waits for BACKWARD(1,0)" in text
    assert "1/compute is at FORWARD(1,1) and waits for FORWARD(0,1)" in text
    with pytest.raises(GraphError, match=r"the plan deadlocks: .*FORWARD") as cycle:
        plan.graph.check()
    assert "BACKWARD(1,0)" in str(cycle.value)


def test_one_slot_is_enough_where_the_schedule_takes_turns(plan_of: PlanOf) -> None:
    """The same edge under 1F1B's order costs time and no deadlock."""
    plan = plan_of(stages=2, microbatches=2, schedule="1f1b")
    slow = with_a_ring_of_one_slot(plan)
    slow.graph.check()
    assert simulate(slow).iteration_seconds > simulate(plan).iteration_seconds


def test_a_task_of_a_plan_takes_the_time_that_is_given_for_it(plan_of: PlanOf) -> None:
    plan = plan_of(stages=1, microbatches=1, recovery="off")
    seconds = [
        {Kind.LOAD: 0.0, Kind.FORWARD: 1.0, Kind.BACKWARD: 4.0, Kind.UPDATE: 0.5}[t.kind] for t in plan.graph.tasks
    ]
    simulation = simulate(plan, seconds, iterations=2)
    compute = simulation.spans[Lane(0, "compute")]
    assert [(span.start, span.end) for span in compute] == [
        (0, 1),
        (1, 5),
        (5, 5.5),
        (5.5, 6.5),
        (6.5, 10.5),
        (10.5, 11),
    ]
    assert simulation.seconds == 11
    assert simulation.iteration_seconds == pytest.approx(5.5)
