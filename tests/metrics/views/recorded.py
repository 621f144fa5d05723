"""Recordings for tests, made by arithmetic. Modules of tests take it with `runpy`, since tests are no package."""

from __future__ import annotations

from weft.metrics.recording.recording import PlannedSpan, RecordedTask, Recording
from weft.plan.graph import Edge
from weft.plan.kinds import MODES, Cause
from weft.plan.rows import Row, packed_rows

TASK_NS, WAIT_NS = 60_000, 20_000


def wide_recording(num_lanes: int = 32, tasks_per_lane: int = 200, iterations: int = 6) -> Recording:
    """Lanes of as many forwards as backwards, each after a wait for the same task of the lane before it: a wavefront.

    Task t of lane n is n * tasks_per_lane + t. In iteration i it runs for TASK_NS from `start_of(n, t, i)`.
    """
    lanes = [f"cpu-{number}/compute" for number in range(num_lanes)]
    period = iteration_ns(num_lanes, tasks_per_lane)
    forwards = tasks_per_lane // 2
    tasks = []
    for number, lane in enumerate(lanes):
        for place in range(tasks_per_lane):
            kind = "forward" if place < forwards else "backward"
            tasks.append(
                RecordedTask(
                    id=number * tasks_per_lane + place,
                    name=f"{kind.upper()}({number},{place % forwards})",
                    kind=kind,
                    replica=0,
                    stage=number,
                    microbatch=place % forwards,
                    bucket=None,
                    owner=None,
                    lane=lane,
                )
            )
    packed = {}
    for number, lane in enumerate(lanes):
        rows: list[Row] = []
        last = 0
        for iteration in range(iterations):
            for place in range(tasks_per_lane):
                task = tasks[number * tasks_per_lane + place]
                start = iteration * period + number * (TASK_NS + WAIT_NS) + place * (TASK_NS + WAIT_NS) + WAIT_NS
                source = task.id - tasks_per_lane if number else -1
                wait = "stall_activation" if task.kind == "forward" else "stall_gradient"
                rows.append((MODES.index(wait if number else "stall_data"), task.id, iteration, source, last, start))
                rows.append((MODES.index(task.kind), task.id, iteration, -1, start, start + TASK_NS))
                last = start + TASK_NS
        packed[lane] = packed_rows(rows)
    planned = [
        PlannedSpan(task.id, i, (i * period + begin) / 1e9, (i * period + begin + TASK_NS) / 1e9)
        for i in range(3)
        for task in tasks
        for begin in [(task.stage + task.id % tasks_per_lane) * (TASK_NS + WAIT_NS)]
    ]
    return Recording(
        job="wide-1",
        attempt=1,
        clock_ns=1_700_000_000_000_000_000,
        tasks=tuple(tasks),
        edges=tuple(Edge(task.id - tasks_per_lane, task.id, 0, Cause.ACTIVATION) for task in tasks[tasks_per_lane:]),
        programs={
            lane: tuple(range(number * tasks_per_lane, (number + 1) * tasks_per_lane))
            for number, lane in enumerate(lanes)
        },
        packed=packed,
        finished=iterations,
        planned=tuple(planned),
        task_seconds=(TASK_NS / 1e9,) * len(tasks),
        spec={},
        inspection={},
        facts={"ended": True},
    )


def iteration_ns(num_lanes: int, tasks_per_lane: int) -> int:
    return (num_lanes + tasks_per_lane) * (TASK_NS + WAIT_NS)
