"""The observatory: what the timeline page is told of the driver's runs and the ledger's jobs.

It is the `Source` of weft/scheduler/daemon/http/page_routes.py.

    page ──asks──▶ on the loop: a run's numbers, its reports by reference ──▶ in a thread: rows, critical path, JSON

One answer is made at a time, and a running job's stands for a moment: many pages cost the daemon hardly more than one.
Between two pieces of an answer the thread lets the event loop go first.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from weft.metrics.accounts.history import History
from weft.metrics.recording.recording import FILE, Recording, RecordingError, packed_by_lane
from weft.metrics.views.page_data import timeline
from weft.scheduler.core.waiting import why
from weft.scheduler.daemon.driver import Driver
from weft.scheduler.daemon.http.page_routes import SourceUnavailable, encoded
from weft.scheduler.ledger.ledger import AsyncLedger, JobRow, Ledger, LedgerError
from weft.scheduler.runs.iteration_pace import Pace
from weft.scheduler.runs.recording import empty_recording, simulated
from weft.scheduler.runs.result import details_of
from weft.scheduler.runs.run import PlannedAttempt, Run

MAX_JOBS = 200  # in the page's list, the newest
MAX_ANSWERS = 16  # that stand at once: each has up to 2 MB
FRESH_SECONDS = 0.8  # that a running job's answer stands: below the page's second
PACE_SECONDS = 10.0  # that a running job's pace stands once it has a limit: that takes milliseconds to find

Json = dict[str, Any]
_FIGURES = (
    *("seconds", "first_iteration_seconds", "iteration_seconds", "limit_seconds", "validation"),
    *("plan", "time", "overlap"),
)


def summary_of(row: JobRow, driver: Driver) -> Json:
    """What `weft ps` and the page tell of a job in a line. Where the run has news, from there."""
    if row.job not in driver.core.jobs:
        return {**brief_of(row, driver), "why": None}
    return {**brief_of(row, driver), "why": why(driver.core, row.job) or driver.runs[row.job].hang}


def brief_of(row: JobRow, driver: Driver) -> Json:
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
        "steps": attempt.plan.itinerary.steps if attempt else _steps_of(row),
        "loss": attempt.progress.loss if attempt else row.loss,
        "submitted_at": row.submitted_at,
        "started_at": row.started_at,
        "ended_at": row.ended_at,
    }


def _steps_of(row: JobRow) -> int | None:
    """Of a job without a plan; None where its spec tells epochs."""
    planned: int | None = (row.result or {}).get("steps")
    return row.spec.get("job", {}).get("steps") if planned is None else planned


class Observatory:
    """For the daemon's event loop. Errors: SourceUnavailable."""

    def __init__(self, driver: Driver, ledger: AsyncLedger) -> None:
        self._driver = driver
        self._ledger = ledger
        self._making = asyncio.Lock()
        self._answers: OrderedDict[tuple[int, int], tuple[float, bytes]] = OrderedDict()  # until when each stands
        self._frames: dict[str, tuple[PlannedAttempt, Recording]] = {}  # of running jobs: recordings without rows
        self._paces: dict[str, tuple[float, Pace]] = {}  # until when each stands

    async def jobs(self) -> list[Json]:
        with _available():
            rows = await self._ledger.run(Ledger.jobs, limit=MAX_JOBS)
        return [brief_of(row, self._driver) for row in rows]

    def live(self) -> Json:
        """The state of every job that has not ended, and the progress of those that run.

        changes: of any job's state so far. A short job may begin and end between two looks.
        """
        runs = self._driver.runs
        return {
            "changes": self._driver.any_change.num_times,
            "jobs": {job: str(run.state) for job, run in runs.items()},
            "progress": {job: run.news for job, run in runs.items() if run.news is not None},
        }

    async def job(self, job: str) -> bytes | None:
        return await self._answer(job, 0, self._make_job)

    async def timeline(self, job: str, iterations: int) -> bytes | None:
        return await self._answer(job, iterations, lambda row: self._make_timeline(row, iterations))

    async def _answer(self, job: str, iterations: int, make: Callable[[JobRow], Awaitable[bytes]]) -> bytes | None:
        """The answer that stands, or a new one. That of a job that has ended stands until the job is removed."""
        async with self._making:
            with _available():
                row = await self._ledger.run(Ledger.job, job)
            if row is None:
                return None
            key = row.seq, iterations  # another job may have the id by now
            stands_until, body = self._answers.get(key, (0.0, b""))
            if time.monotonic() < stands_until:
                self._answers.move_to_end(key)
                return body
            is_over = row.state.is_terminal and row.job not in self._driver.runs  # else its recording is not yet whole
            body = await make(row)
            self._answers[key] = math.inf if is_over else time.monotonic() + FRESH_SECONDS, body
            self._answers.move_to_end(key)
            while len(self._answers) > MAX_ANSWERS:
                self._answers.popitem(last=False)
            self._forget_ended()
            return body

    def _forget_ended(self) -> None:
        for kept in (self._frames, self._paces):
            for job in kept.keys() - self._driver.runs.keys():
                del kept[job]

    # --- one job

    async def _make_job(self, row: JobRow) -> bytes:
        run = self._driver.runs.get(row.job)
        told = {
            **summary_of(row, self._driver),
            "attempt": run.attempt.number if run and run.attempt else row.attempt,
            "exit_code": row.exit_code,
            "error": row.error,
            "run_dir": row.run_dir,
            "progress": run.news if run else None,
        }
        details = row.result or {} if run is None else details_of(run, pace=self._pace_of(run))
        told |= {name: details.get(name) for name in _FIGURES}
        if run is None:
            return await asyncio.to_thread(_with_history, told, Path(row.run_dir, FILE))
        history = run.attempt.progress.history if run.attempt else History()
        return await asyncio.to_thread(encoded, told | {"history": history.curves()})

    def _pace_of(self, run: Run) -> Pace | None:
        """Both of its figures or neither anew: they are of the same iterations."""
        if run.attempt is None:
            return None
        stands_until, pace = self._paces.get(run.job, (0.0, Pace()))
        if time.monotonic() >= stands_until:
            pace = run.attempt.pace()
            self._paces.pop(run.job, None)
            if pace.limit_seconds is not None:
                self._paces[run.job] = time.monotonic() + PACE_SECONDS, pace
        return pace

    # --- its last iterations

    async def _make_timeline(self, row: JobRow, iterations: int) -> bytes:
        run = self._driver.runs.get(row.job)
        if run is None:
            return await asyncio.to_thread(_timeline_of_file, Path(row.run_dir, FILE), row.job, iterations)
        attempt = run.attempt
        if attempt is None:
            return encoded(_nothing(row.job))
        frame, recorder = await self._frame(attempt), attempt.books.recorder
        facts = {**frame.facts, "dropped": recorder.dropped()}
        frame = replace(frame, finished=attempt.progress.finished_iterations, facts=facts)
        return await asyncio.to_thread(_timeline_of_reports, frame, recorder.reports(), iterations)

    async def _frame(self, attempt: PlannedAttempt) -> Recording:
        """The job's tasks and programs, its plan in virtual time: what stays as it is while the attempt lasts."""
        kept = self._frames.get(attempt.job)
        if kept is not None and kept[0] is attempt:
            return kept[1]
        planned = await simulated(attempt)
        frame = await asyncio.to_thread(empty_recording, attempt)
        self._frames[attempt.job] = attempt, replace(frame, planned=planned)
        return self._frames[attempt.job][1]


@contextmanager
def _available() -> Iterator[None]:
    try:
        yield
    except LedgerError as error:
        raise SourceUnavailable(str(error)) from None


# --- in a thread


def _timeline_of_reports(frame: Recording, reports: Sequence[tuple[str, bytes]], iterations: int) -> bytes:
    return _joined(replace(frame, packed=packed_by_lane(reports)), iterations)


def _timeline_of_file(path: Path, job: str, iterations: int) -> bytes:
    try:
        recording = Recording.load(path, owner=os.geteuid())
    except FileNotFoundError:
        return encoded(_nothing(job))
    except (OSError, RecordingError) as error:
        return encoded({**_nothing(job), "error": str(error)})
    return _joined(recording, iterations)


def _with_history(told: Json, path: Path) -> bytes:
    try:
        told["history"] = Recording.load(path, owner=os.geteuid()).facts.get("history")
    except (OSError, RecordingError):
        told["history"] = None  # the job never ran, or its recording is lost
    return encoded(told)


def _joined(recording: Recording, iterations: int) -> bytes:
    pieces = []
    for piece in timeline(recording, iterations):
        pieces.append(piece)
        time.sleep(0)  # gives the interpreter to the event loop, if that waits for it
    return b"".join(pieces)


def _nothing(job: str) -> Json:
    """The timeline of a job of which no row is there."""
    return {"job": job, "iterations": [], "lanes": [], "tasks": [], "path": [], "planned": None, "duration": 0}
