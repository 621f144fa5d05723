"""The verb `weft schedule`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from weft.cli.exits import guarded
from weft.cli.verbs.options import Json
from weft.client.result import to_json
from weft.spec.replica import MAX_MICROBATCHES, MAX_STAGES
from weft.spec.schedule_text import DYNAMIC, GRID_FILE, GRID_SUFFIX, MEASURED, SCHEDULE_NAMES
from weft.spec.source import working_directory

if TYPE_CHECKING:
    from weft.plan.schedules.schedule import Schedule


_OF_JOBS: Final = {  # what is to be said of those that a name and two numbers do not make
    MEASURED: "measured: this is the order for stages of one speed; a job's is made of its own times, and its run "
    f"directory has it as {GRID_FILE}",
    DYNAMIC: "dynamic: each stage begins whichever pass is ready; this is what comes out where all take as long, and "
    f"what came out of a job is in its run directory as {GRID_FILE}",
}


def _complete(incomplete: str) -> list[str]:
    """What the shell offers."""
    return [name for name in SCHEDULE_NAMES if name.startswith(incomplete)]


@guarded
def schedule(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            autocompletion=_complete,
            help=f"{', '.join(SCHEDULE_NAMES)}, or a grid in a file NAME.grid.",
        ),
    ],
    stages: Annotated[
        int | None, typer.Option(metavar="N", min=1, max=MAX_STAGES, help="Of a named one; 4, if not given.")
    ] = None,
    microbatches: Annotated[
        int | None, typer.Option(metavar="N", min=1, max=MAX_MICROBATCHES, help="Of a named one; 8, if not given.")
    ] = None,
    stages_per_worker: Annotated[
        int | None, typer.Option(metavar="N", min=1, max=MAX_STAGES, help="Of interleaved; 2, if not given.")
    ] = None,
    json: Json = False,
) -> None:
    """Print in which order stages compute what, as a grid: a line for each worker, a column for the time of a pass.

    A grid in a file is checked: what it lacks, what is out of order, and who would wait for whom for ever. What is
    printed is such a file.
    """
    from weft.plan.schedules.grid import drawn

    made = _made(name, stages, microbatches, stages_per_worker)
    if name in _OF_JOBS:
        print(_OF_JOBS[name], file=sys.stderr)
    if json:
        print(to_json(_facts(name, made)))
        return
    title = f"{name}, {_count(made.num_stages, 'stage')}, {_count(made.num_microbatches, 'microbatch', 'es')}"
    print(drawn(made, title))
    depths = ", ".join(str(made.in_flight(stage)) for stage in range(made.num_stages))
    print(
        f"idle {100 * _idle(made):.0f} % if every pass takes as long; microbatches in flight: {depths}", file=sys.stderr
    )


def _count(number: int, thing: str, plural: str = "s") -> str:
    return f"{number} {thing}{plural if number > 1 else ''}"


def _made(name: str, stages: int | None, microbatches: int | None, stages_per_worker: int | None) -> Schedule:
    from weft.plan.schedules.grid import read_grid, schedule_of
    from weft.plan.schedules.schedule import ScheduleError
    from weft.spec.field_errors import SpecError
    from weft.spec.schedule_text import read_grid_file
    from weft.spec.strategy import Strategy

    if not name.endswith(GRID_SUFFIX):
        known = Strategy(schedule=name).schedule  # says if there is none
        try:
            return schedule_of(known, stages or 4, microbatches or 8, stages_per_worker)
        except ScheduleError as error:
            raise SpecError(str(error)) from None
    tables: dict[str, Any] = {"directory": working_directory(), "strategy": {"schedule": name}}
    read_grid_file(tables)
    text = Strategy(schedule=tables["strategy"]["schedule"]).schedule
    try:
        made = read_grid(text)
        return schedule_of(text, stages or made.num_stages, microbatches or made.num_microbatches, stages_per_worker)
    except ScheduleError as error:
        raise SpecError(f"{name}: {error}") from None


def _idle(made: Schedule) -> float:
    """The part of the workers' time in which they wait, where every pass takes as long as any other; beside backwards
    in two parts a whole one takes twice as long."""
    from weft.plan.kinds import Kind

    kinds = [each.kind for program in made.programs for each in program]
    seconds = {Kind.BACKWARD: 2 if Kind.WEIGHT in kinds else 1}
    end = max(start + seconds.get(each.kind, 1) for start, _, each in made.timeline(seconds))
    return 1 - sum(seconds.get(kind, 1) for kind in kinds) / (len(made.programs) * end)


def _facts(name: str, made: Schedule) -> dict[str, Any]:
    from weft.plan.schedules.grid import grid_of

    return {
        "schedule": name,
        "stages": made.num_stages,
        "microbatches": made.num_microbatches,
        "in_flight": [made.in_flight(stage) for stage in range(made.num_stages)],
        "idle": _idle(made),
        "grid": grid_of(made),
        "programs": [
            [{"stage": each.stage, "kind": str(each.kind), "microbatch": each.microbatch} for each in program]
            for program in made.programs
        ],
    }
