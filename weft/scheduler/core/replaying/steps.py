"""What a replay does to a job, step by step. Functions on a Job, which runs.

begin ── snapshot ── iteration ── over: others take the places ── snapshot ── iteration ── over: it stands
                                                                      ▲                     │ it differs, and
                                                                      └─────────────────────┘ is run once more
"""

from __future__ import annotations

import dataclasses

from weft.plan.tables import Adjustment
from weft.scheduler.core import dispatch
from weft.scheduler.core.copying import snapshots
from weft.scheduler.core.events import Adjust, Command, RecordReplay, TaskDigested
from weft.scheduler.core.job import Job, Outcome
from weft.scheduler.core.outcomes import CORRUPTED, EXIT_SOFTWARE
from weft.scheduler.core.queue import kinds_of
from weft.scheduler.core.replaying.replay import MAX_RUNS, Made, Replay, told

COMPUTING = "cpu"  # the kind of worker whose arithmetic is looked at
REMEDY = "test the processor and the memory"


def begin(job: Job) -> list[Command]:
    """With a snapshot of the first iteration that can have one (of the newest that is told where each has one), and the
    next one as the one to compare; nothing where that cannot be now: another snapshot is under way, the job is about to
    end, an epoch is to be judged between."""
    assert job.plan is not None
    itinerary, told = job.plan.itinerary, snapshots.newest_told(job)
    after = snapshots.next_to_learn(job, snapshots.first_unsent(job)) if told is None else told
    if job.replay is not None or job.stopping is not None or not job.plan.recovers:
        return []
    if after >= itinerary.num_iterations or itinerary.at(after).step + 2 >= itinerary.steps:
        return []
    iteration = itinerary.update_of(itinerary.at(after).step + 2)
    ends = job.ends if job.gate is None else min(job.ends, itinerary.update_of(itinerary.steps_done(job.gate)))
    others = [each.iteration for each in job.copying if told is None or each.iteration > told]
    if iteration >= ends or iteration < snapshots.first_unsent(job) or any(other <= iteration for other in others):
        return []
    copies = snapshots.copy(job, after, to_disk=False)
    if not copies and told is None:
        return []
    computing = tuple(place for place, kind in enumerate(kinds_of(job)) if kind == COMPUTING)
    job.replay = Replay(after, iteration, computing)
    return [*copies, *compare(job)]


def compare(job: Job) -> list[Command]:
    """Has workers tell what the tasks of the iteration make, in this attempt."""
    if job.replay is None:
        return []
    told_ahead = Adjustment(compared=True)
    return [Adjust(job.name, job.attempt, job.workers, job.replay.iteration, told_ahead)]


def note(job: Job, event: TaskDigested) -> None:
    if job.replay is not None and event.iteration == job.replay.iteration:
        job.replay.digests[Made(event.task, event.replica)] = event.digest


def drop(job: Job) -> list[Command]:
    """Something else is to happen to the job. Its lanes, which have waited for the replay, go on."""
    if job.replay is None:
        return []
    job.replay = None
    return dispatch.go_on(job)


def is_run(job: Job) -> bool:
    """Every lane is through the iteration."""
    return job.replay is not None and job.iterations_done > job.replay.iteration


def over(job: Job, now: float) -> tuple[list[Command], Outcome | None]:
    """A run is over. With an outcome the job lets go of its workers: for another run, or since nobody can say what is
    right."""
    replay, plan = job.replay, job.plan
    assert replay is not None
    assert plan is not None
    if not replay.runs:
        replay.began = now
    replay.end_run(job.workers)
    label = plan.itinerary.label(replay.iteration)
    if len(replay.runs) == 1:
        return [], _again(f"{label} is run again by other workers, to compare", job)
    differences = list(dict.fromkeys(replay.differences(plan.graph)))
    about = f"{label}, run {len(replay.runs)} times, has other bits: {'; '.join(differences)}"
    if not replay.stands and len(replay.runs) < MAX_RUNS:
        return [], _again(f"{about}; it is run once more", job)
    record = RecordReplay(
        job=job.name, is_same=replay.is_same, message=f"{label} run again: the same bits", seconds=now - replay.began
    )
    if replay.stands:
        wrong = [f"{worker} has computed other bits in {told(task)}" for worker, task in replay.wrong(plan.graph)]
        if wrong:
            told_wrong = f"{label}: {'; '.join(wrong)}, than two runs that agree; the job goes on from these; {REMEDY}"
            record = dataclasses.replace(record, message=told_wrong)
        job.replay = None
        return [record, *snapshots.begin_checkpoint(job), *snapshots.begin_best(job), *dispatch.go_on(job)], None
    workers = ", ".join(sorted({run.workers[place] for run in replay.runs for place in replay.computing}))
    message = (
        f"{about}; no two of these runs agree that had different workers, so nobody can say which of {workers} is "
        f"wrong: {REMEDY}; or the job's code does not compute the same twice (then leave out strategy.verify)"
    )
    return [dataclasses.replace(record, message=message)], Outcome("failed", CORRUPTED, message, EXIT_SOFTWARE)


def _again(message: str, job: Job) -> Outcome:
    return Outcome("queued", "replay", f"{message} (attempt {job.attempt + 1})")
