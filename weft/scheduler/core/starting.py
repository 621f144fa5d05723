"""Starting: which job is next, and how it comes from the queue to lanes that run."""

from __future__ import annotations

from collections import Counter

from weft.plan.plan import Plan
from weft.quantities import duration
from weft.scheduler.core import dispatch, events, outcomes, queue
from weft.scheduler.core.back_off import back_off
from weft.scheduler.core.ending import Ending
from weft.scheduler.core.events import Command
from weft.scheduler.core.job import Job, Outcome, Phase
from weft.scheduler.core.replaying import steps
from weft.spec.workers_needed import inspecting_worker


class Starting(Ending):
    def _start_jobs(self) -> list[Command]:
        """In their order. Behind one that has to wait only those go on that hold workers already, and lack one in the
        place of a lost one: what is waited for may be theirs."""
        commands, somebody_waits = list[Command](), False
        if self.draining:
            return self._let_menders_go(outcomes.SHUTDOWN)  # no worker starts in the place of a lost one
        for job in queue.in_order(self.jobs.values()):
            if job.phase is Phase.RELEASING and job.outcome is not None and job.outcome.is_another_try:
                break  # it is on its way to the queue, in its place there
            if job.phase not in (Phase.QUEUED, Phase.MENDING):
                continue
            is_new = job.phase is Phase.QUEUED
            if is_new and somebody_waits:
                continue
            free = self.free()
            workers = queue.chosen_for(job, free) if is_new else queue.mended(job, free, self._starting_at_once())
            if workers is not None:
                commands += (self._start if is_new else self._go_on)(job, workers)
                continue
            somebody_waits = True
            if is_new and (made := self._make_room(job)):
                return commands + made
        return commands

    def _starting_at_once(self) -> list[str]:
        return [worker.name for worker in self.workers.values() if not worker.up and not back_off(worker.failures)]

    def _let_menders_go(self, outcome: Outcome) -> list[Command]:
        menders = [job for job in self.jobs.values() if job.phase is Phase.MENDING]
        return [command for job in menders for command in self._release(job, outcome)]

    def _go_on(self, job: Job, workers: tuple[str, ...]) -> list[Command]:
        """As `_start`, with workers of which only some are new."""
        assert job.plan is not None
        new = ", ".join(name for name in workers if name not in job.workers)
        self._give(job, workers)
        planning = events.RecordState(job=job.name, state="planning", attempt=job.attempt)
        return [planning, *self._prepare(job, f"goes on with {new}", job.plan)]

    def _give(self, job: Job, workers: tuple[str, ...]) -> None:
        job.workers, job.positions, job.is_mended = workers, workers, False
        for name in workers:
            self.workers[name].job = job.name

    def _start(self, job: Job, workers: tuple[str, ...]) -> list[Command]:
        self._give(job, workers)
        job.arenas = job.attempt
        planning = events.RecordState(job=job.name, state="planning", attempt=job.attempt)
        if job.plan is not None:
            return [planning, *self._prepare(job, f"holds {', '.join(workers)} and goes on", job.plan)]
        self._move(job, Phase.PLANNING, f"holds {', '.join(workers)}")
        return [planning, events.PlanJob(job=job.name, attempt=job.attempt, worker=workers[job.inspector])]

    def _make_room(self, job: Job) -> list[Command]:
        commands: list[Command] = []
        for other in queue.preempted_by(job, self.jobs.values(), self.free()):
            commands += self._stop(other, outcomes.preempted_by(job))
        return commands

    def _job_planned(self, event: events.JobPlanned) -> list[Command]:
        job = self._current(event.job, event.attempt, Phase.PLANNING)
        if job is None:
            return []
        job.instead = event.instead
        if job.snapshot is None and event.checkpoint is not None:
            job.snapshot = event.checkpoint
            job.adjustments = job.adjustments or event.checkpoint.adjusted
        return [
            *self._let_go_of_others(job, event.plan),
            *self._prepare(job, f"planned: {duration(event.plan.limit_seconds)} an iteration at best", event.plan),
        ]

    def _let_go_of_others(self, job: Job, plan: Plan) -> list[Command]:
        """Of the workers among which the plan has chosen, those that it has nothing for. They have done nothing but for
        the one that inspected, which is replaced: nobody knows what the job's code has left there."""
        inspector = job.workers[job.inspector]
        held = {kind: [name for name in job.workers if self.workers[name].kind == kind] for kind in job.needs}
        job.needs = Counter(plan.workers)
        job.inspector = inspecting_worker(job.needs)
        chosen = tuple(name for kind, count in job.needs.items() for name in held[kind][:count])
        others = [name for name in job.workers if name not in chosen]
        job.workers = job.positions = chosen
        for name in others:
            self.workers[name].job = None
        if inspector not in others:
            return []
        self.workers[inspector].up, self.workers[inspector].failures = False, 0
        return [events.KillWorker(worker=inspector, cause=f"it has inspected {job.name}, which goes on without it")]

    def _prepare(self, job: Job, cause: str, plan: Plan) -> list[Command]:
        self._move(job, Phase.PREPARING, cause)
        dispatch.adopt(job, plan)
        assert job.plan is not None
        job.waiting_for = set(job.workers)
        return [
            events.Prepare(
                job=job.name,
                attempt=job.attempt,
                arenas=job.arenas,
                worker=worker,
                position=position,
                plan=job.plan,
                snapshot=job.snapshot,
            )
            for position, worker in enumerate(job.workers)
        ]

    def _worker_prepared(self, event: events.WorkerPrepared) -> list[Command]:
        job = self._current(event.job, event.attempt, Phase.PREPARING)
        if job is None:
            return []
        job.waiting_for.discard(event.worker)
        self.workers[event.worker].failures = 0  # whoever ends it now, its start has not failed
        if job.waiting_for:
            return []
        self._move(job, Phase.RUNNING, "every worker is prepared")
        return [
            events.RecordState(job=job.name, state="running", attempt=job.attempt),
            *steps.compare(job),
            *dispatch.begin(job),
        ]
