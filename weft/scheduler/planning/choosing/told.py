"""Told: a choice as plain data, for `weft plan`. Pure; docs/plan.md describes it."""

from __future__ import annotations

from typing import Any, Final

from weft.metrics.views.timeline import bar_label
from weft.plan.graph import Task
from weft.plan.kinds import KINDS, KindFacts
from weft.plan.plan import Plan
from weft.scheduler.planning.choosing.choice import Choice, Considered, names_of
from weft.scheduler.planning.choosing.roles import Roles
from weft.scheduler.planning.outlook import Outlook
from weft.scheduler.planning.simulator import WARMUP_ITERATIONS, Simulation

VERSION: Final = 1  # of the data; a key that is renamed, goes away or changes its meaning makes it another


def told(choice: Choice, roles: Roles | None, *, shared_bytes_free: int, host_bytes_free: float) -> dict[str, Any]:
    """shared_bytes_free, host_bytes_free: as of `make_plan`."""
    plan, outlook, names = choice.plan, choice.outlook, names_of(choice.plan)
    best = choice.considered[0]
    free = {"cpu": host_bytes_free, "gpu": choice.inspection.device_bytes}
    return {
        "version": VERSION,
        "strategy": choice.spec.strategy.model_dump(exclude_none=True),
        "title": best.title,
        "lines": list(choice.lines),
        "notes": [note for note in plan.notes if note not in choice.lines],
        "workers": list(names),
        "stages": plan.describe_stages(names),
        "memory": [
            {
                "worker": names[worker],
                "bytes": num_bytes,
                "activation_bytes": plan.activation_bytes[worker],
                "optimizer_bytes": plan.optimizer_bytes[worker],
                "free_bytes": free[plan.workers[worker]],
            }
            for worker, num_bytes in sorted(plan.worker_bytes().items())
        ],
        "shared_bytes": plan.shared_bytes,
        "shared_bytes_free": shared_bytes_free,
        "predicted_iteration_seconds": outlook.iteration_seconds,
        "samples_per_second": plan.itinerary.full_batch / outlook.iteration_seconds,
        "limit_seconds": outlook.limit_seconds,
        "critical_cycle": outlook.critical_cycle,
        "critical_lanes": outlook.critical_lanes,
        "bubble_ratio": outlook.bubble_ratio,
        "bottleneck": outlook.bottleneck,
        "bottleneck_busy": outlook.bottleneck_busy,
        "roles": roles and roles.told(),
        "candidates": [_candidate(each, plan.itinerary.full_batch) for each in choice.considered],
        "timeline": _timeline(plan, outlook, choice.simulation),
    }


def _candidate(each: Considered, full_batch: int) -> dict[str, Any]:
    return {
        "title": each.title,
        "strategy": each.spec.strategy.model_dump(exclude_defaults=True, exclude_none=True),
        "predicted_iteration_seconds": each.seconds,
        "least_seconds": each.least_seconds,
        "samples_per_second": each.seconds and full_batch / each.seconds,
        "memory_bytes": each.memory_bytes,
        "why_not": each.why_not,
    }


def _timeline(plan: Plan, outlook: Outlook, simulation: Simulation) -> list[dict[str, Any]]:
    """By lane, what it does for as long as an iteration takes, from the moment when one begins to compute. Of a job
    that only runs forward no passes back: the graph has them, and they do nothing."""
    tasks, names = plan.graph.tasks, outlook.workers
    begin = min(
        span.start
        for own in simulation.spans.values()
        for span in own
        if span.iteration == WARMUP_ITERATIONS and KINDS[tasks[span.task].kind].computes
    )
    end = begin + outlook.iteration_seconds
    return [
        {
            "lane": f"{names[lane.worker]}/{lane.name}",
            "tasks": [
                _drawn(tasks[span.task])
                | {
                    "iteration": span.iteration - WARMUP_ITERATIONS,
                    "start": max(span.start, begin) - begin,
                    "end": min(span.end, end) - begin,
                }
                for span in own
                if span.start < end and span.end > begin and _is_drawn(KINDS[tasks[span.task].kind], plan)
            ],
        }
        for lane, own in simulation.spans.items()
    ]


def _is_drawn(facts: KindFacts, plan: Plan) -> bool:
    return bool(facts.letter) and not (facts.learns and plan.itinerary.forward_only)


def _drawn(task: Task) -> dict[str, str]:
    """What a picture has of it."""
    label = bar_label(task.kind, task.microbatch, task.bucket)
    return {"task": str(task), "mode": KINDS[task.kind].mode, "label": label}
