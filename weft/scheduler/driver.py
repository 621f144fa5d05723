"""The driver: feeds the core and performs what it commands. The only place where the two meet.

    worker or client ──event──▶ feed ──▶ Core.handle ──▶ commands ──▶ perform: pool, ledger, run directories, metrics

One event at a time, on the event loop; what takes long (planning, the ledger's disk) runs beside it and comes back as
an event.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, assert_never

from weft.metrics.exporter import Exporter
from weft.scheduler import replica_commands
from weft.scheduler.admission import doubt_of_batch
from weft.scheduler.changed import Changed as Changed  # of `Driver.changed`, for those who wait on it
from weft.scheduler.core import Core
from weft.scheduler.crew import Crew
from weft.scheduler.device_facts import DeviceFacts
from weft.scheduler.events import (
    Command,
    DirectoryMissed,
    Dispatch,
    DropArenas,
    Event,
    Grant,
    JobFaulted,
    JobPlanned,
    JobSubmitted,
    KillWorker,
    PlanJob,
    Prepare,
    RecordIteration,
    RecordState,
    RecordVerdict,
    Release,
    ResultSaved,
    SaveResult,
    SetRoutes,
    SetShares,
    SetTimer,
    StartWorker,
    TasksFinished,
    Ticked,
    WorkerJoined,
    WorkerLost,
    WorkerPrepared,
    WorkerReleased,
)
from weft.scheduler.free_memory import free_memory
from weft.scheduler.inspection import Inspection
from weft.scheduler.job import Phase
from weft.scheduler.job_metrics import JobMetrics
from weft.scheduler.job_recording import keep_profiled
from weft.scheduler.job_result import conclude, could_not_begin, details_of
from weft.scheduler.job_run import JobRun
from weft.scheduler.job_state import JobState
from weft.scheduler.ledger import AsyncLedger, JobRow, Ledger
from weft.scheduler.plan import Plan
from weft.scheduler.planner import PlanError, make_plan
from weft.scheduler.pool import DIRECTORY, Pool
from weft.scheduler.run_writer import RunWriter
from weft.spec import JobSpec, SpecError
from weft.transport.wire import Message

Spawn = Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]


class Driver:
    """runs: of jobs that have not ended; others are in the ledger. changed[job] fires on its state, log or progress."""

    def __init__(
        self, crew: Crew, ledger: AsyncLedger, exporter: Exporter, pool: Pool, spawn: Spawn, writer: RunWriter
    ) -> None:
        self.crew = crew
        self.core = Core(crew.kinds())
        self.runs: dict[str, JobRun] = {}
        self.states: dict[str, str] = {}
        self.changed: dict[str, Changed] = {}
        self.any_change = Changed()
        self._ledger = ledger
        self._exporter = exporter
        self._metrics = JobMetrics(exporter)
        self._pool = pool
        self._spawn = spawn
        self.writer = writer
        self._submitted_at: dict[str, float] = {}
        self._started_at: dict[str, float] = {}
        self._progress: dict[str, Message] = {}
        self._starting: set[asyncio.Task[None]] = set()
        self._device_facts = DeviceFacts()

    # --- into the core

    def feed(self, event: Event) -> None:
        """Tells the core what happened and does what it says."""
        for command in self.core.handle(event, time.monotonic()):
            self._perform(command)

    def start(self) -> None:
        for command in self.core.start():
            self._perform(command)

    def close(self) -> None:
        """Workers that are about to start no longer do."""
        for task in self._starting:
            task.cancel()

    def num_running(self) -> int:
        """Jobs that hold workers, or whose end is not in the ledger yet."""
        return sum(name not in self.core.jobs or self.core.jobs[name].phase is not Phase.QUEUED for name in self.runs)

    def adopt(self, row: JobRow, *, attempt: int) -> None:
        """Takes a job that stands in the ledger into the core; attempt is above 1 after a restart.

        One that cannot even begin (no run directory, a spec that an older Weft took) fails, and harms no other.
        """
        try:
            spec = JobSpec.parse(row.spec)
        except SpecError as error:
            self._spawn(self._ledger.run(Ledger.record, row.job, **could_not_begin(error)), f"end {row.job}")
            return
        run = JobRun(row.job, Path(row.run_dir), row.spec, self.writer)
        self.changed[row.job] = Changed()
        self.runs[row.job] = run
        self._spawn(self._make_directory(run), f"directory of {row.job}")
        self._submitted_at[row.job] = row.submitted_at
        if attempt > 1:
            self._exporter.add("weft_recoveries_total", cause="daemon-restart")
            run.log(f"the daemon has restarted; the job starts again (attempt {attempt})")
        self.feed(JobSubmitted(job=row.job, spec=spec, priority=row.priority, attempt=attempt))

    async def _make_directory(self, run: JobRun) -> None:
        error = await self.writer.make_directory(run.directory)
        job = self.core.jobs.get(run.job)
        if error is not None and job is not None and not error.is_shortage:
            self._fail(run.job, job.attempt, "run-directory", error, exit_code=1)

    def worker_lost(self, worker: str, exit_code: int | None) -> None:
        self._exporter.set("weft_worker_up", 0, worker=worker)
        self._exporter.add("weft_worker_restarts_total", reason=_reason_of_exit(exit_code))
        self.feed(WorkerLost(worker=worker, exit_code=exit_code))

    def worker_said(self, worker: str, message: Message) -> None:
        arrived = time.monotonic()
        match message["type"]:
            case "report":
                self._report(worker, message, arrived)
            case "joined":
                self._exporter.set("weft_worker_up", 1, worker=worker)
                self._device_facts.add(worker, message)
                self.feed(WorkerJoined(worker=worker, kind=self.core.workers[worker].kind))
            case "stopped" | "continued" as what:
                self._exporter.set("weft_worker_up", what == "continued", worker=worker)
                if (run := self.runs.get(self.core.workers[worker].job or "")) is not None:
                    (run.books.stops.stop if what == "stopped" else run.books.stops.resume)(worker, message["at"])
            case "inspected":
                self._spawn(self._plan(message), f"plan {message['job']}")
            case "prepared":
                self.feed(WorkerPrepared(job=message["job"], attempt=message["attempt"], worker=worker))
            case "saved":
                self.feed(ResultSaved(job=message["job"], attempt=message["attempt"]))
            case "released":
                if message["job"] in self.runs:
                    self.runs[message["job"]].note_peak(worker, message["peak_bytes"], message["device_peak_bytes"])
                self.feed(
                    WorkerReleased(
                        worker=worker, job=message["job"], attempt=message["attempt"], clean=message["clean"]
                    )
                )
            case "fault":
                fields = {key: message[key] for key in ("job", "attempt", "reason", "message", "exit_code")}
                if (run := self.runs.get(message["job"])) is not None:
                    run.note_exception(message["exception"])
                self.feed(JobFaulted(**fields))
            case "directory-missed":
                self.feed(DirectoryMissed(job=message["job"], attempt=message["attempt"], message=message["message"]))
            case "output":
                if message["job"] in self.runs:
                    self.runs[message["job"]].log_output(message["text"])
                    self.changed[message["job"]].notify()
            case "profiled":
                if message["job"] in self.runs:
                    self.runs[message["job"]].note_profile(worker, message["attempt"], message["text"])
                    self.changed[message["job"]].notify()
            case other:
                raise AssertionError(f"worker {worker} sent {other!r}")

    def _report(self, worker: str, message: Message, arrived: float) -> None:
        name, attempt, lane = message["job"], message["attempt"], message["lane"]
        job, run = self.core.jobs.get(name), self.runs.get(name)
        if job is None or run is None or job.attempt != attempt:
            return  # late: the attempt has ended
        commands = self.core.handle(TasksFinished(name, attempt, worker, lane, message["count"]), arrived)
        dispatches = [command for command in commands if isinstance(command, (Grant, Dispatch))]
        for dispatch in dispatches:  # before the books are kept: a lane may wait for it
            self._perform(dispatch)
        if dispatches:
            self._exporter.observe("weft_dispatch_latency_seconds", time.monotonic() - arrived)
        run.add_report(worker, lane, message["records"], message["values"])
        for command in commands:
            if not isinstance(command, (Grant, Dispatch)):
                self._perform(command)

    async def _plan(self, message: Message) -> None:
        name, attempt = message["job"], message["attempt"]
        job = self.core.jobs.get(name)
        if job is None or job.attempt != attempt:
            return
        try:
            told = message["inspection"] | self._device_facts.of(job.workers)
            told["peer_access"] = self.crew.has_peer_access(job.workers)
            inspection, self.runs[name].inspection = Inspection.from_wire(told), told
            free = free_memory()
            plan = await asyncio.to_thread(
                make_plan, job.spec, inspection, shared_bytes_free=free.shared, host_bytes_free=free.host
            )
        except PlanError as error:
            self._fail(name, attempt, "invalid-plan", error, exit_code=2)
        else:
            self.feed(JobPlanned(job=name, attempt=attempt, plan=plan))

    def _fail(self, job: str, attempt: int, reason: str, error: Exception, *, exit_code: int) -> None:
        self.feed(JobFaulted(job=job, attempt=attempt, reason=reason, message=str(error), exit_code=exit_code))

    # --- out of the core

    def _perform(self, command: Command) -> None:
        match command:
            case Dispatch():
                self._pool.send(command.worker, {"type": "dispatch", "lane": command.lane, "work": command.work})
            case Grant() | SetShares() | SetRoutes() | RecordVerdict():
                replica_commands.perform(command, self.core.jobs[command.job], self.runs[command.job], self._pool.send)
            case RecordIteration():
                self._record_iteration(command)
            case StartWorker():
                task = self._spawn(self._start_worker(command), f"start {command.worker}")
                self._starting.add(task)
                task.add_done_callback(self._starting.discard)
            case KillWorker():
                self._pool.kill(command.worker, command.cause)
            case SetTimer():
                asyncio.get_running_loop().call_later(command.seconds, self.feed, Ticked())
            case PlanJob():
                self._send(command.worker, "inspect", command.job, command.attempt)
            case Prepare():
                self._prepare(command)
            case SaveResult():
                self._save(command)
            case Release():
                self._send(command.worker, "release", command.job, command.attempt)
            case DropArenas():
                self._pool.send(DIRECTORY, {"arenas": arenas_name(command.job, command.attempt)})
            case RecordState():
                self._record_state(command)
            case _:
                assert_never(command)

    def _measure_replicas(self, name: str) -> None:
        """Tells the core how fast the job's replicas are, where that is newly known and may change something."""
        run, job = self.runs[name], self.core.jobs.get(name)
        for event in replica_commands.measured(job, run) if job is not None else ():
            self.feed(event)

    def _send(self, worker: str, kind: str, job: str, attempt: int, **fields: Any) -> None:
        run = self.runs[job]
        message = {
            "type": kind,
            "job": job,
            "attempt": attempt,
            "arenas": arenas_name(job, attempt),
            "spec": self.core.jobs[job].spec.to_wire(),
            "run_dir": str(run.directory),
        }
        self._pool.send(worker, message | fields)

    def _prepare(self, command: Prepare) -> None:
        if command.position == 0:
            self._begin(command.job, command.plan)
        self._send(
            command.worker, "prepare", command.job, command.attempt, plan=command.plan.worker_view(command.position)
        )

    def _begin(self, name: str, plan: Plan) -> None:
        run = self.runs[name]
        self._metrics.publish(run)  # what the attempt before has left
        run.begin(plan, self.core.jobs[name].workers, self.core.jobs[name].attempt)
        self._metrics.begin(run)
        parts = "1 microbatch" if plan.microbatches == 1 else f"{plan.microbatches} microbatches"
        run.log(
            f"plan: {plan.schedule}, {parts}, {plan.summary(run.worker_names)}; "
            f"predicted {plan.predicted_iteration_seconds * 1e3:.3g} ms an iteration "
            f"(limit {plan.limit_seconds * 1e3:.3g} ms)"
        )
        for note in plan.notes:
            run.log(note)
        if doubt := doubt_of_batch(plan.itinerary):
            run.log(doubt)

    def _save(self, command: SaveResult) -> None:
        run = self.runs[command.job]
        assert run.plan is not None
        self._send(
            command.worker,
            "save",
            command.job,
            command.attempt,
            path=str(run.model_path),
            arenas_to_save=run.plan.arenas_to_save(),
        )

    async def _start_worker(self, command: StartWorker) -> None:
        await asyncio.sleep(command.delay_seconds)
        await self._pool.start_worker(command.worker)

    def _record_iteration(self, command: RecordIteration) -> None:
        run = self.runs[command.job]
        self._metrics.iteration(run, run.finish_iteration(command.iteration))
        if run.take_profiled():
            self._spawn(keep_profiled(run), f"profile of {run.job}")
        if run.plan is not None and run.plan.share == "stealing":
            self._measure_replicas(command.job)

    def _record_state(self, command: RecordState) -> None:
        name, state = command.job, JobState(command.state)
        run = self.runs[name]
        self.states[name] = state
        self.any_change.notify()
        now = time.time()
        changes: dict[str, Any] = {"state": state, "attempt": command.attempt}
        if state is JobState.PLANNING and name not in self._started_at:
            self._started_at[name] = changes["started_at"] = now
            self._exporter.observe("weft_queue_wait_seconds", max(0.0, now - self._submitted_at[name]))
        run.log(f"{state}" + (f" ({command.reason})" if command.reason else ""))
        if command.message and state is not JobState.CANCELLED:
            run.log(command.message)
        if state is JobState.RECOVERING:
            self._exporter.add("weft_recoveries_total", cause=command.reason or "other")
        if not state.is_terminal:
            self._spawn(self._ledger.run(Ledger.record, name, **changes), f"record {name}")
            self.changed[name].notify()
            return
        run.books.overlap.flush()
        self._metrics.end(run, time.monotonic())
        self._exporter.add("weft_jobs_ended_total", state=state, reason=command.reason or "")
        changes |= {
            "reason": command.reason,
            "error": command.message if state is JobState.FAILED else None,
            "exit_code": command.exit_code,
            "ended_at": now,
            "step": run.step,
            "loss": run.loss,
            "result": details_of(run, now - self._started_at[name] if name in self._started_at else 0.0),
        }
        self._spawn(self._end(name, changes), f"end {name}")

    # --- what is looked at now and then

    def tick(self) -> None:
        """Once a second: brings the live numbers of each running job to the metrics, its files and its followers."""
        self.feed(Ticked())
        self._metrics.tick(self.runs, time.monotonic())
        self.writer.troubles.publish(self._exporter)
        for name, run in self.runs.items():
            run.flush()
            if run.plan is not None:
                self._progress[name] = run.take_progress() or self._progress.get(name, {})
                self._measure_replicas(name)
                self.changed[name].notify()

    def progress(self, name: str) -> Message | None:
        """The newest progress of a running job."""
        return self._progress.get(name) or None

    async def _end(self, name: str, changes: dict[str, Any]) -> None:
        run = self.runs[name]
        run.close()
        await run.written()
        await conclude(run, changes["result"])
        await self._ledger.run(Ledger.record, name, **changes)
        del self.runs[name], self.states[name]
        self._progress.pop(name, None)
        self._started_at.pop(name, None)
        del self._submitted_at[name]
        self.changed.pop(name).notify()
        self.any_change.notify()


def arenas_name(job: str, attempt: int) -> str:
    """A job's name in the directory: an attempt never meets the blocks of the one before."""
    return f"{job}@{attempt}"


def _reason_of_exit(exit_code: int | None) -> str:
    return f"signal-{-exit_code}" if exit_code is not None and exit_code < 0 else "exit"
