"""The driver: feeds the core and performs what it commands. The only place where the two meet.

    worker or client ──event──▶ feed ──▶ Core.handle ──▶ commands ──▶ perform: pool, ledger, run directories, metrics

One event at a time, on the event loop; what takes long (planning, the ledger's disk) runs beside it and comes back as
an event.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import Any, assert_never

from weft.metrics.prometheus.exporter import Exporter
from weft.scheduler.core import events
from weft.scheduler.core.back_off import back_off
from weft.scheduler.core.events import Command, Event
from weft.scheduler.core.job import Phase
from weft.scheduler.core.outcomes import EXIT_SOFTWARE
from weft.scheduler.daemon.guard import Guard, Spawn, told_of_bug
from weft.scheduler.daemon.hangs import Hangs
from weft.scheduler.daemon.hearing import Hearing
from weft.scheduler.daemon.link import DIRECTORY, saver_of
from weft.scheduler.daemon.orders import arenas_name, blocks_kept_for, order_of, saver_order
from weft.scheduler.daemon.plans import Plans, with_chosen
from weft.scheduler.daemon.pool import Pool
from weft.scheduler.daemon.replacing.estate import Estate
from weft.scheduler.daemon.savers import Order, Savers
from weft.scheduler.ledger.ledger import AsyncLedger, JobRow, Ledger
from weft.scheduler.planning.plan_notes import lines_of_plan
from weft.scheduler.runs import judging, recording
from weft.scheduler.runs.result import conclude, could_not_begin, details_of
from weft.scheduler.runs.run import Changed, Run
from weft.scheduler.runs.run_directory import RunDirectory, read_code, tidy
from weft.scheduler.runs.run_writer import RunWriter
from weft.scheduler.runs.series import JobMetrics
from weft.spec.candidates import instead_of, workers_wanted
from weft.spec.job_spec import JobSpec, SpecError
from weft.spec.job_state import JobState
from weft.spec.workers_needed import inspecting_worker
from weft.transport.wire.frames import Message


class Driver:
    """estate: its own from here on, and all of its state that outlives it."""

    def __init__(
        self, estate: Estate, ledger: AsyncLedger, exporter: Exporter, pool: Pool, spawn: Spawn, writer: RunWriter
    ) -> None:
        self.estate = estate
        self.crew, self.core, self.runs = estate.crew, estate.core, estate.runs
        self.any_change = Changed()  # of any job's state
        self._ledger = ledger
        self._exporter = exporter
        self._metrics = JobMetrics(exporter)
        self._pool = pool
        self._spawn = spawn
        self.writer = writer
        self._starting: set[asyncio.Task[None]] = set()
        self._settling: set[asyncio.Task[None]] = set()  # about a job, and no other daemon could do them
        self.guard = Guard()
        self.savers = Savers(pool.start_saver, writer, spawn, self.guard, self._saved, self._drop, estate.writing)
        self._plans = Plans(estate, self.savers, self.feed, self._fail, self.guard)
        self._failing: set[str] = set()  # jobs that are being failed for a bug of ours
        self._hangs = Hangs(self.core, self.runs, pool, exporter, self._begin_task, self.feed, estate.watches)
        self.hearing = Hearing(
            self.core,
            self.runs,
            exporter,
            self.guard,
            feed=self.feed,
            perform=self._perform_guarded,
            progress=self._hangs.heard,
            plan=self._begin_plan,
            fail=self._fail_for_bug,
            device_facts=estate.device_facts,
        )

    # --- into the core

    def feed(self, event: Event) -> None:
        """Tells the core what happened and does what it says. Never raises: a bug of ours costs the job it is about."""
        commands: list[Command] = []
        job = self._job_of(event)
        with self.guard.around(f"what the core does about {type(event).__name__}", partial(self._fail_for_bug, job)):
            commands = self.core.handle(event, time.monotonic())
        for command in commands:
            self._perform_guarded(command)

    def start(self) -> None:
        for command in self.core.start():
            self._perform_guarded(command)

    def close(self) -> None:
        """Workers that are about to start no longer do."""
        for task in self._starting:
            task.cancel()

    def num_running(self) -> int:
        """Jobs that hold workers, or whose end is not in the ledger yet."""
        waiting = (Phase.QUEUED, Phase.PAUSED)
        return sum(name not in self.core.jobs or self.core.jobs[name].phase not in waiting for name in self.runs)

    def num_unfinished(self) -> int:
        """Jobs that run, or wait for workers."""
        return sum(job.phase is not Phase.PAUSED for job in self.core.jobs.values())

    def adopt(self, row: JobRow, *, attempt: int) -> None:
        """Takes a job that stands in the ledger into the core; attempt is above 1 after a restart.

        One that cannot even begin (no run directory, a spec that an older Weft took) fails, and harms no other.
        """
        try:
            spec = with_chosen(JobSpec.parse(row.spec), Path(row.run_dir))
        except SpecError as error:
            self._begin_task("end", row.job, self._ledger.run(Ledger.record, row.job, **could_not_begin(error)))
            return
        files = RunDirectory(row.job, Path(row.run_dir), self.writer)
        run = Run(job=row.job, spec=spec, files=files, state=row.state, submitted_at=row.submitted_at)
        run.started_at, run.code = row.started_at, read_code(files.path) if attempt > 1 else {}
        self.runs[row.job] = run
        self._begin_task("directory", row.job, self._make_directory(run))
        paused = row.state is JobState.PAUSED
        if attempt > 1 and not paused:
            self._exporter.add("weft_recoveries_total", cause="daemon-restart")
            files.log(f"the daemon has restarted; the job runs again (attempt {attempt})")
        begin = partial(events.JobSubmitted, job=row.job, priority=row.priority, attempt=attempt, paused=paused)
        needs, instead = workers_wanted(spec, self.crew.host), instead_of(spec, self.crew.host)
        self.feed(begin(needs=needs, inspector=inspecting_worker(needs), instead=instead))
        if not paused and (problem := self.crew.why_not(spec)) is not None:  # there were more when it was submitted
            self._fail(row.job, attempt, "invalid-plan", problem, exit_code=2)

    async def _make_directory(self, run: Run) -> None:
        error = await self.writer.make_directory(run.files.path)
        self.writer.put(partial(tidy, [run.files.path]))
        if error is not None and not error.is_shortage and (job := self.core.jobs.get(run.job)) is not None:
            self._fail(run.job, job.attempt, "run-directory", error, exit_code=1)

    def _begin_plan(self, message: Message) -> None:
        job = message["job"]
        self._spawn(self._guarded("plan", job, self._plans.make(message)), f"plan {job}")

    def _fail(self, job: str, attempt: int, reason: str, error: Exception | str, *, exit_code: int) -> None:
        self.feed(events.JobFaulted(job=job, attempt=attempt, reason=reason, message=str(error), exit_code=exit_code))

    # --- from one daemon to the next

    @property
    def is_settled(self) -> bool:
        """What is under way could be begun anew from the estate, and nothing is being written."""
        return not self._settling and self.writer.is_idle

    async def settle(self) -> None:
        """So that it is, unless something begins meanwhile."""
        if self._settling:
            await asyncio.wait(self._settling)
        for run in self.runs.values():
            run.files.flush()
        await self.writer.settled()

    def go_on(self) -> None:
        """With an estate: begins anew what was under way for it, and tells the metrics, which were new."""
        for worker in self.core.workers.values():
            self._exporter.set("weft_worker_up", worker.up, worker=worker.name)
            if not self._pool.has(worker.name):
                delay = back_off(worker.failures)
                self._perform(events.StartWorker(worker=worker.name, delay_seconds=delay))
        for run in self.runs.values():
            self._metrics.go_on(run)
            job = self.core.jobs.get(run.job)
            if job is not None and job.phase is Phase.PLANNING and run.inspected_attempt == job.attempt:
                self._begin_plan({"job": job.name, "attempt": job.attempt, "inspection": run.inspection})
        for name in self.estate.writing.now:
            if not self._pool.has(saver_of(name)):
                self.savers.begin(name)

    @property
    def is_idle(self) -> bool:
        """Every process is there, and none has anything of a job's."""
        free = all(worker.up and worker.job is None for worker in self.core.workers.values())
        is_kept = self.savers.num_active or any(job.copies for job in self.core.jobs.values())
        return free and not is_kept and self._pool.has(DIRECTORY)

    async def renew(self, log: Path) -> None:
        """All processes, of which nobody needs anything."""
        for worker in list(self.core.workers.values()):
            self.hearing.lost(worker.name, None)
        await self._pool.renew(log)

    # --- the boundary: what goes wrong about one job is that job's end, and nobody else's

    def _begin_task(self, what: str, job: str, work: Coroutine[Any, Any, None]) -> None:
        """A task about one job, which has to end before another daemon can go on with it."""
        task = self._spawn(self._guarded(what, job, work), f"{what} {job}")
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)

    async def _guarded(self, what: str, job: str, work: Coroutine[Any, Any, None]) -> None:
        with self.guard.around(f"{what} of {job}", partial(self._fail_for_bug, job)):
            await work

    def _perform_guarded(self, command: Command) -> None:
        with self.guard.around(type(command).__name__, partial(self._fail_for_bug, self._job_of(command))):
            self._perform(command)

    def _fail_for_bug(self, name: str | None, bug: Exception) -> None:
        """Nothing where the job has ended, or where failing it is what went wrong."""
        job = self.core.jobs.get(name or "")
        if job is None or job.name in self._failing:
            return
        self._failing.add(job.name)
        self._fail(job.name, job.attempt, "internal", told_of_bug(bug), exit_code=EXIT_SOFTWARE)
        self._failing.discard(job.name)

    def _job_of(self, what: Event | Command) -> str | None:
        """That it is about, or that the worker holds which it is about."""
        job: str | None = getattr(what, "job", None)
        worker = self.core.workers.get(getattr(what, "worker", ""))
        return worker.job if job is None and worker is not None else job

    # --- out of the core

    def _perform(self, command: Command) -> None:
        match command:
            case events.Dispatch():
                self._pool.send(command.worker, {"type": "dispatch", "lane": command.lane, "work": command.work})
            case events.Adjust():
                message = {"type": "adjust", "first": command.first_iteration, "adjustment": command.adjustment}
                for worker in command.workers:
                    self._pool.send(worker, message)
                self.runs[command.job].adjust(command.first_iteration, command.adjustment)
            case events.RecordVerdict():
                self.runs[command.job].judge(command.verdict, command.first_iteration)
            case events.RecordReplay():
                self.runs[command.job].note_replay(command)
                self._exporter.add("weft_replays_total", result="same" if command.is_same else "different")
            case events.JudgeEpoch():
                if (event := judging.judge_epoch(self.runs[command.job], command)) is not None:
                    self.feed(event)
                else:  # the job's own function has to say
                    self._pool.send(command.worker, order_of(command, self.estate))
            case events.RecordIteration():
                self._record_iteration(command)
            case events.RecordSnapshot():
                step = self.runs[command.job].note_snapshot(command.snapshot)
                self._exporter.set("weft_job_snapshot_step", step, job=command.job)
            case events.SaveSnapshot():
                run = self.runs[command.job]
                run.files.flush()  # who goes on from it finds the lines of all steps before
                self.savers.save(Order(run, saver_order(command.snapshot, run)))
            case events.StartWorker():
                task = self._spawn(self._start_worker(command), f"start {command.worker}")
                self._starting.add(task)
                task.add_done_callback(self._starting.discard)
            case events.KillWorker():
                self._pool.kill(command.worker, command.cause)
            case events.SetTimer():
                asyncio.get_running_loop().call_later(command.seconds, self.feed, events.Ticked())
            case events.PlanJob() | events.Prepare() | events.SaveResult() | events.Release():
                self._pool.send(command.worker, order_of(command, self.estate))
                if isinstance(command, events.Prepare) and command.worker == self.core.jobs[command.job].workers[-1]:
                    self._begin(command)  # while they prepare
            case events.HandMemoryOn():
                run = self.runs[command.job]
                if command.worker == self.core.jobs[command.job].workers[0]:
                    run.files.log("the directory process was lost; the workers hand the job's memory on to the next")
                self._pool.send(command.worker, order_of(command, self.estate))
            case events.DropArenas():
                (self.savers.drop_after if command.attempt is None else self._drop)(command)
            case events.FallBack():
                self._plans.fall_back(self.runs[command.job])
            case events.RecordState():
                self._record_state(command)
            case _:
                assert_never(command)

    def _drop(self, command: events.DropArenas) -> None:
        self._pool.drop(arenas_name(command.job, command.attempt))
        if command.attempt is not None:
            self._metrics.let_go(command.job)

    def _saved(self, run: Run, answer: Message) -> None:
        """The job may have ended meanwhile."""
        with self.guard.around(f"the checkpoint of {run.job}"):
            self._note_checkpoint(run, answer)
        self.feed(events.SnapshotSaved(job=run.job, path=answer.get("path")))

    def _note_checkpoint(self, run: Run, answer: Message) -> None:
        run.files.log(f"no checkpoint: {answer['error']}" if "error" in answer else f"checkpoint {answer['path']}")
        self._exporter.add("weft_checkpoints_total", result="failed" if "error" in answer else "written")
        if run.attempt is not None:
            run.attempt.note_checkpoint()

    def _measure(self, name: str, *, ticked: bool) -> None:
        """Tells the core how fast the job has been, where that is newly known and may change something."""
        job = self.core.jobs.get(name)
        for number, policy in enumerate(job.policies if job is not None else ()):
            if (ticked or policy.after_each_iteration) and (measured := policy.take()) is not None:
                assert job is not None
                self.feed(events.JobMeasured(job=name, attempt=job.attempt, policy=number, measured=measured))

    def _begin(self, command: events.Prepare) -> None:
        run, job, plan = self.runs[command.job], self.core.jobs[command.job], command.plan
        if run.attempt is not None:
            self._metrics.publish(run.attempt)  # what the attempt before has left
        begins = 0 if command.snapshot is None else command.snapshot.iteration + 1
        self._metrics.begin(run.begin(plan, job.workers, job.attempt, job.policies, begins), len(run.switching.changes))
        for line in lines_of_plan(plan, job.workers) if begins == 0 or job.attempt == 1 else ():
            run.files.log(line)

    async def _start_worker(self, command: events.StartWorker) -> None:
        await asyncio.sleep(command.delay_seconds)
        with self.guard.around(f"the start of {command.worker}", lambda bug: self.hearing.lost(command.worker, None)):
            await self._pool.start_worker(command.worker, blocks_kept_for(command.worker, self.estate))

    def _record_iteration(self, command: events.RecordIteration) -> None:
        run = self.runs[command.job]
        attempt, iteration = run.attempt, run.finish_iteration(command.iteration)
        assert attempt is not None
        self._metrics.iteration(attempt, iteration)
        if run.take_profiled():
            self._begin_task("profile", run.job, recording.keep_profiled(run))
        self._measure(command.job, ticked=False)
        for event in run.take_due(time.monotonic()):
            self.feed(event)
        if self._plans.is_due(run):
            self._spawn(self._plans.improve(run), f"plan {run.job} again")

    def _record_state(self, command: events.RecordState) -> None:
        name, run, now = command.job, self.runs[command.job], time.time()
        run.state = state = JobState(command.state)
        self.any_change.notify()
        changes: dict[str, Any] = {"state": state, "attempt": command.attempt}
        if state is JobState.PLANNING and run.started_at is None:
            run.started_at = changes["started_at"] = now
            self._exporter.observe("weft_queue_wait_seconds", max(0.0, now - run.submitted_at))
        run.files.log(f"{state}" + (f" ({command.reason})" if command.reason not in (None, "", state) else ""))
        if command.message and state is not JobState.CANCELLED:
            run.files.log(command.message)
        if state is JobState.RUNNING:
            run.start(time.monotonic())
        if state is JobState.COMPLETED:
            run.stopped = command.message
        if state is JobState.RECOVERING or command.reason == "preempted":
            self._exporter.add("weft_recoveries_total", cause=command.reason or "other")
        if not state.is_terminal:
            self._begin_task("record", name, self._ledger.run(Ledger.record, name, **changes))
            run.changed.notify()
            return
        self._exporter.add("weft_jobs_ended_total", state=state, reason=command.reason or "")
        changes |= {
            "reason": command.reason,
            "error": command.message if state is JobState.FAILED else None,
            "exit_code": command.exit_code,
            "ended_at": now,
        }
        if run.attempt is not None:
            changes |= {"step": run.attempt.progress.step, "loss": run.attempt.progress.loss}
        self._begin_task("end", name, self._end(name, changes))

    # --- what is looked at now and then

    def tick(self) -> None:
        """Once a second: brings the live numbers of each running job to the metrics, its files and its followers."""
        self.feed(events.Ticked())
        with self.guard.around("the tick"):
            self._pool.look()
            self._metrics.tick((run.attempt for run in self.runs.values() if run.attempt is not None), time.monotonic())
            self.writer.troubles.publish(self._exporter)
            self._hangs.look(time.monotonic())
        for name, run in self.runs.items():
            with self.guard.around(f"the tick of {name}", partial(self._fail_for_bug, name)):
                run.files.flush()
                if run.attempt is not None:
                    run.news = run.attempt.take_news() or run.news
                    self._measure(name, ticked=True)
                    run.changed.notify()

    async def _end(self, name: str, changes: dict[str, Any]) -> None:
        """Whatever goes wrong on the way, the job's end reaches the ledger; its figures may be missing."""
        run = self.runs[name]
        with self.guard.around(f"the figures of {name}"):
            if run.attempt is not None:
                run.attempt.books.overlap.flush()
                self._metrics.end(run.attempt, time.monotonic())
            changes["result"] = details_of(run, seconds=changes["ended_at"] - (run.started_at or changes["ended_at"]))
        await self.savers.close_files(run)
        with self.guard.around(f"the recording of {name}"):
            await run.files.written()
            if "result" in changes:
                await conclude(run, changes["result"])
        with self.guard.around(f"the end of {name}"):
            await self._ledger.run(Ledger.record, name, **changes)
        del self.runs[name]
        run.changed.notify()
        self.any_change.notify()
