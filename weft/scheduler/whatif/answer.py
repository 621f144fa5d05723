"""What-if: what an iteration of a recorded job would take if something were different. Pure.

    recording ─▶ median seconds of each task ─▶ simulate ─▶ baseline ─┐
        │              │ calibrate                                    ├─▶ predicted = measured × changed ÷ baseline
        └─ spec ─ --set ─▶ make_plan ─▶ costs ─▶ simulate ─▶ changed ─┘

The simulation knows what each task takes, what a lane loses between tasks to reports and dispatches, and how long a
lane sleeps on after what it waited for is there; all three are measured. What it does not know (tasks that take long at
the same time, lanes that share a core) is in the measured iteration and not in the baseline. It is taken to be in the
changed job in proportion, so the prediction is the measured time times the ratio of two simulations, never a
simulation alone. How far the baseline is off decides what is told: a number, a range or none (`whatif_doubt`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Final

from weft.metrics.accounts.accounting import NANOSECONDS
from weft.metrics.recording.recording import Recording
from weft.plan.inspection import Inspection
from weft.plan.kinds import FIRST_STALL
from weft.plan.plan import Plan
from weft.scheduler.planning.costs import PlannedJob
from weft.scheduler.planning.measured_costs import PASSED, MeasuredCosts
from weft.scheduler.planning.outlook import Outlook as Outlook
from weft.scheduler.planning.outlook import outlook_of
from weft.scheduler.planning.partition import PlanError
from weft.scheduler.planning.planner import make_plan
from weft.scheduler.planning.resized import resized
from weft.scheduler.whatif.changes import Speed, check_speeds, parse_changes
from weft.scheduler.whatif.doubt import predict
from weft.scheduler.whatif.notes import notes_of
from weft.scheduler.whatif.overheads import Overheads, overheads_of
from weft.spec.job_spec import JobSpec, SpecError

UNBOUNDED: Final = 1 << 62  # bytes of shared memory: a what-if is not refused for what this machine lacks
WARM: Final = 4  # iterations at a job's start that do not count, where there are more


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the simulation explains too badly is None, and `doubt` says so."""

    job: str
    settings: tuple[str, ...]
    iterations: int
    measured_seconds: float  # the median recorded iteration
    predicted_seconds: float | None  # of the changed job, with the ends of its range
    predicted_low_seconds: float | None
    predicted_high_seconds: float | None
    ratio: float | None  # predicted ÷ measured
    doubt: str | None
    baseline_error: float  # of the simulation of the recorded job, relative to what was measured
    wake_seconds: float
    dispatch_seconds: float
    before: Outlook
    after: Outlook | None
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def what_if(recording: Recording, settings: Sequence[str] = (), *, machine: Mapping[str, int] | None = None) -> Answer:
    """settings: KEY=VALUE each, see `weft.scheduler.whatif.changes`. machine: workers by kind, where known.

    Errors: SpecError for a setting that makes no sense, and for a recording without a complete training iteration.
    """
    iterations = _iteration_seconds(recording)
    measured = median(iterations)
    spec = JobSpec.parse(recording.spec, source=f"{recording.job}'s recording")
    changes = parse_changes(spec, settings)
    inspection = Inspection.from_wire(recording.inspection)
    job = PlannedJob(spec, _recorded_plan(recording, spec, inspection))
    costs = MeasuredCosts(job, inspection, _task_seconds(recording))
    overheads = overheads_of(recording)
    names: tuple[str, ...] = tuple(recording.facts["workers"])
    before = _outlook(job, costs.of(job), (), overheads, inspection, names)
    after, changed = before, job
    if changes.replans or changes.speeds:
        facts = resized(inspection, spec, changes.spec)
        changed = PlannedJob(changes.spec, _plan(changes.spec, facts) if changes.replans else job.plan)
        names = _names(changed.plan, names)
        check_speeds(changes.speeds, _lanes(changed.plan, names))
        after = _outlook(changed, costs.of(changed), changes.speeds, overheads, facts, names)
    simulated = before.iteration_seconds, after.iteration_seconds
    told = predict(measured, *simulated, changed=bool(settings))
    return Answer(
        job=recording.job,
        settings=tuple(settings),
        iterations=len(iterations),
        measured_seconds=measured,
        predicted_seconds=told.seconds,
        predicted_low_seconds=told.low_seconds,
        predicted_high_seconds=told.high_seconds,
        ratio=told.ratio,
        doubt=told.doubt,
        baseline_error=before.iteration_seconds / measured - 1,
        wake_seconds=overheads.wake_seconds,
        dispatch_seconds=overheads.dispatch_seconds,
        before=before,
        after=None if told.seconds is None else after,
        notes=notes_of(recording, inspection, job, changed, changes, machine),
    )


def _iteration_seconds(recording: Recording) -> list[float]:
    ends = recording.iteration_ends
    seconds = [(ends[i] - ends[i - 1]) / NANOSECONDS for i in sorted(recording.training) if i - 1 in ends]
    if not seconds:
        raise SpecError(
            f"{recording.job} has no two training iterations on end recorded, which it takes to time one; ask again "
            "once it has run a few, or run a job that has ended for more steps"
        )
    return seconds[min(WARM, len(seconds) - 1) :]


def _task_seconds(recording: Recording) -> dict[int, float]:
    """The median of each task in the training iterations; where replicas steal, of those runs that had a microbatch."""
    found: dict[int, list[int]] = {}
    for rows in recording.rows.values():
        for mode, task, iteration, _, start, end in rows:
            if mode < FIRST_STALL and task >= 0 and iteration in recording.training:
                found.setdefault(task, []).append(end - start)
    steals = recording.spec.get("strategy", {}).get("share") == "stealing"
    return {task: _typical(runs, steals=steals) / NANOSECONDS for task, runs in found.items()}


def _typical(runs: Sequence[int], *, steals: bool) -> float:
    worked = [run for run in runs if run > max(runs) * PASSED] if steals else runs
    return median(worked)


def _recorded_plan(recording: Recording, spec: JobSpec, inspection: Inspection) -> Plan:
    plan = _plan(spec, inspection)
    if [str(task) for task in plan.graph.tasks] != [task.name for task in recording.tasks]:
        raise SpecError(f"{recording.job} was planned by another version of Weft; run it again, and ask of that run")
    return plan


def _plan(spec: JobSpec, inspection: Inspection) -> Plan:
    try:
        return make_plan(spec, inspection, shared_bytes_free=UNBOUNDED)
    except PlanError as error:
        raise SpecError(f"--set: {error}") from error


def _outlook(
    job: PlannedJob,
    seconds: Sequence[float],
    speeds: Sequence[Speed],
    overheads: Overheads,
    inspection: Inspection,
    names: Sequence[str],
) -> Outlook:
    plan = job.plan
    faster = [cost / _factor(plan, task, speeds, names) for task, cost in enumerate(seconds)]
    lost = [overheads.of(task.lane) for task in plan.graph.tasks]
    return outlook_of(plan, inspection, faster, names, lost=lost, wake_seconds=overheads.wake_seconds)[0]


def _factor(plan: Plan, task: int, speeds: Sequence[Speed], names: Sequence[str]) -> float:
    where = plan.graph.tasks[task]
    factor = 1.0
    for speed in speeds:
        if speed.touches(names[where.lane.worker], where.lane.name, where.kind):
            factor *= speed.factor
    return factor


def _names(plan: Plan, recorded: Sequence[str]) -> tuple[str, ...]:
    """The recorded workers as far as they go, then others of the kind with the next numbers."""
    free: dict[str, list[str]] = {}
    for name in recorded:
        free.setdefault(name.rpartition("-")[0], []).append(name)
    names: list[str] = []
    for kind in plan.workers:
        known = free.setdefault(kind, [])
        if known:
            names.append(known.pop(0))
            continue
        number = 0
        while f"{kind}-{number}" in {*names, *recorded}:
            number += 1
        names.append(f"{kind}-{number}")
    return tuple(names)


def _lanes(plan: Plan, names: Sequence[str]) -> dict[str, list[str]]:
    lanes: dict[str, list[str]] = {name: [] for name in names}
    for lane in plan.graph.programs:
        lanes[names[lane.worker]].append(lane.name)
    return lanes
