"""Checking: what would be wrong with a schedule that somebody has written. Pure.

Each stage has every microbatch once, in one line, forward before backward and in the order of the plain loop, in which
gradients are summed; and the workers do not wait for one another in a circle. Slots need no check: a schedule has as
many as its own order asks for.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise

from weft.plan.kinds import Kind
from weft.plan.schedules.schedule import Pass, Schedule, ScheduleError


def check_schedule(schedule: Schedule) -> None:
    """Raises ScheduleError for the first thing that is wrong."""
    _check_stages(schedule)
    for stage in schedule.worker_of:
        _check_complete(schedule, stage)
    for stage in schedule.worker_of:
        _check_order(schedule, stage)
    for _ in schedule.timeline():
        pass


def _check_stages(schedule: Schedule) -> None:
    if not schedule.programs:
        raise ScheduleError("no worker has a pass; write a line for each worker, for example F0 F1 B0 B1")
    for worker, program in enumerate(schedule.programs):
        if not program:
            raise ScheduleError(
                f"{schedule.line(worker)} is a worker without passes; write its passes there, or leave the line out"
            )
        for each in program:
            if (home := schedule.worker_of[each.stage]) != worker:
                raise ScheduleError(
                    f"{schedule.line(worker)} has {schedule.shown(each)} of stage {each.stage}, which is in "
                    f"{schedule.line(home)}; write all passes of a stage in one line"
                )
    last = max(schedule.worker_of)
    if last >= schedule.num_stages:
        missing = min(set(range(last)) - set(schedule.worker_of))
        raise ScheduleError(
            f"stage {missing} is in no line, and stage {last} in {schedule.line(schedule.worker_of[last])}; number "
            "the stages from 0 without gaps"
        )


def _check_complete(schedule: Schedule, stage: int) -> None:
    line, passes = schedule.line(schedule.worker_of[stage]), schedule.passes(stage)
    twice = next((each for each, count in Counter(passes).items() if count > 1), None)
    if twice is not None:
        raise ScheduleError(f"{line} has {schedule.shown(twice)} twice; leave one of them out")
    of_microbatch: defaultdict[int, set[Kind]] = defaultdict(set)
    for each in passes:
        of_microbatch[each.microbatch].add(each.kind)
    for m in range(schedule.num_microbatches):
        given = of_microbatch[m]
        split = not given.isdisjoint((Kind.INPUT, Kind.WEIGHT))
        if split and Kind.BACKWARD in given:
            raise ScheduleError(
                f"{line} has microbatch {m} go back whole and in parts; write B{m}, or I{m} and W{m} for its parts"
            )
        for kind in (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT) if split else (Kind.FORWARD, Kind.BACKWARD):
            if kind not in given:
                raise ScheduleError(
                    f"{line} lacks {schedule.shown(Pass(stage, kind, m))}; each stage has every microbatch once, "
                    f"forward and back, and the grid has {schedule.num_microbatches}"
                )


def _check_order(schedule: Schedule, stage: int) -> None:
    line, passes = schedule.line(schedule.worker_of[stage]), schedule.passes(stage)
    directions = ({Kind.FORWARD}, {Kind.BACKWARD, Kind.INPUT}, {Kind.BACKWARD, Kind.WEIGHT})
    for kinds in directions:
        for before, each in pairwise(other for other in passes if other.kind in kinds):
            if each.microbatch < before.microbatch:
                raise ScheduleError(
                    f"{line} has {schedule.shown(each)} behind {schedule.shown(before)}; write a stage's microbatches "
                    "in their order, in which the plain loop sums gradients"
                )
    places = {each: place for place, each in enumerate(passes)}
    for each in passes:
        for needed in schedule.needs(each):
            if needed.stage == stage and places[needed] > places[each]:
                raise ScheduleError(
                    f"{line} has {schedule.shown(each)} before {schedule.shown(needed)}, which it needs; write "
                    f"{schedule.shown(needed)} first"
                )
