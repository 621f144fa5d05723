"""Dispatch: what the lanes of a running job are sent next, and how the job is adjusted. Functions on a Job.

A lane is sent the tasks of its endless program up to a window ahead of what it has finished, and no further than a
policy allows. Sockets keep the order of messages, so each worker knows of an adjustment before it is sent the tasks
that need it: those of positions that are granted, and those of the first iteration with new shares or routes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, assert_never

from weft.plan.buckets import Route
from weft.plan.plan import Plan
from weft.plan.tables import KEPT, Adjustment
from weft.scheduler.adapting.lane_state import LaneState, work_between
from weft.scheduler.adapting.policy import Policy
from weft.scheduler.adapting.routes import BalancedRoutes
from weft.scheduler.adapting.shares import AdaptiveShares
from weft.scheduler.adapting.stealing import Stealing
from weft.scheduler.core.events import (
    Adjust,
    CheckpointDue,
    Command,
    Dispatch,
    EpochJudged,
    JobMeasured,
    RecordSnapshot,
    RecordVerdict,
    SaveSnapshot,
    Snapshot,
    SnapshotDue,
    StopRequested,
)
from weft.scheduler.core.gates import at_gate, first_gate, open_gate
from weft.scheduler.core.job import Job

POLICIES = (AdaptiveShares, Stealing, BalancedRoutes)


def policies_of(plan: Plan) -> tuple[Policy[Any], ...]:
    """What adjusts a job as it runs."""
    return tuple(policy(plan) for policy in POLICIES if policy.applies(plan))


def begin(job: Job) -> list[Command]:
    """Every worker is prepared: the first work of every lane."""
    assert job.plan is not None
    iterations, begins = job.plan.itinerary.num_iterations, first_iteration(job)
    lanes = {
        lane: LaneState(
            job.workers[lane.worker],
            lane.name,
            program,
            total=iterations * len(program),
            sent=begins * len(program),
            finished=begins * len(program),
        )
        for lane, program in job.plan.graph.programs.items()
    }
    job.iterations_done, job.ends, job.stopped = begins, iterations, None
    job.gate = first_gate(job, begins)
    job.lanes = {(state.worker, state.name): state for state in lanes.values()}
    job.num_behind = len(lanes)
    for policy in job.policies:
        policy.begin(lanes)
    again = [Adjust(job.name, job.attempt, job.workers, *each) for each in job.adjustments if each[0] > begins]
    checkpoint = [*begin_best(job), *begin_checkpoint(job)]
    if job.losses:  # who has lost workers may lose more, and soon: what this attempt comes to is not to be lost, too
        checkpoint += begin_snapshot(job)
    work = (command for state in lanes.values() for command in lane_finished(job, state))
    return [*again, *checkpoint, *work, *at_gate(job)]


def first_iteration(job: Job) -> int:
    """Of the attempt."""
    return 0 if job.snapshot is None else job.snapshot.iteration + 1


def lane_finished(job: Job, lane: LaneState) -> list[Command]:
    """The lane has finished some more of its tasks."""
    commands: list[Command] = []
    for policy in job.policies:
        grants, lanes = policy.come(lane)
        if grants:
            workers = tuple(sorted({each.worker for each in lanes}))
            commands.append(Adjust(job.name, job.attempt, workers, job.iterations_done, Adjustment(grants=grants)))
        for each in lanes:
            commands += top_up(job, each)
    return commands + top_up(job, lane)


def top_up(job: Job, lane: LaneState) -> list[Command]:
    """Sends the lane its next tasks, up to the window, once half of the window is free."""
    assert job.plan is not None
    outstanding = lane.sent - lane.finished
    if outstanding and 2 * outstanding > job.plan.window:
        return []
    return _send(job, lane, job.plan.window)


def send_ahead(job: Job, windows: int) -> list[Command]:
    """So many to each lane, as far as it may be sent, with a snapshot at their begin: the next one is behind them."""
    assert job.plan is not None
    work = (command for lane in job.lanes.values() for command in _send(job, lane, windows * job.plan.window))
    return [*begin_snapshot(job), *work]


def _send(job: Job, lane: LaneState, ahead: int) -> list[Command]:
    """Its next tasks, to so many ahead of what it has finished."""
    until = min(lane.finished + ahead, lane.total, lane.total if lane.allowed is None else lane.allowed)
    if job.gate is not None:
        until = min(until, job.gate * len(lane.program))
    if job.replay is not None:  # what comes behind it may have to be made again
        until = min(until, (job.replay.iteration + 1) * len(lane.program))
    if until <= lane.sent:
        return []
    work = work_between(lane.program, lane.sent, until)
    lane.sent = until
    return [Dispatch(job.name, job.attempt, lane.worker, lane.name, work)]


def asked(job: Job, event: JobMeasured | SnapshotDue | CheckpointDue | StopRequested) -> list[Command]:
    """What changes the iterations that come, of which no lane has been sent anything."""
    match event:
        case JobMeasured():
            return measured(job, event)
        case SnapshotDue():
            return begin_snapshot(job)
        case CheckpointDue():
            return begin_checkpoint_now(job)
        case StopRequested():
            return stop(job, event)
    assert_never(event)


def end_after(job: Job, iterations: int) -> None:
    """iterations: no fewer than any lane has been sent something of."""
    job.ends = min(job.ends, iterations)
    for lane in job.lanes.values():
        lane.total = job.ends * len(lane.program)


def judged(job: Job, event: EpochJudged) -> list[Command]:
    """The epoch at whose end all lanes stand; they go on, or not."""
    open_gate(job, event)
    if event.stop is not None and job.iterations_done < job.ends:
        job.stopped, job.gate = event.stop, None
        end_after(job, job.iterations_done)
    kept = keep_best(job, event) if event.is_best else []
    told = [*measured_for_schedulers(job, event), *begin_best(job)] if job.iterations_done < job.ends else []
    return [*kept, *told, *(command for lane in job.lanes.values() for command in top_up(job, lane))]


def measured_for_schedulers(job: Job, event: EpochJudged) -> list[Command]:
    """Ahead of the first iteration behind the gate; who makes that again comes to the gate again before."""
    if event.measured is None:
        return []
    told = Adjustment(measured=event.measured)
    return [Adjust(job.name, job.attempt, job.workers, event.iteration + 1, told)]


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


def stop(job: Job, event: StopRequested) -> list[Command]:
    """Ends training with the first step of which no lane has been sent anything, since after its last one a worker
    leaves what is saved of the model; or at the gate before that. Nothing where the job ends as soon."""
    step = next_to_learn(job)
    ends = step + 1 if job.gate is None else min(step + 1, job.gate)
    if ends >= job.ends:
        return []
    job.stopped = event.reason
    end_after(job, ends)
    return [Adjust(job.name, job.attempt, job.workers, step, Adjustment(ends=ends))] if step < ends else []


def measured(job: Job, event: JobMeasured) -> list[Command]:
    """What the policy makes of it; nothing while iterations are made again, which are what they were."""
    unsent = _first_unsent(job)
    decision = job.policies[event.policy].decide(event.measured, unsent) if unsent >= job.replays else None
    if decision is None:
        return []
    first, adjustment, verdict = decision
    commands: list[Command] = []
    if adjustment is not None:
        commands.append(Adjust(job.name, job.attempt, job.workers, first, adjustment))
        job.adjustments = (*job.adjustments[1 - KEPT :], (first, adjustment))
    if verdict is not None:
        commands.append(RecordVerdict(job=job.name, attempt=job.attempt, verdict=verdict, first_iteration=first))
    return commands


def adopt(job: Job, plan: Plan) -> None:
    """The plan of an attempt, with the shares and ways that the job had in the iteration with which it begins; what it
    was adjusted to behind that, in iterations that had been made, is told again when it begins."""
    begins = first_iteration(job)
    job.replays = max(job.furthest, begins) if begins else 0  # begins: behind a checkpoint of another daemon's
    job.adjustments = tuple(each for each in job.adjustments if each[0] < job.replays and _fits(each[1], plan))
    job.plan = _adjusted(plan, [adjustment for first, adjustment in job.adjustments if first <= begins])
    job.policies = policies_of(_adjusted(plan, [adjustment for _, adjustment in job.adjustments]))
    for stealing in _stealing(job):
        stealing.go_on_from(job.stolen, again=range(begins, job.replays))


def forget_policies(job: Job) -> None:
    """The attempt is over."""
    for stealing in _stealing(job):
        job.stolen = stealing.stolen
    job.policies = ()


def _stealing(job: Job) -> Iterator[Stealing]:
    return (policy for policy in job.policies if isinstance(policy, Stealing))


def _fits(adjustment: Adjustment, plan: Plan) -> bool:
    """A job may have been planned anew, on other workers."""
    if adjustment.local is None:
        return len(adjustment.shares) == len(plan.shares)
    sync = plan.synchronisation
    either = {bucket.index for bucket in sync.buckets if bucket.route is Route.EITHER} if sync is not None else set()
    return either.issuperset(adjustment.local)


def _adjusted(plan: Plan, adjustments: Iterable[Adjustment]) -> Plan:
    """The plan as it would be if it had begun so."""
    for adjustment in adjustments:
        if adjustment.shares:
            plan = dataclasses.replace(plan, shares=tuple(adjustment.shares))
        if adjustment.local is not None and plan.synchronisation is not None:
            sync = dataclasses.replace(plan.synchronisation, local=tuple(adjustment.local))
            plan = dataclasses.replace(plan, synchronisation=sync)
    return plan


def plan_to_go_on_with(job: Job) -> Plan | None:
    """Of the next attempt; None where there has to be another: it begins again, or other GPUs may be free by then."""
    goes_on = job.snapshot is not None and job.outcome is not None and job.outcome.is_another_try
    return (job.improved or job.plan) if goes_on and "gpu" not in job.needs else None


def can_mend(job: Job) -> bool:
    """Whether its workers may keep what they have for the next attempt, which needs only those that were lost. What is
    on GPUs is planned anew, since others may be free by then."""
    return bool(job.plan is not None and job.workers and job.snapshot is not None and "gpu" not in job.needs)


def halt(job: Job) -> list[Command]:
    """Has a job that is to stop do so behind a copy of what it has come to, which is told ahead; nothing while no place
    is free, and where the job is about to end."""
    assert job.plan is not None
    if job.stopping is None or job.ends < job.plan.itinerary.num_iterations:
        return []
    iteration = next_to_learn(job)
    commands = copy(job, iteration, to_disk=job.stopping.state == "paused")
    if any(each.iteration == iteration for each in job.copying):
        end_after(job, iteration + 1)
    return commands


def has_halted(job: Job) -> bool:
    """Behind a copy of what it has come to, or where there was to be one."""
    assert job.plan is not None
    is_copied = job.snapshot is not None and job.snapshot.iteration + 1 == job.iterations_done
    return is_copied or (job.stopped is None and job.iterations_done == job.ends < job.plan.itinerary.num_iterations)


def begin_snapshot(job: Job) -> list[Command]:
    """For an attempt after a lost worker: of the first iteration that can have one; nothing where none can."""
    assert job.plan is not None
    if not job.plan.recovers or any(not (each.to_disk or each.best) for each in job.copying):
        return []
    return copy(job, next_to_learn(job), to_disk=False)


def begin_checkpoint(job: Job) -> list[Command]:
    """The next one after a number of steps, told ahead; nothing while one is under way or being written."""
    assert job.plan is not None
    every, itinerary = job.plan.checkpoint_steps, job.plan.itinerary
    if every is None or not _may_save(job):
        return []
    first = _first_unsent(job)
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


def next_to_learn(job: Job) -> int:
    """Of the iterations of which no lane has been sent anything; behind the last one where none of them learns."""
    assert job.plan is not None
    itinerary, first = job.plan.itinerary, _first_unsent(job)
    if first >= itinerary.num_iterations or itinerary.forward_only:
        return itinerary.num_iterations
    iteration = itinerary.at(first)
    return first if iteration.learns else itinerary.update_of(iteration.step + 1)


def take_snapshots(job: Job) -> list[Command]:
    """Those that were under way, once all lanes are through their iterations."""
    commands: list[Command] = []
    for copied in sorted(job.copying, key=lambda each: each.iteration):
        if copied.iteration < job.iterations_done:
            job.copying.remove(copied)
            job.snapshot = copied
            commands += [RecordSnapshot(job=job.name, attempt=job.attempt, snapshot=copied), *save_next(job)]
    return commands


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


def _first_unsent(job: Job) -> int:
    """The first iteration of which no lane has been sent anything."""
    return max(-(-lane.sent // len(lane.program)) for lane in job.lanes.values())
