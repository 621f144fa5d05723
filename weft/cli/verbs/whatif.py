"""The verb `weft whatif`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli.exits import guarded
from weft.cli.recordings.edited_file import reads_recording
from weft.cli.verbs.completion import complete_job
from weft.cli.verbs.options import Json
from weft.client.result import to_json
from weft.transport.wire.frames import Message

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.table import Table

    from weft.scheduler.whatif.answer import Answer, Outlook

_SETTINGS_HELP = (
    "workers.NAME.speed, workers.NAME.LANE.speed, links.speed (links.h2d.speed, links.d2h.speed) or load.speed with a "
    "factor; or a key of the spec: strategy.AXIS, job.batch_size. Repeatable."
)


@guarded
@reads_recording
def whatif(
    job: Annotated[
        str,
        typer.Argument(
            metavar="JOB", autocompletion=complete_job, help="The job's id, or the path of a recording.msgpack."
        ),
    ],
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help=_SETTINGS_HELP)] = None,
    json: Json = False,
) -> None:
    """Say what an iteration would take with a faster worker or link, or planned otherwise: from recorded task times.

    Without --set it compares the simulation of the job as it ran with what was measured. Nothing is run.
    """
    from weft.cli.recordings.recorded_job import find_recording
    from weft.scheduler.whatif.answer import what_if

    recording, directory = find_recording(job)
    answer = what_if(recording, set_ or (), machine=_machine(job, directory.name))
    if json:
        print(to_json(answer.to_json()))
        return
    _print(answer)


def _machine(source: str, directory: str) -> Mapping[str, int] | None:
    """The daemon's workers by kind; None where the recording was given as a path: it may be of another machine."""
    if "/" in source or source != directory:
        return None
    from collections import Counter

    from weft.client.client import Client

    workers: list[Message] = Client().status()["workers"]
    return Counter(worker["kind"] for worker in workers)


def _print(answer: Answer) -> None:
    from weft.client.console import make_console
    from weft.quantities import duration

    console = make_console(sys.stdout)
    what = " ".join(answer.settings) or "as it ran"
    iterations = "one recorded iteration" if answer.iterations == 1 else f"{answer.iterations} recorded iterations"
    console.print(f"{answer.job}, {iterations}; {what}", soft_wrap=True)
    console.print(headline(answer), soft_wrap=True)
    console.print(_table(answer))
    for what, outlook in zip(("as it ran", "what if"), _outlooks(answer), strict=False):
        console.print(f"critical cycle {what}: {outlook.critical_cycle or 'not sought: too many tasks'}")
    if answer.settings and answer.ratio is not None:
        console.print(f"predicted = measured × {answer.ratio:.3g}, the ratio of the two simulations")
    console.print(
        f"simulated with {duration(answer.wake_seconds)} for a wake-up and {duration(answer.dispatch_seconds)} for "
        "reports and dispatch of each task, as measured"
    )
    for note in answer.notes:
        console.print(f"note: {note}")


def headline(answer: Answer) -> str:
    """What is predicted, and how far that can be trusted, in one sentence."""
    from weft.quantities import duration

    doubt = f": {answer.doubt}" if answer.doubt else ""
    if not answer.settings:
        return answer.doubt or f"the simulation is off by {100 * answer.baseline_error:+.1f} %, and so explains the job"
    if answer.predicted_seconds is None:
        return f"no prediction{doubt}"
    return f"predicted: {_predicted(answer)} an iteration, {duration(answer.measured_seconds)} as it ran{doubt}"


def _predicted(answer: Answer) -> str:
    from weft.quantities import duration

    low, high = duration(answer.predicted_low_seconds), duration(answer.predicted_high_seconds)
    return duration(answer.predicted_seconds) if answer.doubt is None else f"{low} to {high}"


def _outlooks(answer: Answer) -> list[Outlook]:
    return [answer.before, *([answer.after] if answer.settings and answer.after else [])]


def _table(answer: Answer) -> Table:
    from weft.cli.screens.display import make_table, plain_text
    from weft.quantities import duration, percent

    outlooks = _outlooks(answer)
    changed = len(outlooks) > 1
    table = make_table("", "as it ran", *(["what if"] if changed else []))
    cells = {
        "measured iteration": [duration(answer.measured_seconds), "-"],
        "simulated": [duration(each.iteration_seconds) for each in outlooks],
        "predicted": [duration(answer.measured_seconds), _predicted(answer)],
        "ratio": ["1", "-" if answer.ratio is None else f"{answer.ratio:.3g}"],
        "limit": [duration(each.limit_seconds) for each in outlooks],
        "bubble": [percent(100 * each.bubble_ratio) for each in outlooks],
        "bottleneck": [f"{each.bottleneck}, busy {percent(100 * each.bottleneck_busy)}" for each in outlooks],
    }
    for name, row in cells.items():
        if changed or name not in ("predicted", "ratio"):
            table.add_row(name, *(plain_text(cell) for cell in row[: len(outlooks)]))
    return table
