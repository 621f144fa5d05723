"""Planner: from a spec and an inspection to a checked plan. Pure; a plan that cannot run is refused with the reason.

The cut: contiguous units to stages so that the slowest stage is as fast as possible (dynamic programming over measured
unit times), for each replica by itself, by the times of its kind of device. The graph: design section 3. The check: the
graph's cycles, then one simulated run with real slot depths.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

from weft.itinerary import Itinerary
from weft.scheduler.admission import problem_of_spec
from weft.scheduler.balance import local_buckets
from weft.scheduler.costs import mean_seconds, task_seconds
from weft.scheduler.graph import Graph, GraphError
from weft.scheduler.inspection import Inspection, UnitFacts
from weft.scheduler.iteration_graph import build_graph
from weft.scheduler.limit import speed_limit
from weft.scheduler.owner_memory import copied_bytes, state_bytes
from weft.scheduler.placement import Cuts, Placement, place
from weft.scheduler.plan import Plan, Ring, StagePlan
from weft.scheduler.plan_notes import plan_notes
from weft.scheduler.rings import make_rings, shared_bytes
from weft.scheduler.simulator import SimulationError, simulate
from weft.scheduler.working_window import largest_that_fits, layer_cuts, smallest_as_good
from weft.shapes import ShapeError
from weft.spec import JobSpec
from weft.strategy import Replica

WINDOW_SECONDS = 0.25  # tasks sent ahead to a lane cover this much work: far above a round trip to the daemon
MIN_WINDOW_ITERATIONS = 2
MAX_WINDOW_TASKS = 4096
MAX_ITERATIONS = 2**31 - 1  # a board word is an int32


class PlanError(ValueError):
    """The job cannot be planned as asked. The text names the field and the remedy."""


def make_plan(
    spec: JobSpec, inspection: Inspection, *, shared_bytes_free: int, host_bytes_free: float = math.inf
) -> Plan:
    """A plan that has passed its checks. host_bytes_free: of any memory of the host; where it is scarce, updates do not
    speculate. Errors: PlanError."""
    _check_sizes(spec, inspection)
    cuts = [_cut(inspection.units_on(replica.device), replica) for replica in spec.strategy.replica_list]
    given = [replica.working_window for replica in spec.strategy.replica_list]

    def plan_with(window: int) -> Plan:
        wanted = (window if own == "auto" else own for own in given)
        windows = [_within(own, layers) for own, layers in zip(wanted, cuts, strict=True)]
        return _plan(spec, inspection, cuts, windows, shared_bytes_free, host_bytes_free)

    if "auto" not in given:
        return plan_with(0)
    streamed = [own_cuts for own, own_cuts in zip(given, cuts, strict=True) if own == "auto"]
    return smallest_as_good(plan_with, max(largest_that_fits(inspection, layers) for layers in streamed))


def _cut(units: Sequence[UnitFacts], replica: Replica) -> Cuts:
    if replica.working_window is None:
        return partition(units, replica.stages, replica.split)
    split = replica.split if replica.split is not None else layer_cuts(units, _allowed_cuts(units))
    return partition(units, len(split) + 1, split)


def _within(window: int | None, layers: Cuts) -> int | None:
    return None if window is None else min(window, len(layers))


def _plan(
    spec: JobSpec,
    inspection: Inspection,
    cuts: Sequence[Cuts],
    windows: Sequence[int | None],
    shared_bytes_free: int,
    host_bytes_free: float,
) -> Plan:
    strategy = spec.strategy
    placement = place(strategy, inspection, cuts, windows=windows, learns=spec.job.mode == "train")
    if strategy.update == "balanced" and placement.synchronisation is not None:
        placement = place(strategy, inspection, cuts, local_buckets(inspection, placement))
    try:
        rings = make_rings(strategy, inspection, placement)
    except ShapeError as error:
        raise PlanError(str(error)) from error
    if _speculation_bytes(inspection, placement, rings) > host_bytes_free:
        placement = _without_speculation(placement)
    graph = build_graph(
        strategy.schedule,
        placement,
        rings,
        coarse=strategy.sync == "coarse",
        has_buffers=any(unit.buffer_bytes for unit in inspection.units),
        recompute=strategy.recompute,
        weighted=inspection.weighted,
        steals=strategy.steals,
    )
    seconds = task_seconds(spec, inspection, placement, graph)
    shared = _shared_bytes(inspection, placement, rings, len(graph.tasks))
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
        replicas=placement.replicas,
        shares=tuple(strategy.share_list),
        stages=_stage_plans(inspection, placement, rings),
        workers=placement.workers,
        graph=graph,
        rings=rings,
        task_seconds=seconds,
        shared_bytes=shared,
        synchronisation=placement.synchronisation,
        share=strategy.share if len(placement.replicas) > 1 else "fixed",
        notes=tuple(plan_notes(spec, inspection)),
    )
    return _checked(plan)


def partition(units: Sequence[UnitFacts], num_stages: int, split: Sequence[int] | None = None) -> Cuts:
    """(first, last) of each stage, last exclusive, minimising the slowest stage's forward plus backward time.

    No cut falls after a unit whose output is no single tensor, nor between units that share a parameter. split: the
    user's own cuts instead. Errors: PlanError.
    """
    allowed = _allowed_cuts(units)
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
                f"strategy.split: the model cannot be cut before unit {refused[0]}{_why_not(units, refused[0])}; "
                f"it can be before {allowed}"
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


def _allowed_cuts(units: Sequence[UnitFacts]) -> list[int]:
    return [cut for cut in range(1, len(units)) if _can_cut(units, cut)]


def _can_cut(units: Sequence[UnitFacts], cut: int) -> bool:
    return units[cut - 1].dtype is not None and not any(
        partner < cut for unit in units[cut:] for partner in unit.tied_to
    )


def _why_not(units: Sequence[UnitFacts], cut: int) -> str:
    if not 0 < cut < len(units):
        return f", of {len(units)}"
    before = units[cut - 1]
    if before.dtype is None:
        kind = f" ({before.kind})" if before.kind else ""
        output = before.output or "no single tensor"
        return f": unit {cut - 1}{kind} passes on {output}, and only a plain tensor goes from stage to stage"
    pair = next((tied, number) for number, unit in enumerate(units) for tied in unit.tied_to if tied < cut <= number)
    return f": units {pair[0]} and {pair[1]} have a buffer in common"


def _itinerary(spec: JobSpec, inspection: Inspection) -> Itinerary:
    itinerary = Itinerary.of(
        num_train=inspection.num_train,
        num_validation=inspection.num_validation,
        batch_size=spec.job.batch_size,
        epochs=spec.job.epochs,
        steps=spec.job.steps,
        forward_only=spec.job.mode == "forward",
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
    if (problem := problem_of_spec(spec)) is not None:
        raise PlanError(problem)


def _default_window(graph: Graph, seconds: Sequence[float]) -> int:
    """Tasks to send ahead: WINDOW_SECONDS of work of the busiest lane, within bounds."""
    longest = max(len(program) for program in graph.programs.values())
    busiest = max(sum(seconds[task] for task in program) for program in graph.programs.values())
    iterations = max(MIN_WINDOW_ITERATIONS, round(WINDOW_SECONDS / max(busiest, 1e-6)))
    return max(MIN_WINDOW_ITERATIONS * longest, min(iterations * longest, MAX_WINDOW_TASKS))


def _shared_bytes(inspection: Inspection, placement: Placement, rings: Sequence[Ring], num_tasks: int) -> int:
    state = sum(unit.parameter_bytes + unit.buffer_bytes for unit in inspection.units)
    return state + shared_bytes(rings) + _synchronised_bytes(placement) + 4 * (num_tasks + 1)


def _speculation_bytes(inspection: Inspection, placement: Placement, rings: Sequence[Ring]) -> int:
    """What the job needs of the host's memory with updates that can be undone; 0 where none has to be."""
    if placement.synchronisation is None or not placement.synchronisation.speculative:
        return 0
    owned = state_bytes(inspection, placement) + copied_bytes(inspection, placement)
    return _shared_bytes(inspection, placement, rings, 0) + owned


def _without_speculation(placement: Placement) -> Placement:
    assert placement.synchronisation is not None
    return dataclasses.replace(
        placement, synchronisation=dataclasses.replace(placement.synchronisation, speculative=False)
    )


def _synchronised_bytes(placement: Placement) -> int:
    """Gradients of every holder, the versions of the parameters that stale replicas read, and the optimizer's state
    where it may have to move."""
    if placement.synchronisation is None:
        return 0
    depths = [1 + replica.staleness for replica in placement.replicas]
    versions = max(depths) if max(depths) > 1 else 0
    return sum(
        part.bucket.num_bytes * (versions + sum(depths[r] for r, _ in part.bucket.holders)) + part.state_bytes()
        for part in placement.synchronisation.buckets
    )


def _stage_plans(inspection: Inspection, placement: Placement, rings: Sequence[Ring]) -> tuple[StagePlan, ...]:
    owned = {ring.name: ring.depth * ring.slot_bytes for ring in rings}
    plans = []
    for r, cuts in enumerate(placement.cuts):
        for stage, (first, last) in enumerate(cuts):
            units = inspection.units_on(placement.replicas[r].device)[first:last]
            parameters = sum(unit.parameter_bytes for unit in units)
            slots = owned.get(f"activation-{r}-{stage}", 0) + owned.get(f"gradient-{r}-{stage - 1}", 0)
            replica = placement.replicas[r]
            copies = 3 if replica.private and replica.working_window is None else 2
            memory = copies * parameters + sum(unit.buffer_bytes for unit in units) + slots
            plans.append(
                StagePlan(
                    first=first,
                    last=last,
                    worker=placement.worker_of[r, stage],
                    parameter_bytes=parameters,
                    memory_bytes=memory,
                    copies_input=units[0].in_place,
                    replica=r,
                    stage=stage,
                )
            )
    return tuple(plans)


def _checked(plan: Plan) -> Plan:
    try:
        plan.graph.check()
        local = plan.synchronisation.local if plan.synchronisation else ()
        limit = speed_limit(plan.graph.going(local), mean_seconds(plan))
        predicted = simulate(plan).iteration_seconds
    except (GraphError, SimulationError) as error:
        raise PlanError(str(error)) from error
    return dataclasses.replace(
        plan,
        predicted_iteration_seconds=predicted,
        limit_seconds=limit.seconds,
        limit_cycle=plan.graph.describe_cycle(limit.cycle),
    )
