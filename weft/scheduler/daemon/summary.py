"""What `weft ps` and the timeline page tell of a job in a line, from its row in the ledger and from its run."""

from __future__ import annotations

from weft.scheduler.core.waiting import why
from weft.scheduler.daemon.driver import Driver
from weft.scheduler.ledger.ledger import JobRow
from weft.transport.wire.frames import Message


def summary_of(row: JobRow, driver: Driver) -> Message:
    """Where the run has news, from there."""
    if row.job not in driver.core.jobs:
        return {**brief_of(row, driver), "why": None}
    return {**brief_of(row, driver), "why": why(driver.core, row.job) or driver.runs[row.job].hang}


def brief_of(row: JobRow, driver: Driver) -> Message:
    """A summary without the reason why the job waits or hangs, which takes a look at the whole queue."""
    run = driver.runs.get(row.job)
    attempt = run.attempt if run else None
    return {
        "job": row.job,
        "state": run.state if run else row.state,
        "reason": row.reason,
        "exception": (row.result or {}).get("exception"),
        "priority": row.priority,
        "step": attempt.progress.step if attempt else row.step,
        "steps": attempt.plan.itinerary.steps if attempt else (row.result or {}).get("steps"),
        "loss": attempt.progress.loss if attempt else row.loss,
        "submitted_at": row.submitted_at,
        "started_at": row.started_at,
        "ended_at": row.ended_at,
    }
