"""Plans whose replicas' parts of a batch are not known beforehand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from weft.plan.inspection import Inspection, TensorFacts, UnitFacts, ValueFacts
from weft.plan.kinds import Kind
from weft.plan.plan import Plan
from weft.plan.worker_view import WorkerView
from weft.scheduler.planning.partition import PlanError

PlanOf = Callable[..., Plan]


def test_replicas_that_steal_read_one_ring_that_is_loaded_by_number(plan_of: PlanOf) -> None:
    plan = plan_of(replicas=3, microbatches=4, share="stealing")
    assert [ring.name for ring in plan.rings if ring.by_number] == ["input-0", "target-0"]
    loads = [task for task in plan.graph.tasks if task.kind is Kind.LOAD]
    assert [task.microbatch for task in loads] == [0, 1, 2, 3]
    for replica in range(3):
        first = next(t for t in plan.graph.tasks if (t.kind, t.replica, t.microbatch) == (Kind.FORWARD, replica, 0))
        assert (loads[-1].id, 0) in {(edge.source, edge.distance) for edge in plan.graph.inputs(first.id)}
        names = {ring.name for ring in WorkerView.of(plan, replica).rings}
        assert {"input-0", "target-0"} <= names


@pytest.mark.parametrize(
    ("batches", "reader", "distance"), [(1, "BACKWARD({}0,3)", 1), (2, "FORWARD({}0,0)", 1), (3, "FORWARD({}0,0)", 2)]
)
def test_a_batch_is_handed_back_by_every_replica_that_may_have_read_it(
    plan_of: PlanOf, batches: int, reader: str, distance: int
) -> None:
    """With the next batch, where there are slots for another: a loader had a core while all waited for sums."""
    plan = plan_of(replicas=2, microbatches=4, share="stealing", prefetch={"load": batches})
    loads = [task.id for task in plan.graph.tasks if task.kind is Kind.LOAD]
    sources = [{(str(plan.graph.tasks[e.source]), e.distance) for e in plan.graph.inputs(load)} for load in loads]
    assert sources == [{(reader.format(replica), distance) for replica in ("", "r1,")}, set(), set(), set()]


def test_two_replicas_that_steal_are_predicted_to_be_twice_as_fast_as_one(plan_of: PlanOf) -> None:
    one = plan_of(replicas=1, microbatches=8)
    two = plan_of(replicas=2, microbatches=8, share="stealing")
    assert two.limit_seconds <= two.predicted_iteration_seconds * (1 + 1e-9)
    assert two.predicted_iteration_seconds == pytest.approx(one.predicted_iteration_seconds / 2, rel=0.05)


def test_one_replica_has_nobody_to_steal_from(plan_of: PlanOf) -> None:
    assert plan_of(replicas=1, microbatches=2, share="stealing").share == "fixed"


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"replicas": [{"microbatches": 2}, {}], "microbatches": 4}, r"microbatches = \[2, 4\] cannot stand beside"),
        ({"replicas": 2, "microbatches": 4, "staleness": [0, 1]}, r"staleness = \[0, 1\] differs between replicas"),
        ({"replicas": 2, "microbatches": 900}, r"job\.batch_size = 840 is smaller than"),
    ],
)
def test_what_would_depend_on_who_is_free_is_refused(plan_of: PlanOf, settings: dict[str, Any], text: str) -> None:
    with pytest.raises(PlanError, match=text):
        plan_of(share="stealing", **settings)


def test_shapes_that_do_not_grow_evenly_are_refused_where_shares_adapt(
    plan_of: PlanOf, inspection_of: Callable[..., Inspection], unit_of: Callable[..., UnitFacts]
) -> None:
    odd = TensorFacts(dtype="float32", itemsize=4, shapes={1: (1, 1), 2: (2, 2), 4: (4, 16)})
    inspection = inspection_of([unit_of(0)], input=odd)
    assert plan_of(inspection, replicas=2).rings
    with pytest.raises(PlanError, match="the shapes of inputs do not grow evenly with them"):
        plan_of(inspection, replicas=2, share="adaptive")


def test_of_a_model_that_is_cut_by_its_own_forward_they_may_grow_as_they_like(
    plan_of: PlanOf,
    inspection_of: Callable[..., Inspection],
    unit_of: Callable[..., UnitFacts],
    value_of: Callable[..., ValueFacts],
) -> None:
    """Sentences padded to the longest of their microbatch: refused, though a slot tells its reader what is in it."""
    odd = value_of(0, shapes={1: (1, 1), 2: (2, 2), 4: (4, 16)})
    batch = TensorFacts(dtype="uint8", itemsize=1, shapes={4: (1024,)})
    inspection = inspection_of([unit_of(0), unit_of(1)], values=(odd,), input=batch, target=None)
    assert plan_of(inspection, replicas=[{"stages": 2}, {}], share="adaptive").share == "adaptive"
