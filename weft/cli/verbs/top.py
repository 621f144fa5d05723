"""The verb `weft top`."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from weft.cli.exits import guarded
from weft.cli.verbs.completion import complete_live_job
from weft.client.client import Client
from weft.client.result import to_json

LEAST_SECONDS = 0.2  # lanes report twice a second: less shows nothing more, and asks the daemon for more
MOST_SECONDS = 60.0


@guarded
def top(
    job: Annotated[
        str | None,
        typer.Argument(
            metavar="JOB",
            autocompletion=complete_live_job,
            help="The job to look at; by default the first one that runs.",
        ),
    ] = None,
    interval: Annotated[
        float, typer.Option(metavar="S", min=LEAST_SECONDS, max=MOST_SECONDS, help="Seconds between two looks.")
    ] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print one interval and exit, as it does without a terminal.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one interval as JSON on stdout.")] = False,
) -> None:
    """Show live what the daemon, its jobs and the lanes of one job do; ? lists the keys."""
    client = Client()
    if json or once or not _is_interactive():
        from weft.cli.top.top import print_snapshot, take_snapshot

        told = take_snapshot(client, job, interval)
        if json:
            print(to_json(told))
            return
        from weft.client.console import make_console

        print_snapshot(make_console(sys.stdout), told)
        return
    from weft.cli.top.top import run_top, take_sample

    run_top(take_sample(client, job), job, interval)


def _is_interactive() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")
