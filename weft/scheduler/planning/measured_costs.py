"""Measured costs: the seconds of each task of a plan that nobody has run, from those of one that has. Pure.

A task that the recorded plan has too, with the same cost there, takes what it took. A forward or backward of another
size or another cut is computed from its units. What a unit costs is a line, from the two sizes that the inspection
timed each unit with; a task is its units and a little more, with what it passes on:

    seconds = a · (TASK + Σ fixed) + b · samples · Σ per sample

The line is then moved through what was recorded: its two parts take the difference in proportion to how uncertain each
is (the update of a Gaussian with a standard deviation of the part's own size, twice that for samples). So a recording
of large microbatches corrects what a sample costs, one of small ones what a call costs, and neither upsets the other.
Other tasks are what the planner says, times what was recorded ÷ what it said then. Lines and ratios are of one kind of
device each; one that was not recorded has those of the one that was.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean, median
from typing import Final

from weft.plan.buckets import Holder
from weft.plan.graph import Task
from weft.plan.inspection import Inspection, UnitFacts
from weft.plan.kinds import KINDS, Kind
from weft.plan.plan import Plan
from weft.scheduler.planning.costs import PlannedJob, largest_microbatch
from weft.spec.job_spec import JobSpec

# Found on one machine (EPYC, 2 cores) with the example of digits by 1 and 2 stages: what a task costs beyond its units
# (slots, random numbers, the start of autograd), and what timing a unit alone counts that a stage has once.
TASK_SECONDS: Final = {Kind.FORWARD: 13e-6, Kind.BACKWARD: 34e-6, Kind.INPUT: 34e-6, Kind.WEIGHT: 17e-6}
UNIT_SECONDS: Final = {Kind.FORWARD: 0.0, Kind.BACKWARD: 16e-6, Kind.INPUT: 8e-6, Kind.WEIGHT: 8e-6}
UPDATE_SECONDS: Final = 50e-6  # of an optimizer's step, however few its parameters; found likewise
SLOPE_UNCERTAINTY: Final = 2.0  # of the cost of a sample, relative to that of a call; arbitrary

PASSED: Final = 0.1  # of the longest of them; arbitrary: without a microbatch it takes a hundredth, or nothing
SAME: Final = 1e-9  # relative: two costs that the planner computes alike
Corrections = tuple[float, float]  # factors of what a call and what a sample costs
OfDevice = tuple[Kind, str]  # tasks of a kind on workers of a kind


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds of a task of `samples`: fixed + samples × each."""

    fixed: float
    each: float

    def at(self, samples: float) -> float:
        return self.fixed + samples * self.each

    def corrections(self, samples: float, seconds: float) -> Corrections:
        """Factors of both parts so that the line goes through the point; 1 where there is nothing to go by."""
        parts = self.fixed, samples * self.each
        weights = parts[0] ** 2, (SLOPE_UNCERTAINTY * parts[1]) ** 2
        if not seconds or not sum(weights):
            return 1.0, 1.0
        missing = seconds - sum(parts)
        moved = [part + missing * weight / sum(weights) for part, weight in zip(parts, weights, strict=True)]
        if min(moved) <= 0:
            return (seconds / sum(parts),) * 2
        return moved[0] / parts[0] if parts[0] else 1.0, moved[1] / parts[1] if parts[1] else 1.0


class MeasuredCosts:
    """job, inspection: of what ran. seconds: of its tasks, those that ran."""

    def __init__(self, job: PlannedJob, inspection: Inspection, seconds: Mapping[int, float]) -> None:
        self._job = job
        self._inspection = inspection
        seconds = {**seconds, **_of_positions_without_any(job.plan, seconds)}
        self._units = lines_of_units(job.spec, inspection)
        modelled = [self._model(job, task) for task in job.plan.graph.tasks]
        self._known = {
            task.key: (seconds[task.id], modelled[task.id])
            for task in job.plan.graph.tasks
            if task.id in seconds and not KINDS[task.kind].seldom
        }
        self._corrections = {kind: self._corrected(kind) for kind in UNIT_SECONDS}
        self._ratios, self._means = self._of_others()

    def of(self, job: PlannedJob) -> tuple[float, ...]:
        """The seconds of task i of another plan of the same model at i."""
        return tuple(self._cost(job, task) for task in job.plan.graph.tasks)

    def _cost(self, job: PlannedJob, task: Task) -> float:
        modelled = self._model(job, task)
        if (known := self._known.get(task.key)) is not None and abs(modelled - known[1]) <= SAME * modelled:
            return known[0]
        if KINDS[task.kind].computes:
            return self._line(job, task, corrected=True).at(job.samples(task))
        if modelled:
            return modelled * self._ratio(task.kind, job.device(task))
        return self._means.get((task.kind, job.device(task)), 0.0)

    # --- what the inspection says, uncorrected

    def _model(self, job: PlannedJob, task: Task) -> float:
        """Compute by lines; the others as the planner has them, but what each call of an optimizer costs, whatever its
        bytes."""
        planned = job.plan.task_seconds[task.id]
        if KINDS[task.kind].computes:
            return self._line(job, task).at(job.samples(task))
        if task.kind is Kind.UPDATE:
            whole = self._inspection.update_seconds_on(job.device(task)) or 1.0
            call = min(UPDATE_SECONDS, whole / 2)
            return call * job.sharing(job.device(task), self._inspection.host) + planned * (1 - call / whole)
        return planned

    def _line(self, job: PlannedJob, task: Task, *, corrected: bool = False) -> Line:
        """Of nothing where the task has no samples."""
        computed = job.computed(task) if job.samples(task) else ()
        if not computed:
            return Line(0.0, 0.0)
        device, units = job.device(task), job.units(task)
        corrections = [self._correction(task, device, u) if corrected else (1.0, 1.0) for u in units]
        of_task, of_largest = job.handing(task, self._inspection)
        of_task += (not task.goes_on) * TASK_SECONDS[task.kind] + job.around(task, self._inspection)
        fixed = of_task * fmean(of_call for of_call, _ in corrections)
        each = of_largest / job.largest * fmean(of_sample for _, of_sample in corrections)
        slowness = job.slowness(task, self._inspection)
        for kind in computed:
            for unit, (of_call, of_sample) in zip(units, corrections, strict=True):
                fixed += of_call * slowness * self._units[device, kind][unit].fixed
                each += of_sample * slowness * self._units[device, kind][unit].each
        crowding = job.crowding(device, self._inspection.host)
        return Line(crowding * fixed, crowding * each)

    # --- what was measured

    def _corrected(self, kind: Kind) -> dict[tuple[str, int, int], Corrections]:
        """By device, replica and unit."""
        found: dict[tuple[str, int, int], Corrections] = {}
        ran: dict[Holder, dict[int | None, list[Task]]] = {}  # by microbatch, whose forward may be in parts
        for task in self._job.plan.graph.tasks:
            if task.kind is kind and task.key in self._known and self._job.samples(task):
                ran.setdefault(task.holder, {}).setdefault(task.microbatch, []).append(task)
        for holder, passes in ran.items():
            tasks = next(iter(passes.values()))
            samples = fmean(self._job.samples(parts[0]) for parts in passes.values())
            measured = fmean(sum(self._known[task.key][0] for task in parts) for parts in passes.values())
            lines = [self._line(self._job, task) for task in tasks]
            whole = Line(sum(line.fixed for line in lines), sum(line.each for line in lines))
            corrections = whole.corrections(samples, measured)
            stage, device = self._job.stages[holder], self._job.device(tasks[0])
            found |= {(device, holder.replica, unit): corrections for unit in range(stage.first, stage.last)}
        return found

    def _correction(self, task: Task, device: str, unit: int) -> Corrections:
        """That of the replica's unit; of a replica that was not there, the mean of those that were, on the device if
        any was."""
        known = self._corrections[task.kind]
        if (device, task.holder.replica, unit) in known:
            return known[device, task.holder.replica, unit]
        of_unit = [(of, pair) for (of, _, number), pair in known.items() if number == unit]
        others = [pair for of, pair in of_unit if of == device] or [pair for _, pair in of_unit] or [(1.0, 1.0)]
        return fmean(pair[0] for pair in others), fmean(pair[1] for pair in others)

    def _of_others(self) -> tuple[dict[OfDevice, float], dict[OfDevice, float]]:
        """Measured ÷ modelled; and the mean, for tasks that the planner takes for nothing."""
        found: dict[OfDevice, list[tuple[float, float]]] = {}
        for task in self._job.plan.graph.tasks:
            if task.key in self._known:
                found.setdefault((task.kind, self._job.device(task)), []).append(self._known[task.key])
        ratios = {
            where: sum(seconds for seconds, modelled in both if modelled) / sum(modelled for _, modelled in both)
            for where, both in found.items()
            if any(modelled for _, modelled in both)
        }
        return ratios, {where: fmean(seconds for seconds, _ in both) for where, both in found.items()}

    def _ratio(self, kind: Kind, device: str) -> float:
        """On the device; on another one if that kind ran there alone; 1 where there is nothing to go by."""
        others = [ratio for (of_kind, _), ratio in self._ratios.items() if of_kind == kind]
        return self._ratios.get((kind, device), fmean(others or [1.0]))


def _of_positions_without_any(plan: Plan, seconds: Mapping[int, float]) -> dict[int, float]:
    """Where replicas steal, of positions that have never had a microbatch, or passed at once: what the same task takes
    at the replica's other positions, since another run may give them one."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for task in plan.graph.tasks if plan.share == "stealing" else ():
        if KINDS[task.kind].of_position:
            alike.setdefault((task.holder, task.kind, task.bucket), []).append(task.id)
    found: dict[int, float] = {}
    for tasks in alike.values():
        least = max((seconds[task] for task in tasks if task in seconds), default=0.0) * PASSED
        worked = [seconds[task] for task in tasks if seconds.get(task, 0.0) > least]
        if worked:
            found |= {task: median(worked) for task in tasks if seconds.get(task, 0.0) <= least}
    return found


def lines_of_units(spec: JobSpec, inspection: Inspection) -> dict[tuple[str, Kind], list[Line]]:
    """By kind of device and of task."""
    size = inspected_size(spec, inspection)
    return {
        (device, kind): [_line_of(inspection, size, unit, kind) for unit in inspection.units_on(device)]
        for device in ("cpu", "gpu")
        for kind in UNIT_SECONDS
    }


def _line_of(inspection: Inspection, largest: int, unit: UnitFacts, kind: Kind) -> Line:
    """Through both sizes; through the origin where there is one."""
    seconds, small = getattr(unit, f"{kind}_seconds"), getattr(unit, f"small_{kind}_seconds")
    if not 0 < inspection.small_size < largest:
        return Line(0.0, seconds / largest)
    each = min(max((seconds - small) / (largest - inspection.small_size), 0.0), seconds / largest)
    is_apart = getattr(unit, f"around_{kind}_seconds") > 0  # what a stage has once is not in these
    return Line(max(seconds - largest * each - (0.0 if is_apart else UNIT_SECONDS[kind]), 0.0), each)


def inspected_size(spec: JobSpec, inspection: Inspection) -> int:
    """Of the microbatch that units were timed with: the largest that was looked at."""
    return max(inspection.input.shapes, default=0) or largest_microbatch(spec, inspection.num_train)
