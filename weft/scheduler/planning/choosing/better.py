"""Better: another plan for a job that runs, by what its tasks have taken. Pure.

    what its tasks took ─▶ corrected inspection ─┬─▶ its own plan ─────▶ simulate ─┐
                                                 └─▶ candidates ─ plan ─▶ simulate ─┴─▶ the fastest, if it is enough

Nothing that could change a bit of the result is a candidate's to change. A candidate differs from the job's own
strategy in where the model is cut and in which order stages compute, no further than its user has left that open, and
has as many workers of each kind. So only a job of one replica on CPU workers has any, and only where the cut does not
show: no norm bounds an update, since that is summed by stages, and no parameter of several units is rounded in each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from weft.plan.inspection import Inspection
from weft.plan.plan import Plan
from weft.scheduler.adapting.switching import Gain
from weft.scheduler.planning.choosing.choice import Considered, MakePlan, iteration_seconds, simulated
from weft.scheduler.planning.choosing.corrected import corrected
from weft.scheduler.planning.choosing.titles import title_of
from weft.scheduler.planning.costs import PlannedJob
from weft.scheduler.planning.outlook import is_beyond
from weft.spec.candidates import candidates
from weft.spec.job_spec import JobSpec
from weft.spec.schedule_text import MEASURED
from weft.spec.strategy import Strategy
from weft.spec.workers_needed import Host, threads_of, workers_needed


@dataclass(frozen=True, slots=True, kw_only=True)
class Better:
    """Another plan, which is faster by enough."""

    spec: JobSpec
    plan: Plan
    inspection: Inspection  # by which it was planned
    gain: Gain
    told: str  # what is different, and what that is expected to bring


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A plan, and what was measured of it."""

    plan: Plan
    task_seconds: Mapping[int, float]  # medians
    iteration_seconds: float  # the median


def may_improve(spec: JobSpec, plan: Plan, *, is_chosen: bool) -> bool:
    """is_chosen: the strategy was, of many."""
    strategy = spec.strategy
    if not strategy.replan or not plan.has_snapshots or len(strategy.replica_list) > 1:
        return False
    (replica,) = strategy.replica_list
    if replica.device != "cpu" or replica.num_stages == 1:
        return False
    is_bounded = strategy.clip_norm is not None or strategy.skip_nonfinite
    is_rounded = strategy.precision == "bf16" and any(len(each.units) > 1 for each in plan.parameters)
    if is_bounded or is_rounded:  # then the cut shows in the result
        return False
    return is_chosen or replica.split is None or strategy.schedule == MEASURED


def better(spec: JobSpec, given: JobSpec, running: Running, inspection: Inspection, make: MakePlan) -> Better | None:
    """The fastest of those that are faster by enough. spec: with the strategy that the job has; given: with that from
    which it was chosen, or the same. inspection: by which it was planned."""
    known = corrected(PlannedJob(spec, running.plan), inspection, running.task_seconds)
    host = inspection.host
    considered = [
        simulated(Considered(spec=each, title=title_of(each.strategy, host), least_seconds=0.0), known, make)
        for each in alternatives(spec, given, host)
    ]
    fastest = min(considered, key=lambda each: each.seconds or math.inf)
    if fastest.seconds is None:
        return None
    before = iteration_seconds(spec, running.plan, known)
    gain = gain_of(running.iteration_seconds, before, fastest.seconds)
    if gain is None:
        return None
    plan = replace(make(fastest.spec, known), predicted_iteration_seconds=gain.expected_seconds)
    told = f"another plan: {difference(running.plan, plan)}; {gain.told()}"
    return Better(spec=fastest.spec, plan=plan, inspection=known, gain=gain, told=told)


def gain_of(measured: float, before: float, after: float) -> Gain | None:
    """measured: an iteration. before, after: simulated, with the times of its tasks. What the simulation does not
    explain stays as it is with the other plan; what it has too much is so in proportion. None where it is not enough,
    or where nothing can be said."""
    if is_beyond(before / measured):
        return None
    expected = measured - (before - after) if before < measured else measured * after / before
    gain = Gain(before_seconds=measured, expected_seconds=expected)
    return gain if gain.is_enough else None


def alternatives(spec: JobSpec, given: JobSpec, host: Host) -> Iterator[JobSpec]:
    """The job's own first, which may be cut elsewhere."""
    yield spec
    own = spec.strategy
    for each in candidates(given, host) if given.strategy.is_auto else ():
        strategy = each.strategy.model_copy(update={"replan": own.replan})
        if strategy != own and strategy.division == own.division and _workers(strategy, host) == _workers(own, host):
            yield spec.model_copy(update={"strategy": strategy})


def _workers(strategy: Strategy, host: Host) -> tuple[dict[str, int], int]:
    """By kind, and the threads of each."""
    return workers_needed(strategy, host), threads_of(strategy, host)


def difference(before: Plan, after: Plan) -> str:
    """Of the stages and of the order in which they compute."""
    found = []
    if before.schedule != after.schedule:
        found.append(f"{after.schedule} instead of {before.schedule}")
    if _cuts(before) != _cuts(after):
        found.append(f"stages of {_units(after)} units instead of {_units(before)}")
    elif not found and _orders(before) != _orders(after):
        found.append("another order of the stages' passes")
    return ", ".join(found)


def _cuts(plan: Plan) -> list[tuple[int, int]]:
    return [(stage.first, stage.last) for stage in plan.stages]


def _units(plan: Plan) -> str:
    *others, last = [str(stop - first) for first, stop in _cuts(plan)]
    return f"{', '.join(others)} and {last}" if others else last


def _orders(plan: Plan) -> list[list[str]]:
    return [[str(plan.graph.tasks[task]) for task in program] for program in plan.graph.programs.values()]
