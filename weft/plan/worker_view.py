"""Worker view: what the worker at one position of a plan needs to run its part. Sent as plain data."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import TypeAdapter

from weft.plan.buckets import Holder
from weft.plan.graph import Edge, Task
from weft.plan.itinerary import Itinerary
from weft.plan.kinds import KINDS, Kind
from weft.plan.plan import Plan, ReplicaPlan, Ring, StagePlan, Synchronisation


@dataclass(frozen=True, slots=True, kw_only=True)
class Unneeded:
    """Parameters of the model that none of a worker's stages has."""

    numbers: tuple[int, ...] = ()  # as in the inspection
    largest_bytes: int = 0  # of those
    num_bytes: int = 0  # of those, all
    copied_bytes: int = 0  # of the others, which have no number
    digests: Mapping[int, int] = field(default_factory=dict)  # of what its stages have, by its place in the model

    @classmethod
    def of(cls, plan: Plan, position: int) -> Unneeded:
        own = [range(stage.first, stage.last) for stage in plan.stages if stage.worker == position]
        needed, unneeded = {}, []
        for place, parameter in enumerate(plan.parameters):
            if any(unit in units for unit in parameter.units or (0,) for units in own):  # the first has what none uses
                needed[place] = parameter.digest
            else:
                unneeded.append(parameter)
        sizes = {each.number: each.num_bytes for each in unneeded if each.number is not None}
        return cls(
            numbers=tuple(sizes),
            largest_bytes=max(sizes.values(), default=0),
            num_bytes=sum(sizes.values()),
            copied_bytes=sum(each.num_bytes for each in unneeded if each.number is None),
            digests={place: digest for place, digest in needed.items() if digest is not None},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """As in the plan, where nothing else is said."""

    position: int  # the worker's, in Plan.workers
    stages: tuple[StagePlan, ...]  # its own
    replicas: tuple[ReplicaPlan, ...]
    shares: tuple[float, ...]
    share: Literal["fixed", "adaptive", "stealing"]
    recompute: bool
    itinerary: Itinerary
    rings: tuple[Ring, ...]  # that its tasks read or write
    num_tasks: int  # of all workers
    programs: Mapping[str, tuple[Task, ...]]  # of its lanes, by name
    free: Mapping[str, int] = field(default_factory=dict)  # of its lanes, as in the graph
    waits: Mapping[int, tuple[Edge, ...]]  # of its tasks, those that wait for another lane
    wakes: frozenset[int]  # of its tasks, those that another lane waits for
    first_stages: tuple[StagePlan, ...]  # of the first replica
    synchronisation: Synchronisation | None
    reporter: int | None  # the worker that tells the learning rate and the norm of each step, where there are buckets
    skipped_calls: str = ""  # as in the inspection
    compiled_calls: str = ""  # as in the inspection
    draws: bool = True
    seeds_others: bool = False  # as in the inspection
    optimizer_draws: bool = False  # as in the inspection
    unneeded: Unneeded = Unneeded()
    judged: bool = False
    is_adjusted: bool = False

    @classmethod
    def of(cls, plan: Plan, position: int) -> WorkerView:
        graph = plan.graph
        programs = {
            lane.name: tuple(graph.tasks[task] for task in program)
            for lane, program in graph.programs.items()
            if lane.worker == position
        }
        own = [task for program in programs.values() for task in program]
        crossing = {edge.source for task in graph.tasks for edge in graph.cross_lane_inputs(task.id)}
        loads = {task.replica for task in own if task.kind is Kind.LOAD}
        holders = {task.holder for task in own if KINDS[task.kind].of_position}

        def has(ring: Ring) -> bool:
            if ring.writer is not None:
                return any(Holder(ring.replica, stage) in holders for stage in (ring.writer, *ring.stages))
            return (ring.is_loaded and ring.replica in loads) or not holders.isdisjoint(ring.readers(plan.replicas))

        return cls(
            position=position,
            stages=tuple(stage for stage in plan.stages if stage.worker == position),
            replicas=plan.replicas,
            shares=plan.shares,
            share=plan.share,
            recompute=plan.recompute,
            itinerary=plan.itinerary,
            rings=tuple(filter(has, plan.rings)),
            num_tasks=len(graph.tasks),
            programs=programs,
            free={lane.name: limit for lane, limit in graph.free.items() if lane.worker == position},
            waits={task.id: waits for task in own if (waits := graph.cross_lane_inputs(task.id))},
            wakes=frozenset(task.id for task in own if task.id in crossing),
            first_stages=tuple(stage for stage in plan.stages if stage.replica == 0),
            synchronisation=plan.synchronisation,
            skipped_calls=plan.skipped_calls,
            compiled_calls=plan.compiled_calls,
            draws=plan.draws,
            seeds_others=plan.seeds_others,
            optimizer_draws=plan.optimizer_draws,
            reporter=_reporter(plan),
            unneeded=Unneeded.of(plan, position),
            judged=plan.judged,
            is_adjusted=plan.is_adjusted,
        )

    @property
    def last_updated_stage(self) -> int:
        """Of the first replica: whose update tells the learning rate where there are no buckets."""
        stages = [stage for stage in self.first_stages if stage.parameter_bytes] or self.first_stages
        return stages[-1].stage

    @property
    def loads_only(self) -> bool:
        """Whether nothing of the model is its own."""
        return all(task.kind is Kind.LOAD for program in self.programs.values() for task in program)

    def to_wire(self) -> dict[str, Any]:
        data: dict[str, Any] = self.wire().dump_python(self, mode="json", exclude_defaults=True)
        return data

    @classmethod
    def from_wire(cls, data: Mapping[str, Any]) -> WorkerView:
        return cls.wire().validate_python(data)

    @staticmethod
    @functools.cache
    def wire() -> TypeAdapter[WorkerView]:
        """Made when it is first asked for, since that takes 10 ms."""
        return TypeAdapter(WorkerView)


def _reporter(plan: Plan) -> int | None:
    if plan.synchronisation is None:
        return None
    updates = [task for task in plan.graph.tasks if task.kind is Kind.UPDATE]
    first = min(updates, key=lambda task: (task.owner is None, task.owner, task.stage, task.replica))
    return first.lane.worker
