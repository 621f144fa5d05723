"""Ending: how a job lets go of its workers, and what it is then: ended, paused, or in the queue once more."""

from __future__ import annotations

from dataclasses import replace

from weft.scheduler.core import dispatch, events, outcomes
from weft.scheduler.core.events import Command
from weft.scheduler.core.job import Job, Outcome, Phase
from weft.scheduler.core.state import State

RELEASE_SECONDS = 10.0  # a worker that has not let go by then is killed; a task on a CPU lasts well under it
CANCEL_SECONDS = 1.0  # the same of a job that somebody has cancelled, and waits for: done within 2 s, come what may


class Ending(State):
    def _stop(self, job: Job, outcome: Outcome) -> list[Command]:
        """At the end of an iteration, with a snapshot of what it has come to; at once where it has not begun."""
        if job.phase is not Phase.RUNNING:
            return self._release(job, outcome)
        job.stopping = outcome
        return dispatch.halt(job)

    def _pause(self, job: Job) -> list[Command]:
        self._move(job, Phase.PAUSED, "asked for")
        record = events.RecordState(job=job.name, state="paused", attempt=job.attempt)
        return [record, *dispatch.save(job), *self._let_go_of_copies(job)]

    def _let_go_of_copies(self, job: Job) -> list[Command]:
        """Of a job that is paused, once they are on the disk: that is where it will find them."""
        kept = job.snapshot
        if job.saving or (kept is not None and kept.path is None and kept.iteration > job.on_disk):
            return []
        job.snapshot, copies, job.copies = None, job.copies, False
        return [events.DropArenas(job=job.name, attempt=None)] if copies else []

    def _release(self, job: Job, outcome: Outcome) -> list[Command]:
        self._move(job, Phase.RELEASING, outcome.message or outcome.state)
        job.outcome = outcome
        job.deadline = self._now + RELEASE_SECONDS
        job.waiting_for = set(job.workers)
        commands: list[Command] = []
        if outcome.state == "recovering":
            commands.append(outcomes.record_of(outcome, job))
        if not job.waiting_for:
            return commands + self._released(job)
        return commands + [events.Release(worker=worker, job=job.name, attempt=job.attempt) for worker in job.workers]

    def _let_go(self, job: Job, worker: str) -> list[Command]:
        job.waiting_for.discard(worker)
        return [] if job.waiting_for else self._released(job)

    def _released(self, job: Job) -> list[Command]:
        commands: list[Command] = [events.DropArenas(job=job.name, attempt=job.attempt)]
        job.furthest = max(job.furthest, job.iterations_done)
        job.workers, job.lanes, job.deadline, job.iterations_done = (), {}, None, 0
        job.policies, job.copying, job.hung = (), [], None
        assert job.outcome is not None
        if job.outcome.is_end:
            return commands + self._end(job)
        job.plan = dispatch.plan_to_go_on_with(job)
        job.attempt += 1
        outcome, job.outcome, job.stopping = job.stopping or job.outcome, None, None
        if outcome.state == "paused":
            return commands + self._pause(job)
        self._move(job, Phase.QUEUED, f"attempt {job.attempt}")
        queued = events.RecordState(job=job.name, state="queued", attempt=job.attempt)
        if outcome.state == "queued":  # else it has been told why
            queued = replace(queued, reason=outcome.reason, message=outcome.message)
        return [*commands, queued]

    def _end(self, job: Job) -> list[Command]:
        self._move(job, Phase.ENDED, "")
        assert job.outcome is not None
        del self.jobs[job.name]
        saved = (dispatch.save if job.outcome.keeps else dispatch.save_best)(job)
        dropped = [events.DropArenas(job=job.name, attempt=None)] if job.copies else []
        return [*saved, *dropped, outcomes.record_of(job.outcome, job)]

    def _hurry(self, job: Job) -> list[Command]:
        """Somebody waits for the job's end: its workers get less time to let go."""
        if job.phase is not Phase.RELEASING or job.deadline is None or job.deadline <= self._now + CANCEL_SECONDS:
            return []
        job.deadline = self._now + CANCEL_SECONDS
        return [events.SetTimer(seconds=CANCEL_SECONDS)]
