"""Replica commands: how the driver performs what the core decides about replicas' parts of batches and their buckets'
ways, and what it tells the core for that."""

from __future__ import annotations

from collections.abc import Callable

from weft.scheduler.core.events import (
    Event,
    Grant,
    RecordVerdict,
    ReplicasMeasured,
    RoutesMeasured,
    SetRoutes,
    SetShares,
)
from weft.scheduler.core.job import Job
from weft.scheduler.runs.run import JobRun
from weft.transport.wire.frames import Message

ReplicaCommand = Grant | SetShares | SetRoutes | RecordVerdict
Send = Callable[[str, Message], None]


def perform(command: ReplicaCommand, job: Job, run: JobRun, send: Send) -> None:
    """send: to a worker, in order with all else that it is sent."""
    assert run.replicas is not None
    assert run.routes is not None
    match command:
        case Grant():
            for worker in _workers_of(command.replica, job):
                send(worker, {"type": "grants", "replica": command.replica, "grants": command.grants})
            run.replicas.grant(command.replica, command.grants)
        case SetShares():
            for worker in job.workers:
                send(worker, {"type": "shares", "first": command.first_iteration, "shares": command.shares})
            run.replicas.set(command.first_iteration, command.shares)
            parts = ", ".join(f"{100 * share:.1f} %" for share in command.shares)
            assert run.plan is not None
            run.log(f"shares from {run.plan.itinerary.label(command.first_iteration)} on: {parts}")
        case SetRoutes():
            for worker in job.workers:
                send(worker, {"type": "routes", "first": command.first_iteration, "local": command.local})
            run.log(run.routes.set(command.first_iteration, command.local))
        case RecordVerdict():
            run.log(run.replicas.judge(command.verdict, command.first_iteration))


def measured(job: Job, run: JobRun) -> list[Event]:
    """What the core has to know of how fast the job has been, where that is newly known and may change something."""
    events: list[Event] = []
    if run.replicas is not None and (replicas := run.replicas.take()) is not None:
        events.append(ReplicasMeasured(job=job.name, attempt=job.attempt, measured=replicas))
    if run.routes is not None and (routes := run.routes.take()) is not None:
        events.append(RoutesMeasured(job=job.name, attempt=job.attempt, measured=routes))
    return events


def _workers_of(replica: int, job: Job) -> list[str]:
    assert job.plan is not None
    return [job.workers[w] for w in sorted({stage.worker for stage in job.plan.stages if stage.replica == replica})]
