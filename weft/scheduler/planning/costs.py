"""Costs: the seconds of each task, from what an inspection measured. Pure; a prediction that the run corrects."""

from __future__ import annotations

from collections.abc import Sequence

from weft.plan.buckets import Bucket, Holder
from weft.plan.division import divide
from weft.plan.graph import Graph, Lane, Task
from weft.plan.inspection import Inspection
from weft.plan.kinds import KINDS, Kind
from weft.plan.placement import Placement
from weft.plan.plan import Plan
from weft.spec.job_spec import JobSpec


def task_seconds(spec: JobSpec, inspection: Inspection, placement: Placement, graph: Graph) -> tuple[float, ...]:
    """The cost of task i of the graph at i, for a whole batch divided by the shares at the start."""
    costs = _Costs(spec, inspection, placement)
    return tuple(costs.of(task) for task in graph.tasks)


def mean_seconds(plan: Plan, task_seconds: Sequence[float] | None = None) -> tuple[float, ...]:
    """What each task of a plan takes on average: where replicas steal, a position has a microbatch now and then only,
    and a replica gets as many as its speed is of all replicas' together. task_seconds: as recorded, instead of the
    plan's, of which a task of a way that its bucket does not go at the start takes nothing."""
    local = plan.synchronisation.local if plan.synchronisation else ()
    planned = (0.0 if task.passes(local) else plan.task_seconds[task.id] for task in plan.graph.tasks)
    costs = tuple(task_seconds or planned)
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
    def __init__(self, spec: JobSpec, inspection: Inspection, placement: Placement) -> None:
        self._inspection = inspection
        self._recompute = spec.strategy.recompute
        self._placement = placement
        self._parts = divide(spec.job.batch_size, *spec.strategy.division)
        self._largest = max(part.size for parts in self._parts for part in parts)
        if spec.strategy.share == "adaptive":  # what a replica may come to have was measured
            self._largest = -(-spec.job.batch_size // min(spec.strategy.microbatch_counts))
        self._forward, self._backward = self._by_stage("forward_seconds"), self._by_stage("backward_seconds")
        self._parameter_bytes = self._by_stage("parameter_bytes")
        sync = placement.synchronisation
        self._buckets: Sequence[Bucket] = sync.buckets if sync else ()
        self._all_bytes = sum(unit.parameter_bytes for unit in inspection.units) or 1

    def _by_stage(self, fact: str) -> dict[Holder, float]:
        return {
            Holder(r, s): sum(getattr(unit, fact) for unit in self._inspection.units_on(replica.device)[first:last])
            for r, (replica, cuts) in enumerate(zip(self._placement.replicas, self._placement.cuts, strict=True))
            for s, (first, last) in enumerate(cuts)
        }

    def of(self, task: Task) -> float:
        match task.kind:
            case Kind.LOAD:
                return self._inspection.load_seconds * self._size(task)
            case Kind.FETCH:
                facts = (self._inspection.input, self._inspection.target)
                return self._inspection.link_seconds(sum(part.max_bytes() for part in facts)) * self._size(task)
            case Kind.FORWARD:
                return self._forward[task.holder] * self._size(task)
            case Kind.BACKWARD:
                again = self._forward[task.holder] if self._recompute else 0.0
                return (self._backward[task.holder] + again) * self._size(task) if self._placement.learns else 0.0
            case Kind.DOWN | Kind.UP | Kind.RELOAD:
                return self._inspection.link_seconds(self._part(task).num_bytes)
            case Kind.SYNC:
                return self._sync(task)
            case Kind.UPDATE:
                seconds = self._inspection.update_seconds_on(self._device(task))
                return seconds * self._updated_bytes(task) / self._all_bytes
            case Kind.GRAD | Kind.VALIDATE:
                return 0.0

    def _size(self, task: Task) -> float:
        """The task's microbatch as a part of the largest one, which was measured."""
        assert task.microbatch is not None
        parts = self._parts[task.holder.replica if len(self._parts) > 1 else 0]
        return parts[task.microbatch].size / self._largest

    def _part(self, task: Task) -> Bucket:
        assert task.bucket is not None
        return self._buckets[task.bucket]

    def _sync(self, task: Task) -> float:
        """A device adds up nothing of its own; its squares take the speed of its own memory, next to nothing."""
        holders = len(self._part(task).holders)
        if holders == 1 and self._device(task) == "gpu":
            return 0.0
        return self._owned_bytes(task) / self._inspection.copy_bytes_per_second * (holders + 1) / 2

    def _device(self, task: Task) -> str:
        """The kind of the worker in whose lane it runs."""
        return self._placement.workers[task.lane.worker]

    def _owned_bytes(self, task: Task) -> int:
        part = self._part(task)
        return sum(part.itemsize * (r.stop - r.start) for r in part.all_ranges if r.owner == task.owner)

    def _updated_bytes(self, task: Task) -> float:
        if task.bucket is None:
            return self._parameter_bytes[task.holder]
        return self._part(task).num_bytes if task.owner is None else self._owned_bytes(task)
