"""What is told of a job: the details of its run, live or as the ledger keeps them, and the result for followers."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

from weft.machine.checkpoint_files import best_of
from weft.machine.run_file import is_regular
from weft.metrics.views.time_report import path_report, time_report
from weft.scheduler.adapting.switching import Switching
from weft.scheduler.ledger.ledger import JobChanges, JobRow
from weft.scheduler.runs.iteration_pace import Pace
from weft.scheduler.runs.recording import keep_recording, lane_name, make_recording
from weft.scheduler.runs.run import PlannedAttempt, Run
from weft.scheduler.runs.run_directory import MODEL
from weft.spec.job_spec import SpecError
from weft.spec.job_state import JobState
from weft.spec.strategy import Strategy
from weft.transport.wire.frames import Message

DETAILS = (
    *("plan", "lanes", "overlap", "time", "peak_bytes", "device_peak_bytes", "validation", "seconds"),
    *("first_iteration_seconds", "iteration_seconds", "limit_seconds", "stopped", "planned"),
    *("snapshot_step", "snapshot_seconds"),
)

_NO_NUMBERS = (  # before it has a plan
    *("plan", "steps", "time", "iteration_seconds", "limit_seconds"),
    *("snapshot_step", "snapshot_seconds"),
)
_NO_PARTS = ("lanes", "overlap", "peak_bytes", "device_peak_bytes", "validation")
_SHOWN_OF_PLAN = (
    *("stages", "schedule", "microbatches", "recompute", "predicted_iteration_seconds", "limit_seconds"),
    *("window", "shared_bytes", "notes"),
)

_log = logging.getLogger("weft.job_result")


def details_of(run: Run, *, seconds: float | None = None, pace: Pace | None = None) -> dict[str, Any]:
    """seconds: since the job started, None where nobody asks. pace: where it is known already."""
    about = {
        "exception": run.exception,
        "stopped": run.stopped,
        "planned": run.planned,
        "seconds": seconds,
        "first_iteration_seconds": run.first_iteration_seconds,
    }
    if run.attempt is None:
        return about | dict.fromkeys(_NO_NUMBERS) | {name: {} for name in _NO_PARTS}
    plan, books, pace = run.attempt.plan, run.attempt.books, pace or run.attempt.pace()
    return about | {
        "plan": _summary_of_plan(run.attempt, run.spec.strategy, run.switching),
        "steps": plan.itinerary.steps,
        "lanes": books.account.lane_seconds(),
        "overlap": books.overlap.seconds(),
        "time": _time_of(run.attempt),
        "peak_bytes": books.peak_bytes,
        "device_peak_bytes": books.device_peak_bytes,
        "validation": run.attempt.progress.validation or {},
        "iteration_seconds": pace.iteration_seconds,
        "limit_seconds": pace.limit_seconds,
        "snapshot_step": run.attempt.snapshot_step,
        "snapshot_seconds": run.attempt.snapshots.newest_seconds,
    }


def _summary_of_plan(attempt: PlannedAttempt, strategy: Strategy, switching: Switching) -> dict[str, Any]:
    """The parts of the plan that fit a screen, what it was made from, and what has become of the shares; and of the
    plan, over all attempts."""
    plan, described = attempt.plan, attempt.plan.describe(attempt.workers)
    return {
        **{key: described[key] for key in _SHOWN_OF_PLAN},
        "windows": plan.windows(attempt.workers),
        "strategy": strategy.model_dump(exclude_none=True),
        "batch_size": plan.itinerary.batch_size,
        "num_train": plan.itinerary.per_pass or plan.itinerary.num_train,
        "samples_per_step": attempt.progress.samples_per_step,
        "streams": plan.streams,
        "shares": attempt.shares(),
        "verdicts": [*switching.told(), *attempt.verdicts],
        "changes": [change.numbers() for change in switching.changes],
        "updates": plan.updates(attempt.course.local.newest[1], attempt.workers),
    }


def _time_of(attempt: PlannedAttempt) -> dict[str, Any]:
    """Its time report so far."""
    tasks, workers, books = attempt.plan.graph.tasks, attempt.workers, attempt.books
    report = time_report(
        books.account, books.waits, lambda task: str(tasks[task]), lambda task: lane_name(tasks[task].lane, workers)
    )
    began = attempt.plan.itinerary.steps_done(attempt.begins)
    return {"attempt": attempt.number, "began_after_step": began, **report}


async def add_critical_path(run: Run, details: dict[str, Any]) -> None:
    """Of the last iterations, to the time report of a job that runs; found beside the event loop."""
    recording = make_recording(run)
    if recording is not None:
        details["time"]["critical_path"] = await asyncio.to_thread(path_report, recording)


async def conclude(run: Run, details: dict[str, Any]) -> None:
    """A job that has ended: its recording goes to its directory, the critical path of its end to the details."""
    if run.attempt is None:
        return
    try:
        await keep_recording(run)
    except OSError as error:  # a full disk costs the recording, never the job
        _log.warning("%s: its recording is lost: %s", run.job, error)
    await add_critical_path(run, details)


async def result_of(row: JobRow) -> Message:
    details = row.result or {}
    return {
        "job": row.job,
        "state": row.state,
        "reason": row.reason,
        "exception": details.get("exception"),
        "steps": row.step,
        "loss": row.loss,
        "validation": details.get("validation", {}),
        "stopped": details.get("stopped"),
        "seconds": details.get("seconds"),
        "first_iteration_seconds": details.get("first_iteration_seconds"),
        "iteration_seconds": details.get("iteration_seconds"),
        "limit_seconds": details.get("limit_seconds"),
        "peak_bytes": details.get("peak_bytes", {}),
        "run_dir": row.run_dir,
        "model": await model_of(row),
        "best": await best_model_of(row),
        "exit_code": row.exit_code,
        "error": row.error,
    }


def could_not_begin(error: SpecError) -> JobChanges:
    """The end of a job without a run."""
    changes: JobChanges = {"state": JobState.FAILED, "reason": "invalid-spec", "error": str(error)}
    return changes | {"exit_code": 1, "ended_at": time.time()}


async def model_of(row: JobRow) -> str | None:
    """Its path; None where there is none, or something else in its place."""
    path = Path(row.run_dir, MODEL)
    return str(path) if row.state == "completed" and await asyncio.to_thread(is_regular, path) else None


async def best_model_of(row: JobRow) -> str | None:
    """The path of the weights that a validation has found the best, of a job that keeps them."""
    best = await asyncio.to_thread(best_of, Path(row.run_dir))
    return None if best is None else str(best / MODEL)
