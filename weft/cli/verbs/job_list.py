"""The list of jobs: `weft ps`, which answers in under 150 ms and so goes without typer (and the pydantic it brings)."""

from __future__ import annotations

import sys
import time

from weft.cli.screens.ledger_trouble import ledger_trouble
from weft.client.client import Client
from weft.client.result import to_json


def list_jobs(*, finished: bool, json: bool) -> None:
    """Prints the jobs that wait or run, the finished ones too if asked; on stderr what is amiss with the ledger."""
    from weft.spec.job_state import TERMINAL_STATES

    listing = Client().listing()
    jobs = [job for job in listing["jobs"] if finished or job["state"] not in TERMINAL_STATES]
    for line in ledger_trouble(listing.get("ledger")):
        print(f"weft: {line}", file=sys.stderr)
    if json:
        print(to_json({**listing, "jobs": jobs}))
        return
    from weft.cli.screens.display import jobs_table
    from weft.client.console import make_console

    make_console(sys.stdout).print(jobs_table(jobs, time.time()))
