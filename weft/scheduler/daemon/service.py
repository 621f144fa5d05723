"""The service: what each verb of the daemon's socket answers; `reception.py` has the conversations."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path
from typing import Any

from weft.machine.checkpoint_files import checkpoints
from weft.machine.descriptors import are_short, hardly_one
from weft.machine.run_file import RunFileError, claim, size, unclaim
from weft.metrics.prometheus.exporter import Exporter
from weft.metrics.recording.recording import FILE
from weft.plan.schedules.given import problem_of_job
from weft.scheduler.core.core import Core
from weft.scheduler.core.events import CancelRequested, PauseRequested, ResumeRequested
from weft.scheduler.core.job import Phase
from weft.scheduler.core.waiting import why
from weft.scheduler.daemon.driver import Driver
from weft.scheduler.daemon.observatory import summary_of
from weft.scheduler.daemon.pool import Pool
from weft.scheduler.daemon.reception import Caller, FollowedLog, Reception, Verb
from weft.scheduler.ledger.ledger import AsyncLedger, IdTaken, JobRow, Ledger, LedgerError, Submission
from weft.scheduler.runs.recording import keep_recording
from weft.scheduler.runs.removal import NotRemoved, remove
from weft.scheduler.runs.result import DETAILS, add_critical_path, best_model_of, details_of, model_of, result_of
from weft.spec.job_id import InvalidJobId
from weft.spec.job_spec import JobSpec, SpecError
from weft.spec.job_state import JobState
from weft.spec.settings import Settings
from weft.transport.wire.frames import ErrorCode, Message, WireError, field
from weft.version import __version__

PROGRESS_SECONDS = 1.0
MAX_JOBS_LISTED = 1000
MAX_WAIT_SECONDS = 86_400.0  # of one `wait` request; event loops refuse times far above
MAX_PRIORITY = 1000  # as in a spec, and below


class Service:
    """The verbs. What one raises as WireError is its refusal; whatever else is a bug, which ends that request alone."""

    def __init__(self, settings: Settings, driver: Driver, ledger: AsyncLedger, exporter: Exporter, pool: Pool) -> None:
        self._settings = settings
        self._driver = driver
        self._ledger = ledger
        self._pool = pool
        self._metrics_url: str | None = None
        self._succession: Verb
        self._removing = asyncio.Lock()  # one at a time: each takes a thread, of which planning needs one, too
        verbs: dict[str, Verb] = {
            "submit": self._submit,
            "ps": self._ps,
            "show": self._show,
            "record": self._record,
            "follow": self._follow,
            "wait": self._wait,
            "cancel": self._cancel,
            "pause": self._pause,
            "restart": self._restart,
            "resume": self._resume,
            "remove": self._remove,
            "replace": self._replace,
            "status": self._status,
        }
        self.reception = Reception({name: _told_of_the_ledger(verb) for name, verb in verbs.items()}, exporter)

    @property
    def _core(self) -> Core:
        return self._driver.core

    def announce_metrics(self, url: str) -> None:
        self._metrics_url = url

    def announce_succession(self, replace: Verb) -> None:
        self._succession = replace

    # --- verbs

    async def _submit(self, request: Message, caller: Caller) -> Message:
        tables = field(request, "spec", dict)
        job = field(request, "job", (str, type(None)), None)
        priority = field(request, "priority", (int, type(None)), None)
        if priority is not None and not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
            raise WireError(ErrorCode.BAD_FIELD, f"priority is {priority}; give {-MAX_PRIORITY} to {MAX_PRIORITY}")
        return await self._admit(tables, job, priority)

    async def _restart(self, request: Message, caller: Caller) -> Message:
        """A terminal state never changes: what starts is a new job, with what the ledger has of the old one."""
        row = await self._ended_row(request, caller)
        return await self._admit(row.spec, None, row.priority)

    async def _resume(self, request: Message, caller: Caller) -> Message:
        """One that is paused goes on itself; else as `_restart`, from the newest checkpoint of the old one."""
        self._check_takes_jobs()
        row = await self._row(request)
        if self._is_paused(row.job):
            if problem := self._driver.crew.why_not(JobSpec.parse(row.spec)):
                remedy = f"or go on by another strategy: weft submit SPEC --set strategy... --resume {row.run_dir}"
                raise WireError(ErrorCode.INVALID_SPEC, f"{row.job} stays paused: {problem}; {remedy}")
            await self._driver.savers.wait(row.job)  # what it reads is written over by who goes on
            self._driver.feed(ResumeRequested(job=row.job))
            await self._until_known(request, row.job, paused=False)
            return {"job": row.job, "created": False}
        row = await self._ended_row(request, caller)
        await self._driver.savers.wait(row.job)
        if not await asyncio.to_thread(checkpoints, Path(row.run_dir)):
            raise WireError(
                ErrorCode.INVALID_SPEC,
                f"{row.job} has no checkpoint; run it from the beginning with `weft restart {row.job}`",
            )
        job = row.spec["job"] | {"resume_from": row.run_dir}
        return await self._admit(row.spec | {"job": job}, None, row.priority)

    def _check_takes_jobs(self) -> None:
        if self._core.draining:
            raise WireError(
                ErrorCode.DRAINING, "the daemon is shutting down and takes no jobs; submit after its restart"
            )

    def _check_room(self) -> None:
        """For one job more."""
        self._check_takes_jobs()
        if len(self._driver.runs) >= self._settings.max_queued:
            raise WireError(
                ErrorCode.QUEUE_FULL,
                f"{len(self._driver.runs)} jobs wait, run or are paused, the most that max_queued allows; "
                "try again when one ends",
            )
        if are_short():
            raise WireError(ErrorCode.QUEUE_FULL, hardly_one(" when a job ends"))

    async def _admit(self, tables: Message, job: str | None, priority: int | None) -> Message:
        """job: the user's id for it, if any; priority: instead of the spec's, if any. One that is known needs no room:
        who never heard that it was taken asks again."""
        is_new = job is None or await self._ledger.run(Ledger.job, job) is None
        if is_new:
            self._check_room()
        try:
            num_gpus = list(self._driver.crew.kinds().values()).count("gpu")
            spec, problem = await asyncio.to_thread(_checked_spec, tables, num_gpus)  # many mistakes take long to write
        except SpecError as error:
            raise WireError(ErrorCode.INVALID_SPEC, str(error)) from None
        if is_new and (problem := problem or self._driver.crew.why_not(spec)):
            raise WireError(ErrorCode.INVALID_SPEC, problem)  # it can never run here
        try:
            await self._driver.writer.check_room(self._settings.runs_path)
            submission = await self._ledger.run(
                _add_and_claim,
                spec.to_wire(),
                uid=os.getuid(),
                priority=spec.job.priority if priority is None else priority,
                submitted_at=time.time(),
                job=job,
            )
        except InvalidJobId as error:
            raise WireError(ErrorCode.BAD_FIELD, str(error)) from None
        except IdTaken as error:
            raise WireError(ErrorCode.ID_TAKEN, str(error)) from None
        except RunFileError as error:
            raise WireError(ErrorCode.NO_ROOM, f"{error}; the job was not taken: make room and submit again") from None
        if submission.is_new:
            self._driver.adopt(submission.row, attempt=1)
        return {"job": submission.row.job, "created": submission.is_new}

    async def _remove(self, request: Message, caller: Caller) -> Message:
        """First what the job left on disk, then its row: what fails half-way can be tried again."""
        stop = threading.Event()
        async with self._removing:
            row = await self._ended_row(request, caller)
            await self._driver.savers.wait(row.job)
            try:
                await asyncio.to_thread(remove, Path(row.run_dir), row.job, self._settings.runs_path, stop)
            except NotRemoved as error:
                raise WireError(ErrorCode.NOT_REMOVED, f"{row.job} stays: {error}") from None
            finally:
                stop.set()  # the daemon ends, and waits for its threads
            await self._ledger.run(Ledger.remove, row.job)
        self._driver.any_change.notify()
        return {"job": row.job}

    async def _replace(self, request: Message, caller: Caller) -> Message:
        return await self._succession(request, caller)

    async def _ps(self, request: Message, caller: Caller) -> Message:
        before = field(request, "ended_before", (int, float, type(None)), None)
        if before is None:
            rows = await self._ledger.run(Ledger.jobs, limit=MAX_JOBS_LISTED)
        else:
            rows = await self._ledger.run(Ledger.ended_before, float(before), limit=MAX_JOBS_LISTED)
        return {"jobs": [summary_of(row, self._driver) for row in rows], "ledger": self._ledger.health.to_wire()}

    async def _show(self, request: Message, caller: Caller) -> Message:
        row = await self._row(request)
        run = self._driver.runs.get(row.job)
        details: dict[str, Any] = row.result or {}
        if run is not None:
            details = details_of(run)
            if details["time"] is not None and field(request, "path", bool, False):
                await add_critical_path(run, details)
        return {
            **summary_of(row, self._driver),
            **{key: details.get(key) for key in DETAILS},
            "exit_code": row.exit_code,
            "spec": row.spec,
            "run_dir": row.run_dir,
            "model": await model_of(row),
            "checkpoint": await asyncio.to_thread(_newest_checkpoint, Path(row.run_dir)),
            "best": await best_model_of(row),
            "error": row.error,
        }

    async def _record(self, request: Message, caller: Caller) -> Message:
        """A job that has ended has its recording; one that runs gets a new one."""
        row = await self._row(request)
        run = self._driver.runs.get(row.job)
        path = Path(row.run_dir, FILE)
        if run is not None and run.attempt is not None:
            try:
                await keep_recording(run)
            except OSError as error:
                raise WireError(ErrorCode.NOTHING_RECORDED, str(error)) from None
            return {"path": str(path)}
        try:
            await asyncio.to_thread(size, path, owner=os.geteuid())
        except FileNotFoundError:
            nothing = f"{row.job} has run no iteration; there is nothing to look at"
            raise WireError(ErrorCode.NOTHING_RECORDED, nothing) from None
        except OSError as error:
            raise WireError(ErrorCode.NOTHING_RECORDED, str(error)) from None
        return {"path": str(path)}

    async def _wait(self, request: Message, caller: Caller) -> Message:
        timeout = field(request, "timeout", (int, float, type(None)), None)
        if timeout is not None and not 0 <= timeout <= MAX_WAIT_SECONDS:  # refuses nan, too
            raise WireError(ErrorCode.BAD_FIELD, f"timeout is {timeout}; give 0 to {MAX_WAIT_SECONDS:.0f} seconds")
        row = await self._row(request)
        try:
            async with asyncio.timeout(timeout):
                await self._until_ended(row.job, caller)
        except TimeoutError:
            raise WireError(
                ErrorCode.TIMED_OUT, f"{row.job} has not ended within {round(timeout or 0, 1):g} s"
            ) from None
        return {"result": await result_of(await self._row(request))}

    async def _until_ended(self, job: str, caller: Caller) -> None:
        while (run := self._driver.runs.get(job)) is not None:
            await caller.wait_for(run.changed)

    async def _follow(self, request: Message, caller: Caller) -> Message:
        row = await self._row(request)
        offset = field(request, "offset", int, 0)
        live = field(request, "live", bool, True)
        with_progress = field(request, "progress", bool, False)
        sent_at = 0.0
        log = FollowedLog(Path(row.run_dir), offset)
        while True:
            run = self._driver.runs.get(row.job)
            seen = run.changed.num_times if run else 0
            if run is not None:
                await run.files.written()
            await log.send_new(caller)
            if run is None or not live:
                return {"result": await result_of(await self._row(request))}
            if with_progress and time.monotonic() - sent_at >= PROGRESS_SECONDS:
                sent_at = time.monotonic()
                if run.news is not None:
                    await caller.send({"progress": run.news})
            if run.changed.num_times == seen:  # nothing has come while this was sent
                await caller.wait_for(run.changed)

    async def _cancel(self, request: Message, caller: Caller) -> Message:
        row = await self._row(request)
        if row.job in self._core.jobs:
            self._driver.feed(CancelRequested(job=row.job, discard=field(request, "discard", bool, False)))
            await self._until_ended(row.job, caller)
        return {"state": (await self._row(request)).state}

    async def _pause(self, request: Message, caller: Caller) -> Message:
        """Answered once its workers are free and it is on the disk; or it has ended first."""
        row = await self._row(request)
        if (run := self._driver.runs.get(row.job)) is not None:
            if (problem := run.why_not_paused()) is not None:
                raise WireError(ErrorCode.NOT_PAUSED, f"{row.job} cannot be paused: {problem}")
            run.files.log("asked to pause")
            self._driver.feed(PauseRequested(job=row.job))
            while row.job in self._driver.runs and not self._is_paused(row.job):
                await caller.wait_for(run.changed)
            await self._driver.savers.wait(row.job)
            await self._until_known(request, row.job, paused=True)
            job = self._core.jobs.get(row.job)
            if job is not None and job.saves_again is not None:
                raise WireError(ErrorCode.NOT_SAVED, f"{row.job}: {why(self._core, row.job)}")
        return {"state": (await self._row(request)).state}

    async def _until_known(self, request: Message, job: str, *, paused: bool) -> None:
        """To the ledger, so that the next daemon knows it, too."""
        while self._is_paused(job) is paused and ((await self._row(request)).state is JobState.PAUSED) is not paused:
            pass  # each look at it is behind what stood in its thread before

    def _is_paused(self, name: str) -> bool:
        job = self._core.jobs.get(name)
        return job is not None and job.phase is Phase.PAUSED

    async def _status(self, request: Message, caller: Caller) -> Message:
        counts = await self._ledger.run(Ledger.counts_by_state)
        return {
            "pid": os.getpid(),
            "version": __version__,
            "workers": [
                {
                    "worker": worker.name,
                    "kind": worker.kind,
                    "device": self._driver.crew[worker.name].model,
                    "state": "down" if not worker.up else "busy" if worker.job else "free",
                    "pid": self._pool.pid(worker.name),
                    "job": worker.job,
                }
                for worker in self._core.workers.values()
            ],
            "jobs": {str(state): count for state, count in counts.items()},
            "metrics": self._metrics_url,
            "ledger": self._ledger.health.to_wire(),
            "state_dir": str(self._settings.state_dir),
            "runs_dir": str(self._settings.runs_path),
        }

    # --- shared

    async def _row(self, request: Message) -> JobRow:
        name = field(request, "job", str)
        row = await self._ledger.run(Ledger.job, name)
        if row is None:
            raise WireError(ErrorCode.NO_SUCH_JOB, f"no job {name!r:.140}; `weft ps --all` lists them")
        return row

    async def _ended_row(self, request: Message, caller: Caller) -> JobRow:
        row = await self._row(request)
        run = self._driver.runs.get(row.job)
        state = run.state if run else row.state
        if not state.is_terminal:
            raise WireError(
                ErrorCode.NOT_ENDED, f"{row.job} is {state}; end it first with `weft cancel {row.job}`, then try again"
            )
        await self._until_ended(row.job, caller)  # its end may be on its way to the ledger
        return await self._row(request)


def _told_of_the_ledger(verb: Verb) -> Verb:
    """The same, where a ledger that fails is a refusal."""

    async def told(request: Message, caller: Caller) -> Message:
        try:
            return await verb(request, caller)
        except LedgerError as error:
            raise WireError(ErrorCode.LEDGER_UNAVAILABLE, str(error)) from None

    return told


def _newest_checkpoint(run: Path) -> str | None:
    return next((str(path) for path in reversed(checkpoints(run))), None)


def _checked_spec(tables: Message, num_gpus: int) -> tuple[JobSpec, str | None]:
    """With why no machine could plan it. Errors: SpecError."""
    spec = JobSpec.parse(tables).on(num_gpus)
    spec.check_files()
    return spec, problem_of_job(spec)


def _add_and_claim(ledger: Ledger, *args: Any, **kwargs: Any) -> Submission:
    """`Ledger.add`, and the run directory of a new job: in the same thread, so that nobody sees the one without the
    other. A directory that cannot be made is told when the job begins."""
    made: list[Path] = []

    def takes(directory: Path) -> bool:
        try:
            if not claim(directory, directory.name):
                return False
        except OSError:
            return not os.path.lexists(directory)
        made.append(directory)
        return True

    try:
        submission = ledger.add(*args, takes=takes, **kwargs)
    except BaseException:
        for directory in made:
            unclaim(directory)
        raise
    if submission.is_new and not made:
        takes(Path(submission.row.run_dir))
    return submission
