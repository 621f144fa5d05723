"""Snapshots of a running job: which iterations have one, when it is whole and goes to the disk. Functions on a Job.

due ── copy: told ahead, with its place ── lanes copy, or go on beside the next iteration ── take_whole ── save_next
"""

from __future__ import annotations

import dataclasses

from weft.plan.placement import LOAD
from weft.plan.tables import Adjustment
from weft.scheduler.adapting.lane_state import LaneState
from weft.scheduler.core.events import Adjust, Command, EpochJudged, RecordSnapshot, SaveSnapshot, Snapshot
from weft.scheduler.core.job import Job

SHORT_SECONDS = 0.5  # an iteration: to begin again takes about as long


def begin_best(job: Job) -> list[Command]:
    """Of the last step before the next gate: the validation behind it may find it the best."""
    assert job.plan is not None
    if not job.plan.keeps_best or job.gate is None:
        return []
    itinerary = job.plan.itinerary
    last = itinerary.update_of(itinerary.steps_done(job.gate))
    return copy(job, last, to_disk=False, best=True) if last >= job.iterations_done else []


def keep_best(job: Job, event: EpochJudged) -> list[Command]:
    """The snapshot of the epoch goes to the disk; once the one that is on its way there has come."""
    assert job.plan is not None
    itinerary = job.plan.itinerary
    last = itinerary.update_of(itinerary.steps_done(event.iteration + 1))
    if job.snapshot is None or job.snapshot.iteration != last:
        return []
    job.best = dataclasses.replace(job.snapshot, best=True)
    return save_next(job)


def save_best(job: Job) -> list[Command]:
    """Of one that waits."""
    best, job.best = job.best, None
    if best is None:
        return []
    job.saving.append(best)
    return [SaveSnapshot(job=job.name, snapshot=best)]


def begin(job: Job, *, skipped: int = 0) -> list[Command]:
    """For an attempt after a lost worker: of the first iteration that can have one, but for so many; nothing where none
    can."""
    assert job.plan is not None
    if not job.plan.recovers or any(not (each.to_disk or each.best) for each in job.copying):
        return []
    iteration, itinerary = next_to_learn(job), job.plan.itinerary
    if skipped and iteration < itinerary.num_iterations:
        iteration = itinerary.update_of(itinerary.at(iteration).step + 1 + skipped)
    return copy(job, iteration, to_disk=False)


def begin_again(job: Job) -> list[Command]:
    """For an attempt that begins after a loss: who has lost a worker may lose another, and soon. Short iterations have
    it behind the second: what the copy goes to is made beside the first, whose end people wait for."""
    assert job.plan is not None
    if job.plan.predicted_iteration_seconds >= SHORT_SECONDS:
        return begin(job)
    return begin(job, skipped=1)


def begin_each(job: Job) -> list[Command]:
    """Where each iteration has one: of those that lanes may be sent now."""
    assert job.plan is not None
    if not job.plan.copies_each:
        return []
    itinerary = job.plan.itinerary
    ends = min(iterations_ahead(job), itinerary.num_iterations)
    learning = (index for index in range(first_unread(job), ends) if itinerary.at(index).learns)
    return [command for index in learning for command in copy(job, index, to_disk=False)]


def newest_told(job: Job) -> int | None:
    """The iteration of the last of them that is under way; None where there is none."""
    assert job.plan is not None
    told = (each.iteration for each in job.copying if each.iteration < iterations_ahead(job))
    return max(told, default=None) if job.plan.copies_each else None


def iterations_ahead(job: Job) -> int:
    """Where each iteration has a snapshot: lanes are sent nothing of this one before the snapshot two before it is
    whole, and the place of the one three before it free."""
    return job.iterations_done + 2


def begin_checkpoint(job: Job) -> list[Command]:
    """The next one after a number of steps, told ahead; nothing while one is under way or being written."""
    assert job.plan is not None
    every, itinerary = job.plan.checkpoint_steps, job.plan.itinerary
    if every is None or not _may_save(job):
        return []
    first = first_unread(job)
    done = itinerary.at(first).step if first < itinerary.num_iterations else itinerary.steps
    return copy(job, itinerary.update_of((done // every + 1) * every), to_disk=True)


def begin_checkpoint_now(job: Job) -> list[Command]:
    """The next one after a time."""
    return copy(job, next_to_learn(job), to_disk=True) if _may_save(job) else []


def _may_save(job: Job) -> bool:
    return not job.saving and not any(each.to_disk for each in job.copying)


def copy(job: Job, iteration: int, *, to_disk: bool, best: bool = False) -> list[Command]:
    """Nothing where a place or an iteration is missing: after the last one there is the result. One place is left for
    what may turn out the best."""
    assert job.plan is not None
    kept = (each for each in (job.snapshot, job.best) if each)
    tasks, taken = job.plan.snapshot_tasks(), [*job.copying, *job.saving, *kept]
    free = set(range(job.plan.snapshot_places)) - {each.place for each in taken if each.path is None}
    if job.plan.keeps_best and not best and not any(each.best for each in job.copying) and len(free) == 1:
        free = set()
    told = next((each for each in job.copying if each.iteration == iteration), None)
    if told is not None:  # one copy serves both
        job.copying[job.copying.index(told)] = dataclasses.replace(
            told, to_disk=told.to_disk or to_disk, best=told.best or best
        )
    if told is not None or not tasks or not free or iteration + 1 >= job.plan.itinerary.num_iterations:
        return []
    if job.replay is not None and iteration <= job.replay.iteration:  # all its runs go on from one
        return []
    place = min(free)
    job.copying.append(Snapshot(iteration=iteration, place=place, tasks=tasks, to_disk=to_disk, best=best))
    job.copies = True
    return [Adjust(job.name, job.attempt, job.workers, iteration, Adjustment(snapshot=place))]


def next_to_learn(job: Job, begins: int | None = None) -> int:
    """Of the iterations from one on, by default of which no lane has been sent more than data; behind the last one
    where none of them learns."""
    assert job.plan is not None
    itinerary, first = job.plan.itinerary, first_unread(job) if begins is None else begins
    if first >= itinerary.num_iterations or itinerary.forward_only:
        return itinerary.num_iterations
    iteration = itinerary.at(first)
    return first if iteration.learns else itinerary.update_of(iteration.step + 1)


def take_whole(job: Job) -> list[Command]:
    """Those that were under way, once all lanes are through their iterations, or the next ones."""
    commands: list[Command] = []
    for copied in sorted(job.copying, key=lambda each: each.iteration):
        if copied.iteration + copied.goes_on < job.iterations_done:
            job.copying.remove(copied)
            job.snapshot = whole = dataclasses.replace(copied, goes_on=False)
            commands += [RecordSnapshot(job=job.name, attempt=job.attempt, snapshot=whole), *save_next(job)]
    return commands


def go_on_beside(job: Job, iteration: int) -> list[Command]:
    """A lane goes on with its part beside the next iteration."""
    job.copying = [
        dataclasses.replace(each, goes_on=each.goes_on or each.iteration == iteration) for each in job.copying
    ]
    return []


def save_next(job: Job) -> list[Command]:
    """Of a running job, whose lanes go on writing: what waits for the disk, one at a time, since the place of one that
    is on its way there is nobody else's meanwhile."""
    if job.saving:
        return []
    if job.best is not None:
        return save_best(job)
    return save(job) if job.snapshot is not None and job.snapshot.to_disk else []


def save(job: Job) -> list[Command]:
    """The newest snapshot, unless it is on the disk, or on its way there; and the best, if that waits."""
    newest, best = job.snapshot, save_best(job)
    there = max([job.on_disk, *(each.iteration for each in job.saving)])
    if newest is None or newest.iteration <= there or newest.path is not None:
        return best
    newest = dataclasses.replace(newest, best=False)
    job.saving.append(newest)
    return [*best, SaveSnapshot(job=job.name, snapshot=newest)]


def first_unsent(job: Job) -> int:
    """The first iteration of which no lane has been sent anything."""
    return max(map(_first_unsent, job.lanes.values()))


def first_unread(job: Job) -> int:
    """The first iteration of which no lane has been sent anything but to load its data. Where steps are slow that is
    sooner: lanes that load are ahead by all that there is room for, and nothing that they load is in a snapshot."""
    return max(_first_unsent(lane) for lane in job.lanes.values() if lane.name != LOAD)


def _first_unsent(lane: LaneState) -> int:
    return -(-lane.sent // len(lane.program))
