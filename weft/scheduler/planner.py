"""Planner: from a spec and an inspection to a checked plan. Pure; a plan that cannot run is refused with the reason.

The cut: contiguous units to stages so that the slowest stage is as fast as possible (dynamic programming over measured
unit times). The graph: design section 3. The check: the graph's cycles, then one simulated run with real slot depths.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import accumulate, pairwise

from weft.itinerary import Itinerary
from weft.scheduler.graph import Cause, Edge, Graph, GraphError, Kind, Lane, Task
from weft.scheduler.limit import speed_limit
from weft.scheduler.plan import Inspection, Plan, Ring, StagePlan, UnitFacts, slot_bytes
from weft.scheduler.schedules import SCHEDULES, in_flight
from weft.scheduler.simulator import SimulationError, simulate
from weft.spec import JobSpec

PREFETCH_BATCHES = 2  # input slots for this many whole batches: one in use, one being loaded
WINDOW_SECONDS = 0.25  # tasks sent ahead to a lane cover this much work: far above a round trip to the daemon
MIN_WINDOW_ITERATIONS = 2
MAX_WINDOW_TASKS = 4096
MAX_ITERATIONS = 2**31 - 1  # a board word is an int32
COMPUTE, LOAD = "compute", "load"


class PlanError(ValueError):
    """The job cannot be planned as asked. The text names the field and the remedy."""


def make_plan(spec: JobSpec, inspection: Inspection, *, shared_bytes_free: int) -> Plan:
    """A plan that has passed its checks. Errors: PlanError."""
    strategy = spec.strategy
    _check_sizes(spec, inspection)
    cuts = partition(inspection.units, strategy.stages, strategy.split)
    graph, rings = build_graph(spec, inspection, cuts)
    seconds = _task_seconds(graph, inspection, cuts, recompute=strategy.recompute)
    shared = _shared_bytes(inspection, rings, len(graph.tasks))
    if shared > shared_bytes_free:
        raise PlanError(
            f"the plan needs {shared / 2**20:.0f} MiB of shared memory (parameters and slots) and /dev/shm has "
            f"{shared_bytes_free / 2**20:.0f} MiB free; use fewer microbatches, a smaller batch, or a larger /dev/shm"
        )
    plan = Plan(
        schedule=strategy.schedule,
        microbatches=strategy.microbatches,
        recompute=strategy.recompute,
        window=strategy.window or _default_window(graph, seconds),
        itinerary=_itinerary(spec, inspection),
        stages=_stage_plans(inspection, cuts, rings),
        workers=("cpu",) * strategy.stages + ("loader",),
        graph=graph,
        rings=rings,
        task_seconds=seconds,
        shared_bytes=shared,
    )
    return _checked(plan)


def partition(
    units: Sequence[UnitFacts], num_stages: int, split: Sequence[int] | None = None
) -> tuple[tuple[int, int], ...]:
    """(first, last) of each stage, last exclusive, minimising the slowest stage's forward plus backward time.

    No cut falls after a unit whose output is no single tensor, nor between units that share a parameter. split: the
    user's own cuts instead. Errors: PlanError.
    """
    allowed = [cut for cut in range(1, len(units)) if _can_cut(units, cut)]
    if num_stages > len(allowed) + 1:
        names = ", ".join(unit.name.rstrip(".") or "the whole model" for unit in units[:8])
        raise PlanError(
            f"strategy.stages = {num_stages}, but the model can be cut into at most {len(allowed) + 1} stages "
            f"(units: {names}{', …' if len(units) > 8 else ''}); use fewer stages, or build the model as an "
            "nn.Sequential of more children that pass one tensor on and share no parameter"
        )
    if split is not None:
        if refused := sorted(set(split) - set(allowed)):
            raise PlanError(
                f"strategy.split: the model cannot be cut before unit {refused[0]}; it can be before {allowed}"
            )
        return tuple(pairwise([0, *split, len(units)]))
    bounds = [0, *allowed, len(units)]
    before = [0.0, *accumulate(unit.forward_seconds + unit.backward_seconds for unit in units)]
    # best[b] = (slowest stage, cut indices) over the units before bounds[b]
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, (0,))}
    for _ in range(num_stages):
        best = {
            b: min(
                (max(slowest, before[bounds[b]] - before[bounds[a]]), (*path, b))
                for a, (slowest, path) in best.items()
                if a < b
            )
            for b in range(1, len(bounds))
            if any(a < b for a in best)
        }
    path = best[len(bounds) - 1][1]
    return tuple((bounds[a], bounds[b]) for a, b in pairwise(path))


def build_graph(
    spec: JobSpec, inspection: Inspection, cuts: Sequence[tuple[int, int]]
) -> tuple[Graph, tuple[Ring, ...]]:
    """The iteration graph of one pipeline replica, and the slot rings that its back-pressure edges stand for."""
    num_stages, num_microbatches = len(cuts), spec.strategy.microbatches
    builder = _Builder(num_microbatches)
    loader = Lane(num_stages, LOAD)
    for m in range(num_microbatches):
        builder.add(Kind.LOAD, 0, m, loader)
    for stage in range(num_stages):
        for kind, m in SCHEDULES[spec.strategy.schedule](stage, num_stages, num_microbatches):
            builder.add(kind, stage, m, Lane(stage, COMPUTE))
        builder.add(Kind.UPDATE, stage, -1, Lane(stage, COMPUTE))
    builder.flow_edges(num_stages)
    rings = _rings(spec, inspection, cuts)
    for ring in rings:
        boundary = ring.name.partition("-")[2]
        match ring.name.partition("-")[0]:
            case "input":
                builder.batch_edge(Kind.LOAD, 0, Kind.BACKWARD, 0)
            case "target":
                builder.batch_edge(Kind.LOAD, 0, Kind.BACKWARD, num_stages - 1)
            case "activation":
                builder.ring_edges(Kind.FORWARD, int(boundary), Kind.BACKWARD, int(boundary) + 1, ring.depth)
            case "gradient":
                builder.ring_edges(Kind.BACKWARD, int(boundary) + 1, Kind.BACKWARD, int(boundary), ring.depth)
    return builder.graph(), rings


class _Builder:
    """Collects tasks by (kind, stage, microbatch), then edges between them."""

    def __init__(self, num_microbatches: int) -> None:
        self._num_microbatches = num_microbatches
        self._tasks: dict[tuple[Kind, int, int], Task] = {}
        self._edges: dict[tuple[int, int, int], Edge] = {}

    def add(self, kind: Kind, stage: int, microbatch: int, lane: Lane) -> None:
        task = Task(id=len(self._tasks), kind=kind, stage=stage, microbatch=microbatch, lane=lane)
        self._tasks[kind, stage, microbatch] = task

    def edge(self, source: tuple[Kind, int, int], target: tuple[Kind, int, int], distance: int, cause: Cause) -> None:
        key = (self._tasks[source].id, self._tasks[target].id, distance)
        self._edges.setdefault(key, Edge(*key, cause))  # the first cause given stands: data before slot

    def flow_edges(self, num_stages: int) -> None:
        last = num_stages - 1
        for m in range(self._num_microbatches):
            self.edge((Kind.LOAD, 0, m), (Kind.FORWARD, 0, m), 0, Cause.DATA)
            self.edge((Kind.LOAD, 0, m), (Kind.FORWARD, last, m), 0, Cause.DATA)
            for s in range(num_stages):
                self.edge((Kind.FORWARD, s, m), (Kind.BACKWARD, s, m), 0, Cause.ACTIVATION)
                self.edge((Kind.BACKWARD, s, m), (Kind.UPDATE, s, -1), 0, Cause.GRADIENT)
                self.edge((Kind.UPDATE, s, -1), (Kind.FORWARD, s, m), 1, Cause.UPDATE)
                if s < last:
                    self.edge((Kind.FORWARD, s, m), (Kind.FORWARD, s + 1, m), 0, Cause.ACTIVATION)
                    self.edge((Kind.BACKWARD, s + 1, m), (Kind.BACKWARD, s, m), 0, Cause.GRADIENT)

    def ring_edges(self, writer: Kind, writer_stage: int, reader: Kind, reader_stage: int, depth: int) -> None:
        """The writer of microbatch u of the whole run waits for the last reader of microbatch u - depth."""
        for m in range(self._num_microbatches):
            iterations_back, before = divmod(m - depth, self._num_microbatches)
            self.edge((reader, reader_stage, before), (writer, writer_stage, m), -iterations_back, Cause.SLOT)

    def batch_edge(self, writer: Kind, writer_stage: int, reader: Kind, reader_stage: int) -> None:
        """A ring of PREFETCH_BATCHES whole batches is handed back a batch at a time.

        The first write of a batch waits for the last read of the batch whose slots it takes; lane order does the rest.
        So the writer wakes once an iteration and not once a microbatch: on a machine where every core computes, each
        wake-up of a loader takes its time from a compute lane.
        """
        last = self._num_microbatches - 1
        self.edge((reader, reader_stage, last), (writer, writer_stage, 0), PREFETCH_BATCHES, Cause.SLOT)

    def graph(self) -> Graph:
        programs: dict[Lane, list[int]] = {}
        for task in self._tasks.values():
            programs.setdefault(task.lane, []).append(task.id)
        return Graph(
            tasks=tuple(self._tasks.values()),
            edges=tuple(self._edges.values()),
            programs={lane: tuple(program) for lane, program in programs.items()},
        )


def _rings(spec: JobSpec, inspection: Inspection, cuts: Sequence[tuple[int, int]]) -> tuple[Ring, ...]:
    num_stages, num_microbatches = len(cuts), spec.strategy.microbatches
    rings = []
    for name, facts in (("input", inspection.input), ("target", inspection.target)):
        size = slot_bytes(facts.shapes, facts.itemsize)
        depth = PREFETCH_BATCHES * num_microbatches
        rings.append(Ring(name=name, depth=depth, dtype=facts.dtype, slot_bytes=size, shapes=facts.shapes))
    for stage, (_, last) in enumerate(cuts[:-1]):
        unit = inspection.units[last - 1]
        depth = in_flight(spec.strategy.schedule, stage, num_stages, num_microbatches)
        size = slot_bytes(unit.shapes, unit.itemsize)
        rings += [
            Ring(name=name, depth=depth, dtype=unit.dtype or "", slot_bytes=size, shapes=unit.shapes)
            for name in (f"activation-{stage}", f"gradient-{stage}")
        ]
    return tuple(rings)


def _can_cut(units: Sequence[UnitFacts], cut: int) -> bool:
    return units[cut - 1].dtype is not None and not any(
        partner < cut for unit in units[cut:] for partner in unit.tied_to
    )


def _itinerary(spec: JobSpec, inspection: Inspection) -> Itinerary:
    itinerary = Itinerary.of(
        num_train=inspection.num_train,
        num_validation=inspection.num_validation,
        batch_size=spec.job.batch_size,
        epochs=spec.job.epochs,
        steps=spec.job.steps,
    )
    if itinerary.num_iterations > MAX_ITERATIONS:
        field = "epochs" if spec.job.steps is None else "steps"
        raise PlanError(
            f"job.{field} makes {itinerary.num_iterations} iterations, a board counts to {MAX_ITERATIONS}; give fewer"
        )
    return itinerary


def _check_sizes(spec: JobSpec, inspection: Inspection) -> None:
    if inspection.num_train == 0:
        raise PlanError("Workload.train has length 0; give at least one sample")
    if spec.job.batch_size < spec.strategy.microbatches:
        raise PlanError(
            f"job.batch_size = {spec.job.batch_size} is smaller than strategy.microbatches = "
            f"{spec.strategy.microbatches}; a microbatch needs at least one sample"
        )


def _task_seconds(
    graph: Graph, inspection: Inspection, cuts: Sequence[tuple[int, int]], *, recompute: bool
) -> tuple[float, ...]:
    forward = [sum(unit.forward_seconds for unit in inspection.units[first:last]) for first, last in cuts]
    backward = [sum(unit.backward_seconds for unit in inspection.units[first:last]) for first, last in cuts]
    in_stage = [sum(unit.parameter_bytes for unit in inspection.units[first:last]) for first, last in cuts]
    update = [inspection.update_seconds * size / (sum(in_stage) or 1) for size in in_stage]

    def cost(task: Task) -> float:
        match task.kind:
            case Kind.LOAD:
                return inspection.load_seconds
            case Kind.FORWARD:
                return forward[task.stage]
            case Kind.BACKWARD:
                return backward[task.stage] + (forward[task.stage] if recompute else 0.0)
            case Kind.UPDATE:
                return update[task.stage]

    return tuple(cost(task) for task in graph.tasks)


def _default_window(graph: Graph, seconds: Sequence[float]) -> int:
    """Tasks to send ahead: WINDOW_SECONDS of work of the busiest lane, within bounds."""
    longest = max(len(program) for program in graph.programs.values())
    busiest = max(sum(seconds[task] for task in program) for program in graph.programs.values())
    iterations = max(MIN_WINDOW_ITERATIONS, round(WINDOW_SECONDS / max(busiest, 1e-6)))
    return max(MIN_WINDOW_ITERATIONS * longest, min(iterations * longest, MAX_WINDOW_TASKS))


def _shared_bytes(inspection: Inspection, rings: Sequence[Ring], num_tasks: int) -> int:
    state = sum(unit.parameter_bytes + unit.buffer_bytes for unit in inspection.units)
    return state + sum(ring.depth * ring.slot_bytes for ring in rings) + 4 * (num_tasks + 1)


def _stage_plans(
    inspection: Inspection, cuts: Sequence[tuple[int, int]], rings: Sequence[Ring]
) -> tuple[StagePlan, ...]:
    owned = {ring.name: ring.depth * ring.slot_bytes for ring in rings}
    plans = []
    for stage, (first, last) in enumerate(cuts):
        units = inspection.units[first:last]
        parameters = sum(unit.parameter_bytes for unit in units)
        slots = owned.get(f"activation-{stage}", 0) + owned.get(f"gradient-{stage - 1}", 0)
        memory = 2 * parameters + sum(unit.buffer_bytes for unit in units) + slots
        plans.append(
            StagePlan(
                first=first,
                last=last,
                worker=stage,
                parameter_bytes=parameters,
                memory_bytes=memory,
                copies_input=units[0].in_place,
            )
        )
    return tuple(plans)


def _checked(plan: Plan) -> Plan:
    try:
        plan.graph.check()
        limit = speed_limit(plan.graph, plan.task_seconds)
        predicted = simulate(plan).iteration_seconds
    except (GraphError, SimulationError) as error:
        raise PlanError(str(error)) from error
    return dataclasses.replace(
        plan,
        predicted_iteration_seconds=predicted,
        limit_seconds=limit.seconds,
        limit_cycle=plan.graph.describe_cycle(limit.cycle),
    )
