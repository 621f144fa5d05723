"""The scheduler core: one sans-IO state machine. `handle(event, now)` is the only thing that changes its state.

It knows jobs, workers and how far each lane has come. It knows no clock (now is given), no socket, no torch.

A job's phases, and what moves it on:

    QUEUED ──workers free──▶ PLANNING ──planned──▶ PREPARING ──all prepared──▶ RUNNING ──all lanes done──▶ SAVING
       ▲                        │                      │                          │                          │
       │                        └─────────── cancel, fault, worker lost, drain ───┴─────────────── saved ────┤
       │                                                                                                     ▼
       └────── after a lost worker: the next attempt ◀──────── all workers released or lost ◀───────── RELEASING
                                                                        │
                                                                        └──▶ ENDED: completed, failed, cancelled

A job gets all its workers at once or waits. Within one priority jobs start in the order of submission, and a job that
waits for workers holds back those behind it: nobody overtakes, so nobody starves.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import assert_never

from weft.plan.plan import Plan
from weft.scheduler.core import dispatch, events, gates, losses, outcomes
from weft.scheduler.core.back_off import back_off
from weft.scheduler.core.events import Command, Event
from weft.scheduler.core.job import MOVES, Job, Outcome, Phase, Worker

RELEASE_SECONDS = 10.0  # a worker that has not let go by then is killed; a task on a CPU lasts well under it
CANCEL_SECONDS = 1.0  # the same of a job that somebody has cancelled, and waits for: done within 2 s, come what may
DIRECTORY_LOST = "the directory process was lost"


class IllegalMove(AssertionError):
    """A bug of ours: the machine was asked for a move that its table does not have. Carries the job's story."""


class Core:
    """Errors: IllegalMove for a bug of ours."""

    def __init__(self, workers: dict[str, str]) -> None:
        """workers: name -> kind ("cpu" or "loader") of every worker that the daemon should keep running."""
        self.jobs: dict[str, Job] = {}  # those that have not ended
        self.workers = {name: Worker(name, kind) for name, kind in workers.items()}
        self.draining = False
        self._sequence = 0

    def start(self) -> list[Command]:
        return [events.StartWorker(worker=w.name, kind=w.kind, delay_seconds=0.0) for w in self.workers.values()]

    def handle(self, event: Event, now: float) -> list[Command]:
        """What to do about what happened. now: seconds on any clock that never goes back."""
        match event:
            case events.TasksFinished():  # first: it is the only frequent one
                return self._tasks_finished(event)
            case events.JobSubmitted():
                return self._job_submitted(event)
            case events.WorkerJoined():
                return self._worker_joined(event)
            case events.WorkerLost():
                return self._worker_lost(event, now)
            case events.WorkerGarbled():
                return self._worker_garbled(event, now)
            case events.JobPlanned():
                return self._job_planned(event)
            case events.WorkerPrepared():
                return self._worker_prepared(event)
            case events.JobFaulted():
                return self._job_faulted(event, now)
            case events.ResultSaved():
                return self._result_saved(event, now)
            case events.WorkerReleased():
                return self._worker_released(event)
            case events.DirectoryLost():
                return self._directory_lost(now)
            case events.DirectoryMissed():
                return self._directory_missed(event, now)
            case events.JobMeasured() | events.SnapshotDue() | events.CheckpointDue() | events.StopRequested():
                job = self._current(event.job, event.attempt, Phase.RUNNING)
                return [] if job is None else dispatch.asked(job, event)
            case events.EpochJudged():
                job = self._current(event.job, event.attempt, Phase.RUNNING)
                return [] if job is None else [*dispatch.judged(job, event), *self._saved_if_over(job)]
            case events.SnapshotSaved():
                return self._snapshot_saved(event)
            case events.CancelRequested():
                return self._cancel_requested(event, now)
            case events.DrainRequested():
                return self._drain_requested(event, now)
            case events.Ticked():
                return self._ticked(now)
        assert_never(event)

    # --- jobs come, start, end

    def _job_submitted(self, event: events.JobSubmitted) -> list[Command]:
        assert event.job not in self.jobs, event.job
        self._sequence += 1
        job = Job(event.job, event.needs, event.inspector, event.priority, self._sequence, event.attempt)
        self.jobs[event.job] = job
        return [events.RecordState(job=job.name, state="queued", attempt=job.attempt), *self._start_jobs()]

    def _start_jobs(self) -> list[Command]:
        commands: list[Command] = []
        if self.draining:
            return commands
        for job in self._in_order(self.jobs.values()):
            if job.phase is Phase.RELEASING and job.outcome is not None and job.outcome.state == "":
                break  # it is on its way to the queue, in its place there
            if job.phase is not Phase.QUEUED:
                continue
            free = self.free()
            if any(len(free.get(kind, ())) < count for kind, count in job.needs.items()):
                break
            job.workers = tuple(name for kind, count in job.needs.items() for name in free[kind][:count])
            for name in job.workers:
                self.workers[name].job = job.name
            commands.append(events.RecordState(job=job.name, state="planning", attempt=job.attempt))
            if job.plan is not None:
                commands += self._prepare(job, f"holds {', '.join(job.workers)} and goes on", job.plan)
                continue
            self._move(job, Phase.PLANNING, f"holds {', '.join(job.workers)}")
            commands.append(events.PlanJob(job=job.name, attempt=job.attempt, worker=job.workers[job.inspector]))
        return commands

    def _job_planned(self, event: events.JobPlanned) -> list[Command]:
        job = self._current(event.job, event.attempt, Phase.PLANNING)
        if job is None:
            return []
        if job.snapshot is None:
            job.snapshot = event.checkpoint
        return self._prepare(job, f"planned: {event.plan.limit_seconds * 1e3:.3g} ms an iteration at best", event.plan)

    def _prepare(self, job: Job, cause: str, plan: Plan) -> list[Command]:
        self._move(job, Phase.PREPARING, cause)
        job.plan, job.policies = plan, dispatch.policies_of(plan)
        job.waiting_for = set(job.workers)
        return [
            events.Prepare(
                job=job.name,
                attempt=job.attempt,
                worker=worker,
                position=position,
                plan=plan,
                snapshot=job.snapshot,
            )
            for position, worker in enumerate(job.workers)
        ]

    def _worker_prepared(self, event: events.WorkerPrepared) -> list[Command]:
        job = self._current(event.job, event.attempt, Phase.PREPARING)
        if job is None:
            return []
        job.waiting_for.discard(event.worker)
        if job.waiting_for:
            return []
        self._move(job, Phase.RUNNING, "every worker is prepared")
        return [events.RecordState(job=job.name, state="running", attempt=job.attempt), *dispatch.begin(job)]

    def _tasks_finished(self, event: events.TasksFinished) -> list[Command]:
        job = self.jobs.get(event.job)
        if job is None or job.attempt != event.attempt or job.phase is not Phase.RUNNING:
            return []
        lane = job.lanes[event.worker, event.lane]
        before = lane.done
        lane.finished += event.count
        if lane.finished > lane.sent:
            raise IllegalMove(self._story(job, f"{lane} finished more than it was sent"))
        commands = dispatch.lane_finished(job, lane)
        if lane.done > before:
            commands += self._iterations_finished(job)
        return commands

    def _iterations_finished(self, job: Job) -> list[Command]:
        done = min(lane.done for lane in job.lanes.values())
        commands: list[Command] = [
            events.RecordIteration(job.name, job.attempt, iteration) for iteration in range(job.iterations_done, done)
        ]
        job.iterations_done = done
        return [*commands, *dispatch.take_snapshots(job), *gates.at_gate(job), *self._saved_if_over(job)]

    def _saved_if_over(self, job: Job) -> list[Command]:
        if not gates.is_over(job):
            return []
        self._move(job, Phase.SAVING, job.stopped or "every iteration is done")
        return [events.SaveResult(job=job.name, attempt=job.attempt, worker=job.workers[0])]

    def _snapshot_saved(self, event: events.SnapshotSaved) -> list[Command]:
        if (job := self.jobs.get(event.job)) is None:
            return []
        job.saving, job.on_disk = None, job.on_disk if event.path is not None else -1
        return dispatch.begin_checkpoint(job) if job.phase is Phase.RUNNING else []

    def _result_saved(self, event: events.ResultSaved, now: float) -> list[Command]:
        job = self._current(event.job, event.attempt, Phase.SAVING)
        return [] if job is None else self._release(job, outcomes.of_completed(job), now)

    def _job_faulted(self, event: events.JobFaulted, now: float) -> list[Command]:
        job = self.jobs.get(event.job)
        if job is None or job.attempt != event.attempt or job.phase is Phase.RELEASING:
            return []
        outcome = Outcome("failed", event.reason, event.message, event.exit_code)
        if job.phase is Phase.QUEUED:  # nothing of its own has failed yet: it can have no directory
            job.outcome = outcome
            return [*self._end(job), *self._start_jobs()]
        return self._release(job, outcome, now)

    def _cancel_requested(self, event: events.CancelRequested, now: float) -> list[Command]:
        if (job := self.jobs.get(event.job)) is None:
            return []
        outcome = outcomes.DISCARDED if event.discard else outcomes.CANCELLED
        if job.phase is Phase.QUEUED:
            job.outcome = outcome
            return [*self._end(job), *self._start_jobs()]
        commands: list[Command] = []
        if job.phase is not Phase.RELEASING:
            commands = self._release(job, outcome, now)
        elif job.outcome is not None and job.outcome.state == "":  # on its way to another attempt; a success stands
            job.outcome = outcome
            commands = self._start_jobs()  # it held back those behind it; no longer
        return commands + self._hurry(job, now)

    def _hurry(self, job: Job, now: float) -> list[Command]:
        """Somebody waits for the job's end: its workers get less time to let go."""
        if job.phase is not Phase.RELEASING or job.deadline is None or job.deadline <= now + CANCEL_SECONDS:
            return []
        job.deadline = now + CANCEL_SECONDS
        return [events.SetTimer(seconds=CANCEL_SECONDS)]

    def _directory_lost(self, now: float) -> list[Command]:
        """A job that is being planned has nothing in it yet, unless it is to go on from a snapshot."""
        for job in self.jobs.values():
            job.snapshot = None
            if job.phase is Phase.QUEUED:
                job.plan = None
        losers = [job for job in self._active() if job.phase is not Phase.PLANNING]
        return [command for job in losers for command in self._start_again(job, DIRECTORY_LOST, now)]

    def _directory_missed(self, event: events.DirectoryMissed, now: float) -> list[Command]:
        losers = [job for job in self._active() if (job.name, job.attempt) == (event.job, event.attempt)]
        return [command for job in losers for command in self._start_again(job, event.message, now)]

    def _start_again(self, job: Job, message: str, now: float) -> list[Command]:
        """Its snapshots are gone with the directory."""
        job.snapshot = None
        job.directory_losses += 1
        return self._release(job, outcomes.of_lost_directory(message, job), now)

    # --- workers come and go

    def _worker_joined(self, event: events.WorkerJoined) -> list[Command]:
        self.workers[event.worker].up = True
        return self._start_jobs()

    def _worker_lost(self, event: events.WorkerLost, now: float) -> list[Command]:
        worker = self.workers[event.worker]
        worker.up, name, worker.job = False, worker.job, None
        worker.failures += 1
        commands: list[Command] = []
        if not self.draining:
            delay = back_off(worker.failures)
            commands.append(events.StartWorker(worker=worker.name, kind=worker.kind, delay_seconds=delay))
        if name is None:
            return commands
        job = self.jobs[name]
        if job.phase is Phase.RELEASING:
            return commands + self._let_go(job, event.worker)
        losses.note(event, job)
        job.workers = tuple(w for w in job.workers if w != event.worker)
        return commands + self._release(job, outcomes.of_lost_worker(event, job), now)

    def _worker_garbled(self, event: events.WorkerGarbled, now: float) -> list[Command]:
        """The job holds the worker until that is lost, which is soon."""
        worker = self.workers[event.worker]
        worker.up = False
        commands: list[Command] = [
            events.KillWorker(worker=worker.name, cause=f"it sent what no worker sends: {event.message}")
        ]
        job = self.jobs[worker.job] if worker.job is not None else None
        if job is None or job.phase is Phase.RELEASING:
            return commands
        worker.failures = 0  # the job's doing: those behind it need not wait longer for the next start
        return commands + self._release(job, outcomes.of_garbled_worker(event), now)

    def _worker_released(self, event: events.WorkerReleased) -> list[Command]:
        job = self._current(event.job, event.attempt, Phase.RELEASING)
        worker = self.workers[event.worker]
        if job is None or worker.job != event.job:
            return []
        worker.job = None
        worker.failures = 0
        commands: list[Command] = []
        if not event.clean:
            worker.up = False
            commands.append(events.KillWorker(worker=worker.name, cause=f"{event.job} left it unclean"))
        return commands + self._let_go(job, event.worker)

    def _release(self, job: Job, outcome: Outcome, now: float) -> list[Command]:
        self._move(job, Phase.RELEASING, outcome.message or outcome.state)
        job.outcome = outcome
        job.deadline = now + RELEASE_SECONDS
        job.waiting_for = set(job.workers)
        commands: list[Command] = []
        if outcome.state == "":
            commands.append(outcomes.record_of(outcome, job))
        if not job.waiting_for:
            return commands + self._released(job)
        return commands + [events.Release(worker=worker, job=job.name, attempt=job.attempt) for worker in job.workers]

    def _let_go(self, job: Job, worker: str) -> list[Command]:
        job.waiting_for.discard(worker)
        if not job.waiting_for:
            return self._released(job)
        assert job.outcome is not None
        return self._start_jobs() if job.outcome.state else []  # a job that starts again keeps its place before others

    def _released(self, job: Job) -> list[Command]:
        commands: list[Command] = [events.DropArenas(job=job.name, attempt=job.attempt)]
        job.workers, job.lanes, job.deadline, job.iterations_done = (), {}, None, 0
        job.policies, job.copying = (), []
        assert job.outcome is not None
        job.plan = dispatch.plan_to_go_on_with(job)
        if job.outcome.state == "":
            job.attempt += 1
            job.outcome = None
            self._move(job, Phase.QUEUED, f"attempt {job.attempt}")
            commands.append(events.RecordState(job=job.name, state="queued", attempt=job.attempt))
        else:
            commands += self._end(job)
        return commands + self._start_jobs()

    def _end(self, job: Job) -> list[Command]:
        self._move(job, Phase.ENDED, "")
        assert job.outcome is not None
        del self.jobs[job.name]
        saved = dispatch.save(job) if job.outcome.keeps else []
        dropped = [events.DropArenas(job=job.name, attempt=None)] if job.copies else []
        return [*saved, *dropped, outcomes.record_of(job.outcome, job)]

    # --- time and shutdown

    def _drain_requested(self, event: events.DrainRequested, now: float) -> list[Command]:
        self.draining = True
        if not event.now:
            return []
        again = Outcome("", "shutdown", "the daemon is shutting down")
        saved = [command for job in self.jobs.values() for command in dispatch.save(job)]
        return [*saved, *(command for job in self._active() for command in self._release(job, again, now))]

    def _ticked(self, now: float) -> list[Command]:
        commands: list[Command] = []
        for job in self.jobs.values():
            if job.deadline is not None and now >= job.deadline:
                job.deadline = None  # a killed worker is lost soon, and never answers otherwise
                cause = f"did not let go of {job.name} in time"
                commands += [events.KillWorker(worker=worker, cause=cause) for worker in sorted(job.waiting_for)]
        return commands

    # --- shared

    def queue(self) -> list[Job]:
        """The jobs that wait, in the order in which they will start."""
        return self._in_order(job for job in self.jobs.values() if job.phase is Phase.QUEUED)

    @staticmethod
    def _in_order(jobs: Iterable[Job]) -> list[Job]:
        return sorted(jobs, key=lambda job: (-job.priority, job.sequence))

    def free(self) -> dict[str, list[str]]:
        """Workers that are up and hold no job, by kind."""
        free: dict[str, list[str]] = {}
        for worker in self.workers.values():
            if worker.up and worker.job is None:
                free.setdefault(worker.kind, []).append(worker.name)
        return free

    def _active(self) -> list[Job]:
        """Jobs whose workers are at work for them."""
        return [job for job in self.jobs.values() if job.phase not in (Phase.QUEUED, Phase.RELEASING)]

    def _current(self, name: str, attempt: int, phase: Phase) -> Job | None:
        """The job if the event belongs to its present attempt and phase; else the event is late and dropped."""
        job = self.jobs.get(name)
        return job if job is not None and job.attempt == attempt and job.phase is phase else None

    def _move(self, job: Job, phase: Phase, cause: str) -> None:
        if phase not in MOVES[job.phase]:
            raise IllegalMove(self._story(job, f"{job.phase} → {phase} is not in the table"))
        job.story.append(f"{job.phase} → {phase}: {cause}")
        job.phase = phase

    def _story(self, job: Job, problem: str) -> str:
        return f"{job.name}, attempt {job.attempt}: {problem}; " + "; ".join(job.story)
