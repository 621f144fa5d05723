"""Corrected: an inspection whose times are those of a plan that runs. Pure.

A stage's tasks have shown what its units take together, in the microbatches that the job has, and not what each takes.
So each of them takes the same part of that as in the inspection, both the part of a call and that of a sample (a job
that changes its plan keeps its microbatches). Planned once more with these times, units that lie in other stages show
more, and the next correction begins where this one ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from weft.plan.graph import Task
from weft.plan.inspection import Inspection, UnitFacts
from weft.plan.kinds import KINDS, Kind
from weft.plan.plan import StagePlan
from weft.scheduler.planning.costs import PlannedJob
from weft.scheduler.planning.measured_costs import (
    TASK_SECONDS,
    UNIT_SECONDS,
    MeasuredCosts,
    inspected_size,
    lines_of_units,
)
from weft.spec.workers_needed import threads_of


def corrected(job: PlannedJob, inspection: Inspection, seconds: Mapping[int, float]) -> Inspection:
    """job: of one CPU replica, which ran. inspection: by which it was planned. seconds: of tasks that ran."""
    known = inspection.with_threads(threads_of(job.spec.strategy, inspection.host))
    stages = _Stages(job, known, seconds)
    units = list(known.units)
    for stage in job.plan.stages:
        factors = {kind: stages.factor(stage, kind) for kind in (Kind.FORWARD, Kind.BACKWARD)}
        for number in range(stage.first, stage.last):
            units[number] = _scaled(units[number], factors, has_two_sizes=stages.has_two_sizes)
    planned = MeasuredCosts(job, known, {}).of(job)
    return replace(
        known,
        units=tuple(units),
        load_seconds=known.load_seconds * _ratio(job, Kind.LOAD, planned, seconds),
        update_seconds=known.update_seconds * _ratio(job, Kind.UPDATE, planned, seconds),
    )


def told(inspection: Inspection) -> dict[str, Any]:
    """What is corrected in it, as `Inspection.from_wire` takes it."""
    return {
        "units": [asdict(unit) for unit in inspection.units],
        "threaded": None,
        **{key: getattr(inspection, key) for key in ("load_seconds", "update_seconds", "copy_bytes_per_second")},
    }


def _scaled(unit: UnitFacts, factors: Mapping[Kind, float], *, has_two_sizes: bool) -> UnitFacts:
    """What timing a unit alone counts that a stage has once, stays."""

    def at(seconds: float, kind: Kind) -> float:
        alone = min(UNIT_SECONDS[kind], seconds) if has_two_sizes else 0.0
        return alone + (seconds - alone) * factors[kind]

    return replace(
        unit,
        forward_seconds=at(unit.forward_seconds, Kind.FORWARD),
        backward_seconds=at(unit.backward_seconds, Kind.BACKWARD),
        small_forward_seconds=at(unit.small_forward_seconds, Kind.FORWARD),
        small_backward_seconds=at(unit.small_backward_seconds, Kind.BACKWARD),
    )


def _ratio(job: PlannedJob, kind: Kind, planned: Sequence[float], seconds: Mapping[int, float]) -> float:
    """Measured ÷ planned, of all tasks of the kind; 1 where there is nothing to go by."""
    ran = [task.id for task in job.plan.graph.tasks if task.kind is kind and task.id in seconds]
    expected = sum(planned[task] for task in ran)
    return sum(seconds[task] for task in ran) / expected if expected else 1.0


class _Stages:
    """By what their passes took."""

    def __init__(self, job: PlannedJob, inspection: Inspection, seconds: Mapping[int, float]) -> None:
        self._job = job
        self._seconds, self._inspection = seconds, inspection
        self._crowding = job.crowding("cpu", inspection.host)
        self._lines = lines_of_units(job.spec, inspection)
        self.has_two_sizes = 0 < inspection.small_size < inspected_size(job.spec, inspection)

    def factor(self, stage: StagePlan, kind: Kind) -> float:
        """Of its units, measured ÷ inspected. kind: BACKWARD stands for its two parts, too."""
        ran = [task for task in self._job.plan.graph.tasks if self._is_of(task, stage, kind)]
        inspected = sum(self._units(task, kind) for task in ran)
        if not inspected:
            return 1.0
        took = sum(self._seconds[task.id] for task in ran) / self._crowding
        beside = sum(TASK_SECONDS[task.kind] + self._beside(task) for task in ran)
        if kind is Kind.BACKWARD:  # with recompute a forward is in it
            again = sum(self._units(task, Kind.FORWARD) for task in ran)
            beside += again and again * self.factor(stage, Kind.FORWARD)
        return max(took - beside, took / 2) / inspected

    def _beside(self, task: Task) -> float:
        """Seconds of what it passes on, and of what is around a stage's units, which are no unit's."""
        of_task, of_largest = self._job.handing(task, self._inspection)
        handing = of_task + of_largest * self._job.samples(task) / self._job.largest
        return handing + self._job.around(task, self._inspection)

    def _is_of(self, task: Task, stage: StagePlan, kind: Kind) -> bool:
        computes = KINDS[task.kind].computes and (task.kind is Kind.FORWARD) == (kind is Kind.FORWARD)
        return computes and task.holder == stage.holder and task.id in self._seconds and self._job.samples(task) > 0

    def _units(self, task: Task, kind: Kind) -> float:
        """What the inspection says of it, of that part of its work."""
        size = self._job.samples(task)
        return self._job.slowness(task, self._inspection) * sum(
            self._lines["cpu", each][unit].at(size)
            for each in self._job.computed(task)
            if (each is Kind.FORWARD) == (kind is Kind.FORWARD)
            for unit in self._job.units(task)
        )
