"""Dispatch: what the lanes of a running job are sent next, and how the job is adjusted. Functions on a Job.

A lane is sent the tasks of its endless program up to a window ahead of what it has finished, and no further than a
policy allows. Sockets keep the order of messages, so each worker knows of an adjustment before it is sent the tasks
that need it: those of positions that are granted, and those of the first iteration with new shares or routes.
"""

from __future__ import annotations

from typing import Any

from weft.plan.plan import Plan
from weft.plan.tables import Adjustment
from weft.scheduler.adapting.lane_state import LaneState, work_between
from weft.scheduler.adapting.policy import Policy
from weft.scheduler.adapting.routes import BalancedRoutes
from weft.scheduler.adapting.shares import AdaptiveShares
from weft.scheduler.adapting.stealing import Stealing
from weft.scheduler.core.events import Adjust, Command, Dispatch, JobMeasured, RecordVerdict
from weft.scheduler.core.job import Job

POLICIES = (AdaptiveShares, Stealing, BalancedRoutes)


def policies_of(plan: Plan) -> tuple[Policy[Any], ...]:
    """What adjusts a job as it runs."""
    return tuple(policy(plan) for policy in POLICIES if policy.applies(plan))


def begin(job: Job) -> list[Command]:
    """Every worker is prepared: the first work of every lane."""
    assert job.plan is not None
    iterations = job.plan.itinerary.num_iterations
    lanes = {
        lane: LaneState(job.workers[lane.worker], lane.name, program, iterations * len(program))
        for lane, program in job.plan.graph.programs.items()
    }
    job.lanes = {(state.worker, state.name): state for state in lanes.values()}
    for policy in job.policies:
        policy.begin(lanes)
    return [command for state in lanes.values() for command in lane_finished(job, state)]


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
    window = job.plan.window
    outstanding = lane.sent - lane.finished
    if lane.sent == lane.total or (outstanding and 2 * outstanding > window):
        return []
    until = min(lane.finished + window, lane.total if lane.allowed is None else lane.allowed)
    if until <= lane.sent:
        return []
    work = work_between(lane.program, lane.sent, until)
    lane.sent = until
    return [Dispatch(job.name, job.attempt, lane.worker, lane.name, work)]


def measured(job: Job, event: JobMeasured) -> list[Command]:
    """What the policy makes of it."""
    decision = job.policies[event.policy].decide(event.measured, _first_unsent(job))
    if decision is None:
        return []
    first, adjustment, verdict = decision
    commands: list[Command] = []
    if adjustment is not None:
        commands.append(Adjust(job.name, job.attempt, job.workers, first, adjustment))
    if verdict is not None:
        commands.append(RecordVerdict(job=job.name, attempt=job.attempt, verdict=verdict, first_iteration=first))
    return commands


def _first_unsent(job: Job) -> int:
    """The first iteration of which no lane has been sent anything."""
    return max(-(-lane.sent // len(lane.program)) for lane in job.lanes.values())
