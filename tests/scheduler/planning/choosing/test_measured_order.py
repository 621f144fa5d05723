"""Plans whose order is made of this model's times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.plan.inspection import Inspection, UnitFacts
from weft.plan.plan import Plan
from weft.plan.schedules.grid import read_grid
from weft.plan.schedules.named import SCHEDULES
from weft.plan.schedules.planned import planned_grid, planned_schedule
from weft.scheduler.planning.partition import PlanError
from weft.scheduler.planning.planner import make_plan
from weft.spec.job_spec import JobSpec

PlanOf = Callable[..., Plan]
UnitOf = Callable[..., UnitFacts]
InspectionOf = Callable[..., Inspection]
InspectedOf = Callable[..., Inspection]


@pytest.fixture(scope="session")
def inspected(inspection_of: InspectionOf, unit_of: UnitOf) -> InspectedOf:
    """Of a unit for each pair of what its forward and its backward take, in ms."""

    def inspected_of(*times: tuple[float, float]) -> Inspection:
        units = [unit_of(n, forward=f * 1e-3, backward=b * 1e-3) for n, (f, b) in enumerate(times)]
        return inspection_of([replace(unit, parameter_bytes=4000) for unit in units])

    return inspected_of


@settings(max_examples=6, deadline=None)
@given(
    times=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=4),
    microbatches=st.integers(1, 5),
    recompute=st.booleans(),
)
def test_it_is_never_slower_in_the_simulator_than_the_best_named_one(
    plan_of: PlanOf,
    inspected: InspectedOf,
    times: list[tuple[int, int]],
    microbatches: int,
    recompute: bool,
) -> None:
    how = {"stages": len(times), "microbatches": microbatches, "recompute": recompute}
    measured = plan_of(inspected(*times), schedule="measured", **how)
    best = min(plan_of(inspected(*times), schedule=name, **how).predicted_iteration_seconds for name in SCHEDULES)
    assert measured.predicted_iteration_seconds <= best
    assert read_grid(planned_grid(measured) or "") == planned_schedule(measured)
    assert plan_of(inspected(*times), schedule="measured", **how) == measured


def test_the_plan_says_what_it_gains_and_its_grid_gives_the_same_plan(plan_of: PlanOf, inspected: InspectedOf) -> None:
    unequal, how = inspected((12, 5), (7, 11), (4, 3)), {"stages": 3, "microbatches": 4, "batch_size": 8}
    measured = plan_of(unequal, schedule="measured", **how)
    (note,) = measured.notes
    assert note.startswith("measured: the order that was made of this model's times takes ")
    assert note.endswith(" % less than the best named one, zero-bubble (83 ms)")
    grid = planned_grid(measured) or ""
    assert grid.startswith("# measured, 3 stages, 4 microbatches\n")
    assert replace(plan_of(unequal, schedule=grid, **how), notes=measured.notes).graph == measured.graph


def test_one_of_them_is_called_one(plan_of: PlanOf, inspected: InspectedOf) -> None:
    one = plan_of(inspected((1, 1), (9, 9)), schedule="measured", stages=2, microbatches=1, batch_size=8)
    assert (planned_grid(one) or "").startswith("# measured, 2 stages, 1 microbatch\n")


def test_where_no_order_is_faster_it_is_the_best_named_one(plan_of: PlanOf, inspected: InspectedOf) -> None:
    measured = plan_of(inspected((1, 1), (9, 9)), schedule="measured", stages=2, microbatches=4, batch_size=8)
    assert measured.notes == ("measured: no order was faster in the simulator than zero-bubble, so it is that",)
    assert planned_schedule(measured) == SCHEDULES["zero-bubble"](2, 4)


def test_replicas_have_an_order_each_of_their_own_size(plan_of: PlanOf, inspected: InspectedOf) -> None:
    replicas = [{"stages": 2, "microbatches": 3}, {"stages": 3, "microbatches": 2}]
    measured = plan_of(inspected((4, 5), (4, 4), (1, 9)), schedule="measured", replicas=replicas, batch_size=10)
    assert (planned_schedule(measured).num_stages, planned_schedule(measured).num_microbatches) == (2, 3)
    measured.graph.check()


def test_a_job_that_fits_memory_in_no_order_is_refused(spec_of: Callable[..., JobSpec], inspected: InspectedOf) -> None:
    spec = spec_of(schedule="measured", stages=2, microbatches=4, batch_size=8)
    with pytest.raises(PlanError, match=r"the plan needs .* MiB of shared memory"):
        make_plan(spec, inspected((4, 5), (4, 4)), shared_bytes_free=1)


def test_an_order_that_does_not_fit_memory_is_left_out(
    spec_of: Callable[..., JobSpec], plan_of: PlanOf, inspected: InspectedOf
) -> None:
    """It is as many microbatches that greedy orders and gpipe would keep as there is no room for."""
    equal, how = inspected((4, 5), (4, 4)), {"stages": 2, "microbatches": 8, "batch_size": 8}
    room = plan_of(equal, schedule="zero-bubble", **how).shared_bytes
    assert planned_schedule(plan_of(equal, schedule="measured", **how)).in_flight(0) > 2
    planned = make_plan(spec_of(schedule="measured", **how), equal, shared_bytes_free=room)
    assert planned.shared_bytes <= room
