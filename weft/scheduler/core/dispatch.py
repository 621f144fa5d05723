"""Dispatch: what the lanes of a running job are sent next, and how its replicas divide the batches. Functions on a Job.

A lane is sent the tasks of its endless program up to a window ahead of what it has finished. Where replicas steal, the
lanes of a replica are sent no task of a position before it is granted; see weft.scheduler.adapting.stealing.

New shares hold from the first iteration of which no lane has been sent anything. Sockets keep the order of messages, so
each worker knows them before it is sent a task of that iteration. New routes of buckets hold a training iteration
later: in that iteration the optimizer's state goes from one side to the other. So that both are soon, lanes of a job
whose shares or routes adapt are sent few iterations ahead. Where buckets have two ways, a lane of the one that none of
them goes waits for nothing and would run through the whole job: it is sent as few ahead of those that compute.
"""

from __future__ import annotations

import math

from weft.plan.division import replica_sizes
from weft.plan.kinds import is_compute_lane
from weft.plan.plan import Plan
from weft.scheduler.adapting.lane_state import LaneState, work_between
from weft.scheduler.adapting.route_pace import RouteMeasurement
from weft.scheduler.adapting.routes import Routes
from weft.scheduler.adapting.routes import adapt as adapt_routes
from weft.scheduler.adapting.shares import Measurement, Shares, Verdict, adapt
from weft.scheduler.adapting.stealing import Stealing
from weft.scheduler.core.events import (
    Command,
    Dispatch,
    Grant,
    RecordVerdict,
    ReplicasMeasured,
    RoutesMeasured,
    SetRoutes,
    SetShares,
)
from weft.scheduler.core.job import Job

ADAPTIVE_ITERATIONS = 4  # at least, sent ahead to each lane: what adapts is late by as many
ADAPTIVE_SECONDS = 0.05  # of work, where iterations are short: a daemon without a core of its own answers late


def begin(job: Job) -> list[Command]:
    """Every worker is prepared: the first work of every lane."""
    plan = job.plan
    assert plan is not None
    iterations = plan.itinerary.num_iterations
    lanes = {
        lane: LaneState(job.workers[lane.worker], lane.name, program, iterations * len(program))
        for lane, program in plan.graph.programs.items()
    }
    job.lanes = {(state.worker, state.name): state for state in lanes.values()}
    job.shares = Shares.starting(plan.shares)
    job.routes = Routes.starting(plan)
    commands: list[Command] = []
    if plan.share == "stealing":
        job.stealing = Stealing(plan, lanes)
        for replica in range(len(plan.replicas)):
            commands += _grant(job, replica)
    for state in job.lanes.values():
        commands += lane_finished(job, state)
    return commands


def lane_finished(job: Job, lane: LaneState) -> list[Command]:
    """The lane has finished some more of its tasks."""
    commands: list[Command] = []
    assert job.plan is not None
    if job.plan.has_ways:
        return [command for each in _allow_with_compute(job, lane) for command in top_up(job, each)]
    if job.plan.share == "adaptive":
        _allow(job.plan, lane, lane.finished // len(lane.program))
    if job.stealing is not None and (replica := job.stealing.replica_that_ends_in(lane)) is not None:
        commands += _grant(job, replica)
    return commands + top_up(job, lane)


def _allow(plan: Plan, lane: LaneState, done: int) -> None:
    """Some iterations beyond those that are done."""
    ahead = ADAPTIVE_ITERATIONS
    if plan.predicted_iteration_seconds:
        ahead = max(ahead, math.ceil(ADAPTIVE_SECONDS / plan.predicted_iteration_seconds))
    lane.allowed = min(lane.total, (done + ahead) * len(lane.program))


def _allow_with_compute(job: Job, lane: LaneState) -> list[LaneState]:
    """The lanes that may be sent more now that one has finished some tasks."""
    if not is_compute_lane(lane.name) and lane.allowed is not None:
        return [lane]
    assert job.plan is not None
    _allow(job.plan, lane, lane.finished // len(lane.program))
    done = min(each.finished // len(each.program) for each in job.lanes.values() if is_compute_lane(each.name))
    others = [each for each in job.lanes.values() if not is_compute_lane(each.name)]
    for each in others:
        _allow(job.plan, each, done)
    return [lane, *others]


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


def _grant(job: Job, replica: int) -> list[Command]:
    """The replica's next microbatches, and the tasks that they let its lanes be sent."""
    assert job.stealing is not None
    grants = job.stealing.grant_more(replica)
    if not grants:
        return []
    commands: list[Command] = [Grant(job.name, job.attempt, replica, tuple(grants))]
    for lane in job.stealing.lanes_of(replica):
        commands += top_up(job, lane)
    return commands


# --- measurements


def measured(job: Job, event: ReplicasMeasured | RoutesMeasured) -> list[Command]:
    """What the measured speed of the replicas, or of buckets' ways, changes."""
    if isinstance(event, RoutesMeasured):
        return _change_routes(job, event.measured)
    return _replicas_measured(job, event.measured)


def _replicas_measured(job: Job, measured: Measurement) -> list[Command]:
    if job.stealing is not None:
        verdict = job.stealing.measured(measured)
        return [_record(job, verdict, job.stealing.first_open())] if verdict is not None else []
    return _change_shares(job, measured)


def _change_shares(job: Job, measured: Measurement) -> list[Command]:
    plan, before = job.plan, job.shares
    assert plan is not None
    assert before is not None
    batch_size = min(plan.itinerary.batch_size, plan.itinerary.num_train)
    job.shares, verdict = adapt(before, measured, batch_size)
    first = first_unsent(job)
    commands: list[Command] = []
    changed = replica_sizes(batch_size, before.weights) != replica_sizes(batch_size, job.shares.weights)
    if changed and first < plan.itinerary.num_iterations:
        commands.append(SetShares(job=job.name, attempt=job.attempt, first_iteration=first, shares=job.shares.weights))
    if verdict is not None:
        commands.append(_record(job, verdict, first))
    return commands


def _change_routes(job: Job, measured: RouteMeasurement) -> list[Command]:
    plan, before = job.plan, job.routes
    assert plan is not None
    assert before is not None
    first = _first_to_turn(job, plan)
    if first is None:
        return []
    job.routes = adapt_routes(plan, before, measured)
    if job.routes.local == before.local:
        return []
    local = tuple(sorted(job.routes.local))
    return [SetRoutes(job=job.name, attempt=job.attempt, first_iteration=first, local=local)]


def _first_to_turn(job: Job, plan: Plan) -> int | None:
    """The iteration behind the first training iteration of which no lane has been sent anything; None where nothing is
    updated after that."""
    for index in range(first_unsent(job), plan.itinerary.num_iterations):
        iteration = plan.itinerary.at(index)
        if iteration.learns:
            return index + 1 if iteration.step + 1 < plan.itinerary.steps else None
    return None


def first_unsent(job: Job) -> int:
    """The first iteration of which no lane has been sent anything."""
    return max(-(-lane.sent // len(lane.program)) for lane in job.lanes.values())


def _record(job: Job, verdict: Verdict, first: int) -> Command:
    return RecordVerdict(job=job.name, attempt=job.attempt, verdict=verdict, first_iteration=first)
