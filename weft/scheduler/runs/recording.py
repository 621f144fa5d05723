"""Recordings of jobs: what a run's recorder holds, beside the job's graph, its plan in virtual time and its spec."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict, replace
from typing import Any

from weft.metrics.recording.recording import FILE, PROFILED_FILE, PlannedSpan, RecordedTask, Recording
from weft.metrics.recording.slot_use import ring_facts
from weft.plan.graph import Lane
from weft.plan.plan import Plan
from weft.plan.schedules.planned import grid_of_rows
from weft.scheduler.planning.simulator import WARMUP_ITERATIONS, simulate
from weft.scheduler.runs.run import PlannedAttempt, Run
from weft.spec.schedule_text import GRID_FILE

PLANNED_ITERATIONS = 3
MAX_TASKS_TO_SIMULATE = 4096  # in an iteration: more take seconds, of a core that a lane has use for


async def keep_profiled(run: Run) -> None:
    """The recording as it is now, since the profiled iterations will be the oldest ones before long."""
    try:
        await keep_recording(run, PROFILED_FILE)
    except OSError as error:
        run.files.log(f"the recording of the profiled iterations is not kept: {error}")


async def keep_recording(run: Run, file: str = FILE) -> None:
    """Into the directory of a run that has a plan. Errors: OSError."""
    assert run.attempt is not None
    await simulated(run.attempt)
    async with run.recording:  # nobody's older one replaces the one that is made at the job's end
        recording = make_recording(run)
        assert recording is not None
        await run.files.written()  # whoever reads it finds the losses of its iterations in metrics.jsonl
        await asyncio.to_thread(run.files.save, file, recording.encode)
        if run.attempt.plan.graph.free and (grid := await asyncio.to_thread(_order_of, run.attempt, recording)):
            await asyncio.to_thread(run.files.save, GRID_FILE, grid.encode)


def _order_of(attempt: PlannedAttempt, recording: Recording) -> str | None:
    """As a grid, in which order passes came whose lanes begin what is ready."""
    rows = {lane: recording.rows[lane_name(lane, attempt.workers)] for lane in attempt.plan.graph.free}
    return grid_of_rows(attempt.plan, rows)


def make_recording(run: Run) -> Recording | None:
    """What is known of the newest attempt; None before one has a plan."""
    if run.attempt is None:
        return None
    attempt = run.attempt
    return replace(
        empty_recording(attempt),
        edges=attempt.plan.graph.edges,
        packed=attempt.books.recorder.packed(),
        finished=attempt.progress.finished_iterations,
        planned=attempt.planned or (),
        spec=run.spec.to_wire(),
        inspection=run.inspection,
        facts=_facts(run, attempt),
    )


def empty_recording(attempt: PlannedAttempt) -> Recording:
    """What stays as it is while the attempt lasts, and is of use to a picture of its iterations."""
    plan, names = attempt.plan, attempt.workers
    return Recording(
        job=attempt.job,
        attempt=attempt.number,
        clock_ns=time.time_ns() - time.monotonic_ns(),
        tasks=recorded_tasks(plan, names),
        edges=(),
        programs=recorded_programs(plan, names),
        packed={},
        finished=0,
        planned=(),
        task_seconds=plan.task_seconds,
        spec={},
        inspection={},
        facts={"itinerary": asdict(plan.itinerary)},
    )


def recorded_tasks(plan: Plan, worker_names: tuple[str, ...]) -> tuple[RecordedTask, ...]:
    return tuple(
        RecordedTask(
            id=task.id,
            name=str(task),
            lane=lane_name(task.lane, worker_names),
            **task.key._asdict(),
        )
        for task in plan.graph.tasks
    )


def recorded_programs(plan: Plan, worker_names: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    return {lane_name(lane, worker_names): tuple(program) for lane, program in plan.graph.programs.items()}


def lane_name(lane: Lane, worker_names: tuple[str, ...]) -> str:
    return f"{worker_names[lane.worker]}/{lane.name}"


async def simulated(attempt: PlannedAttempt) -> tuple[PlannedSpan, ...]:
    """The plan's iterations in virtual time, made beside the event loop when somebody first looks."""
    if attempt.planned is None:
        attempt.planned = await asyncio.to_thread(planned_spans, attempt.plan)
    return attempt.planned


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


def _facts(run: Run, attempt: PlannedAttempt) -> dict[str, Any]:
    plan, pace = attempt.plan, attempt.pace()
    return {
        "ended": run.files.closed,
        "workers": list(attempt.workers),
        "schedule": plan.schedule,
        "microbatches": plan.microbatches,
        "batch_size": plan.itinerary.batch_size,
        "itinerary": asdict(plan.itinerary),
        "rings": [ring_facts(ring) for ring in plan.rings],
        "predicted_iteration_seconds": plan.predicted_iteration_seconds,
        "limit_seconds": pace.limit_seconds,
        "iteration_seconds": pace.iteration_seconds,
        "run_dir": str(run.files.path),
        "history": attempt.progress.history.curves(),
        "dropped": attempt.books.recorder.dropped(),
    }
