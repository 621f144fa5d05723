"""Which buckets devices update themselves, from what the tasks of both ways took."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from weft.plan.buckets import Route
from weft.plan.inspection import Inspection, ParameterFacts, UnitFacts
from weft.plan.kinds import Kind, Way
from weft.plan.plan import Plan
from weft.plan.rows import Row
from weft.plan.tables import Adjustment
from weft.scheduler.adapting.balance import Trip, kept, measured_local
from weft.scheduler.adapting.policy import Decision
from weft.scheduler.adapting.routes import KEPT, MIN_ITERATIONS, BalancedRoutes, RouteMeasurement

InspectionOf = Callable[..., Inspection]
UnitOf = Callable[..., UnitFacts]
ParameterOf = Callable[..., ParameterFacts]
PlanOf = Callable[..., Plan]
GPU, CPU = {"device": "gpu"}, {"device": "cpu"}


@pytest.fixture
def balanced(plan_of: PlanOf, inspection_of: InspectionOf, unit_of: UnitOf, parameter_of: ParameterOf) -> PlanOf:
    """Of three units with a bucket each, the last unit's first."""

    def plan(
        update_seconds: float = 3.0,
        device_units: tuple[UnitFacts, ...] = (),
        device_update_seconds: float | None = None,
        **strategy: Any,
    ) -> Plan:
        parameters = tuple(parameter_of(number, num_elements=1000, state=()) for number in range(3))
        inspection = inspection_of(
            [unit_of(number, parameter_bytes=4000) for number in range(3)],
            parameters=parameters,
            update_seconds=update_seconds,
            device_units=device_units,
            device_update_seconds=device_update_seconds,
        )
        settings = {"replicas": [GPU], "update": "balanced", "bucket_mib": 0.004, "steps": 200} | strategy
        return plan_of(inspection, **settings)

    return plan


def seconds_of(plan: Plan, *, device: float, host: float) -> dict[int, float]:
    """Of each task: what an update takes on the device and on the host, and the rest."""
    seconds = {}
    for task in plan.graph.tasks:
        match task.kind:
            case Kind.DOWN | Kind.UP:
                seconds[task.id] = 0.1
            case Kind.UPDATE:
                seconds[task.id] = device if task.way is Way.DEVICE else host
            case Kind.BACKWARD:
                seconds[task.id] = 10.0
            case _:
                seconds[task.id] = 0.0
    return seconds


def born_at(*seconds: float) -> dict[tuple[int, tuple[int, int]], float]:
    return {(bucket, (0, 0)): at for bucket, at in enumerate(seconds)}


def test_a_bucket_goes_to_the_host_if_it_can_be_back_when_the_device_is_ready_for_it(balanced: PlanOf) -> None:
    plan = balanced()
    births = born_at(2.0, 6.0, 10.0)
    assert measured_local(plan, seconds_of(plan, device=1.0, host=1.0), births) == {2}
    assert measured_local(plan, seconds_of(plan, device=1.0, host=20.0), births) == {0, 1, 2}
    assert measured_local(plan, seconds_of(plan, device=30.0, host=5.0), births) == {2}, "nobody to wait for"
    assert measured_local(plan, seconds_of(plan, device=0.1, host=4.5), births) == {1, 2}


def test_where_synchronisation_is_coarse_the_host_begins_when_backward_has_ended() -> None:
    trips = [Trip(bucket=b, born=b, down=0.1, host_update=1.0, up=0.1, device_update=0.5) for b in range(3)]
    assert kept(trips, 5.0, 0.0) == set()
    assert kept(trips, 5.0, 0.0, coarse=True) == {0, 1, 2}
    assert kept(trips, 5.0, 3.0, coarse=True) == {2}


def test_where_a_forward_waits_by_layer_a_bucket_has_until_its_layer_is_read(balanced: PlanOf) -> None:
    by_stage, by_layer = balanced(waits="stage"), balanced(waits="layer")
    births = born_at(2.0, 6.0, 10.0)
    assert measured_local(by_stage, seconds_of(by_stage, device=0.1, host=4.5), births) == {1, 2}
    assert [str(task) for task in by_layer.graph.tasks if task.kind is Kind.FORWARD] == [
        "FORWARD(0,0,b1)",
        "FORWARD(0,0)",
    ]
    for forward, local in ((0.1, {1, 2}), (3.0, {2})):
        seconds = seconds_of(by_layer, device=0.1, host=4.5)
        seconds |= {task.id: forward for task in by_layer.graph.tasks if task.kind is Kind.FORWARD}
        assert measured_local(by_layer, seconds, births) == local


def test_later_stages_have_the_time_in_which_earlier_ones_compute(balanced: PlanOf) -> None:
    plan = balanced(replicas=[{"device": "gpu", "stages": 2, "split": [1]}])
    births = {(0, (0, 1)): 5.0, (1, (0, 1)): 10.0, (2, (0, 0)): 10.0}
    assert measured_local(plan, seconds_of(plan, device=1.0, host=4.0), births) == {2}


def test_a_way_that_no_bucket_has_gone_is_estimated_by_the_largest_task_of_its_kind(balanced: PlanOf) -> None:
    """Beyond that one by the inspection's rate: a small task takes its time whatever its bytes, and once a large
    bucket's was taken for a multiple of it."""
    plan = balanced()
    births = born_at(2.0, 6.0, 10.0)
    seconds = seconds_of(plan, device=1.0, host=1.0)
    only_first = {t.id: seconds[t.id] for t in plan.graph.tasks if t.way is not Way.HOST or t.bucket == 0}
    assert measured_local(plan, only_first, births) == measured_local(plan, seconds, births)
    slow = {task: each * (20 if plan.graph.tasks[task].way is Way.HOST else 1) for task, each in only_first.items()}
    assert measured_local(plan, slow, births) == {0, 1, 2}
    unmeasured = {t.id: seconds[t.id] for t in plan.graph.tasks if t.way is not Way.HOST}
    assert measured_local(plan, unmeasured, births) == {2}, "as the inspection says, a second there as well"


def test_several_holders_update_with_the_sum_or_not_at_all(balanced: PlanOf) -> None:
    plan = balanced(replicas=[GPU, CPU])
    births = born_at(2.0, 6.0, 10.0)
    assert {part.route for part in plan.synchronisation.buckets} == {Route.EITHER}  # type: ignore[union-attr]
    assert measured_local(plan, seconds_of(plan, device=1.0, host=1.0), births) == {2}


@pytest.mark.parametrize(
    ("backward", "host", "device", "local"),
    [
        (2.0, 3.0, 3.0, {2}),
        (0.2, 3.0, 3.0, {1, 2}),
        (0.2, 3.0, 0.3, {0, 1, 2}),
        (2.0, 30.0, 3.0, {0, 1, 2}),
        (2.0, 30.0, 300.0, {2}),
    ],
)
def test_before_the_job_runs_each_side_is_judged_by_what_was_measured_there(
    balanced: PlanOf, unit_of: UnitOf, backward: float, host: float, device: float, local: set[int]
) -> None:
    """backward: of a unit on the device, where the host takes two seconds. host, device: a step on the whole model."""
    units = tuple(unit_of(number, backward / 2, backward, parameter_bytes=4000) for number in range(3))
    plan = balanced(update_seconds=host, device_units=units, device_update_seconds=device)
    assert plan.synchronisation is not None
    assert set(plan.synchronisation.local) == local


# --- two measurements in a row


def measured_of(plan: Plan, host: float) -> RouteMeasurement:
    return RouteMeasurement(seconds=seconds_of(plan, device=1.0, host=host), born=born_at(2.0, 6.0, 10.0))


def test_buckets_turn_where_two_measurements_in_a_row_say_the_same(balanced: PlanOf) -> None:
    plan = balanced()
    routes = BalancedRoutes(plan)
    decisions = [routes.decide(measured_of(plan, host), 4) for host in (20.0, 1.0, 20.0, 20.0, 1.0, 4.5, 4.5)]
    told = [decision and decision.adjustment and decision.adjustment.local for decision in decisions]
    assert told[:3] == [None] * 3
    assert told[3:6] == [(0, 1, 2), None, None]
    assert told[6] is not None
    assert told[6] != (0, 1, 2)


def test_what_the_other_way_took_is_remembered(balanced: PlanOf) -> None:
    """Otherwise the inspection's estimate would send a bucket there again and again."""
    plan = balanced()
    routes = BalancedRoutes(plan)
    for told in (None, Decision(5, Adjustment(local=(0, 1, 2)))):
        assert routes.decide(measured_of(plan, 20.0), 4) == told
    own = {t.id: each for t, each in zip(plan.graph.tasks, measured_of(plan, 20.0).seconds.values(), strict=True)}
    for task in plan.graph.tasks:
        if task.way is Way.HOST:
            del own[task.id]
    for _ in range(3):
        assert routes.decide(RouteMeasurement(seconds=own, born=born_at(2.0, 6.0, 10.0)), 9) is None


# --- rows


def rows_of(plan: Plan, local: set[int], iteration: int) -> list[Row]:
    """Every task that runs takes a millisecond, one second after another in the graph's order."""
    going = [task for task in plan.graph.tasks if not task.passes(local)]
    return [(0, task.id, iteration, -1, n * 10**9, n * 10**9 + 10**6) for n, task in enumerate(going)]


def test_medians_are_taken_of_the_tasks_of_the_ways_that_buckets_go(balanced: PlanOf) -> None:
    plan = balanced()
    pace = BalancedRoutes(plan)
    assert plan.synchronisation is not None
    local = set(plan.synchronisation.local)
    for iteration in range(MIN_ITERATIONS):
        assert pace.take() is None
        pace.add(rows_of(plan, local, iteration))
    measured = pace.take()
    assert measured is not None
    names = {str(plan.graph.tasks[task]) for task in measured.seconds}
    assert {name for name in names if name.startswith("DOWN")} == {f"DOWN(0,b{b})" for b in {0, 1, 2} - local}
    assert set(measured.seconds.values()) == {1e-3}
    assert sorted(bucket for bucket, _ in measured.born) == [0, 1, 2]
    assert pace.take() is None, "each iteration counts once"


def test_iterations_before_a_turn_belong_to_no_measurement_and_few_are_kept(balanced: PlanOf) -> None:
    plan = balanced()
    pace = BalancedRoutes(plan)
    decisions = [pace.decide(measured_of(plan, 20.0), 9) for _ in range(2)]
    assert decisions == [None, Decision(10, Adjustment(local=(0, 1, 2)))]
    for iteration in range(10 + MIN_ITERATIONS - 1):
        pace.add(rows_of(plan, {0, 1, 2}, iteration))
    assert pace.take() is None
    for iteration in range(17, 10 + 2 * KEPT):
        pace.add(rows_of(plan, {0, 1, 2}, iteration))
    pace.add(rows_of(plan, {0, 1, 2}, 12))  # of a lane that reports late
    measured = pace.take()
    assert measured is not None
    assert not any(plan.graph.tasks[task].way is Way.HOST for task in measured.seconds)


def test_what_a_validate_takes_belongs_to_the_updates_that_it_makes_again(balanced: PlanOf) -> None:
    """Where the last step was clipped, UPDATE leaves its bucket to VALIDATE: the host once seemed to take no time."""
    plan = balanced(clip_norm=1.0)
    assert plan.synchronisation is not None
    pace = BalancedRoutes(replace(plan, synchronisation=replace(plan.synchronisation, local=(1,))))
    for iteration in range(MIN_ITERATIONS):
        pace.add(rows_of(plan, {1}, iteration))
    measured = pace.take()
    assert measured is not None
    seconds = {str(plan.graph.tasks[task]): each for task, each in measured.seconds.items()}
    assert seconds["UPDATE(o0,b0)"] == seconds["UPDATE(o0,b2)"] == pytest.approx(1.5e-3)
    assert seconds["UPDATE(o1,b1)"] == pytest.approx(2e-3)


def test_people_read_who_updates_which_bucket(balanced: PlanOf, plan_of: PlanOf) -> None:
    names = ("cpu-0", "gpu-0", "loader-0")
    assert balanced(replicas=[GPU, CPU]).updates({1}, names) == "buckets 0, 2 by the host; bucket 1 by gpu-0"
    assert plan_of().updates((), ("cpu-0", "loader-0")) is None
