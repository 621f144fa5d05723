"""Costs: the seconds of each task, from what an inspection measured. Pure; a prediction that the run corrects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from weft.plan.buckets import Bucket, Holder
from weft.plan.division import Part, divide
from weft.plan.graph import Lane, Task
from weft.plan.inspection import Inspection
from weft.plan.kinds import KINDS, Kind
from weft.plan.plan import Plan, Ring, Role, StagePlan
from weft.spec.job_spec import JobSpec
from weft.spec.workers_needed import Host, threads_of


def largest_microbatch(spec: JobSpec, num_train: int) -> int:
    """That any replica may come to have; units are timed with it. num_train: samples; no batch has more."""
    batch_size = min(spec.job.batch_size, num_train)
    if spec.strategy.share == "adaptive":
        return -(-batch_size // min(spec.strategy.microbatch_counts))
    return max(part.size for parts in divide(batch_size, *spec.strategy.division) for part in parts)


def part_of_largest(spec: JobSpec, inspection: Inspection, r: int) -> float:
    """Of the largest microbatch, with which units were inspected, a replica's largest."""
    parts = divide(min(spec.job.batch_size, inspection.num_train), *spec.strategy.division)
    sizes = [max(part.size for part in own) for own in parts]
    return sizes[r] / max(sizes) if len(sizes) > r else 1.0  # those that steal have one part together


# Found on machines of two cores, of several models: what a core takes more for the same work where all others compute,
# too. They share memory, the outermost cache and the power that a boost takes.
CROWDED: Final = 0.08


@dataclass(frozen=True)
class PlannedJob:
    """What each task of a plan works on, in a whole batch that is divided by the shares at the start."""

    spec: JobSpec
    plan: Plan

    @cached_property
    def _parts(self) -> list[list[Part]]:
        return divide(self.plan.itinerary.full_batch, *self.spec.strategy.division)

    @cached_property
    def largest(self) -> int:
        return largest_microbatch(self.spec, self.plan.itinerary.num_train)

    @cached_property
    def stages(self) -> dict[Holder, StagePlan]:
        return {stage.holder: stage for stage in self.plan.stages}

    def samples(self, task: Task) -> int:
        """Of the task's microbatch; 0 for a task that has none."""
        if task.microbatch is None:
            return 0
        return self._parts[task.holder.replica if len(self._parts) > 1 else 0][task.microbatch].size

    def computed(self, task: Task) -> tuple[Kind, ...]:
        """What a forward or backward computes of its units: with recompute a backward is a forward too. Nothing in a
        job that learns nothing. Of a first stage's backward all is the parameters'."""
        if KINDS[task.kind].learns and self.spec.job.mode != "train":
            return ()
        again = (Kind.FORWARD,) if KINDS[task.kind].hands_back and self.spec.strategy.recompute else ()
        is_first = task.holder.stage == 0
        match task.kind:
            case Kind.INPUT if is_first:
                return again
            case Kind.WEIGHT if is_first:
                return (Kind.BACKWARD,)
            case _:
                return (*again, task.kind)

    @cached_property
    def _borders(self) -> dict[Holder, list[int]]:
        """Of stages whose first forward is in parts, the buckets with which these begin but the first, in order."""
        borders: dict[Holder, list[int]] = {}
        for task in self.plan.graph.tasks:
            if task.goes_on and task.bucket is not None:
                borders.setdefault(task.holder, []).append(task.bucket)
        return borders

    def units(self, task: Task) -> range:
        """Those that a forward or backward runs: of its stage; of a part of a forward its own."""
        stage, borders = self.stages[task.holder], self._borders.get(task.holder, [])
        if task.kind is not Kind.FORWARD or task.microbatch or not borders:
            return range(stage.first, stage.last)
        assert self.plan.synchronisation is not None
        buckets = self.plan.synchronisation.buckets
        bounds = [stage.first, *(buckets[each].first_read(task.holder) for each in borders), stage.last]
        part = len(borders) if task.bucket is None else borders.index(task.bucket)
        return range(bounds[part], bounds[part + 1])

    @cached_property
    def _num_computing(self) -> int:
        """CPU workers with forwards or backwards."""
        tasks = (task for task in self.plan.graph.tasks if KINDS[task.kind].computes and self.device(task) == "cpu")
        return len({task.lane.worker for task in tasks})

    @cached_property
    def _at_once(self) -> dict[str, float]:
        """By kind, how many workers compute at the same moment, on average: all of them, but those of a pipeline that
        fills and drains in each iteration, of which some wait."""
        own: dict[int, set[int]] = {}
        for task in self.plan.graph.tasks:
            if KINDS[task.kind].computes:
                own.setdefault(task.holder.replica, set()).add(task.lane.worker)
        drains = self.spec.job.mode == "train" and all(task.kind is not Kind.WEIGHT for task in self.plan.graph.tasks)
        found = {"cpu": 0.0, "gpu": 0.0}
        for r, workers in own.items():
            replica, num_workers = self.plan.replicas[r], len(workers)
            turns = replica.microbatches * replica.num_stages / num_workers  # of each worker
            waits = drains and not replica.staleness
            found[replica.device] += num_workers * (turns / (turns + num_workers - 1) if waits else 1.0)
        return found

    def crowding(self, device: str, host: Host) -> float:
        """What forwards and backwards take on workers of that kind, as a multiple of what they took the inspecting
        worker, which was alone."""
        threads = threads_of(self.spec.strategy, host)
        others = host.workers * host.threads - threads
        if device != "cpu" or others <= 0:
            return self.sharing(device, host)
        return (1.0 + CROWDED * min((self._num_computing - 1) * threads / others, 1.0)) * self.sharing(device, host)

    def sharing(self, device: str, host: Host) -> float:
        """What anything takes on workers of that kind, as such a multiple, where more threads compute than there are
        processors: each has its part of one. So no iteration is predicted to be shorter than all work by processors."""
        if host.processors is None or (device != "cpu" and not host.stand_ins):
            return 1.0
        threads = {"cpu": threads_of(self.spec.strategy, host), "gpu": host.threads if host.stand_ins else 0}
        together = sum(count * threads[kind] for kind, count in self._at_once.items())
        alone = max(threads[device], host.processors)  # more threads than that a worker was timed with, too
        return max(1.0, together / alone)

    def device(self, task: Task) -> str:
        """The kind of the worker in whose lane it runs."""
        return self.plan.workers[task.lane.worker]

    def slowness(self, task: Task, inspection: Inspection) -> float:
        """Of that worker, as in the inspection."""
        worker, kind = task.lane.worker, self.device(task)
        return inspection.slowness_of(kind, worker - self.plan.workers.index(kind)) if inspection.slowness else 1.0

    @cached_property
    def _handed(self) -> dict[tuple[Holder, bool], list[Ring]]:
        """Rings that a stage's tasks copy into or out of: those that hand back, and the others."""
        handed: dict[tuple[Holder, bool], list[Ring]] = {}
        for ring in self.plan.rings:
            if ring.writer is None or ring.memory == "device":
                continue
            is_gpu = self.plan.replicas[ring.replica].device == "gpu"
            writes, reads = ring.memory == "shared", is_gpu  # cores read in place, and a peer's writer writes so
            for stage in ((ring.writer,) if writes else ()) + (ring.stages if reads else ()):
                handed.setdefault((Holder(ring.replica, stage), ring.role is not Role.ACTIVATION), []).append(ring)
        return handed

    def around(self, task: Task, inspection: Inspection) -> float:
        """Seconds of a forward or backward beside its units, whatever the microbatch; once, where it is in parts."""
        if task.goes_on or not self.samples(task):
            return 0.0
        first = inspection.units_on(self.plan.replicas[task.holder.replica].device)[self.stages[task.holder].first]
        seconds: float = sum(getattr(first, f"around_{kind}_seconds") for kind in self.computed(task))
        return seconds * self.slowness(task, inspection)

    def handing(self, task: Task, inspection: Inspection) -> tuple[float, float]:
        """Seconds in which a forward or backward passes on what it has made, or a device takes it up: whatever the
        microbatch, and of the largest one."""
        if task.goes_on or task.kind is Kind.WEIGHT or not self.samples(task):
            return 0.0, 0.0
        rate = inspection.link_seconds if self.device(task) == "gpu" else inspection.copy_seconds
        fixed = each = 0.0
        for ring in self._handed.get((task.holder, KINDS[task.kind].hands_back), ()):
            if ring.role is Role.TIED:
                fixed += rate(ring.slot_bytes)
            else:
                each += rate(ring.slot_bytes)
        return fixed, each


def planned_seconds(job: PlannedJob, inspection: Inspection) -> tuple[float, ...]:
    """The cost of task i of the plan at i."""
    costs = _Costs(job, inspection)
    return tuple(costs.of(task) for task in job.plan.graph.tasks)


def mean_seconds(plan: Plan, task_seconds: Sequence[float] | None = None) -> tuple[float, ...]:
    """What each task of a plan takes on average: where replicas steal, a position has a microbatch now and then only,
    and a replica gets as many as its speed is of all replicas' together. Of loaders that take turns at a microbatch
    each has it as often as another. task_seconds: as recorded, instead of the plan's, of which a task of a way that its
    bucket does not go at the start takes nothing."""
    local = plan.synchronisation.local if plan.synchronisation else ()
    planned = (0.0 if task.passes(local) else plan.task_seconds[task.id] for task in plan.graph.tasks)
    takers = plan.turns.takers
    costs = tuple(
        cost / takers if task.kind is Kind.LOAD else cost
        for task, cost in zip(plan.graph.tasks, task_seconds or planned, strict=True)
    )
    if plan.share != "stealing":
        return costs
    of_position = [task for task in plan.graph.tasks if KINDS[task.kind].of_position]
    busy: dict[int, dict[Lane, float]] = {}
    for task in of_position:
        lanes = busy.setdefault(task.holder.replica, {})
        lanes[task.lane] = lanes.get(task.lane, 0.0) + costs[task.id]
    speeds = {replica: 1 / (max(lanes.values()) or 1e-9) for replica, lanes in busy.items()}
    seconds = list(costs)
    for task in of_position:
        seconds[task.id] *= speeds[task.holder.replica] / sum(speeds.values())
    return tuple(seconds)


class _Costs:
    def __init__(self, job: PlannedJob, inspection: Inspection) -> None:
        self._job, self._inspection = job, inspection
        self._by_units: dict[tuple[str, range, Kind], float] = {}
        self._all_bytes = sum(unit.parameter_bytes for unit in inspection.units) or 1

    def of(self, task: Task) -> float:
        match task.kind:
            case Kind.LOAD:
                return self._inspection.load_seconds * self._size(task)
            case Kind.FETCH if self._job.plan.replicas[task.holder.replica].resident:
                return 0.0  # a copy within the device's own memory, next to nothing
            case Kind.FETCH:
                facts = (self._inspection.input, self._inspection.target)
                return self._inspection.link_seconds(sum(part.max_bytes() for part in facts if part)) * self._size(task)
            case Kind.FORWARD | Kind.BACKWARD | Kind.INPUT | Kind.WEIGHT:
                seconds = sum(self._computing(task, kind) for kind in self._job.computed(task)) * self._size(task)
                fixed, each = self._job.handing(task, self._inspection)
                crowding = self._job.crowding(self._job.device(task), self._inspection.host)
                computing = seconds * self._job.slowness(task, self._inspection)
                computing += self._job.around(task, self._inspection)
                return (computing + each * self._size(task) + fixed) * crowding
            case Kind.DOWN | Kind.UP | Kind.RELOAD:
                return self._inspection.link_seconds(self._bucket(task).num_bytes)
            case Kind.SYNC:
                return self._sync(task) * self._sharing(task)
            case Kind.UPDATE:
                seconds = self._inspection.update_seconds_on(self._job.device(task))
                slowness = self._job.slowness(task, self._inspection)
                return seconds * slowness * self._sharing(task) * self._updated_bytes(task) / self._all_bytes
            case Kind.GRAD | Kind.VALIDATE | Kind.REFRESH | Kind.SNAPSHOT:
                return 0.0

    def _sharing(self, task: Task) -> float:
        return self._job.sharing(self._job.device(task), self._inspection.host)

    def _computing(self, task: Task, kind: Kind) -> float:
        device, units = self._job.plan.replicas[task.holder.replica].device, self._job.units(task)
        key = device, units, kind
        if key not in self._by_units:
            own = self._inspection.units_on(device)[units.start : units.stop]
            self._by_units[key] = sum(getattr(unit, f"{kind}_seconds") for unit in own)
        return self._by_units[key]

    def _size(self, task: Task) -> float:
        """The task's microbatch as a part of the largest one, which was measured."""
        return self._job.samples(task) / self._job.largest

    def _bucket(self, task: Task) -> Bucket:
        assert self._job.plan.synchronisation is not None
        return self._job.plan.synchronisation.bucket_of(task)

    def _sync(self, task: Task) -> float:
        return sum_seconds(self._inspection, self._bucket(task), self._owned_bytes(task), self._job.device(task))

    def _owned_bytes(self, task: Task) -> int:
        bucket = self._bucket(task)
        return sum(bucket.itemsize * (r.stop - r.start) for r in bucket.all_ranges if r.owner == task.owner)

    def _updated_bytes(self, task: Task) -> int:
        if task.bucket is None:
            return self._job.stages[task.holder].parameter_bytes
        return self._bucket(task).num_bytes if task.owner is None else self._owned_bytes(task)


def sum_seconds(inspection: Inspection, bucket: Bucket, num_bytes: int, device: str) -> float:
    """Of so much of a bucket's gradients. A device adds up nothing of its own; its squares take the speed of its own
    memory, next to nothing. device: the kind of the worker that sums."""
    if len(bucket.holders) == 1 and device == "gpu":
        return 0.0
    summed = len(bucket.gradient_holders)
    return num_bytes / inspection.copy_bytes_per_second * (summed + 1) / 2
