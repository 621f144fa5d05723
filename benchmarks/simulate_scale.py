"""Planner, simulator and core on machines that nobody here has: 8 to 4,096 workers, in one process.

plan            seconds from spec and facts to a checked plan, its simulated run included
core            seconds of the core for each task that a lane reports, ÷ those on the smallest machine
SCHEDULE_bubble an iteration of equal tasks, simulated, less what its microbatches compute ÷ the published formula:
                (p - 1) (F + B) for GPipe (Huang et al., 2019) and 1F1B (Narayanan et al., 2019), that ÷ v for v stages
                in a worker (Narayanan et al., 2021), and (p - 1) (F + B - 2 W) for ZB-H1 (Qi et al., 2023)
zero-bubble-v_over_work   an iteration of it ÷ what its microbatches compute: ZB-V has no bubble for F = B = W

Workers are stages times replicas, each stage of one unit with one parameter; a replica's gradients are summed with all
others'. Nothing is run but the scheduler's own code.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass

from measure import Result, main, ratio_result, value_result

from weft.plan.inspection import Inspection, ParameterFacts, TensorFacts, UnitFacts
from weft.plan.plan import Plan
from weft.scheduler.core.core import Core
from weft.scheduler.core.events import JobPlanned, JobSubmitted, TasksFinished, WorkerJoined, WorkerPrepared
from weft.scheduler.planning.planner import make_plan
from weft.spec.job_spec import JobSection, JobSpec, Strategy
from weft.spec.schedule_text import STAGES_PER_WORKER

JOB = "scale-1"
FORWARD, BACKWARD, WEIGHT = 1e-3, 2e-3, 1e-3  # seconds of each stage's microbatch; the last are of the second
MICROBATCHES = 8
TASKS = 40_000  # of which the core is told, in whole iterations, for each of
SHARES = 5


@dataclass(frozen=True, slots=True)
class Size:
    replicas: int
    stages: int

    @property
    def workers(self) -> int:
        return self.replicas * self.stages


SIZES = (Size(1, 8), Size(8, 8), Size(8, 64), Size(64, 64))
QUICK = SIZES[:2]
DEPTHS, QUICK_DEPTHS = (8, 16, 32), (8,)  # stages of a pipeline whose bubble is looked at
SCHEDULES = {"gpipe": 0, "1f1b": 0, "interleaved": 0, "zero-bubble": 2}  # W that the formula takes off, p - 1 times


def collect(quick: bool) -> list[Result]:
    sizes = QUICK if quick else SIZES
    results, core_seconds = [], []
    for size in sizes:
        seconds, plan = planned(size)
        results.append(
            value_result(
                f"plan_{size.workers}",
                [seconds],
                "s",
                how=f"{size.replicas} replicas of {size.stages} stages, {len(plan.graph.tasks)} tasks, "
                f"{len(plan.graph.edges)} edges",
                goal="<= 60",
            )
        )
        core_seconds.append(core_seconds_per_task(plan))
    for size, seconds in zip(sizes, core_seconds, strict=True):
        how = "of the core for each task"
        results.append(value_result(f"core_{size.workers}", seconds, "us", how=how, scale=1e6))
        if size is not sizes[0]:
            how = f"core_{size.workers} ÷ core_{sizes[0].workers}"
            results.append(ratio_result(f"core_{size.workers}_ratio", seconds, core_seconds[0], how=how, goal="<= 2"))
    for schedule in SCHEDULES:
        results += [bubble(schedule, workers) for workers in (QUICK_DEPTHS if quick else DEPTHS)]
    return results + [without_bubble(workers) for workers in (QUICK_DEPTHS if quick else DEPTHS)]


def planned(size: Size, schedule: str = "1f1b", microbatches: int = MICROBATCHES) -> tuple[float, Plan]:
    spec = JobSpec(
        job=JobSection(entry="scale.py:workload", steps=1_000_000, batch_size=4 * microbatches * size.replicas),
        strategy=Strategy(microbatches=microbatches, schedule=schedule, stages=size.stages, replicas=size.replicas),
        directory="/",
    )
    begun = time.perf_counter()
    plan = make_plan(spec, facts(size.stages), shared_bytes_free=1 << 50)
    return time.perf_counter() - begun, plan


def facts(stages: int) -> Inspection:
    tensor = TensorFacts(dtype="float32", itemsize=4, shapes={4: (4, 64)})
    units = tuple(
        UnitFacts(
            name=f"{number}.",
            parameter_bytes=1 << 16,
            buffer_bytes=0,
            forward_seconds=FORWARD,
            backward_seconds=BACKWARD,
        )
        for number in range(stages)
    )
    parameters = tuple(
        ParameterFacts(units=(number,), num_elements=1 << 14, dtype="float32", itemsize=4, trained=True, group=0)
        for number in range(stages)
    )
    return Inspection(
        units=units,
        input=tensor,
        target=tensor,
        num_train=1 << 20,
        num_validation=0,
        load_seconds=0.0,
        update_seconds=0.0,
        metrics=(),
        parameters=parameters,
        copy_bytes_per_second=float("inf"),
    )


def core_seconds_per_task(plan: Plan) -> list[float]:
    """Lanes report task after task, in turn, and are sent more; the first share is not counted."""
    core = Core({f"{kind}-{position}": kind for position, kind in enumerate(plan.workers)})
    core.start()
    for name in core.workers:
        core.handle(WorkerJoined(worker=name), 0.0)
    core.handle(JobSubmitted(job=JOB, needs=Counter(plan.workers)), 0.0)
    core.handle(JobPlanned(job=JOB, attempt=1, plan=plan), 0.0)
    for name in core.jobs[JOB].workers:
        core.handle(WorkerPrepared(job=JOB, attempt=1, worker=name), 0.0)
    lanes = {
        TasksFinished(JOB, 1, f"{plan.workers[lane.worker]}-{lane.worker}", lane.name, 1): len(program)
        for lane, program in plan.graph.programs.items()
    }
    iterations, num_tasks = max(3, TASKS // len(plan.graph.tasks)), len(plan.graph.tasks)
    shares = []
    for _ in range(1 + SHARES):
        begun = time.perf_counter()
        for _ in range(iterations):
            for position in range(max(lanes.values())):
                for event, length in lanes.items():
                    if position < length:
                        core.handle(event, 0.0)
        shares.append((time.perf_counter() - begun) / (iterations * num_tasks))
    assert core.jobs[JOB].iterations_done == (1 + SHARES) * iterations
    return shares[1:]


def bubble(schedule: str, workers: int) -> Result:
    """FORWARD and BACKWARD are of a stage. Where a worker has v, they are the v-th part of the formula's F and B."""
    each, microbatches = STAGES_PER_WORKER.get(schedule, 1), 2 * workers
    _, plan = planned(Size(1, each * workers), schedule, microbatches)
    idle = plan.predicted_iteration_seconds - microbatches * each * (FORWARD + BACKWARD)
    formula = (workers - 1) * (FORWARD + BACKWARD - SCHEDULES[schedule] * WEIGHT)
    how = f"{workers} workers, {microbatches} microbatches: {1e3 * idle:.3f} ms ÷ {1e3 * formula:.3f} ms"
    return value_result(f"{schedule}_bubble_{workers}", [idle / formula], "x", how=how, goal="<= 1.0001")


def without_bubble(workers: int) -> Result:
    microbatches = 2 * workers
    _, plan = planned(Size(1, 2 * workers), "zero-bubble-v", microbatches)
    work = microbatches * 2 * (FORWARD + BACKWARD)
    how = f"{workers} workers, {microbatches} microbatches: {1e3 * plan.predicted_iteration_seconds:.3f} ms"
    ratio = plan.predicted_iteration_seconds / work
    return value_result(f"zero-bubble-v_over_work_{workers}", [ratio], "x", how=how, goal="<= 1.0001")


if __name__ == "__main__":
    main("simulate_scale", collect)
