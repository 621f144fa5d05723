"""Plans whose lanes begin what is ready: as the simulator runs them, with any times."""

from __future__ import annotations

import random
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from weft.plan.inspection import Inspection, UnitFacts
from weft.plan.kinds import KINDS, MODE_INDEX, Kind
from weft.plan.plan import Plan
from weft.plan.schedules.grid import read_grid
from weft.plan.schedules.named import last_stage
from weft.plan.schedules.planned import grid_of_rows, planned_schedule
from weft.plan.schedules.schedule import Schedule
from weft.scheduler.planning.simulator import simulate

PlanOf = Callable[..., Plan]
UnitOf = Callable[..., UnitFacts]
InspectionOf = Callable[..., Inspection]


def came_out(plan: Plan, iterations: int) -> Schedule:
    spans = simulate(plan, iterations=iterations).spans
    rows = {
        lane: [
            (MODE_INDEX[KINDS[plan.graph.tasks[span.task].kind].mode], span.task, span.iteration, -1, 0, 0)
            for span in spans[lane]
        ]
        for lane in plan.graph.free
    }
    return read_grid(grid_of_rows(plan, rows) or "")


@settings(max_examples=25, deadline=None)
@given(
    times=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=4),
    microbatches=st.integers(1, 6),
    recompute=st.booleans(),
    window=st.sampled_from([None, 1, 2, 5]),
    replicas=st.sampled_from([None, 2]),
)
def test_any_times_give_an_order_that_can_run_and_keeps_to_its_slots(
    plan_of: PlanOf,
    unit_of: UnitOf,
    inspection_of: InspectionOf,
    times: list[tuple[int, int]],
    microbatches: int,
    recompute: bool,
    window: int | None,
    replicas: int | None,
) -> None:
    inspection = inspection_of([unit_of(n, forward=f, backward=b) for n, (f, b) in enumerate(times)])
    how = {"stages": len(times), "microbatches": microbatches, "recompute": recompute, "window": window}
    plan = plan_of(inspection, schedule="dynamic", replicas=replicas, **how)
    made = came_out(plan, iterations=3)
    assert (made.num_stages, made.num_microbatches) == (len(times), microbatches)
    for lane, limit in plan.graph.free.items():
        stage = plan.graph.tasks[plan.graph.programs[lane][0]].holder.stage
        assert made.in_flight(stage) <= limit
    assert 0 < plan.limit_seconds <= plan.predicted_iteration_seconds * (1 + 1e-9)
    if window == 1:
        assert made == planned_schedule(plan), "who is sent one task has no choice"


@given(stages=st.integers(1, 4), microbatches=st.integers(1, 6))
@settings(max_examples=15, deadline=None)
def test_where_passes_take_as_long_it_is_last_stage(
    plan_of: PlanOf, unit_of: UnitOf, inspection_of: InspectionOf, stages: int, microbatches: int
) -> None:
    alike = inspection_of([unit_of(n, forward=1.0, backward=1.0) for n in range(stages)])
    plan = plan_of(alike, schedule="dynamic", stages=stages, microbatches=microbatches)
    assert came_out(plan, iterations=3) == last_stage(stages, microbatches)


def test_a_stage_computes_what_is_there_where_a_fixed_order_waits(plan_of: PlanOf) -> None:
    """Of passes of which some take longer than others of their kind, by chance."""
    plans = {name: plan_of(schedule=name, stages=4, microbatches=8) for name in ("1f1b", "last-stage", "dynamic")}
    lengths = random.Random(1)
    seconds = {task.key: task_seconds(task.kind, lengths) for task in plans["1f1b"].graph.tasks}
    took = {
        name: simulate(plan, [seconds[task.key] for task in plan.graph.tasks]).iteration_seconds
        for name, plan in plans.items()
    }
    assert took["dynamic"] < 0.99 * min(took["1f1b"], took["last-stage"])


def task_seconds(kind: Kind, lengths: random.Random) -> float:
    return 1 + lengths.expovariate(1) if KINDS[kind].computes else 0.0
