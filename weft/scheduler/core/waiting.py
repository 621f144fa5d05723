"""Why a job waits, in one sentence for `weft show` and `weft ps`. A view of the core's state; decides nothing."""

from __future__ import annotations

from weft.scheduler.core.core import Core
from weft.scheduler.core.job import Phase

UNSAVED = "what it has come to is in memory alone: the disk has not taken it, its log says why, and it is tried again"


def why(core: Core, name: str) -> str | None:
    """The sentence for a job that has not ended; None if it does not wait."""
    job = core.jobs[name]
    if job.saves_again is not None:
        return f"it is paused, but {UNSAVED}; `weft resume {name}` goes on with it"
    if job.phase is Phase.PAUSED:
        return f"it is paused; `weft resume {name}` goes on with it"
    if job.stopping is not None:
        return f"{job.stopping.message}: it stops at the end of an iteration"
    if job.phase is Phase.MENDING:
        lost = ", ".join(name for name in job.positions if name not in job.workers)
        return f"it was killed, and another is starting: {lost}; the others wait with what they have of the job"
    if job.phase is not Phase.QUEUED:
        return None
    if core.draining:
        return "the daemon is shutting down and starts no more jobs; it will run after a restart"
    queue = [other.name for other in core.queue()]
    ahead = queue[: queue.index(name)]
    if ahead:
        return f"{len(ahead)} job{'s stand' if len(ahead) > 1 else ' stands'} before it, {ahead[0]} first"
    if not all(worker.up for worker in core.workers.values()):
        down = ", ".join(worker.name for worker in core.workers.values() if not worker.up)
        return f"it waits for workers that are starting: {down}"
    free = {kind: len(names) for kind, names in core.free().items()}
    missing = [
        f"{count} {kind} worker{'s' if count > 1 else ''} ({free.get(kind, 0)} free)"
        for kind, count in job.needs.items()
        if free.get(kind, 0) < count
    ]
    if not missing:  # of those that are free none is its own before a job that comes back to the queue has its place
        returning = ", ".join(job.name for job in core.jobs.values() if job.phase in (Phase.RELEASING, Phase.MENDING))
        return f"it waits for what {returning} needs, which lets go of its workers and goes on"
    holders = sorted({worker.job for worker in core.workers.values() if worker.job})
    return f"it needs {' and '.join(missing)}; {', '.join(holders)} hold{'s' if len(holders) == 1 else ''} the others"
