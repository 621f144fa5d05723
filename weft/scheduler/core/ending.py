"""Ending: how a job lets go of its workers, and what it is then: ended, paused, or in the queue once more."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from weft.scheduler.core import dispatch, events, losses, outcomes
from weft.scheduler.core.copying import snapshots
from weft.scheduler.core.events import Command
from weft.scheduler.core.job import Job, Outcome, Phase
from weft.scheduler.core.replanning import change
from weft.scheduler.core.replaying import steps
from weft.scheduler.core.state import State
from weft.spec.workers_needed import inspecting_worker

RELEASE_SECONDS = 10.0  # a worker that has not let go by then is killed; a task on a CPU lasts well under it
SAVE_AGAIN_SECONDS = 30.0  # until a snapshot that the disk has not taken is tried again; arbitrary: each is a process
CANCEL_SECONDS = 1.0  # the same of a job that somebody has cancelled, and waits for: done within 2 s, come what may


class Ending(State):
    def _stop(self, job: Job, outcome: Outcome) -> list[Command]:
        """At the end of an iteration, with a snapshot of what it has come to; at once where it has not begun."""
        if job.phase is not Phase.RUNNING:
            return self._release(job, outcome)
        if outcome.reason != change.REPLANNED:
            change.forget(job)
        job.stopping = outcome
        return [*dispatch.halt(job), *steps.drop(job)]

    def _snapshot_missed(self, job: Job, iteration: int) -> list[Command]:
        """A part of it is missing, so it is none, and the one before stays what another attempt goes on from. Who was
        to come to another plan with it, or to make an iteration again, goes on as it is; who stops for anything else
        does so all the same."""
        job.copying = [each for each in job.copying if each.iteration != iteration]
        if job.replay is not None and job.replay.after == iteration:
            return steps.drop(job)
        return change.missed(job, iteration)

    def _pause(self, job: Job) -> list[Command]:
        self._move(job, Phase.PAUSED, "asked for")
        job.plan = None  # resumed, it is planned anew: with the workers of then, from what is on the disk by then
        record = events.RecordState(job=job.name, state="paused", attempt=job.attempt)
        return [record, *snapshots.save(job), *self._let_go_of_copies(job)]

    def _let_go_of_copies(self, job: Job) -> list[Command]:
        """Of a job that is paused, once they are on the disk: that is where it will find them. Where the disk has not
        taken the newest it is tried again, later."""
        kept = job.snapshot
        if job.saving:
            return []
        if kept is not None and kept.path is None and kept.iteration > job.on_disk:
            job.saves_again = self._now + SAVE_AGAIN_SECONDS
            return []
        job.saves_again, job.snapshot, copies, job.copies = None, None, job.copies, False
        return [events.DropArenas(job=job.name, attempt=None)] if copies else []

    def _release(self, job: Job, outcome: Outcome, *, keeps: Iterable[str] = ()) -> list[Command]:
        """keeps: the workers that stay the job's, with what they have, unless something comes between."""
        self._move(job, Phase.RELEASING, outcome.message or outcome.state)
        if outcome is not job.stopping:
            change.forget(job)
        job.outcome = outcome
        commands: list[Command] = []
        if outcome.state == "recovering":
            job.is_mended = False  # the attempt's number has been told as one that was tried
            commands.append(outcomes.record_of(outcome, job))
        return commands + self._tell_to_let_go(job, frozenset(keeps))

    def _tell_to_let_go(self, job: Job, keeps: frozenset[str] = frozenset()) -> list[Command]:
        job.keeps = keeps
        if job.deadline is None:
            job.deadline, job.patience = self._now + RELEASE_SECONDS, RELEASE_SECONDS
        job.waiting_for = set(job.workers)
        if not job.waiting_for:
            return self._released(job)
        return [
            events.Release(worker=worker, job=job.name, attempt=job.attempt, keeps=worker in keeps)
            for worker in job.workers
        ]

    def _let_go(self, job: Job, worker: str, *, is_kept: bool = False) -> list[Command]:
        """is_kept: the worker has stopped, and is still the job's."""
        job.waiting_for.discard(worker)
        if not is_kept:
            job.workers = tuple(each for each in job.workers if each != worker)
        return [] if job.waiting_for else self._released(job)

    def _released(self, job: Job) -> list[Command]:
        """All have stopped. What they keep is let go of, too, where it is of no use any more."""
        assert job.outcome is not None
        if job.keeps and job.outcome.is_another_try and dispatch.can_mend(job):
            return self._mend(job)
        if job.workers:
            return self._tell_to_let_go(job)
        commands: list[Command] = [events.DropArenas(job=job.name, attempt=job.arenas)]
        self._forget_attempt(job)
        job.replay = None
        if job.outcome.is_end:
            return commands + self._end(job)
        job.plan, job.improved = dispatch.plan_to_go_on_with(job), None
        if job.outcome.falls_back:
            commands += self._fall_back(job)
        if not job.is_mended:
            job.attempt += 1
        job.is_mended = False
        outcome, job.outcome, job.stopping = job.stopping or job.outcome, None, None
        if outcome.state == "paused":
            return commands + self._pause(job)
        self._move(job, Phase.QUEUED, f"attempt {job.attempt}")
        queued = events.RecordState(job=job.name, state="queued", attempt=job.attempt)
        saved = snapshots.save(job) if self.draining else []  # it goes on in the next daemon
        return [*commands, _with_reason(queued, outcome), *saved]

    @staticmethod
    def _fall_back(job: Job) -> list[Command]:
        """Planned anew, from what is on the disk by then: copies in memory are as the plan was."""
        assert job.instead is not None
        job.needs, job.inspector, job.instead = job.instead, inspecting_worker(job.instead), None
        saved, copies = snapshots.save(job), job.copies
        job.plan, job.snapshot, job.copies, job.adjustments = None, None, False, ()
        dropped = [events.DropArenas(job=job.name, attempt=None)] if copies else []
        return [*saved, *dropped, events.FallBack(job=job.name)]

    def _mend(self, job: Job) -> list[Command]:
        """The job holds its workers, and waits for one in the place of each lost one."""
        self._forget_attempt(job)
        outcome, job.outcome, job.is_mended = job.outcome, None, True
        self._move(job, Phase.MENDING, "its workers have stopped")
        if job.replay is not None:
            job.positions = job.replay.positions
        return self._next_attempt(job, outcome)

    @staticmethod
    def _next_attempt(job: Job, outcome: Outcome | None = None) -> list[Command]:
        job.attempt += 1
        queued = events.RecordState(job=job.name, state="queued", attempt=job.attempt)
        return [_with_reason(queued, outcome)]

    @staticmethod
    def _forget_attempt(job: Job) -> None:
        losses.note_progress(job)
        job.lanes, job.deadline, job.iterations_done = {}, None, 0
        job.copying, job.hung = [], None
        dispatch.forget_policies(job)

    def _end(self, job: Job) -> list[Command]:
        self._move(job, Phase.ENDED, "")
        assert job.outcome is not None
        del self.jobs[job.name]
        saved = (snapshots.save if job.outcome.keeps else snapshots.save_best)(job)
        dropped = [events.DropArenas(job=job.name, attempt=None)] if job.copies else []
        return [*saved, *dropped, outcomes.record_of(job.outcome, job)]

    def _hurry(self, job: Job) -> list[Command]:
        """Somebody waits for the job's end: its workers get less time to let go."""
        if job.phase is not Phase.RELEASING or job.deadline is None or job.deadline <= self._now + CANCEL_SECONDS:
            return []
        job.deadline, job.patience = self._now + CANCEL_SECONDS, CANCEL_SECONDS
        return [events.SetTimer(seconds=CANCEL_SECONDS)]


def _with_reason(queued: events.RecordState, outcome: Outcome | None) -> events.RecordState:
    """Of what is "recovering" it has been told."""
    if outcome is None or outcome.state != "queued":
        return queued
    return replace(queued, reason=outcome.reason, message=outcome.message)
