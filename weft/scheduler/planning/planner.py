"""Planner: from a spec and an inspection to a checked plan. Pure; a plan that cannot run is refused with the reason.

The cut (`partition.py`), for each replica by itself and by the times of its kind of device; who has what
(`placing.py`, `synchronising.py`); rings; the graph (`graph/`). The check: the graph's cycles, then one simulated run
with real slot depths.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal

from weft.plan.buckets import Holder
from weft.plan.graph import Graph, GraphError
from weft.plan.inspection import Inspection, UnitFacts
from weft.plan.itinerary import Itinerary
from weft.plan.kinds import Kind
from weft.plan.placement import Cuts, Placement
from weft.plan.plan import Border, Plan, Ring, StagePlan
from weft.plan.schedules.given import problem_of_job
from weft.plan.schedules.schedule import ScheduleError
from weft.plan.shapes import ShapeError
from weft.scheduler.adapting.balance import local_buckets
from weft.scheduler.planning.choosing.choice import LOST_SECONDS, WAKE_SECONDS
from weft.scheduler.planning.choosing.measured_order import Schedules, fastest_order
from weft.scheduler.planning.costs import PlannedJob, mean_seconds, planned_seconds
from weft.scheduler.planning.graph.build import build_graph
from weft.scheduler.planning.graph.lane_order import lane_order, waits_by_layer, work_beside_forwards
from weft.scheduler.planning.limit import speed_limit
from weft.scheduler.planning.memory import (
    activation_bytes,
    check_room,
    check_shared,
    devices_have_room,
    optimizer_bytes,
    plan_bytes,
    speculation_bytes,
    why_not_snapshots,
)
from weft.scheduler.planning.outlook import gradient_milestones
from weft.scheduler.planning.partition import PlanError, cut_for, within_layers
from weft.scheduler.planning.placing import place, scheduled
from weft.scheduler.planning.plan_notes import (
    changing_in,
    check_backward_changes,
    check_changes,
    check_updates,
    plan_notes,
)
from weft.scheduler.planning.resized import fitted
from weft.scheduler.planning.rings import make_rings
from weft.scheduler.planning.simulator import SimulationError, simulate
from weft.scheduler.planning.working_window import largest_that_fits, smallest_as_good
from weft.spec.admission import why_not_compiled
from weft.spec.field_errors import SpecError
from weft.spec.job_spec import JobSpec
from weft.spec.schedule_text import MEASURED, schedule_title
from weft.spec.stopping import Rule, reported_names
from weft.spec.strategy import Strategy
from weft.spec.workers_needed import threads_of

# Tasks sent ahead to a lane cover this much work. Each dispatch wakes a worker beside its lane, and what changes a job
# (a pause, a snapshot) begins behind what is sent; where shares or ways are adjusted, that is to be soon.
WINDOW_SECONDS = 1.0
ADJUSTED_WINDOW_SECONDS = 0.25
MIN_WINDOW_ITERATIONS = 2
MAX_WINDOW_TASKS = 4096
LEAST_GAIN = 0.01  # of an iteration, for forwards in parts: what others cost is predicted no better
MAX_COMPARED_TASKS = 20_000  # arbitrary: a plan of so many takes seconds
MAX_ITERATIONS = 2**31 - 1  # a board word is an int32


def make_plan(
    spec: JobSpec,
    inspection: Inspection,
    *,
    shared_bytes_free: int,
    host_bytes_free: float = math.inf,
    checked: bool = True,
) -> Plan:
    """A plan that has passed its checks. host_bytes_free: of any memory of the host; where it is scarce, updates do not
    speculate. checked: False for one that is only compared with others, which has no prediction; by default its
    forwards wait by stage. Errors: PlanError."""
    _check_sizes(spec, inspection)
    own = fitted(inspection, spec)

    def waiting_by(waits: Literal["layer", "stage"], *, checked: bool) -> Plan:
        told = spec.model_copy(update={"strategy": spec.strategy.model_copy(update={"waits": waits})})
        return _made(told, own, shared_bytes_free, host_bytes_free, checked=checked)

    if spec.strategy.waits is not None:
        return waiting_by(spec.strategy.waits, checked=checked)
    by_stage = waiting_by("stage", checked=checked)
    if checked and _may_wait_by_layer(spec, inspection, by_stage):
        with contextlib.suppress(PlanError):
            by_layer = waiting_by("layer", checked=False)
            if any(task.goes_on for task in by_layer.graph.tasks):
                return _faster(own, by_stage, _checked(by_layer))
    return by_stage


def _faster(inspection: Inspection, by_stage: Plan, by_layer: Plan) -> Plan:
    """Of the two, with what each task costs its lane, and gradients that come before their backward's end."""

    def iteration_seconds(plan: Plan) -> float:
        seconds = [LOST_SECONDS + own for own in plan.task_seconds]
        for forward, beside in work_beside_forwards(plan.graph):
            seconds[forward] += plan.task_seconds[beside]
        milestones = gradient_milestones(plan, inspection)
        return simulate(plan, seconds, milestones=milestones, wake_seconds=WAKE_SECONDS).iteration_seconds

    seconds, before = iteration_seconds(by_layer), iteration_seconds(by_stage)
    if seconds > before * (1.0 - LEAST_GAIN):
        return by_stage
    less = 1.0 - seconds / before
    note = f"waits: by layer, with which an iteration is predicted to take {less:.0%} less than by stage"
    return dataclasses.replace(by_layer, notes=(*by_layer.notes, note))


def _may_wait_by_layer(spec: JobSpec, inspection: Inspection, by_stage: Plan) -> bool:
    """Unasked: where a GPU may wait for updates, nobody reads a parameter unseen, and the plan is small enough to be
    made twice. Forwards of the host have its memory in common with updates, and gain nothing."""
    is_seen = inspection.loose_parameter is None and not spec.strategy.compile
    may_gain = by_stage.synchronisation is not None and inspection.link_bytes_per_second is not None
    return may_gain and is_seen and len(by_stage.graph.tasks) <= MAX_COMPARED_TASKS


def _made(
    spec: JobSpec, inspection: Inspection, shared_bytes_free: int, host_bytes_free: float, *, checked: bool
) -> Plan:
    replicas = spec.strategy.replica_list
    cuts = [cut_for(spec, inspection, r, scheduled(spec.strategy, replica)) for r, replica in enumerate(replicas)]
    given = [replica.working_window for replica in replicas]

    def plan_with(window: int) -> Plan:
        wanted = (window if own == "auto" else own for own in given)
        windows = [within_layers(own, layers) for own, layers in zip(wanted, cuts, strict=True)]

        def ordered(schedules: Schedules) -> Plan:
            _check_whole(spec.strategy, schedules)
            check_backward_changes(spec, inspection, cuts, schedules)
            return _plan(spec, inspection, cuts, schedules, windows, shared_bytes_free, host_bytes_free)

        strategy = spec.strategy
        if strategy.schedule == MEASURED:
            return fastest_order(strategy, lambda schedules: _checked(ordered(schedules)))
        return ordered([scheduled(strategy, replica) for replica in strategy.replica_list])

    def checked_with(window: int) -> Plan:
        return _checked(plan_with(window))

    if "auto" not in given:
        return checked_with(0) if checked else plan_with(0)
    streamed = [own_cuts for own, own_cuts in zip(given, cuts, strict=True) if own == "auto"]
    return smallest_as_good(checked_with, max(largest_that_fits(inspection, layers) for layers in streamed))


def _plan(
    spec: JobSpec,
    inspection: Inspection,
    cuts: Sequence[Cuts],
    schedules: Schedules,
    windows: Sequence[int | None],
    shared_bytes_free: int,
    host_bytes_free: float,
) -> Plan:
    placement, rings = _placed(spec, inspection, cuts, schedules, windows, host_bytes_free)
    needed, bytes_free = plan_bytes(inspection, placement, rings, 0), min(shared_bytes_free, host_bytes_free)
    why_no_snapshots = why_not_snapshots(spec, inspection, needed, bytes_free=bytes_free)
    graph = build_graph(
        spec.strategy,
        placement,
        rings,
        order=lane_order(spec.strategy, inspection, placement),
        has_buffers=any(unit.buffer_bytes for unit in inspection.units) or any(changing_in(inspection)),
        weighted=inspection.weighted,
        snapshots=why_no_snapshots is None,
    )
    shared = plan_bytes(inspection, placement, rings, len(graph.tasks))
    check_shared(spec, shared, shared_bytes_free, why_no_snapshots)
    plan = _untimed(spec, inspection, placement, rings, graph, shared, why_no_snapshots)
    check_room(inspection, plan, host_bytes_free=host_bytes_free)
    return _timed(spec, inspection, plan)


def _untimed(
    spec: JobSpec,
    inspection: Inspection,
    placement: Placement,
    rings: tuple[Ring, ...],
    graph: Graph,
    shared: int,
    why_no_snapshots: str | None,
) -> Plan:
    """Without what its tasks take."""
    strategy, itinerary = spec.strategy, _itinerary(spec, inspection)
    return Plan(
        schedule=schedule_title(strategy.schedule),
        microbatches=strategy.microbatches,
        recompute=strategy.recompute,
        window=strategy.window or 0,
        itinerary=itinerary,
        replicas=placement.replicas,
        shares=tuple(strategy.share_list),
        stages=_stage_plans(inspection, placement, rings),
        workers=placement.workers,
        graph=graph,
        rings=rings,
        task_seconds=(),
        shared_bytes=shared,
        threads=None if strategy.threads is None else threads_of(strategy, inspection.host),
        synchronisation=placement.synchronisation,
        share=strategy.share if len(placement.replicas) > 1 else "fixed",
        skipped_calls=inspection.skipped_calls,
        compiled_calls=inspection.compiled_calls,
        draws=inspection.draws or inspection.optimizer_draws or any(each.changed_as for each in inspection.parameters),
        seeds_others=inspection.seeds_others,
        optimizer_draws=inspection.optimizer_draws,
        notes=tuple(plan_notes(spec, inspection, why_no_snapshots, placement.cuts[0])),
        recovers=strategy.recovery != "off",
        copies_each=strategy.recovery == "iteration" and why_no_snapshots is None,
        spares=strategy.spares,
        **_checkpoints(spec, itinerary),
        on_epoch=inspection.on_epoch,
        scheduler_metric=inspection.scheduler_metric,
        judged=_is_judged(spec, inspection),
        streams=bool(inspection.streams),
        endless=inspection.endless,
        parameters=inspection.parameters,
        activation_bytes=activation_bytes(spec, inspection, placement),
        optimizer_bytes=optimizer_bytes(inspection, placement),
    )


def _timed(spec: JobSpec, inspection: Inspection, plan: Plan) -> Plan:
    """With what its tasks are thought to take, and how many of them are sent ahead."""
    seconds = planned_seconds(PlannedJob(spec, plan), inspection)
    ahead = ADJUSTED_WINDOW_SECONDS if plan.is_adjusted else WINDOW_SECONDS
    window = plan.window or _default_window(plan.graph, seconds, ahead)
    return dataclasses.replace(plan, task_seconds=seconds, window=window)


def _placed(
    spec: JobSpec,
    inspection: Inspection,
    cuts: Sequence[Cuts],
    schedules: Schedules,
    windows: Sequence[int | None],
    host_bytes_free: float,
) -> tuple[Placement, tuple[Ring, ...]]:
    strategy = spec.strategy
    placement = place(strategy, inspection, cuts, schedules=schedules, windows=windows, learns=spec.job.mode == "train")
    check_updates(strategy, inspection, placement)
    if strategy.update == "balanced" and placement.synchronisation is not None:
        local = local_buckets(inspection, placement, by_layer=waits_by_layer(strategy, placement))
        placement = place(strategy, inspection, cuts, local, schedules=schedules)
    try:
        rings = make_rings(strategy, inspection, placement)
    except ShapeError as error:
        raise PlanError(str(error)) from error
    if speculation_bytes(inspection, placement, rings) > host_bytes_free:
        placement = _without_speculation(placement)
    if not devices_have_room(inspection, placement):
        placement = _without_speculation(placement, on_host=True)
    return placement, rings


def _itinerary(spec: JobSpec, inspection: Inspection) -> Itinerary:
    itinerary = Itinerary.of_job(spec.job, inspection.num_train, inspection.num_validation)
    if itinerary.num_iterations > MAX_ITERATIONS:
        field = "epochs" if spec.job.steps is None else "steps"
        raise PlanError(
            f"job.{field} makes {itinerary.num_iterations} iterations, a board counts to {MAX_ITERATIONS}; give fewer"
        )
    return itinerary


def _checkpoints(spec: JobSpec, itinerary: Itinerary) -> dict[str, Any]:
    if spec.checkpoint is None:
        return {}
    best = {"keeps_best": spec.checkpoint.keep_best is not None}
    if spec.checkpoint.interval is None:
        return best
    count, unit = spec.checkpoint.interval
    if unit == "seconds":
        return best | {"checkpoint_seconds": count}
    return best | {"checkpoint_steps": int(count) * (itinerary.steps_per_epoch if unit == "epochs" else 1)}


def _is_judged(spec: JobSpec, inspection: Inspection) -> bool:
    """Whether it is looked at what each epoch has come to. Errors: PlanError, where that cannot be."""
    rule, validated = Rule.of(spec), ("loss", *inspection.metrics) if inspection.num_validation else ()
    try:
        rule.check(reported_names(validated, inspection.epoch_metrics), inspection.scheduler_metric)
    except SpecError as error:
        raise PlanError(str(error)) from error
    return rule.judges or inspection.on_epoch or inspection.scheduler_metric is not None


def _check_sizes(spec: JobSpec, inspection: Inspection) -> None:
    if inspection.num_train == 0:
        raise PlanError("Workload.train has length 0; give at least one sample")
    if (problem := problem_of_job(spec)) is not None:
        raise PlanError(problem)
    _check_schedule(spec.strategy)
    check_changes(spec, inspection)
    if spec.strategy.loaders > 1 and inspection.streams:
        raise PlanError(
            f"strategy.loaders = {spec.strategy.loaders}: Workload.{inspection.streams[0]} is an IterableDataset, and "
            "one process draws its items one after another; use loaders = 1, or give a map-style dataset"
        )


def _check_schedule(strategy: Strategy) -> None:
    for replica in strategy.replica_list:
        try:
            scheduled(strategy, replica)
        except ScheduleError as error:
            raise PlanError(f"strategy.schedule: {error}") from None


def _check_whole(strategy: Strategy, schedules: Schedules) -> None:
    passes = (each for schedule in schedules if schedule is not None for line in schedule.programs for each in line)
    if strategy.compile and any(each.kind is Kind.INPUT for each in passes):
        raise PlanError(why_not_compiled(strategy.schedule))


def _default_window(graph: Graph, seconds: Sequence[float], ahead: float) -> int:
    """Tasks to send ahead: so many seconds of work of the busiest lane, within bounds."""
    longest = max(len(program) for program in graph.programs.values())
    busiest = max(sum(seconds[task] for task in program) for program in graph.programs.values())
    iterations = max(MIN_WINDOW_ITERATIONS, round(ahead / max(busiest, 1e-6)))
    return max(MIN_WINDOW_ITERATIONS * longest, min(iterations * longest, MAX_WINDOW_TASKS))


def _without_speculation(placement: Placement, *, on_host: bool = False) -> Placement:
    """on_host: whether owners go on with it, where devices do not."""
    assert placement.synchronisation is not None
    sync = dataclasses.replace(placement.synchronisation, speculative=on_host, devices_speculate=False)
    return dataclasses.replace(placement, synchronisation=sync)


def _stage_plans(inspection: Inspection, placement: Placement, rings: Sequence[Ring]) -> tuple[StagePlan, ...]:
    plans = []
    for r, cuts in enumerate(placement.cuts):
        all_units = inspection.units_on(placement.replicas[r].device)
        for stage, (first, last) in enumerate(cuts):
            units = all_units[first:last]
            parameters = sum(unit.parameter_bytes for unit in units)
            written = [ring for ring in rings if (ring.replica, ring.writer) == (r, stage)]
            slots = sum(ring.depth * ring.slot_bytes for ring in written)
            replica = placement.replicas[r]
            copies = 3 if replica.private and replica.working_window is None else 2
            memory = copies * parameters + sum(unit.buffer_bytes for unit in units) + slots
            plans.append(
                StagePlan(
                    first=first,
                    last=last,
                    worker=placement.worker_of[Holder(r, stage)],
                    parameter_bytes=parameters,
                    memory_bytes=memory,
                    copies_input=any(unit.in_place for unit in units if unit is units[0] or inspection.is_cut_by_calls),
                    begins=_border(inspection, all_units[first:]) if first else None,
                    ends=_border(inspection, all_units[last:]),
                    state=tuple(sorted({name for unit in units for name in unit.state})),
                    counts=tuple(sorted({name for unit in units for name in unit.counts})),
                    changing=changing_in(inspection, range(first, last)),
                    rewrites=bool(changing_in(inspection, range(first, last), trained=True)),
                    replica=r,
                    stage=stage,
                )
            )
    return tuple(plans)


def _border(inspection: Inspection, units: Sequence[UnitFacts]) -> Border | None:
    """units: behind it."""
    if not units or not inspection.is_cut_by_calls:
        return None
    first = units[0]
    return Border(tuple(unit.name for unit in units), first.given, first.ends, first.late, inspection.units[0].instead)


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
