"""Recordings of made-up pipelines: what perfect workers would have stamped, from a simulation in virtual time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from weft.metrics.recording.recording import Recording
from weft.metrics.recording.slot_use import ring_facts
from weft.plan.graph import Lane
from weft.plan.inspection import Inspection, ParameterFacts, TensorFacts, UnitFacts, ValueFacts
from weft.plan.kinds import KINDS, MODES
from weft.plan.plan import Plan
from weft.plan.rows import Row, packed_rows
from weft.scheduler.planning.planner import make_plan
from weft.scheduler.planning.simulator import Span, simulate
from weft.scheduler.runs.recording import lane_name, planned_spans, recorded_programs, recorded_tasks
from weft.spec.job_spec import JobSpec

BEGIN_NS = 5_000_000_000
RecordingOf = Callable[..., Recording]


def make_pipeline(
    *, units: int = 4, forward: float = 1e-3, backward: float = 2e-3, load: float = 1e-4, **strategy: Any
) -> Plan:
    facts: dict[str, Any] = {"dtype": "float32", "itemsize": 4, "shapes": {1: (1, 8), 2: (2, 8)}}
    inspection = Inspection(
        units=tuple(
            UnitFacts(
                name=f"{n}.",
                parameter_bytes=100,
                buffer_bytes=0,
                forward_seconds=forward,
                backward_seconds=backward,
            )
            for n in range(units)
        ),
        values=tuple(
            ValueFacts(name=f"{n}", maker=n, readers=(n + 1,), differentiable=True, **facts) for n in range(units - 1)
        ),
        parameters=tuple(
            ParameterFacts(units=(n,), num_elements=25, dtype="float32", itemsize=4, trained=True, group=0)
            for n in range(units)
        ),
        input=TensorFacts(dtype="float32", itemsize=4, shapes={1: (1, 3), 2: (2, 3)}),
        target=TensorFacts(dtype="int64", itemsize=8, shapes={1: (1,), 2: (2,)}),
        num_train=80,
        num_validation=0,
        load_seconds=load,
        update_seconds=4e-4,
        metrics=(),
    )
    job = {"entry": "job.py:workload", "batch_size": 80, "steps": 20}
    spec = JobSpec.parse({"job": job, "strategy": strategy, "directory": "/jobs"})
    return make_plan(spec, inspection, shared_bytes_free=1 << 40)


def record(plan: Plan, *, iterations: int = 12, seconds: Mapping[int, float] | None = None) -> Recording:
    """seconds: of tasks that took another time than planned."""
    costs = [(seconds or {}).get(task.id, plan.task_seconds[task.id]) for task in plan.graph.tasks]
    simulation = simulate(plan, costs, iterations=iterations)
    ends = {(span.task, span.iteration): span.end for spans in simulation.spans.values() for span in spans}
    names = tuple(f"{kind}-{position}" for position, kind in enumerate(plan.workers))
    return Recording(
        job="made-up-1",
        attempt=1,
        clock_ns=1_700_000_000_000_000_000,
        tasks=recorded_tasks(plan, names),
        edges=plan.graph.edges,
        programs=recorded_programs(plan, names),
        packed={
            lane_name(lane, names): packed_rows(_rows(plan, lane, spans, ends))
            for lane, spans in simulation.spans.items()
        },
        finished=iterations,
        planned=planned_spans(plan),
        task_seconds=plan.task_seconds,
        spec={},
        inspection={},
        facts={
            "ended": True,
            "limit_seconds": plan.limit_seconds,
            "iteration_seconds": simulation.iteration_seconds,
            "rings": [ring_facts(ring) for ring in plan.rings],
        },
    )


def _rows(plan: Plan, lane: Lane, spans: list[Span], ends: Mapping[tuple[int, int], float]) -> list[Row]:
    """Contiguous: what is not a task is a stall for the input that came last."""
    rows: list[Row] = []
    now = 0.0
    for span in spans:
        task = plan.graph.tasks[span.task]
        if span.start > now:
            arrivals = [
                (ends.get((edge.source, span.iteration - edge.distance), -math.inf), edge)
                for edge in plan.graph.cross_lane_inputs(span.task)
            ]
            _, edge = max(arrivals, key=lambda arrival: arrival[0])
            mode = MODES.index(f"stall_{edge.cause}")
            rows.append((mode, span.task, span.iteration, edge.source, _ns(now), _ns(span.start)))
        rows.append((MODES.index(KINDS[task.kind].mode), task.id, span.iteration, -1, _ns(span.start), _ns(span.end)))
        now = span.end
    return rows


def _ns(seconds: float) -> int:
    return BEGIN_NS + round(seconds * 1e9)


@pytest.fixture(scope="session")
def pipeline_of() -> Callable[..., Plan]:
    """A plan of equal units; strategy by keyword."""
    return make_pipeline


@pytest.fixture(scope="session")
def recording_of() -> RecordingOf:
    """Of a plan, as perfect workers would have made it."""
    return record


@pytest.fixture(scope="session")
def recorded() -> Callable[..., tuple[Plan, Recording]]:
    """A plan of equal units and its recording; strategy by keyword, seconds of tasks that took another time."""

    def make(seconds: Mapping[int, float] | None = None, **strategy: Any) -> tuple[Plan, Recording]:
        plan = make_pipeline(**{"prefetch": {"load": 2}, **strategy})  # as far as a simulation is ahead
        return plan, record(plan, seconds=seconds)

    return make
