"""Plan: a job resolved onto this machine, as a value that can be printed, stored and sent.

An inspection (what a worker found out about the user's model and data) and a spec go in; the planner makes the plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from weft.itinerary import Itinerary
from weft.scheduler.graph import Graph, Kind, Lane

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitFacts:
    """One unit of the model. Times are seconds for one microbatch of the largest size, measured alone.

    shapes: microbatch size -> shape of its output; empty, and dtype None, where the output is no single tensor (no cut
    is possible after such a unit). tied_to: earlier units that share a parameter or buffer. in_place: it writes to its
    input.
    """

    name: str
    parameter_bytes: int
    buffer_bytes: int
    forward_seconds: float
    backward_seconds: float
    dtype: str | None
    itemsize: int
    shapes: Mapping[int, Shape]
    tied_to: tuple[int, ...] = ()
    in_place: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFacts:
    """The input or the target of one microbatch: its dtype and its shape for each microbatch size."""

    dtype: str
    itemsize: int
    shapes: Mapping[int, Shape]

    def max_bytes(self) -> int:
        return max((_elements(shape) * self.itemsize for shape in self.shapes.values()), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """What one worker found out about a workload."""

    units: tuple[UnitFacts, ...]
    input: TensorFacts
    target: TensorFacts
    num_train: int
    num_validation: int
    load_seconds: float
    update_seconds: float
    metrics: tuple[str, ...]

    @classmethod
    def from_wire(cls, data: Mapping[str, Any]) -> Inspection:
        return cls(
            units=tuple(
                UnitFacts(**{**unit, "shapes": _shapes(unit["shapes"]), "tied_to": tuple(unit["tied_to"])})
                for unit in data["units"]
            ),
            input=TensorFacts(**{**data["input"], "shapes": _shapes(data["input"]["shapes"])}),
            target=TensorFacts(**{**data["target"], "shapes": _shapes(data["target"]["shapes"])}),
            metrics=tuple(data["metrics"]),
            **{key: data[key] for key in ("num_train", "num_validation", "load_seconds", "update_seconds")},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """A ring of `depth` slots that the owner's tasks write, microbatch u of the whole run into slot u % depth."""

    name: str
    depth: int
    dtype: str
    slot_bytes: int
    shapes: Mapping[int, Shape]


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """Units first .. last - 1 on the plan's worker `worker`. memory_bytes: state, gradients and slots. copies_input:
    the first unit works in place, so it gets a copy of the slot."""

    first: int
    last: int
    worker: int
    parameter_bytes: int
    memory_bytes: int
    copies_input: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """workers: the kind of each worker that the plan needs, by position. task_seconds: the cost of each task that the
    prediction and the limit come from."""

    schedule: str
    microbatches: int
    recompute: bool
    window: int
    itinerary: Itinerary
    stages: tuple[StagePlan, ...]
    workers: tuple[str, ...]
    graph: Graph
    rings: tuple[Ring, ...]
    task_seconds: tuple[float, ...]
    shared_bytes: int
    predicted_iteration_seconds: float = 0.0
    limit_seconds: float = 0.0
    limit_cycle: str = ""

    def lanes_of(self, worker: int) -> list[Lane]:
        return [lane for lane in self.graph.programs if lane.worker == worker]

    def worker_view(self, worker: int) -> dict[str, Any]:
        """What the worker at a position needs to run its part: plain data."""
        return {
            "position": worker,
            "stages": [
                {
                    "stage": number,
                    "first": stage.first,
                    "last": stage.last,
                    "copies_input": stage.copies_input,
                }
                for number, stage in enumerate(self.stages)
                if stage.worker == worker
            ],
            "num_stages": len(self.stages),
            "microbatches": self.microbatches,
            "recompute": self.recompute,
            "itinerary": asdict(self.itinerary),
            "rings": [
                {**asdict(ring), "shapes": list(ring.shapes.items())}
                for ring in self.rings
                if ring.name in self._rings_of(worker)
            ],
            "num_tasks": len(self.graph.tasks),
            "lanes": {lane.name: self._program(lane) for lane in self.lanes_of(worker)},
        }

    def _rings_of(self, worker: int) -> set[str]:
        """Names of the rings that the worker's tasks read or write."""
        names: set[str] = set()
        for task in (self.graph.tasks[task] for lane in self.lanes_of(worker) for task in self.graph.programs[lane]):
            if task.kind is Kind.LOAD:
                names |= {"input", "target"}
            else:
                names |= {
                    f"{ring}-{stage}" for ring in ("activation", "gradient") for stage in (task.stage - 1, task.stage)
                }
                names |= {"input"} if task.stage == 0 else set()
                names |= {"target"} if task.stage == len(self.stages) - 1 else set()
        return names

    def _program(self, lane: Lane) -> list[dict[str, Any]]:
        crossing = {edge.source for task in self.graph.tasks for edge in self.graph.cross_lane_inputs(task.id)}
        return [
            {
                "id": task,
                "kind": str(self.graph.tasks[task].kind),
                "stage": self.graph.tasks[task].stage,
                "microbatch": self.graph.tasks[task].microbatch,
                "waits": [[edge.source, edge.distance, str(edge.cause)] for edge in self.graph.cross_lane_inputs(task)],
                "wakes": task in crossing,
            }
            for task in self.graph.programs[lane]
        ]

    def describe(self, worker_names: tuple[str, ...] | None = None) -> dict[str, Any]:
        """The plan as people and `plan.json` see it."""
        names = worker_names or tuple(f"{kind}-{position}" for position, kind in enumerate(self.workers))
        return {
            "schedule": self.schedule,
            "microbatches": self.microbatches,
            "recompute": self.recompute,
            "window": self.window,
            "stages": [
                {
                    "units": [stage.first, stage.last],
                    "worker": names[stage.worker],
                    "parameter_bytes": stage.parameter_bytes,
                    "memory_bytes": stage.memory_bytes,
                }
                for stage in self.stages
            ],
            "workers": list(names),
            "lanes": {
                f"{names[lane.worker]}/{lane.name}": [str(self.graph.tasks[task]) for task in program]
                for lane, program in self.graph.programs.items()
            },
            "edges": [
                [str(self.graph.tasks[edge.source]), str(self.graph.tasks[edge.target]), edge.distance, str(edge.cause)]
                for edge in self.graph.edges
            ],
            "rings": [{"name": ring.name, "depth": ring.depth, "slot_bytes": ring.slot_bytes} for ring in self.rings],
            "task_seconds": {str(task): self.task_seconds[task.id] for task in self.graph.tasks},
            "shared_bytes": self.shared_bytes,
            "steps": self.itinerary.steps,
            "iterations": self.itinerary.num_iterations,
            "predicted_iteration_seconds": self.predicted_iteration_seconds,
            "limit_seconds": self.limit_seconds,
            "limit_cycle": self.limit_cycle,
        }


def _shapes(pairs: Any) -> dict[int, Shape]:
    return {int(size): tuple(shape) for size, shape in pairs}


def _elements(shape: Shape) -> int:
    count = 1
    for extent in shape:
        count *= extent
    return count


def slot_bytes(shapes: Mapping[int, Shape], itemsize: int) -> int:
    """Bytes of the largest microbatch, rounded up to the 64 that vector loads want."""
    most = max((_elements(shape) * itemsize for shape in shapes.values()), default=0)
    return -(-most // 64) * 64
