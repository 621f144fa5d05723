"""Grid: a schedule as text, to look at and to write by hand.

A line for each worker, a column for the time of one pass; a dot is a wait, and what follows # is a comment:

    # 1f1b, 2 stages, 4 microbatches
    F0 F1  . B0 F2 B1 F3 B2  . B3
     . F0 B0 F1 B1 F2 B2 F3 B3

A pass is a kind's letter and the microbatch's number. Its stage is the line's number, from 0; a worker of several
stages has the stage before the letter: 2F0. When a pass starts follows from the order alone, so dots may be anywhere,
or nowhere.
"""

from __future__ import annotations

import functools
import re

from weft.plan.kinds import KINDS
from weft.plan.schedules.checking import check_schedule
from weft.plan.schedules.dynamic import of_equal_passes
from weft.plan.schedules.greedy import of_one_speed
from weft.plan.schedules.named import SCHEDULES, SEVERAL_STAGES
from weft.plan.schedules.schedule import Pass, Schedule, ScheduleError
from weft.spec.schedule_text import DYNAMIC, MEASURED, num_lines, why_not_stages

WAIT = "."

_LETTERS = {facts.letter: kind for kind, facts in KINDS.items() if facts.computes}
_CELL = re.compile(rf"(\d{{1,3}})?([{''.join(_LETTERS)}])(\d{{1,4}})")


@functools.lru_cache(maxsize=64)  # of a plan's replicas
def schedule_of(text: str, num_stages: int, num_microbatches: int, stages_per_worker: int | None = None) -> Schedule:
    """text: `strategy.schedule`, a name or a grid; of what follows from times the order where all stages are alike.
    stages_per_worker: as given beside it. Errors: ScheduleError, where there is none of this size."""
    if (problem := why_not_stages(text, num_stages, stages_per_worker)) is not None:
        raise ScheduleError(problem)
    if text in SCHEDULES:
        return SCHEDULES[text](num_stages, num_microbatches)
    if text == DYNAMIC:
        return of_equal_passes(num_stages, num_microbatches)
    if text == MEASURED:
        return of_one_speed(num_stages, num_microbatches)
    if text in SEVERAL_STAGES:
        return SEVERAL_STAGES[text](num_lines(text, num_stages, stages_per_worker), num_stages, num_microbatches)
    schedule = read_grid(text)
    given = (schedule.num_stages, schedule.num_microbatches)
    if given != (num_stages, num_microbatches):
        raise ScheduleError(
            f"the grid has strategy.stages = {given[0]} and strategy.microbatches = {given[1]}, and {num_stages} and "
            f"{num_microbatches} are asked for; use its own, or another grid"
        )
    return schedule


@functools.lru_cache(maxsize=8)  # a large one takes seconds, and is asked for where it is given and where it is planned
def read_grid(text: str) -> Schedule:
    """Checked. Errors: ScheduleError, whose text names the line of what is wrong."""
    programs: list[tuple[Pass, ...]] = []
    lines = []
    for number, line in enumerate(text.splitlines(), start=1):
        if cells := line.partition("#")[0].split():
            programs.append(tuple(_pass(cell, len(programs), number) for cell in cells if cell != WAIT))
            lines.append(number)
    schedule = Schedule(tuple(programs), tuple(lines))
    check_schedule(schedule)
    return schedule


def _pass(cell: str, stage: int, line: int) -> Pass:
    found = _CELL.fullmatch(cell)
    if found is None:
        known = ", ".join(f"{letter} ({kind})" for letter, kind in _LETTERS.items())
        raise ScheduleError(
            f"line {line}: {cell!r:.20} is no pass; write {WAIT} for a wait, or a letter of {known} and a microbatch's "
            "number, for example F0"
        )
    own, letter, microbatch = found.groups()
    return Pass(stage if own is None else int(own), _LETTERS[letter], int(microbatch))


def grid_of(schedule: Schedule) -> list[list[str]]:
    """By worker, then by the time of a pass: what it computes, where each pass takes as long as any other."""
    cells: list[list[str]] = [[] for _ in schedule.programs]
    for start, worker, each in schedule.timeline():
        cells[worker] += [WAIT] * (start - len(cells[worker]))
        cells[worker].append(schedule.shown(each))
    return cells


def drawn(schedule: Schedule, title: str) -> str:
    """As `read_grid` takes it."""
    cells = grid_of(schedule)
    width = max(len(cell) for line in cells for cell in line)
    return "\n".join([f"# {title}", *(" ".join(f"{cell:>{width}}" for cell in line) for line in cells)])
