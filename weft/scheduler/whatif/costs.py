"""What-if costs: the seconds of each task of a plan that nobody has run, from those of a recorded one. Pure.

A task that the recorded plan has too, with the same cost there, takes what it took. A forward or backward of another
size or another cut is computed from its units. What a unit costs is a line, from the two sizes that the inspection
timed each unit with; a task is its units and a little more:

    seconds = a · (TASK + Σ fixed) + b · samples · Σ per sample

The line is then moved through what was recorded: its two parts take the difference in proportion to how uncertain each
is (the update of a Gaussian with a standard deviation of the part's own size, twice that for samples). So a recording
of large microbatches corrects what a sample costs, one of small ones what a call costs, and neither upsets the other.
Other tasks are what the planner says, times what was recorded ÷ what it said then. Lines and ratios are of one kind of
device each; one that was not recorded has those of the one that was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean, median
from typing import Final

from weft.metrics.recording.recording import Recording
from weft.plan.buckets import Holder
from weft.plan.division import divide
from weft.plan.graph import Task
from weft.plan.inspection import Inspection, Shape, TensorFacts, UnitFacts
from weft.plan.kinds import FIRST_STALL, KINDS, Kind
from weft.plan.plan import Plan
from weft.spec.job_spec import JobSpec

NANOSECONDS: Final = 1_000_000_000

# Found on one machine (EPYC, 2 cores) with the example of digits by 1 and 2 stages: what a task costs beyond its units
# (slots, random numbers, the start of autograd), and what timing a unit alone counts that a stage has once.
TASK_SECONDS: Final = {Kind.FORWARD: 13e-6, Kind.BACKWARD: 34e-6}
UNIT_SECONDS: Final = {Kind.FORWARD: 0.0, Kind.BACKWARD: 16e-6}
UPDATE_SECONDS: Final = 50e-6  # of an optimizer's step, however few its parameters; found likewise
SLOPE_UNCERTAINTY: Final = 2.0  # of the cost of a sample, relative to that of a call; arbitrary

SAME: Final = 1e-9  # relative: two costs that the planner computes alike
Corrections = tuple[float, float]  # factors of what a call and what a sample costs


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


@dataclass(frozen=True)
class PlannedJob:
    spec: JobSpec
    plan: Plan

    @cached_property
    def _sizes(self) -> list[list[int]]:
        parts = divide(self.spec.job.batch_size, *self.spec.strategy.division)
        return [[part.size for part in own] for own in parts]

    def samples(self, task: Task) -> int:
        """Of the task's microbatch in a whole batch; 0 for a task that has none."""
        if task.microbatch is None:
            return 0
        return self._sizes[task.holder.replica if len(self._sizes) > 1 else 0][task.microbatch]

    @cached_property
    def largest_microbatch(self) -> int:
        return largest_microbatch(self.spec)

    @cached_property
    def _units(self) -> dict[Holder, range]:
        return {stage.holder: range(stage.first, stage.last) for stage in self.plan.stages}

    def units(self, task: Task) -> range:
        return self._units[task.holder]

    def learns(self, task: Task) -> bool:
        """Whether the task does anything: a job that only runs forward passes over its backwards."""
        return not KINDS[task.kind].learns or self.spec.job.mode == "train"

    def device(self, task: Task) -> str:
        """The kind of the worker that runs it."""
        return self.plan.workers[task.lane.worker]

    def kinds(self, kind: Kind) -> list[Kind]:
        """What a task of a kind computes: with recompute a backward is a forward too."""
        again = kind is Kind.BACKWARD and self.spec.strategy.recompute
        return [Kind.FORWARD, kind] if again else [kind]


def recorded_seconds(recording: Recording) -> dict[int, float]:
    """The median of each task in the training iterations; where replicas steal, of those runs that had a microbatch."""
    found: dict[int, list[int]] = {}
    for rows in recording.rows.values():
        for mode, task, iteration, _, start, end in rows:
            if mode < FIRST_STALL and task >= 0 and iteration in recording.training:
                found.setdefault(task, []).append(end - start)
    steals = recording.spec.get("strategy", {}).get("share") == "stealing"
    return {task: _typical(runs, steals=steals) / NANOSECONDS for task, runs in found.items()}


def _typical(runs: Sequence[int], *, steals: bool) -> float:
    worked = [run for run in runs if run > max(runs) / 10] if steals else runs
    return median(worked)


class RecordedCosts:
    """job, inspection: of the recording. seconds: of its tasks, those that ran."""

    def __init__(self, job: PlannedJob, inspection: Inspection, seconds: Mapping[int, float]) -> None:
        self._job = job
        self._inspection = inspection
        self._units = {device: _unit_lines(job.spec, inspection, device) for device in ("cpu", "gpu")}
        self._seconds = {task.key: seconds[task.id] for task in job.plan.graph.tasks if task.id in seconds}
        self._modelled = dict(zip(job.plan.graph.by_key(), self._model(job), strict=True))
        self._corrections = {kind: self._corrected(kind, seconds) for kind in Kind if KINDS[kind].computes}
        self._ratios = self._ratios_of_others()
        self._means = self._means_of_each()

    def of(self, job: PlannedJob) -> tuple[float, ...]:
        """The seconds of task i of another plan of the same model at i."""
        modelled = self._model(job)
        return tuple(self._cost(job, task, modelled[task.id]) for task in job.plan.graph.tasks)

    def _cost(self, job: PlannedJob, task: Task, modelled: float) -> float:
        key = task.key
        if key in self._seconds and abs(modelled - self._modelled[key]) <= SAME * modelled:
            return self._seconds[key]
        if KINDS[task.kind].computes:
            samples = job.samples(task)
            return self._line(job, task, corrected=True).at(samples) if samples and job.learns(task) else 0.0
        if modelled:
            return modelled * self._ratio(task.kind, job.device(task))
        return self._means.get((task.kind, job.device(task)), 0.0)

    # --- what the inspection says, uncorrected

    def _model(self, job: PlannedJob) -> list[float]:
        """By task. Compute by lines, data by samples; the others as the planner has them."""
        modelled = []
        for task in job.plan.graph.tasks:
            samples = job.samples(task)
            if KINDS[task.kind].computes:
                modelled.append(self._line(job, task).at(samples) if samples and job.learns(task) else 0.0)
            elif task.kind is Kind.LOAD:
                modelled.append(self._inspection.load_seconds * samples / self._job.largest_microbatch)
            elif task.kind is Kind.UPDATE:
                modelled.append(self._update(job.plan.task_seconds[task.id], job.device(task)))
            else:
                modelled.append(job.plan.task_seconds[task.id])
        return modelled

    def _update(self, planned: float, device: str) -> float:
        """The planner divides what the whole model's takes by bytes; a part of it each call costs."""
        whole = self._inspection.update_seconds_on(device) or 1.0
        call = min(UPDATE_SECONDS, whole / 2)
        return call + planned * (1 - call / whole)

    def _line(self, job: PlannedJob, task: Task, *, corrected: bool = False) -> Line:
        units, device = job.units(task), job.device(task)
        corrections = [self._correction(task, device, u) if corrected else (1.0, 1.0) for u in units]
        fixed = TASK_SECONDS[task.kind] * fmean(of_call for of_call, _ in corrections)
        each = 0.0
        for kind in job.kinds(task.kind):
            for unit, (of_call, of_sample) in zip(units, corrections, strict=True):
                fixed += of_call * self._units[device][kind][unit].fixed
                each += of_sample * self._units[device][kind][unit].each
        return Line(fixed, each)

    # --- what the recording says

    def _corrected(self, kind: Kind, seconds: Mapping[int, float]) -> dict[tuple[str, int, int], Corrections]:
        """By device, replica and unit."""
        found: dict[tuple[str, int, int], Corrections] = {}
        for stage in self._job.plan.stages:
            tasks = [
                task
                for task in self._job.plan.graph.tasks
                if task.kind is kind and task.holder == stage.holder and task.id in seconds and self._job.samples(task)
            ]
            if tasks:
                samples = fmean(self._job.samples(task) for task in tasks)
                recorded = fmean(seconds[task.id] for task in tasks)
                corrections = self._line(self._job, tasks[0]).corrections(samples, recorded)
                device = self._job.plan.replicas[stage.replica].device
                found |= {(device, stage.replica, unit): corrections for unit in range(stage.first, stage.last)}
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

    def _means_of_each(self) -> dict[tuple[Kind, str], float]:
        """By kind and device: of tasks that the planner takes for nothing."""
        found: dict[tuple[Kind, str], list[float]] = {}
        for task in self._job.plan.graph.tasks:
            if task.key in self._seconds:
                found.setdefault((task.kind, self._job.device(task)), []).append(self._seconds[task.key])
        return {where: fmean(seconds) for where, seconds in found.items()}

    def _ratio(self, kind: Kind, device: str) -> float:
        """On the device; on another one if that kind ran there alone; 1 where there is nothing to go by."""
        others = [ratio for (of_kind, _), ratio in self._ratios.items() if of_kind == kind]
        return self._ratios.get((kind, device), fmean(others or [1.0]))

    def _ratios_of_others(self) -> dict[tuple[Kind, str], float]:
        """Recorded ÷ modelled, by kind and device."""
        sums: dict[tuple[Kind, str], list[float]] = {}
        for task in self._job.plan.graph.tasks:
            key = task.key
            if key in self._seconds and self._modelled[key]:
                both = sums.setdefault((task.kind, self._job.device(task)), [0.0, 0.0])
                both[0] += self._seconds[key]
                both[1] += self._modelled[key]
        return {where: recorded / modelled for where, (recorded, modelled) in sums.items()}


def largest_microbatch(spec: JobSpec) -> int:
    parts = divide(spec.job.batch_size, *spec.strategy.division)
    largest = max(part.size for each in parts for part in each)
    if spec.strategy.share == "adaptive":
        return -(-spec.job.batch_size // min(spec.strategy.microbatch_counts))
    return largest


def _unit_lines(spec: JobSpec, inspection: Inspection, device: str) -> dict[Kind, list[Line]]:
    units = inspection.units_on(device)
    return {
        Kind.FORWARD: [
            _line_of(inspection, spec, unit.forward_seconds, unit.small_forward_seconds, UNIT_SECONDS[Kind.FORWARD])
            for unit in units
        ],
        Kind.BACKWARD: [
            _line_of(inspection, spec, unit.backward_seconds, unit.small_backward_seconds, UNIT_SECONDS[Kind.BACKWARD])
            for unit in units
        ],
    }


def _line_of(inspection: Inspection, spec: JobSpec, seconds: float, small: float, counted: float) -> Line:
    """Through both sizes; through the origin where there is one."""
    largest = inspected_size(spec, inspection)
    if not 0 < inspection.small_size < largest:
        return Line(0.0, seconds / largest)
    each = min(max((seconds - small) / (largest - inspection.small_size), 0.0), seconds / largest)
    return Line(max(seconds - largest * each - counted, 0.0), each)


def inspected_size(spec: JobSpec, inspection: Inspection) -> int:
    """Of the microbatch that units were timed with: the largest that was looked at."""
    return max(inspection.input.shapes, default=0) or largest_microbatch(spec)


def resized(inspection: Inspection, spec: JobSpec, changed: JobSpec) -> Inspection:
    """The inspection as one of the changed job would have been, as far as the planner looks at it."""
    before, after = inspected_size(spec, inspection), largest_microbatch(changed)
    if before == after or largest_microbatch(spec) == after:
        return inspection
    return replace(
        inspection,
        units=_resized_units(inspection.units, inspection, before, after),
        device_units=_resized_units(inspection.device_units, inspection, before, after),
        input=_resized_tensor(inspection.input, before, after),
        target=_resized_tensor(inspection.target, before, after),
        load_seconds=inspection.load_seconds * after / max(largest_microbatch(spec), 1),
    )


def _resized_units(
    units: Sequence[UnitFacts], inspection: Inspection, before: int, after: int
) -> tuple[UnitFacts, ...]:
    return tuple(_resized_unit(unit, inspection, before, after) for unit in units)


def _resized_unit(unit: UnitFacts, inspection: Inspection, before: int, after: int) -> UnitFacts:
    def at(seconds: float, small: float) -> float:
        if not 0 < inspection.small_size < before:
            return seconds * after / before
        each = max((seconds - small) / (before - inspection.small_size), 0.0)
        return max(seconds + (after - before) * each, 0.0)

    return replace(
        unit,
        forward_seconds=at(unit.forward_seconds, unit.small_forward_seconds),
        backward_seconds=at(unit.backward_seconds, unit.small_backward_seconds),
        shapes=_resized_shapes(unit.shapes, before, after),
    )


def _resized_tensor(facts: TensorFacts, before: int, after: int) -> TensorFacts:
    return replace(facts, shapes=_resized_shapes(facts.shapes, before, after))


def _resized_shapes(shapes: Mapping[int, Shape], before: int, after: int) -> dict[int, Shape]:
    """By the first dimension, which grows with the samples."""
    if before not in shapes or not shapes[before]:
        return dict(shapes)
    first, *others = shapes[before]
    return {after: (-(-first * after // before), *others)}
