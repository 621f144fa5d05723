"""Dispatch: what the lanes of a running job are sent next, and how the job is adjusted. Functions on a Job. Of its
snapshots weft.scheduler.core.copying has charge.

A lane is sent the tasks of its endless program up to a window ahead of what it has finished, to no more iterations than
the window has of the longest program, and no further than a policy allows. Sockets keep the order of messages, so each
worker knows of an adjustment before it is sent the tasks that need it: those of positions that are granted, and those
of the first iteration with new shares or routes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, assert_never

from weft.plan.buckets import Route
from weft.plan.plan import Plan
from weft.plan.tables import KEPT, Adjustment
from weft.scheduler.adapting.lane_state import LaneState, work_between
from weft.scheduler.adapting.policy import Policy
from weft.scheduler.adapting.routes import BalancedRoutes
from weft.scheduler.adapting.shares import AdaptiveShares
from weft.scheduler.adapting.stealing import Stealing
from weft.scheduler.core.copying import snapshots
from weft.scheduler.core.events import (
    Adjust,
    CheckpointDue,
    Command,
    Dispatch,
    EpochJudged,
    JobMeasured,
    RecordVerdict,
    SnapshotDue,
    StopRequested,
)
from weft.scheduler.core.gates import at_gate, first_gate, open_gate
from weft.scheduler.core.job import Job

POLICIES = (AdaptiveShares, Stealing, BalancedRoutes)
MIN_AHEAD = 2  # iterations, as far as the window goes: in one a lane would wait for the daemon at its end


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
            ahead=ahead(job.plan, program),
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
    checkpoint = [*snapshots.begin_best(job), *snapshots.begin_checkpoint(job), *snapshots.begin_each(job)]
    if job.losses:
        checkpoint += snapshots.begin_again(job)
    work = (command for state in lanes.values() for command in lane_finished(job, state))
    return [*again, *checkpoint, *work, *at_gate(job)]


def ahead(plan: Plan, program: Sequence[int]) -> int:
    """Tasks that a lane with the program may be sent ahead: one with few of them would be sent more iterations than
    others, and whatever is to begin with one of which nothing was sent would be late by these."""
    longest = max(map(len, plan.graph.programs.values()))
    return min(plan.window, max(MIN_AHEAD, -(-plan.window // longest)) * len(program))


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
    outstanding = lane.sent - lane.finished
    if outstanding and 2 * outstanding > lane.ahead:
        return []
    return _send(job, lane, lane.ahead)


def send_ahead(job: Job, windows: int) -> list[Command]:
    """So many to each lane, as far as it may be sent, with a snapshot at their begin: the next one is behind them."""
    lanes = job.lanes.values()
    work = (command for lane in lanes for command in _send(job, lane, windows * lane.ahead, is_handed_over=True))
    return [*snapshots.begin(job), *work]


def go_on(job: Job) -> list[Command]:
    """What all lanes have waited for is over: the end of an iteration, where each is copied, or of a replay."""
    told = snapshots.begin_each(job)
    return [*told, *(command for lane in job.lanes.values() for command in top_up(job, lane))]


def _send(job: Job, lane: LaneState, ahead: int, *, is_handed_over: bool = False) -> list[Command]:
    """Its next tasks, to so many ahead of what it has finished. is_handed_over: nobody makes snapshots meanwhile."""
    assert job.plan is not None
    until = min(lane.finished + ahead, lane.total, lane.total if lane.allowed is None else lane.allowed)
    if job.gate is not None:
        until = min(until, job.gate * len(lane.program))
    if job.plan.copies_each and not is_handed_over:
        until = min(until, snapshots.iterations_ahead(job) * len(lane.program))
    if job.replay is not None:  # what comes behind it may have to be made again
        until = min(until, (job.replay.iteration + 1) * len(lane.program))
    if until <= lane.sent:
        return []
    work = work_between(lane.program, lane.sent, until)
    lane.sent = until
    return [Dispatch(job.name, job.attempt, lane.worker, lane.name, work)]


def asked(job: Job, event: JobMeasured | SnapshotDue | CheckpointDue | StopRequested) -> list[Command]:
    """What changes the iterations that come, of which no lane has been sent anything, or nothing but data."""
    match event:
        case JobMeasured():
            return measured(job, event)
        case SnapshotDue():
            return snapshots.begin(job)
        case CheckpointDue():
            return snapshots.begin_checkpoint_now(job)
        case StopRequested():
            return stop(job, event)
    assert_never(event)


def end_after(job: Job, iterations: int) -> None:
    """iterations: no fewer than any lane has been sent something of, but for those that load: what they have loaded
    behind the end is let go of with them."""
    job.ends = min(job.ends, iterations)
    for lane in job.lanes.values():
        lane.total = job.ends * len(lane.program)


def judged(job: Job, event: EpochJudged) -> list[Command]:
    """The epoch at whose end all lanes stand; they go on, or not."""
    open_gate(job, event)
    if event.stop is not None and job.iterations_done < job.ends:
        job.stopped, job.gate = event.stop, None
        end_after(job, job.iterations_done)
    kept = snapshots.keep_best(job, event) if event.is_best else []
    told = [*told_of_epoch(job, event), *snapshots.begin_best(job)] if job.iterations_done < job.ends else []
    return [*kept, *told, *(command for lane in job.lanes.values() for command in top_up(job, lane))]


def told_of_epoch(job: Job, event: EpochJudged) -> list[Command]:
    """Ahead of the first iteration behind the gate; who makes that again comes to the gate again before."""
    if event.measured is None and not event.changes:
        return []
    told = Adjustment(measured=event.measured, changes=event.changes)
    return [Adjust(job.name, job.attempt, job.workers, event.iteration + 1, told)]


def stop(job: Job, event: StopRequested) -> list[Command]:
    """Ends training with the first step of which no lane has been sent more than to load its data, since after its last
    one a worker leaves what is saved of the model; or at the gate before that. Nothing where the job ends as soon."""
    step = snapshots.next_to_learn(job)
    ends = step + 1 if job.gate is None else min(step + 1, job.gate)
    if ends >= job.ends:
        return []
    job.stopped = event.reason
    end_after(job, ends)
    return [Adjust(job.name, job.attempt, job.workers, step, Adjustment(ends=ends))] if step < ends else []


def measured(job: Job, event: JobMeasured) -> list[Command]:
    """What the policy makes of it; nothing while iterations are made again, which are what they were."""
    unsent = snapshots.first_unsent(job)
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
    """Has a job that is to stop do so behind a copy of what it has come to, which is told ahead, and that nothing comes
    behind it; nothing while no place is free, and where the job is about to end."""
    assert job.plan is not None
    if job.stopping is None or job.ends < job.plan.itinerary.num_iterations:
        return []
    iteration = snapshots.next_to_learn(job)
    commands = snapshots.copy(job, iteration, to_disk=job.stopping.state == "paused")
    if any(each.iteration == iteration for each in job.copying):
        end_after(job, iteration + 1)
        commands.append(Adjust(job.name, job.attempt, job.workers, iteration, Adjustment(halts=True)))
    return commands


def has_halted(job: Job) -> bool:
    """Behind a copy of what it has come to, or where there was to be one."""
    assert job.plan is not None
    is_copied = job.snapshot is not None and job.snapshot.iteration + 1 == job.iterations_done
    return is_copied or (job.stopped is None and job.iterations_done == job.ends < job.plan.itinerary.num_iterations)
