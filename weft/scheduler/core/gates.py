"""Gates: after each epoch of a job that may end with it, nothing is sent before it is known whether it does.

    T T T V │ T T T V │ ...      a lane is sent nothing behind the line before every lane has come to it and the daemon,
            ▲                    or a function of the user's, has looked at what the epoch has come to

So the step after which such a job ends is the same however fast the machine is. It costs the lanes' drain, once an
epoch. Functions on a Job.
"""

from __future__ import annotations

from weft.scheduler.core.events import Command, EpochJudged, JudgeEpoch
from weft.scheduler.core.job import Job


def first_gate(job: Job, begins: int) -> int | None:
    """Of an attempt that begins with an iteration; that iteration itself between two epochs, since what it goes on from
    was copied before the first of them was judged, and has nothing of what the user's function made of it."""
    assert job.plan is not None
    itinerary = job.plan.itinerary
    if not job.plan.judged:
        return None
    is_between = begins > 0 and itinerary.end_of_epoch(begins - 1) == begins
    return begins if is_between else itinerary.end_of_epoch(begins)


def at_gate(job: Job) -> list[Command]:
    """Once every lane is there; a job that stops there for now comes to it again."""
    assert job.plan is not None
    stops = job.stopping is not None and job.iterations_done == job.ends < job.plan.itinerary.num_iterations
    if job.iterations_done != job.gate or stops:
        return []
    return [JudgeEpoch(job=job.name, attempt=job.attempt, iteration=job.gate - 1, worker=judging_worker(job))]


def judging_worker(job: Job) -> str:
    """Which runs the user's function: that of the first replica's last stage, which runs the step to its end, so that
    what the step keeps beside the model (a list of losses, a meter) is there for the function to read."""
    assert job.plan is not None
    last = max((each for each in job.plan.stages if each.replica == 0), key=lambda each: each.stage)
    return job.positions[last.worker]


def open_gate(job: Job, event: EpochJudged) -> None:
    """The next one is behind the next epoch; after the last there is none."""
    assert job.plan is not None
    assert job.gate == event.iteration + 1, (job.gate, event)
    job.gate = job.plan.itinerary.end_of_epoch(job.gate) if job.gate < job.ends else None


def is_over(job: Job) -> bool:
    return job.iterations_done == job.ends and job.gate != job.ends
