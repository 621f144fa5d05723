"""The scheduler core: one sans-IO state machine. `handle(event, now)` is the only thing that changes its state.

It knows jobs, workers and how far each lane has come. It knows no clock (now is given), no socket, no torch.

A job's phases, and what moves it on:

    QUEUED ──workers free──▶ PLANNING ──planned──▶ PREPARING ──all prepared──▶ RUNNING ──all lanes done──▶ SAVING
       ▲                        │                      │                          │                          │
       │                        └─────────── cancel, fault, worker lost, drain ───┴─────────────── saved ────┤
       │                                                                                                     ▼
       └── lost worker, preempted, another plan: the next attempt ◀── all workers released or lost ◀── RELEASING
       ▲                                                                │
       │              PREPARING ◀──another worker── MENDING ◀───────────┤
       └───────────────── resumed ◀── PAUSED ◀── asked for ─────────────┤
                                                                        └──▶ ENDED: completed, failed, cancelled

After a lost worker the others keep what they have of the job: MENDING waits for one in its place.

A job gets all its workers at once or waits. Within one priority jobs start in the order of submission, and a job that
waits for workers holds back those behind it: nobody overtakes, so nobody starves. But one that has lost a worker and
keeps the others goes on as soon as there is another, since those before it may wait for what it keeps. One that waits
for workers of jobs of lower priority has these stop, at an iteration's end with a snapshot of it, and wait in their
places.
"""

from __future__ import annotations

from typing import assert_never

from weft.scheduler.core import dispatch, events, gates, losses, outcomes, queue
from weft.scheduler.core.back_off import back_off
from weft.scheduler.core.copying import snapshots
from weft.scheduler.core.events import Command, Event
from weft.scheduler.core.job import Job, Outcome, Phase
from weft.scheduler.core.replanning import change
from weft.scheduler.core.replaying import steps
from weft.scheduler.core.starting import Starting
from weft.scheduler.core.state import IllegalMove

DIRECTORY_LOST = "the directory process was lost"
_MAPPED = (Phase.RUNNING, Phase.SAVING)  # in which a job's workers map all of its memory


class Core(Starting):
    """Errors: IllegalMove for a bug of ours."""

    def start(self) -> list[Command]:
        return [events.StartWorker(worker=w.name, delay_seconds=0.0) for w in self.workers.values()]

    def handle(self, event: Event, now: float) -> list[Command]:
        """What to do about what happened. now: seconds on any clock that never goes back."""
        self._now = now
        match event:
            case events.TasksFinished():  # first: it is the only frequent one
                return self._tasks_finished(event)
            case events.JobMeasured() | events.SnapshotDue() | events.CheckpointDue() | events.StopRequested():
                job = self._current(event.job, event.attempt, Phase.RUNNING)
                return [] if job is None else dispatch.asked(job, event)
            case events.EpochJudged() | events.ReplayDue() | events.TaskDigested() | events.PlanImproved():
                job = self._current(event.job, event.attempt, Phase.RUNNING)
                return [] if job is None else self._asked(job, event)
        return [*self._happened(event), *self._start_jobs()]

    def _asked(
        self, job: Job, event: events.EpochJudged | events.ReplayDue | events.TaskDigested | events.PlanImproved
    ) -> list[Command]:
        match event:
            case events.EpochJudged():
                return [*dispatch.judged(job, event), *self._saved_if_over(job)]
            case events.ReplayDue():
                return steps.begin(job)
            case events.TaskDigested():
                steps.note(job, event)
                return []
            case events.PlanImproved():
                outcome = None if self.draining else change.take(job, event, self.queue())
                return [] if outcome is None else self._stop(job, outcome)
        assert_never(event)

    def _happened(self, event: events.Rare) -> list[Command]:
        """After these, jobs may be able to start."""
        match event:
            case events.JobSubmitted():
                return self._job_submitted(event)
            case events.WorkerJoined():
                self.workers[event.worker].up = True
                return []
            case events.WorkerLost():
                return self._worker_lost(event)
            case events.WorkerGarbled():
                return self._worker_garbled(event)
            case events.WorkerHung():
                return self._hung(event)
            case events.JobPlanned():
                return self._job_planned(event)
            case events.WorkerPrepared():
                return self._worker_prepared(event)
            case events.JobFaulted():
                return self._job_faulted(event)
            case events.ResultSaved():
                return self._result_saved(event)
            case events.WorkerReleased():
                return self._worker_released(event)
            case events.DirectoryLost():
                return self._directory_lost()
            case events.DirectoryMissed():
                return self._directory_missed(event)
            case events.SnapshotGoesOn():
                job = self._current(event.job, event.attempt, Phase.RUNNING)
                return [] if job is None else snapshots.go_on_beside(job, event.iteration)
            case events.SnapshotMissed():
                job = self._current(event.job, event.attempt, Phase.RUNNING)
                return [] if job is None else self._snapshot_missed(job, event.iteration)
            case events.SnapshotSaved():
                return self._snapshot_saved(event)
            case events.PauseRequested():
                return self._pause_requested(event)
            case events.ResumeRequested():
                return self._resume_requested(event)
            case events.CancelRequested():
                return self._cancel_requested(event)
            case events.DrainRequested():
                return self._drain_requested(event)
            case events.HandoverBegun():
                running = [job for job in self.jobs.values() if job.phase is Phase.RUNNING]
                return [command for job in running for command in dispatch.send_ahead(job, event.windows)]
            case events.Ticked():
                return self._ticked()
        assert_never(event)

    # --- jobs come, start, end

    def _job_submitted(self, event: events.JobSubmitted) -> list[Command]:
        assert event.job not in self.jobs, event.job
        self._sequence += 1
        job = Job(event.job, event.needs, event.inspector, event.priority, self._sequence, event.attempt)
        self.jobs[event.job], job.instead = job, event.instead
        if event.paused:
            self._move(job, Phase.PAUSED, "it was")
        return [events.RecordState(job=job.name, state=job.phase, attempt=job.attempt)]

    def _tasks_finished(self, event: events.TasksFinished) -> list[Command]:
        job = self.jobs.get(event.job)
        if job is None or job.attempt != event.attempt:
            return []
        is_last = job.phase is Phase.RELEASING and job.outcome is not None and job.outcome.is_end
        if job.phase is not Phase.RUNNING and not is_last:
            return []
        lane = job.lanes[event.worker, event.lane]
        before = lane.done
        lane.finished, lane.heard = lane.finished + event.count, self._now
        if lane.finished > lane.sent:
            raise IllegalMove(self._story(job, f"{lane} finished more than it was sent"))
        if is_last:
            return self._last_iterations(job)
        commands = dispatch.lane_finished(job, lane)
        if lane.done > before == job.iterations_done:
            job.num_behind -= 1
            if not job.num_behind:
                commands += self._iterations_finished(job)
        return commands

    @staticmethod
    def _last_iterations(job: Job) -> list[Command]:
        """Of a job that ends before its work does: what was over in all lanes when they let go."""
        before, done = job.iterations_done, min(lane.done for lane in job.lanes.values())
        job.iterations_done = done
        stands = done if job.replay is None else min(done, job.replay.iteration)
        return [events.RecordIteration(job.name, job.attempt, iteration) for iteration in range(before, stands)]

    def _iterations_finished(self, job: Job) -> list[Command]:
        """By all lanes."""
        before, done = job.iterations_done, min(lane.done for lane in job.lanes.values())
        job.iterations_done = done
        job.num_behind = sum(lane.done == done for lane in job.lanes.values())
        taken = snapshots.take_whole(job)
        told, outcome = steps.over(job, self._now) if steps.is_run(job) else ([], None)
        recorded = range(before, done if outcome is None else done - 1)  # what does not stand is not told
        commands = told  # first: behind an iteration it is asked for what is due
        commands += [events.RecordIteration(job.name, job.attempt, iteration) for iteration in recorded]
        commands += taken
        if outcome is not None:
            return commands + self._release(job, outcome, keeps=self._exchanged(job, outcome))
        if job.stopping is not None:
            if dispatch.has_halted(job):
                return commands + self._release(job, job.stopping)
            commands += dispatch.halt(job)
        if job.plan is not None and job.plan.copies_each:
            commands += dispatch.go_on(job)
        return [*commands, *gates.at_gate(job), *self._saved_if_over(job)]

    def _exchanged(self, job: Job, outcome: Outcome) -> tuple[str, ...]:
        """The workers that stay the job's for another run of an iteration, in other places."""
        if job.replay is None or outcome.is_end:
            return ()
        job.replay.positions = queue.exchanged(job, job.replay.computing, self.free())
        return tuple(worker for worker in job.workers if worker in job.replay.positions)

    def _saved_if_over(self, job: Job) -> list[Command]:
        if not gates.is_over(job):
            return []
        self._move(job, Phase.SAVING, job.stopped or "every iteration is done")
        return [events.SaveResult(job=job.name, attempt=job.attempt, arenas=job.arenas, worker=job.workers[0])]

    def _snapshot_saved(self, event: events.SnapshotSaved) -> list[Command]:
        if (job := self.jobs.get(event.job)) is None:
            return []
        saved = job.saving.pop(0)
        if event.path is not None:
            job.on_disk = max(job.on_disk, saved.iteration)
        if job.phase is Phase.RUNNING:
            return [*snapshots.save_next(job), *dispatch.halt(job), *snapshots.begin_checkpoint(job)]
        return self._let_go_of_copies(job) if job.phase is Phase.PAUSED else []

    def _result_saved(self, event: events.ResultSaved) -> list[Command]:
        job = self._current(event.job, event.attempt, Phase.SAVING)
        return [] if job is None else self._release(job, outcomes.of_completed(job))

    def _job_faulted(self, event: events.JobFaulted) -> list[Command]:
        job = self.jobs.get(event.job)
        if job is None or job.attempt != event.attempt or job.phase is Phase.RELEASING:
            return []
        outcome = outcomes.of_fault(event, job)
        if job.phase in (Phase.QUEUED, Phase.PAUSED):  # nothing of its own has failed: it can have no directory
            job.outcome = outcome
            return self._end(job)
        if job.phase is not Phase.PLANNING:  # where its code is run as on one worker first
            outcome = outcomes.or_on_one_worker(outcome, job)
        return self._release(job, outcome)

    def _pause_requested(self, event: events.PauseRequested) -> list[Command]:
        """Nothing where it is about to end."""
        if (job := self.jobs.get(event.job)) is None:
            return []
        if job.phase is Phase.QUEUED:
            return self._pause(job)
        if job.phase is Phase.RELEASING and job.outcome is not None and job.outcome.is_another_try:
            change.forget(job)
            job.outcome, job.stopping = outcomes.PAUSED, None
            return []
        return self._stop(job, outcomes.PAUSED) if job.phase in queue.CAN_STOP else []

    def _resume_requested(self, event: events.ResumeRequested) -> list[Command]:
        job = self.jobs.get(event.job)
        if job is None or job.phase is not Phase.PAUSED:
            return []
        self._move(job, Phase.QUEUED, "resumed")
        job.saves_again = None
        return [events.RecordState(job=job.name, state="queued", attempt=job.attempt)]

    def _cancel_requested(self, event: events.CancelRequested) -> list[Command]:
        if (job := self.jobs.get(event.job)) is None:
            return []
        outcome = outcomes.DISCARDED if event.discard else outcomes.CANCELLED
        if job.phase in (Phase.QUEUED, Phase.PAUSED):
            job.outcome = outcome
            return self._end(job)
        commands: list[Command] = []
        if job.phase is not Phase.RELEASING:
            commands = self._release(job, outcome)
        elif job.outcome is not None and not job.outcome.is_end:  # on its way to another attempt; a success stands
            job.outcome = outcome
        return commands + self._hurry(job)

    def _directory_lost(self) -> list[Command]:
        """A job that runs goes on: its workers map its memory. Of others nobody does, and their snapshots are gone. One
        that is being planned has nothing in it yet, unless it is to go on from a snapshot."""
        commands: list[Command] = []
        for job in list(self.jobs.values()):
            if job.phase in _MAPPED:
                commands += _hand_memory_on(job)
                continue
            job.snapshot = job.best = job.saves_again = None
            if job.phase is Phase.QUEUED:
                job.plan = None
            elif job.phase is Phase.PREPARING:
                commands += self._start_again(job, DIRECTORY_LOST)
        return commands + self._let_menders_go(outcomes.WITHOUT_DIRECTORY)

    def _directory_missed(self, event: events.DirectoryMissed) -> list[Command]:
        """What workers map, snapshots among it, they hand on before they let go of it."""
        for job in self._active():
            if (job.name, job.attempt) == (event.job, event.attempt):
                if job.phase in _MAPPED:
                    return [*_hand_memory_on(job), *self._start_again(job, event.message)]
                job.snapshot = job.best = None
                return self._start_again(job, event.message)
        return []

    def _start_again(self, job: Job, message: str) -> list[Command]:
        job.directory_losses += 1
        return self._release(job, outcomes.of_lost_directory(message, job))

    # --- workers come and go

    def _worker_lost(self, event: events.WorkerLost) -> list[Command]:
        worker = self.workers[event.worker]
        worker.up, name, worker.job = False, worker.job, None
        has_inspected = name is not None and self.jobs[name].phase is Phase.PLANNING
        worker.failures = 1 if has_inspected else worker.failures + 1  # it was the job's code that has ended it
        commands: list[Command] = []
        if not self.draining:
            delay = back_off(worker.failures)
            commands.append(events.StartWorker(worker=worker.name, delay_seconds=delay))
        if name is None:
            return commands
        job = self.jobs[name]
        if job.phase is Phase.RELEASING:
            return commands + self._let_go(job, event.worker)
        losses.note(event, job)
        change.forget(job)
        job.workers = tuple(w for w in job.workers if w != event.worker)
        outcome = outcomes.or_on_one_worker(outcomes.of_lost_worker(event, job), job)
        is_same = outcome.state == "recovering" and not outcome.falls_back
        goes_on = is_same and dispatch.can_mend(job) and job.stopping is None
        if goes_on and job.phase is Phase.MENDING:
            return [*commands, outcomes.record_of(outcome, job), *self._next_attempt(job)]
        job.replay = None
        keeps = job.workers if goes_on and job.phase in (Phase.PREPARING, Phase.RUNNING) else ()
        return commands + self._release(job, outcome, keeps=keeps)

    def _hung(self, event: events.WorkerHung) -> list[Command]:
        """Where no worker is to blame, all let go."""
        if event.worker is not None:
            return outcomes.kill_hung(event.worker, event, self.jobs.get(event.job))
        job = self._current(event.job, event.attempt, Phase.RUNNING)
        return [] if job is None else self._release(job, outcomes.of_hung_lanes(event, job))

    def _worker_garbled(self, event: events.WorkerGarbled) -> list[Command]:
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
        return commands + self._release(job, outcomes.of_garbled_worker(event))

    def _worker_released(self, event: events.WorkerReleased) -> list[Command]:
        job = self._current(event.job, event.attempt, Phase.RELEASING)
        worker = self.workers[event.worker]
        if job is None or worker.job != event.job:
            return []
        is_kept = event.worker in job.keeps and event.clean
        if not is_kept:
            worker.job = None
        worker.failures = 0
        commands: list[Command] = []
        if not event.clean:
            worker.up = False
            commands.append(events.KillWorker(worker=worker.name, cause=f"{event.job} left it unclean"))
        return commands + self._let_go(job, event.worker, is_kept=is_kept)

    # --- time and shutdown

    def _drain_requested(self, event: events.DrainRequested) -> list[Command]:
        self.draining = True
        if not event.now:  # what waits in the queue, or is paused, does so for the next daemon
            waiting = [job for job in self.jobs.values() if job.phase in (Phase.QUEUED, Phase.PAUSED)]
            return [command for job in waiting for command in snapshots.save(job)]
        saved = [command for job in self.jobs.values() for command in snapshots.save(job)]
        return [*saved, *(command for job in self._active() for command in self._release(job, outcomes.SHUTDOWN))]

    def _ticked(self) -> list[Command]:
        commands: list[Command] = []
        for job in self.jobs.values():
            if job.saves_again is not None and not job.saving and self._now >= job.saves_again:
                commands += snapshots.save(job)
            if job.deadline is not None and self._now >= job.deadline:
                job.deadline = None  # a killed worker is lost soon, and never answers otherwise
                cause = f"did not let go of {job.name} within {job.patience:g} s"
                commands += [events.KillWorker(worker=worker, cause=cause) for worker in sorted(job.waiting_for)]
        return commands


def _hand_memory_on(job: Job) -> list[Command]:
    return [events.HandMemoryOn(job=job.name, attempt=job.attempt, worker=worker) for worker in job.workers]
