"""The verbs for jobs that have ended: `restart`, `resume` and `rm`."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import Annotated

import typer

from weft.cli.exits import USAGE, guarded, leave, of_refusal
from weft.cli.verbs.completion import complete_ended_job, complete_job_to_resume
from weft.cli.verbs.options import Json
from weft.client.client import Client, RequestRefused
from weft.client.result import to_json
from weft.transport.wire.frames import ErrorCode

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 7 * 86_400.0}
EndedJob = Annotated[
    str, typer.Argument(metavar="JOB", autocompletion=complete_ended_job, help="The id of a job that has ended.")
]
PausedOrEnded = Annotated[
    str,
    typer.Argument(
        metavar="JOB", autocompletion=complete_job_to_resume, help="The id of a job that is paused, or has ended."
    ),
]
OF_ONE_JOB = (ErrorCode.NO_SUCH_JOB, ErrorCode.NOT_ENDED, ErrorCode.NOT_REMOVED)  # the next one may go all the same


@guarded
def restart(job: EndedJob, json: Json = False) -> None:
    """Run a job that has ended once more, as a new job, and print its id.

    It has the spec and the priority of the old one, which stays as it is. Its code is read anew.
    """
    restarted = Client().restart(job)
    print(to_json(restarted) if json else restarted["job"])


@guarded
def resume(job: PausedOrEnded, json: Json = False) -> None:
    """Go on with a job that is paused; or with one that has ended, from its newest checkpoint, as a new job.

    Prints its id. A new job has the spec and the priority of the old one, which stays as it is. Its code is read anew.
    """
    resumed = Client().resume(job)
    print(to_json(resumed) if json else resumed["job"])


@guarded
def rm(
    jobs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="JOB...",
            autocompletion=complete_ended_job,
            help="The ids of jobs that have ended.",
            show_default=False,
        ),
    ] = None,
    older_than: Annotated[
        str | None, typer.Option(metavar="AGE", help="Instead: all that ended longer ago, such as 30d, 12h or 2w.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print their ids, and remove nothing.")] = False,
    json: Json = False,
) -> None:
    """Forget jobs that have ended, remove their run directories with all that is in them, and print their ids.

    A job that cannot be removed stays, and the others go; the exit code is that of the first that stayed.
    """
    if bool(jobs) == (older_than is not None):
        leave(USAGE, "rm: give the ids of jobs, or --older-than AGE, one of the two")
    if dry_run and jobs:
        leave(USAGE, "rm: --dry-run says which jobs --older-than finds; leave it out, or give --older-than AGE")
    client = Client()
    if jobs:
        return _remove(client, dict.fromkeys(jobs), json)
    moment = time.time() - _seconds(older_than or "")
    if not dry_run:
        return _remove(client, _ended_before(client, moment), json)
    found = [row["job"] for row in client.jobs(ended_before=moment)]
    if json:
        print(to_json({"would_remove": found}))
    else:
        sys.stdout.writelines(f"{name}\n" for name in found)
    return None


def _remove(client: Client, names: Iterable[str], json: bool) -> None:
    removed: list[str] = []
    kept: list[dict[str, str]] = []
    for name in names:
        try:
            removed.append(client.remove(name))
        except RequestRefused as refusal:
            if refusal.code not in OF_ONE_JOB:
                raise
            kept.append({"job": name, "code": refusal.code, "message": refusal.message})
            print(f"weft: {refusal.message}", file=sys.stderr)
        else:
            if not json:
                print(name, flush=True)
    if json:
        print(to_json({"removed": removed, "kept": kept}))
    if kept:
        leave(of_refusal(kept[0]["code"]))


def _ended_before(client: Client, moment: float) -> Iterator[str]:
    """The oldest first. The daemon lists a bounded number, so it is asked again once those are dealt with."""
    told: set[str] = set()
    while fresh := [row["job"] for row in client.jobs(ended_before=moment) if row["job"] not in told]:
        told.update(fresh)
        yield from fresh


def _seconds(age: str) -> float:
    number, unit = age[:-1], age[-1:]
    if not (number.isascii() and number.replace(".", "", 1).isdigit()) or unit not in UNITS:
        leave(USAGE, f"rm: --older-than {age!r:.80}: give a number and one of s, m, h, d and w, such as 30d")
    return float(number) * UNITS[unit]
