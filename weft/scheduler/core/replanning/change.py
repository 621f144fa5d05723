"""How a job comes to another plan: as one that is preempted, but that it has its workers again at once.

improved ── halt ── snapshot of an iteration's end ── all let go ── QUEUED, first of all ── Prepare with the other plan

Whatever comes between (a lost worker, a pause, a cancel) is dealt with as if nobody had thought of another plan, which
is then forgotten: what it is made of will be measured again. Functions on a Job.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from weft.scheduler.core import dispatch, queue
from weft.scheduler.core.events import Command
from weft.scheduler.core.gates import at_gate
from weft.scheduler.core.job import Job, Outcome
from weft.scheduler.core.replanning.improved import PlanImproved

REPLANNED = "replanned"  # the reason of such a job's way through the queue


def take(job: Job, event: PlanImproved, waiting: Iterable[Job]) -> Outcome | None:
    """For which the job is to stop; None where it has to go on as it is. waiting: the jobs in the queue, of which none
    may be before it, since that one would have its workers."""
    assert job.plan is not None
    is_free = job.stopping is None and job.replay is None
    if not (is_free and job.plan.has_snapshots and Counter(event.plan.workers) == Counter(job.plan.workers)):
        return None
    if queue.in_order([*waiting, job])[0] is not job:
        return None
    job.improved = event.plan
    return Outcome("queued", REPLANNED, event.message)


def forget(job: Job) -> None:
    """Something has come between."""
    if job.improved is not None:
        job.improved = job.stopping = None


def missed(job: Job, iteration: int) -> list[Command]:
    """Nothing is there of the iteration behind which it was to stop: it goes on as if it had not been told to."""
    assert job.plan is not None
    if job.improved is None or job.stopped is not None or job.ends != iteration + 1:
        return []
    forget(job)
    job.ends = job.plan.itinerary.num_iterations
    for lane in job.lanes.values():
        lane.total = job.ends * len(lane.program)
    return [*dispatch.go_on(job), *at_gate(job)]
