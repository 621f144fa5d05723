"""How long each replica takes for its part, from stamped rows; times here are milliseconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from weft.plan.itinerary import Iteration
from weft.plan.kinds import Kind
from weft.plan.plan import Plan
from weft.scheduler.adapting.replica_pace import MIN_ITERATIONS, ReplicaPace
from weft.scheduler.adapting.replica_shares import ReplicaShares
from weft.scheduler.adapting.shares import Verdict

PlanOf = Callable[..., Plan]
MS = 1_000_000


@pytest.fixture
def plan(plan_of: PlanOf) -> Plan:
    return plan_of(replicas=2, microbatches=2, share="adaptive")


def task_of(plan: Plan, kind: Kind, replica: int, microbatch: int = -1) -> int:
    return next(t.id for t in plan.graph.tasks if (t.kind, t.replica, t.microbatch) == (kind, replica, microbatch))


def run(
    pace: ReplicaPace, plan: Plan, iteration: int, *, seconds: float = 0.1, units: tuple[int, int] = (4, 4)
) -> None:
    """Replica 0 works 10 ms, replica 1 works 40, with a gap; updates take 5 and hide behind nothing."""
    for replica, end in ((0, 10), (1, 40)):
        pace.add(task_of(plan, Kind.FORWARD, replica, 0), iteration, 0, 3 * MS)
        pace.add(task_of(plan, Kind.BACKWARD, replica, 1), iteration, (end - 2) * MS, end * MS)
    pace.add(task_of(plan, Kind.UPDATE, 0), iteration, 40 * MS, 45 * MS)
    pace.finish(iteration, units, seconds)


def test_a_replicas_time_is_from_its_first_forward_to_its_last_backward(plan: Plan) -> None:
    pace = ReplicaPace(plan)
    for iteration in range(MIN_ITERATIONS):
        run(pace, plan, iteration)
    measured = pace.take()
    assert measured is not None
    assert measured.unit_seconds == pytest.approx((0.0025, 0.01))
    assert measured.iteration_seconds == pytest.approx(0.1)
    assert measured.fixed_seconds == pytest.approx(0.005)


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
    run(pace, plan, 0, units=(0, 0))
    assert pace.take(1) is None
    run(pace, plan, 1, units=(4, 0))
    measured = pace.take(1)
    assert measured is not None
    assert measured.unit_seconds[1] is None


# --- what each replica had


def iteration_of(index: int, size: int, **changes: Any) -> Iteration:
    facts: dict[str, Any] = {"index": index, "training": True, "epoch": 0, "step": index, "start": 0, "size": size}
    return Iteration(**facts | changes)


def test_samples_are_those_of_the_shares_of_the_iteration(plan: Plan) -> None:
    replicas = ReplicaShares(plan)
    replicas.set(5, [0.75, 0.25])
    assert replicas.finish(iteration_of(4, 8), 0.1) == [4, 4]
    assert replicas.finish(iteration_of(5, 8), 0.1) == [6, 2]
    assert replicas.newest == (0.75, 0.25)


def test_samples_are_those_of_the_microbatches_that_were_granted(plan_of: PlanOf) -> None:
    """Nine samples in four microbatches: 3, 2, 2, 2."""
    replicas = ReplicaShares(plan_of(replicas=2, microbatches=4, share="stealing"))
    replicas.grant(0, [(0, 0, 0), (0, 1, 1)])
    replicas.grant(1, [(0, 0, 2), (0, 1, -1)])
    replicas.grant(0, [(0, 2, 3), (1, 0, 0)])
    assert replicas.finish(iteration_of(0, 9), 0.1) == [7, 2]


def test_a_verdict_is_a_sentence_with_its_numbers(plan: Plan) -> None:
    replicas = ReplicaShares(plan)
    text = replicas.judge(Verdict(replica=1, with_seconds=0.0123, without_seconds=0.011), 240)
    assert text == (
        "replica 1 does not pay: 12.3 ms an iteration with it, 11.0 ms without; its share is 0 from iteration 240 on"
    )
    assert replicas.verdicts == [text]
