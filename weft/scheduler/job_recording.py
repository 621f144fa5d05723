"""Recordings of jobs: what a run's recorder holds, beside the job's graph, its plan in virtual time and its spec."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from weft.metrics.recording import FILE, PlannedSpan, RecordedEdge, RecordedTask, Recording
from weft.scheduler.graph import Lane
from weft.scheduler.job_run import JobRun
from weft.scheduler.plan import Plan
from weft.scheduler.simulator import WARMUP_ITERATIONS, simulate

PLANNED_ITERATIONS = 3
MAX_TASKS_TO_SIMULATE = 4096  # in an iteration: more take seconds, of a core that a lane has use for


def make_recording(run: JobRun, *, ended: bool = False) -> Recording | None:
    """What is known of the present attempt; None before it has a plan. ended: no more rows come."""
    plan, names = run.plan, run.worker_names
    if plan is None:
        return None
    return Recording(
        job=run.job,
        attempt=run.attempt,
        clock_ns=time.time_ns() - time.monotonic_ns(),
        tasks=recorded_tasks(plan, names),
        edges=tuple(RecordedEdge(e.source, e.target, e.distance, str(e.cause)) for e in plan.graph.edges),
        programs=recorded_programs(plan, names),
        packed=run.books.recorder.packed(),
        planned=run.planned or (),
        task_seconds=plan.task_seconds,
        spec=run.spec,
        inspection=run.inspection,
        facts=_facts(run, plan, ended=ended),
    )


def recorded_tasks(plan: Plan, worker_names: tuple[str, ...]) -> tuple[RecordedTask, ...]:
    return tuple(
        RecordedTask(
            id=task.id,
            name=str(task),
            kind=str(task.kind),
            replica=task.replica,
            stage=task.stage,
            microbatch=task.microbatch,
            bucket=task.bucket,
            lane=lane_name(task.lane, worker_names),
        )
        for task in plan.graph.tasks
    )


def recorded_programs(plan: Plan, worker_names: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    return {lane_name(lane, worker_names): tuple(program) for lane, program in plan.graph.programs.items()}


def save_recording(recording: Recording, directory: Path) -> Path:
    """Into the run directory; the file's path. Errors: OSError."""
    path = directory / FILE
    recording.save(path)
    return path


def lane_name(lane: Lane, worker_names: tuple[str, ...]) -> str:
    return f"{worker_names[lane.worker]}/{lane.name}"


def planned_spans(plan: Plan) -> tuple[PlannedSpan, ...]:
    """Iterations of the steady state, from virtual time 0 on; none of a plan that would take long to simulate."""
    if len(plan.graph.tasks) > MAX_TASKS_TO_SIMULATE:
        return ()
    shown = range(WARMUP_ITERATIONS, WARMUP_ITERATIONS + PLANNED_ITERATIONS)
    spans = [
        span
        for lane in simulate(plan, iterations=shown.stop + 1).spans.values()
        for span in lane
        if span.iteration in shown
    ]
    begin = min(span.start for span in spans)
    return tuple(PlannedSpan(s.task, s.iteration - shown.start, s.start - begin, s.end - begin) for s in spans)


def _facts(run: JobRun, plan: Plan, *, ended: bool) -> dict[str, Any]:
    return {
        "ended": ended,
        "workers": list(run.worker_names),
        "schedule": plan.schedule,
        "microbatches": plan.microbatches,
        "batch_size": plan.itinerary.batch_size,
        "itinerary": asdict(plan.itinerary),
        "rings": [
            {"name": ring.name, "replica": ring.replica, "depth": ring.depth, "slot_bytes": ring.slot_bytes}
            for ring in plan.rings
        ],
        "predicted_iteration_seconds": plan.predicted_iteration_seconds,
        "limit_seconds": run.limit_seconds() or plan.limit_seconds,
        "iteration_seconds": run.median_iteration_seconds(),
        "run_dir": str(run.directory),
        "history": run.history.curves(),
    }
