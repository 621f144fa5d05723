"""Outlook: what an iteration of a plan takes when its tasks take so long, what sets it, and which lanes rest. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from weft.plan.graph import Graph, Lane
from weft.plan.inspection import Inspection
from weft.plan.kinds import KINDS, Kind
from weft.plan.plan import Plan
from weft.scheduler.planning.costs import mean_seconds
from weft.scheduler.planning.limit import Milestones, speed_limit
from weft.scheduler.planning.simulator import WARMUP_ITERATIONS, Simulation, simulate

MOST_OFF: Final = 1.5  # times more, or less, than was measured; arbitrary, between what runs showed to be near and not
MOST_OF_CYCLE: Final = 12  # tasks of a critical cycle that are named
MAX_TASKS: Final = 4096  # in an iteration: the critical cycle of more takes seconds to find


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """One simulated job."""

    iteration_seconds: float  # of the simulation
    limit_seconds: float | None  # None of a graph with too many tasks, as the next
    critical_cycle: str | None
    critical_lanes: tuple[str, ...] | None  # those that it goes through, in their order
    bubble_ratio: float  # the part of their time in which compute lanes do not run a task
    bottleneck: str  # the lane that is busiest
    bottleneck_busy: float  # for what part of its time
    workers: tuple[str, ...]


def outlook_of(
    plan: Plan,
    inspection: Inspection,
    seconds: Sequence[float],
    names: Sequence[str],
    *,
    lost: Sequence[float],
    wake_seconds: float,
) -> tuple[Outlook, Simulation]:
    """seconds: of each task. names: of the workers by position. lost: seconds of each task's lane beside it, to reports
    and dispatches. wake_seconds: as of `simulate`. Errors: SimulationError."""
    milestones = gradient_milestones(plan, inspection)
    simulation = simulate(
        plan,
        [own + more for own, more in zip(seconds, lost, strict=True)],
        milestones=milestones,
        wake_seconds=wake_seconds,
    )
    limit = cycle = through = None
    if len(plan.graph.tasks) <= MAX_TASKS:
        found = speed_limit(plan.graph, mean_seconds(plan, seconds), milestones)
        limit, cycle = found.seconds, describe_cycle(plan.graph, _of_what_is_done(plan, found.cycle))
        lanes = (plan.graph.tasks[task].lane for task in found.cycle)
        through = tuple(dict.fromkeys(f"{names[lane.worker]}/{lane.name}" for lane in lanes))
    busy = _busy(simulation)
    lane = max(busy, key=lambda each: busy[each])
    computing = [busy[each] for each in _computing(plan.graph)]
    outlook = Outlook(
        iteration_seconds=simulation.iteration_seconds,
        limit_seconds=limit,
        critical_cycle=cycle,
        critical_lanes=through,
        bubble_ratio=max(0.0, 1 - fmean(computing)),
        bottleneck=f"{names[lane.worker]}/{lane.name}",
        bottleneck_busy=min(1.0, busy[lane]),
        workers=tuple(names),
    )
    return outlook, simulation


def _of_what_is_done(plan: Plan, cycle: Sequence[int]) -> Sequence[int]:
    """Without the passes back of a job that only runs forward: they are in the graph, and do nothing."""
    if not plan.itinerary.forward_only:
        return cycle
    tasks = plan.graph.tasks
    return [task for task in cycle if not KINDS[tasks[task].kind].learns]


def is_beyond(ratio: float) -> bool:
    """Of simulated to measured, of a plan that ran: what the simulation leaves out is as large as what it knows, and
    nothing can be said of another plan."""
    return not 1 / MOST_OFF <= ratio <= MOST_OFF


def gradient_milestones(plan: Plan, inspection: Inspection) -> Milestones:
    """Where in the last backward of a stage each bucket's gradient is complete: once its first unit has been through,
    by the measured times of the units."""
    if plan.synchronisation is None:
        return {}
    stages, last = {stage.holder: stage for stage in plan.stages}, plan.graph.last_backwards()
    found: dict[int, dict[int, float]] = {}
    for task in plan.graph.tasks:
        if KINDS[task.kind].is_milestone and plan.share != "stealing":
            first, stop = stages[task.holder].first, stages[task.holder].last
            parameters = [place.parameter for place in plan.synchronisation.bucket_of(task).places]
            units = [unit for p in parameters for unit in inspection.parameters[p].units if first <= unit < stop]
            device = plan.replicas[task.holder.replica].device
            seconds = [unit.backward_seconds for unit in inspection.units_on(device)[first:stop]]
            done = sum(seconds[min(units, default=first) - first :]) / (sum(seconds) or 1.0)
            found.setdefault(last[task.holder].id, {})[task.id] = min(1.0, done)
    return found


def _busy(simulation: Simulation) -> dict[Lane, float]:
    """By lane, the part of the simulated steady state in which it runs a task."""
    busy = {}
    for lane, spans in simulation.spans.items():
        steady = [span for span in spans if span.iteration >= WARMUP_ITERATIONS]
        count = len({span.iteration for span in steady}) or 1
        busy[lane] = sum(span.end - span.start for span in steady) / count / (simulation.iteration_seconds or 1.0)
    return busy


def _computing(graph: Graph) -> list[Lane]:
    return [
        lane
        for lane, program in graph.programs.items()
        if any(graph.tasks[task].kind is Kind.FORWARD for task in program)
    ]


def describe_cycle(graph: Graph, cycle: Sequence[int]) -> str:
    """As the plan has it; of a long one the two ends."""
    if len(cycle) <= MOST_OF_CYCLE:
        return graph.describe_cycle(cycle)
    half = MOST_OF_CYCLE // 2
    return f"{graph.describe_cycle(cycle[:half])} → … → {graph.describe_cycle(cycle[-half:])}"
