"""How long each replica takes for its part, from stamped rows; times here are milliseconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from weft.plan.graph import backward, forward, forward_until, update
from weft.plan.inspection import Inspection, UnitFacts
from weft.plan.plan import Plan
from weft.scheduler.adapting.replica_pace import MIN_ITERATIONS, ReplicaPace

PlanOf = Callable[..., Plan]
MS = 1_000_000


@pytest.fixture
def plan(plan_of: PlanOf) -> Plan:
    return plan_of(replicas=2, microbatches=2, share="adaptive", steps=20)


def run(
    pace: ReplicaPace,
    plan: Plan,
    index: int,
    *,
    seconds: float = 0.1,
    units: tuple[int, int] = (4, 4),
    granted: dict[int, list[int]] | None = None,
    **changes: Any,
) -> None:
    """Replica 0 works 10 ms, replica 1 works 40, with a gap; updates take 5 and hide behind nothing."""
    rows, tasks = [], plan.graph.by_key()
    for replica, end in ((0, 10), (1, 40)):
        rows.append((0, tasks[forward(replica, 0, 0)].id, index, -1, 0, 3 * MS))
        rows.append((0, tasks[backward(replica, 0, 1)].id, index, -1, (end - 2) * MS, end * MS))
    rows.append((0, tasks[update(0, 0)].id, index, -1, 40 * MS, 45 * MS))
    pace.add(rows, granted)
    iteration = plan.itinerary.at(index)
    pace.finish(replace(iteration, **{"training": True, "size": 8} | changes), units, seconds)


def test_a_replicas_time_is_from_its_first_forward_to_its_last_backward(plan: Plan) -> None:
    pace = ReplicaPace(plan)
    for iteration in range(MIN_ITERATIONS):
        run(pace, plan, iteration)
    measured = pace.take()
    assert measured is not None
    assert measured.unit_seconds == pytest.approx((0.0025, 0.01))
    assert measured.iteration_seconds == pytest.approx(0.1)
    assert measured.fixed_seconds == pytest.approx(0.005)


def test_what_a_forward_waits_inside_for_parameters_is_no_work_of_the_replicas(
    plan_of: PlanOf, inspection_of: Callable[..., Inspection], unit_of: Callable[..., UnitFacts]
) -> None:
    inspection = inspection_of([unit_of(number, parameter_bytes=4000) for number in range(2)], update_seconds=1.0)
    settings = {"replicas": 2, "clip_norm": 1.0, "bucket_mib": 0.004, "share": "adaptive", "waits": "layer"}
    plan = plan_of(inspection, steps=20, **settings)
    pace, tasks = ReplicaPace(plan), plan.graph.by_key()
    parts = [tasks[forward_until(0, 0, 0, 0)], tasks[forward(0, 0, 0)]]
    for index in range(MIN_ITERATIONS):
        rows = [(0, parts[0].id, index, -1, 0, 3 * MS), (0, parts[1].id, index, -1, 8 * MS, 10 * MS)]
        pace.add([*rows, (0, tasks[backward(0, 0, 0)].id, index, -1, 10 * MS, 13 * MS)])
        pace.finish(replace(plan.itinerary.at(index), training=True, size=8), (4, 4), 0.1)
    measured = pace.take()
    assert measured is not None
    assert measured.unit_seconds[0] == pytest.approx(0.002), "8 ms of 13, for 4 samples"


def test_updates_that_computation_hides_cost_nothing(plan: Plan) -> None:
    pace = ReplicaPace(plan)
    for iteration in range(MIN_ITERATIONS):
        run(pace, plan, iteration, seconds=0.041)
    measured = pace.take()
    assert measured is not None
    assert measured.fixed_seconds == pytest.approx(0.001)


def test_too_few_iterations_say_nothing(plan: Plan) -> None:
    pace = ReplicaPace(plan)
    for iteration in range(MIN_ITERATIONS - 1):
        run(pace, plan, iteration)
    assert pace.take() is None
    run(pace, plan, MIN_ITERATIONS)
    assert pace.take() is not None
    assert pace.take() is None


def test_iterations_under_other_shares_do_not_count(plan: Plan) -> None:
    pace = ReplicaPace(plan)
    for iteration in range(MIN_ITERATIONS - 1):
        run(pace, plan, iteration)
    pace.begin_at(MIN_ITERATIONS + 1)
    for iteration in range(MIN_ITERATIONS - 1, MIN_ITERATIONS + 2):
        run(pace, plan, iteration)
    assert pace.take() is None
    assert pace.take(1) is not None


def test_a_replica_without_samples_and_an_iteration_that_does_not_count_are_not_measured(plan: Plan) -> None:
    pace = ReplicaPace(plan)
    run(pace, plan, 0, training=False)
    run(pace, plan, 0, size=4)
    assert pace.take(1) is None
    run(pace, plan, 1, units=(4, 0))
    measured = pace.take(1)
    assert measured is not None
    assert measured.unit_seconds[1] is None


def test_positions_without_a_microbatch_are_not_measured(plan: Plan) -> None:
    """Their tasks pass at some other time."""
    pace = ReplicaPace(plan)
    run(pace, plan, 0, granted={0: [2, 1]}, units=(2, 1))
    measured = pace.take(1)
    assert measured is not None
    assert measured.unit_seconds == pytest.approx((0.005, 0.003))
