"""Losses: the workers that a job has lost since it came further than ever before, as its owner reads of them. Pure.

One that comes back at the same place is no accident, and what the attempts have in common is the way to its cause: so
each is kept until the job comes further, and all are told where it is given up.
"""

from __future__ import annotations

import signal

from weft.scheduler.core.events import JobFaulted, WorkerHung, WorkerLost
from weft.scheduler.core.job import Job, Phase

_DOING = {
    Phase.PLANNING: "while it was inspected",
    Phase.PREPARING: "while it was prepared",
    Phase.SAVING: "while its weights were saved",
    Phase.MENDING: "while it waited for another worker",
}


def note(event: WorkerLost, job: Job) -> None:
    """The job still holds what it held then."""
    ended = f"{event.worker} {how(event)}" if job.hung is None else f"{job.hung}; {event.worker} was killed for it,"
    told = f"{ended} {_when(event.worker, job)}"
    printed = event.printed.strip()
    _add(f"{told}; it had printed:\n{_indented(printed)}" if printed else told, job)


def note_corruption(event: JobFaulted, job: Job) -> None:
    """A worker has found that memory had changed, and did not use it."""
    _add(event.message, job)


def note_hang(event: WorkerHung, job: Job) -> None:
    """No worker is lost for it."""
    done = job.iterations_done
    after = f", after {job.plan.itinerary.label(done - 1)}" if done and job.plan is not None else ""
    _add(f"{event.message}{after}", job)


def note_progress(job: Job) -> None:
    """However its attempt ends: what it lost before it came further than ever is no crash loop's."""
    if job.iterations_done > job.furthest:
        job.losses.clear()
    job.furthest = max(job.furthest, job.iterations_done)


def _add(told: str, job: Job) -> None:
    note_progress(job)
    job.losses.append(f"attempt {job.attempt}: {told}")


def told(job: Job) -> str:
    """All of them, numbered; nothing where there is no more than the one that a message is about."""
    if len(job.losses) < 2:
        return ""
    numbered = [f"{number}. {loss}" for number, loss in enumerate(job.losses, 1)]
    return "\n".join([f"\n{len(numbered)} attempts ended so before the job came any further:", *numbered])


def how(event: WorkerLost) -> str:
    """Its process ended, in words."""
    code = event.exit_code
    if event.shortage:
        return event.shortage
    if code is None:
        return "could not be started"
    return f"died of {_signal(-code)}" if code < 0 else f"ended with exit code {code}"


def _signal(number: int) -> str:
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:  # a real-time signal has no name
        return f"signal {number}"


def _when(worker: str, job: Job) -> str:
    if job.phase is not Phase.RUNNING or job.plan is None:
        return _DOING[job.phase]
    done = job.iterations_done
    after = f"after {job.plan.itinerary.label(done - 1)}" if done else "before any step was reported"
    return "; ".join([after, *_places(worker, job)])


def _places(worker: str, job: Job) -> list[str]:
    """How far each of its lanes had come when it last said so, which they do twice a second."""
    assert job.plan is not None
    places = []
    for lane in job.lanes.values():
        if lane.worker == worker and lane.sent > lane.finished:
            iteration, place = divmod(lane.finished, len(lane.program))
            of, task = job.plan.itinerary.label(iteration), job.plan.graph.tasks[lane.program[place]]
            is_free = task.lane in job.plan.graph.free
            had = f"{place} of {len(lane.program)} tasks" if is_free else f"all before {task.key}"
            places.append(f"its {lane.name} lane had reported {had} of {of}")
    return places


def _indented(text: str) -> str:
    return "\n".join(f"     | {line}" for line in text.splitlines())
