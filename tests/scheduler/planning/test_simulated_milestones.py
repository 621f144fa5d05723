"""Milestones posted from inside a task, in virtual time: what waits for one starts before the task has ended."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from weft.plan.inspection import Inspection, ParameterFacts, UnitFacts
from weft.plan.kinds import Kind
from weft.plan.plan import Plan
from weft.scheduler.planning.costs import mean_seconds
from weft.scheduler.planning.limit import speed_limit
from weft.scheduler.planning.simulator import Simulation, simulate

PlanOf = Callable[..., Plan]
MIB = 1 << 18  # elements of float32


@pytest.fixture
def plan(plan_of: PlanOf, inspection_of: Callable[..., Inspection], unit_of: Callable[..., UnitFacts]) -> Plan:
    """Two replicas of one stage; backward takes 4 s and completes one bucket in its middle, one at its end."""
    parameters = tuple(
        ParameterFacts(units=(unit,), num_elements=MIB, dtype="float32", itemsize=4, trained=True, group=0)
        for unit in range(2)
    )
    inspection = inspection_of([unit_of(0), unit_of(1)], parameters=parameters, copy_bytes_per_second=float(1 << 22))
    return plan_of(inspection, replicas=2, bucket_mib=1.0)


def times(plan: Plan, simulation: Simulation, kind: Kind, bucket: int, iteration: int) -> tuple[float, float]:
    (task, *_) = [task.id for task in plan.graph.tasks if task.kind is kind and bucket in (task.bucket, -1)]
    (span,) = [s for spans in simulation.spans.values() for s in spans if (s.task, s.iteration) == (task, iteration)]
    return span.start, span.end


def milestones(plan: Plan, part: float) -> dict[int, dict[int, float]]:
    """Bucket 0 after that part of its replica's backward."""
    backward = {task.replica: task.id for task in plan.graph.tasks if task.kind is Kind.BACKWARD}
    grads = [task for task in plan.graph.tasks if task.kind is Kind.GRAD and task.bucket == 0]
    return {backward[task.replica]: {task.id: part} for task in grads}


def test_sync_starts_when_the_milestone_is_posted_inside_backward(plan: Plan) -> None:
    simulation = simulate(plan, milestones=milestones(plan, 0.5))
    for iteration in range(3):
        begin, end = times(plan, simulation, Kind.BACKWARD, -1, iteration)
        assert times(plan, simulation, Kind.SYNC, 0, iteration)[0] == pytest.approx((begin + end) / 2)
        assert times(plan, simulation, Kind.SYNC, 1, iteration)[0] >= end, "its milestone comes in the lane's order"


def test_without_milestones_inside_sync_waits_for_the_end_of_backward(plan: Plan) -> None:
    simulation = simulate(plan)
    assert times(plan, simulation, Kind.SYNC, 0, 2)[0] == times(plan, simulation, Kind.BACKWARD, -1, 2)[1]
    assert simulation.iteration_seconds > simulate(plan, milestones=milestones(plan, 0.5)).iteration_seconds


def test_a_milestone_at_the_end_of_its_task_changes_nothing(plan: Plan) -> None:
    assert simulate(plan, milestones=milestones(plan, 1.0)).spans == simulate(plan).spans


@pytest.mark.parametrize("part", [0.0, 0.25, 0.5, 1.0])
def test_no_iteration_is_shorter_than_the_limit_wherever_milestones_are_posted(plan: Plan, part: float) -> None:
    """`weft plan` once told an iteration of 0.28 ms, and that none is shorter than 0.31 ms: the limit had gradients
    complete at the ends of backwards only."""
    inside = milestones(plan, part)
    simulated = simulate(plan, milestones=inside, iterations=12).iteration_seconds
    limit = speed_limit(plan.graph, mean_seconds(plan), inside).seconds
    assert limit <= simulated * (1 + 1e-9)
    if part == 1.0:
        assert limit == speed_limit(plan.graph, mean_seconds(plan)).seconds


def test_a_cycle_through_a_milestone_has_the_part_of_the_task_that_comes_before_it(
    plan_of: PlanOf, inspection_of: Callable[..., Inspection], unit_of: Callable[..., UnitFacts]
) -> None:
    """Forward 1 s, half of a backward 1 s, and the sums and updates of the only bucket."""
    plan = plan_of(inspection_of([unit_of(0, 1.0, 2.0)], update_seconds=8.0), replicas=2)
    inside = milestones(plan, 0.5)
    whole, half = (speed_limit(plan.graph, mean_seconds(plan), given).seconds for given in (None, inside))
    assert whole - half == pytest.approx(1.0)
    assert half == pytest.approx(simulate(plan, milestones=inside).iteration_seconds)
