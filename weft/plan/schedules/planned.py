"""Planned: the schedule that a plan's lanes have, or in which their passes came, as a value and as a grid. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from weft.plan.graph import Lane, Task
from weft.plan.kinds import FIRST_STALL, KINDS
from weft.plan.plan import Plan
from weft.plan.rows import Row
from weft.plan.schedules.grid import drawn
from weft.plan.schedules.schedule import Pass, Schedule


def planned_grid(plan: Plan) -> str | None:
    """Of the first replica, as `strategy.schedule` takes it from a file; None where the layers of a working window
    take turns."""
    if plan.replicas[0].working_window is not None:
        return None
    return _titled(plan, planned_schedule(plan))


def grid_of_rows(plan: Plan, rows: Mapping[Lane, Iterable[Row]]) -> str | None:
    """Of the first replica, as it came in the newest iteration of which all its passes are there; None where there is
    none. rows: by lane, in the order in which their tasks ended."""
    tasks, begun = plan.graph.tasks, dict[int, dict[Lane, dict[int, None]]]()
    for lane, of_lane in rows.items():
        for mode, task, iteration, *_ in of_lane:
            if mode < FIRST_STALL and task >= 0 and _is_pass(tasks[task]) and tasks[task].replica == 0:
                begun.setdefault(iteration, {}).setdefault(lane, {})[task] = None  # a stop cuts a row in two
    count = sum(_is_pass(task) and task.replica == 0 for task in tasks)
    whole = [iteration for iteration, lanes in begun.items() if sum(map(len, lanes.values())) == count]
    if not whole:
        return None
    came = begun[max(whole)]
    return _titled(
        plan, _schedule([tasks[task] for task in came[lane]] for lane in plan.graph.programs if lane in came)
    )


def _titled(plan: Plan, schedule: Schedule) -> str:
    stages, microbatches = schedule.num_stages, schedule.num_microbatches
    title = f"{plan.schedule}, {stages} stage{'s' * (stages > 1)}, {microbatches} microbatch{'es' * (microbatches > 1)}"
    return drawn(schedule, title) + "\n"


def planned_schedule(plan: Plan) -> Schedule:
    """Of the first replica."""
    tasks = plan.graph.tasks
    return _schedule([tasks[task] for task in program] for program in plan.graph.programs.values())


def _schedule(lanes: Iterable[Sequence[Task]]) -> Schedule:
    of_lanes = (tuple(_pass(task) for task in lane if _is_pass(task)) for lane in lanes if lane[0].replica == 0)
    return Schedule(tuple(filter(None, of_lanes)))


def _is_pass(task: Task) -> bool:
    """Of a forward in parts the last one stands for it."""
    return KINDS[task.kind].computes and not task.goes_on


def _pass(task: Task) -> Pass:
    assert task.microbatch is not None
    return Pass(task.holder.stage, task.kind, task.microbatch)
