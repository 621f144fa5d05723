"""Planned: the schedule that a plan's lanes have, as a value and as a grid. Pure."""

from __future__ import annotations

from weft.plan.graph import Task
from weft.plan.kinds import KINDS
from weft.plan.plan import Plan
from weft.plan.schedules.grid import drawn
from weft.plan.schedules.schedule import Pass, Schedule

FILE = "schedule.grid"  # in a run directory, of a job whose order no name says


def planned_grid(plan: Plan) -> str | None:
    """Of the first replica, as `strategy.schedule` takes it from a file; None where the layers of a working window
    take turns."""
    if plan.replicas[0].working_window is not None:
        return None
    schedule = planned_schedule(plan)
    title = f"{plan.schedule}, {schedule.num_stages} stages, {schedule.num_microbatches} microbatches"
    return drawn(schedule, title) + "\n"


def planned_schedule(plan: Plan) -> Schedule:
    """Of the first replica."""
    tasks, programs = plan.graph.tasks, []
    for program in plan.graph.programs.values():
        passes = [_pass(tasks[task]) for task in program if KINDS[tasks[task].kind].computes]
        if passes and tasks[program[0]].replica == 0:
            programs.append(tuple(passes))
    return Schedule(tuple(programs))


def _pass(task: Task) -> Pass:
    assert task.microbatch is not None
    return Pass(task.holder.stage, task.kind, task.microbatch)
