"""The queue: in which order jobs start, on which workers, and which must make room for one of higher priority. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from weft.scheduler.core.job import Job, Phase, Worker

CAN_STOP = (Phase.PLANNING, Phase.PREPARING, Phase.RUNNING, Phase.MENDING)


def in_order(jobs: Iterable[Job]) -> list[Job]:
    """Higher priority first, then the order of submission."""
    return sorted(jobs, key=lambda job: (-job.priority, job.sequence))


def free_workers(workers: Iterable[Worker]) -> dict[str, list[str]]:
    """Those that are up and hold no job, by kind."""
    free: dict[str, list[str]] = {}
    for worker in workers:
        if worker.up and worker.job is None:
            free.setdefault(worker.kind, []).append(worker.name)
    return free


def chosen_for(job: Job, free: dict[str, list[str]]) -> tuple[str, ...] | None:
    """The workers that it gets, by position; None where there are too few."""
    if any(len(free.get(kind, ())) < count for kind, count in job.needs.items()):
        return None
    return tuple(name for kind, count in job.needs.items() for name in free[kind][:count])


def mended(job: Job, free: dict[str, list[str]], soon: Collection[str]) -> tuple[str, ...] | None:
    """The workers that it goes on with, by position: those that it holds, and in the places of the lost ones themselves
    or others of their kind. None where there are too few, or one that was lost is there soon, and has what it had."""
    assert job.plan is not None
    left = {kind: list(names) for kind, names in free.items()}
    found = []
    for name, kind in zip(job.positions, kinds_of(job), strict=True):
        if name not in job.workers:
            names = left.get(kind, [])
            if not names or (job.plan.has_spares and kind == "cpu" and name not in names and name in soon):
                return None
            name = names.pop(names.index(name) if name in names else 0)
        found.append(name)
    return tuple(found)


def kinds_of(job: Job) -> list[str]:
    """Of the workers that it needs, by position."""
    return [kind for kind, count in job.needs.items() for _ in range(count)]


def exchanged(job: Job, computing: Sequence[int], free: dict[str, list[str]]) -> tuple[str, ...]:
    """Its workers by position, where each of those at some places has the next one's; of one alone, another that is
    free, if there is any."""
    names = [job.workers[place] for place in computing]
    if len(names) == 1:
        names += free.get(kinds_of(job)[computing[0]], [])[:1]
    workers = list(job.workers)
    for number, place in enumerate(computing):
        workers[place] = names[(number + 1) % len(names)]
    return tuple(workers)


def preempted_by(job: Job, jobs: Iterable[Job], free: dict[str, list[str]]) -> list[Job]:
    """Those that have to stop so that it can start: of lower priority, the lowest first, and the last submitted of
    them. None where that would not be enough; what is on its way to let go of its workers is waited for."""
    others = list(jobs)
    short = Counter({kind: count - len(free.get(kind, ())) for kind, count in job.needs.items()})
    for other in others:
        if other.phase is Phase.RELEASING or (other.stopping is not None and not _comes_back(other, job)):
            short.subtract(other.needs)
    chosen = []
    for other in sorted(others, key=lambda each: (each.priority, -each.sequence)):
        if _can_make_room(other, job) and any(short[kind] > 0 for kind in other.needs):
            chosen.append(other)
            short.subtract(other.needs)
    return chosen if all(short[kind] <= 0 for kind in job.needs) else []


def _comes_back(other: Job, job: Job) -> bool:
    """One that stops and has its workers again before the job gets any, as for another plan."""
    return other.stopping is not None and other.stopping.is_another_try and in_order([job, other])[0] is other


def _can_make_room(other: Job, job: Job) -> bool:
    return (
        other.priority < job.priority
        and other.phase in CAN_STOP
        and other.stopping is None
        and (other.plan is None or other.plan.has_snapshots)
    )
