"""Measured order: in which order stages of this model compute, of what each pass takes. Pure.

The named schedules that have a stage in each worker are planned; what their tasks take is what a greedy order is made
of, for each replica by itself. Then the simulator has the word: a greedy order is taken where its iteration is shorter
than that of every named one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from weft.plan.kinds import KINDS, Kind
from weft.plan.plan import Plan
from weft.plan.schedules.greedy import ALIKE, Seconds, fastest
from weft.plan.schedules.named import SCHEDULES
from weft.plan.schedules.schedule import Pass, Schedule
from weft.quantities import duration
from weft.scheduler.planning.partition import PlanError
from weft.spec.strategy import Strategy

Schedules = Sequence[Schedule | None]  # by replica; None: layers of a working window take turns
PlanWith = Callable[[Schedules], Plan]


def fastest_order(strategy: Strategy, plan_with: PlanWith) -> Plan:
    """With a note that says what it gains. plan_with: raises PlanError where an order does not fit memory. Errors:
    PlanError, where none does."""
    shapes = [
        None
        if replica.working_window is not None
        else (replica.num_stages, replica.microbatches or strategy.microbatches)
        for replica in strategy.replica_list
    ]
    named, problem = _fitting(
        plan_with, ((name, [shape and make(*shape) for shape in shapes]) for name, make in SCHEDULES.items())
    )
    if not named:
        assert problem is not None
        raise problem
    best = min(named, key=lambda name: named[name].predicted_iteration_seconds)
    made, _ = _fitting(plan_with, _greedy(shapes, _seconds(named.values())))
    fastest_made = min(made.values(), key=lambda plan: plan.predicted_iteration_seconds, default=named[best])
    return _noted(fastest_made, best, named[best])


def _fitting(plan_with: PlanWith, orders: Iterator[tuple[str, Schedules]]) -> tuple[dict[str, Plan], PlanError | None]:
    """The plans of those that can be planned; what is wrong with the last one that cannot."""
    plans, problem = {}, None
    for name, schedules in orders:
        try:
            plans[name] = plan_with(schedules)
        except PlanError as error:
            problem = error
    return plans, problem


def _seconds(plans: Iterable[Plan]) -> Mapping[tuple[int, Pass], float]:
    """By replica and pass, of all passes that any of them has; of a forward in parts, all of these."""
    seconds: dict[tuple[int, Pass], float] = {}
    for plan in plans:
        own: dict[tuple[int, Pass], float] = {}
        for task in plan.graph.tasks:
            if KINDS[task.kind].computes and task.microbatch is not None:
                key = task.holder.replica, Pass(task.holder.stage, task.kind, task.microbatch)
                own[key] = own.get(key, 0.0) + plan.task_seconds[task.id]
        seconds |= own
    return seconds


def _greedy(
    shapes: Sequence[tuple[int, int] | None], seconds: Mapping[tuple[int, Pass], float]
) -> Iterator[tuple[str, Schedules]]:
    """One with whole backwards, and one with some in two parts where it is known what these take."""
    is_split = any(each.kind is Kind.WEIGHT for _, each in seconds)
    for splits in (False, True) if is_split else (False,):
        orders = [shape and fastest(*shape, _of_replica(seconds, r), splits=splits) for r, shape in enumerate(shapes)]
        yield f"{splits=}", orders


def _of_replica(seconds: Mapping[tuple[int, Pass], float], r: int) -> Seconds:
    return lambda each: seconds[r, each]


def _noted(made: Plan, name: str, named: Plan) -> Plan:
    """The one that it comes to."""
    took, takes = named.predicted_iteration_seconds, made.predicted_iteration_seconds
    if ALIKE * takes > took:
        note = f"measured: no order was faster in the simulator than {name}, so it is that"
        return replace(named, notes=(*named.notes, note))
    gain = 100 * (1 - takes / took)
    note = (
        f"measured: the order that was made of this model's times takes {duration(takes)} an iteration in the "
        f"simulator, {gain:.0f} % less than the best named one, {name} ({duration(took)})"
    )
    return replace(made, notes=(*made.notes, note))
