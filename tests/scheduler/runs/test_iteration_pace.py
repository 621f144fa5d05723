"""The iteration time and the limit of its graph are of the same iterations, and a limit is nothing that was passed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from graphlib import TopologicalSorter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.metrics.accounts.task_times import STEPS, TaskTimes
from weft.plan.inspection import Inspection, UnitFacts
from weft.plan.itinerary import Itinerary
from weft.plan.plan import Plan
from weft.scheduler.runs import iteration_pace
from weft.scheduler.runs.iteration_pace import LEAST, ROUNDING, SAMPLE, IterationPace, Pace

MILLISECOND = 1_000_000
PlanOf = Callable[..., Plan]
Durations = Callable[[int, int], int]  # of a task in an iteration, nanoseconds


def played(plan: Plan, durations: Durations) -> Pace:
    """What is told of a job in which every task starts as soon as the graph allows."""
    times, pace, itinerary = TaskTimes(plan.itinerary), IterationPace(plan), plan.itinerary
    graph = plan.graph
    edges = [*graph.edges, *graph.lane_edges()]
    inputs = [[(e.source, e.distance) for e in edges if e.target == task.id] for task in graph.tasks]
    within = {task.id: [s for s, distance in inputs[task.id] if not distance] for task in graph.tasks}
    order = list(TopologicalSorter(within).static_order())
    ends: list[list[int]] = []
    for index in range(itinerary.num_iterations):
        about, row = itinerary.at(index), [0] * len(order)
        ends.append(row)
        for task in order:
            if graph.tasks[task].kind == "snapshot":
                continue  # no iteration of these
            start = max((ends[index - d][source] for source, d in inputs[task] if d <= index), default=0)
            took = durations(task, index) if about.training or graph.tasks[task].kind in ("load", "forward") else 0
            row[task] = start + took
            if took:
                times.add(task, index, took)
        if about.training and index:
            pace.add(index, about.step, (max(row) - max(ends[index - 1])) / 1e9)
    return pace.of(times)


@pytest.fixture
def plan(plan_of: PlanOf) -> Plan:
    return plan_of(stages=2, microbatches=2, steps=20)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), steps=st.integers(1, 20), num_train=st.integers(1, 40), num_validation=st.integers(0, 20))
def test_the_limit_of_any_short_job_is_below_its_iterations_or_not_told(
    plan_of: PlanOf, data: st.DataObject, steps: int, num_train: int, num_validation: int
) -> None:
    """Jobs of few steps showed "×0.78 of the limit": the first iteration and the validations were in the medians of the
    tasks, and not in the median iteration."""
    shape = data.draw(
        st.sampled_from([{}, {"stages": 2, "microbatches": 2}, {"replicas": 2}, {"replicas": 2, "sync": "coarse"}])
    )
    planned = plan_of(**shape, batch_size=8)
    itinerary = Itinerary(num_train=num_train, num_validation=num_validation, batch_size=8, steps=steps)
    scale = data.draw(st.sampled_from([1, 1, 30]))  # of the first iteration
    random = data.draw(st.randoms(use_true_random=False))
    widths = [random.randint(1, 50) for _ in planned.graph.tasks]

    def durations(task: int, iteration: int) -> int:
        return random.randint(1, widths[task]) * MILLISECOND * (1 if iteration else scale)

    pace = played(replace(planned, itinerary=itinerary), durations)
    assert (pace.iteration_seconds is None) == (steps == 1)
    if steps <= LEAST:
        assert pace.limit_seconds is None
    if pace.limit_seconds is not None:
        assert pace.iteration_seconds is not None
        assert pace.iteration_seconds / pace.limit_seconds >= 1 - ROUNDING


@settings(max_examples=20, deadline=None)
@given(st.integers(LEAST + 1, 20), st.integers(1, 50), st.integers(1, 30))
def test_of_even_tasks_the_limit_is_told_and_the_first_iteration_and_validations_are_not_in_it(
    plan_of: PlanOf, steps: int, took: int, slow: int
) -> None:
    planned = plan_of(stages=2, microbatches=2, batch_size=8)
    itinerary = Itinerary(num_train=1000, num_validation=8, batch_size=8, steps=steps)
    pace = played(
        replace(planned, itinerary=itinerary),
        lambda task, iteration: took * MILLISECOND * (slow if iteration in (0, steps) else 1),
    )
    assert pace.iteration_seconds is not None
    assert pace.limit_seconds == pytest.approx(pace.iteration_seconds)


def test_a_job_that_only_runs_forward_has_a_limit_although_no_backward_runs(plan_of: PlanOf) -> None:
    forward = plan_of(stages=2, microbatches=2, steps=20, mode="forward")
    told = played(forward, lambda task, _: MILLISECOND * (forward.graph.tasks[task].kind != "backward"))
    assert told.limit_seconds is not None


def test_too_few_iterations_have_no_limit(plan: Plan) -> None:
    for steps in (LEAST, LEAST + 1):
        itinerary = replace(plan.itinerary, num_train=100_000, steps=steps)
        told = played(replace(plan, itinerary=itinerary), lambda *_: MILLISECOND)
        assert (told.limit_seconds is None) == (steps == LEAST), "the first step has no beginning"
        assert told.iteration_seconds is not None


def test_a_limit_that_was_passed_is_not_told(plan: Plan) -> None:
    times, pace = TaskTimes(plan.itinerary), IterationPace(plan)
    for step in range(LEAST + 1):
        for task in plan.graph.tasks:
            times.add(task.id, step, 5 * MILLISECOND)
        pace.add(step, step, 0.001)
    assert pace.of(times) == Pace(iteration_seconds=0.001)


def test_both_are_medians_of_the_newest_steps(
    plan_of: PlanOf, inspection_of: Callable[..., Inspection], unit_of: Callable[..., UnitFacts]
) -> None:
    """Load, forward, backward and update in one after the other: the limit of the compute lane is their sum."""
    plan = plan_of(inspection_of([unit_of(0)]), steps=1000)
    times, pace = TaskTimes(replace(plan.itinerary, num_train=10**6)), IterationPace(plan)
    kinds = [str(task.kind) for task in plan.graph.tasks]
    assert kinds == ["load", "forward", "backward", "update", "snapshot"]
    for step in range(SAMPLE * 2):
        for task, each in enumerate((1, 2, 4, 1)):
            late = 100 if step < SAMPLE or step % 3 == 0 else 1
            times.add(task, step, each * late * MILLISECOND)
        pace.add(step, step, 0.008 * (100 if step < SAMPLE else 1))
    told = pace.of(times)
    assert told.limit_seconds == pytest.approx(0.007)
    assert told.iteration_seconds == pytest.approx(0.008)


def test_what_ran_before_the_updates_went_another_way_is_in_neither(plan: Plan) -> None:
    times, pace = TaskTimes(plan.itinerary), IterationPace(plan)
    for step in range(20):
        for task in plan.graph.tasks:
            times.add(task.id, step, MILLISECOND)
        pace.add(step, step, 1.0 if step >= 10 else 9.0)
    assert pace.of(times, since=10).iteration_seconds == 1.0
    assert pace.of(times, since=10).limit_seconds is not None
    assert pace.of(times, since=18).limit_seconds is None


def test_there_is_no_limit_before_every_task_has_run(plan: Plan) -> None:
    times, pace = TaskTimes(plan.itinerary), IterationPace(plan)
    for step in range(LEAST):
        pace.add(step, step, 1.0)
    for task in [task for task in plan.graph.tasks if task.kind != "snapshot"]:
        assert pace.of(times).limit_seconds is None
        for step in range(LEAST):
            times.add(task.id, step, MILLISECOND)
    assert pace.of(times).limit_seconds is not None


def test_a_plan_of_very_many_tasks_is_not_searched_for_its_limit(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(iteration_pace, "MAX_TASKS", 3)
    assert played(plan, lambda *_: MILLISECOND).limit_seconds is None


def test_a_task_that_passes_takes_nothing_and_a_step_that_a_newer_one_replaced_is_not_looked_at() -> None:
    times = TaskTimes(Itinerary(num_train=10**6, num_validation=0, batch_size=1, steps=10**6))
    times.add(3, 5, 50)
    times.add(3, 7, 70)
    assert times.of(3, (5, 6, 7)) == [50, 0, 70]
    assert times.keeps(5)
    times.add(3, 5 + STEPS, 51)
    assert not times.keeps(5)
    assert times.of(3, (7, 5 + STEPS)) == [70, 51]
    times.add(4, 10**6, 1)
    assert not times.has(4), "no iteration of the job"


def test_a_snapshot_is_of_few_iterations_and_so_of_no_limit(plan: Plan) -> None:
    times, pace = TaskTimes(plan.itinerary), IterationPace(plan)
    for step in range(LEAST + 1):
        for task in plan.graph.tasks:
            is_copied = task.kind == "snapshot"
            if not is_copied or step == 3:
                times.add(task.id, step, (500 if is_copied else 1) * MILLISECOND)
        pace.add(step, step, 1.0)
    limit = pace.of(times).limit_seconds
    assert limit is not None
    assert limit < 0.1
