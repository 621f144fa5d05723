"""The verb `weft plan`."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypedDict

import typer

from weft.cli.exits import USAGE, guarded, leave, termination_raises
from weft.cli.verbs.options import (
    STDOUT,
    Gpus,
    JobOptions,
    Json,
    Source,
    StandIns,
    Threads,
    Workers,
    takes_job_options,
)
from weft.client.client import Client, DaemonUnreachable, RequestRefused
from weft.client.result import to_json
from weft.transport.wire.frames import Message

if TYPE_CHECKING:
    from weft.spec.job_spec import JobSpec


@guarded
@takes_job_options
def plan(
    spec: Source,
    told: JobOptions,
    *,
    for_: Annotated[
        str, typer.Option("--for", metavar="time|memory", help="What the strategy is chosen for, where it is auto.")
    ] = "time",
    workers: Workers = None,
    threads: Threads = None,
    stand_ins: StandIns = None,
    gpus: Gpus = None,
    svg: Annotated[
        str | None,
        typer.Option("--svg", metavar="FILE", help="A picture of one iteration, too; - is stdout, without the rest."),
    ] = None,
    json: Json = False,
) -> None:
    """Say how a job would run, and how fast, without training it: its model is measured where it would run.

    The daemon that runs is asked; without one, or with any of --workers, --threads, --stand-ins and --gpus, one of its
    own, as `weft run` has it.
    """
    from weft.spec.candidates import or_auto
    from weft.spec.field_errors import SpecError

    if json and svg == STDOUT:
        leave(USAGE, "only one of --svg - and --json can have stdout; give the picture a file")
    if for_ not in ("time", "memory"):
        raise SpecError(f"--for: {for_!r:.80} is nothing to plan for; write time or memory")
    asked: Literal["time", "memory"] = "memory" if for_ == "memory" else "time"
    job_spec = or_auto(told.load(spec)).model_copy(update={"plan_for": asked})
    shown = _planned(job_spec, _Crew(workers=workers, threads=threads, stand_ins=stand_ins, gpus=gpus))
    planned = shown["planned"]
    if planned is None:
        leave(
            shown["exit_code"] or USAGE, shown["error"] or f"there is no plan: {shown['reason'] or 'it was cancelled'}"
        )
    if svg is not None:
        _write_svg(planned, svg)
    if json:
        print(to_json(planned))
        return
    if svg == STDOUT:
        return
    from weft.cli.screens.plan_page import plan_page
    from weft.client.console import make_console

    plan_page(make_console(sys.stdout), planned)


def _write_svg(planned: Message, output: str) -> None:
    from weft.cli.recordings.whole_file import write_whole
    from weft.metrics.views.plan_svg import plan_svg

    text = plan_svg(planned)
    if output == STDOUT:
        print(text, end="")
        return
    write_whole(Path(output), [text.encode()])
    print(f"svg: one iteration in {output}", file=sys.stderr)


class _Crew(TypedDict):
    """Of a daemon of its own; None: as WEFT_* and weft.toml say."""

    workers: int | None
    threads: int | None
    stand_ins: int | None
    gpus: int | None


def _planned(spec: JobSpec, crew: _Crew) -> Message:
    """What `show` says of the job once it is planned; nothing of it is left."""
    if all(each is None for each in crew.values()):
        with contextlib.suppress(DaemonUnreachable):
            client = Client()
            client.status()
            return _ask(client, spec)
    import tempfile

    from weft.client.embedded import Daemon

    with (
        termination_raises(),
        tempfile.TemporaryDirectory(prefix="weft-plan-", ignore_cleanup_errors=True) as runs_dir,
        Daemon(**crew, loaders=spec.strategy.loaders, runs_dir=runs_dir) as client,
    ):
        return _ask(client, spec)


def _ask(client: Client, spec: JobSpec) -> Message:
    job = client.submit(spec)["job"]
    try:
        client.wait(job)
        return client.show(job)
    finally:
        with contextlib.suppress(RequestRefused, DaemonUnreachable):
            client.cancel(job)
            client.wait(job)
            client.remove(job)
