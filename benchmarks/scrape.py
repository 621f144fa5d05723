"""What Prometheus costs: series and scrape time of a daemon that runs 32 jobs of 16 stages each.

    planner ──plan──▶ attempt ──a row for each lane and mode of the plan──▶ JobMetrics ──▶ Exporter ──HTTP──▶ scraper

The label sets are those of the plan's graph: a lane is busy with what its tasks are and waits for what its edges carry.
The scraper is a process of its own, as Prometheus is.
"""

from __future__ import annotations

import asyncio
import sys

from measure import Result, main, value_result

from weft.metrics.prometheus.declared import MAX_SERIES
from weft.metrics.prometheus.exporter import Exporter
from weft.plan.inspection import Inspection, ParameterFacts, TensorFacts, UnitFacts, ValueFacts
from weft.plan.kinds import KINDS, MODE_INDEX
from weft.plan.plan import Plan
from weft.plan.rows import Row, packed_rows
from weft.scheduler.daemon.http.server import MetricsServer
from weft.scheduler.planning.planner import make_plan
from weft.scheduler.runs.run import PlannedAttempt
from weft.scheduler.runs.series import JobMetrics
from weft.spec.job_spec import JobSection, JobSpec, Strategy
from weft.spec.job_state import JobState

NUM_JOBS, NUM_STAGES, MICROBATCHES = 32, 16, 16
MAX_MILLISECONDS = 100
ROW_NS = 1_000_000
BATCH_SIZE = 2 * MICROBATCHES

SCRAPER = """
import sys, time, urllib.request
for _ in range(int(sys.argv[2])):
    started = time.perf_counter()
    with urllib.request.urlopen(sys.argv[1]) as answer:
        answer.read()
    print(time.perf_counter() - started)
"""


def collect(quick: bool) -> list[Result]:
    runs = 5 if quick else 31
    return [
        *_measured("", job_plan(), runs, "pipelines by 1f1b, a compute lane in each of their 512 workers"),
        *_measured(
            "_buckets",
            job_plan(clip_norm=1.0),
            runs,
            "the same with clip_norm, so that each of the 512 workers has a sync lane beside its compute lane",
        ),
    ]


def _measured(suffix: str, plan: Plan, runs: int, what: str) -> list[Result]:
    exporter = exporting(plan)
    count = num_series(exporter)
    seconds = asyncio.run(scrape_seconds(exporter, runs))
    jobs = f"{NUM_JOBS} jobs of {NUM_STAGES} stages: {what}"
    return [
        value_result(
            f"series{suffix}",
            [count],
            "series",
            goal=f"<= {MAX_SERIES}",
            how=f"samples in one scrape; {jobs}; every lane in every mode that its plan has, every histogram bucket, "
            "and the daemon's own",
        ),
        value_result(
            f"scrape{suffix}",
            seconds,
            "ms",
            scale=1e3,
            goal=f"<= {MAX_MILLISECONDS}",
            how="GET /metrics from another process, from the request to the last byte, of the series above",
        ),
    ]


def job_plan(clip_norm: float | None = None) -> Plan:
    """Of a model of as many like units as stages, by the real planner."""
    units = tuple(
        UnitFacts(
            name=f"{number}.",
            parameter_bytes=1 << 20,
            buffer_bytes=0,
            forward_seconds=1e-3,
            backward_seconds=2e-3,
        )
        for number in range(NUM_STAGES)
    )
    parameters = tuple(
        ParameterFacts(units=(number,), num_elements=1 << 18, dtype="float32", itemsize=4, trained=True, group=0)
        for number in range(NUM_STAGES)
    )
    values = tuple(
        ValueFacts(
            name=f"{number}",
            maker=number,
            readers=(number + 1,),
            dtype="float32",
            itemsize=4,
            shapes={2: (2, 64)},
            differentiable=True,
        )
        for number in range(NUM_STAGES - 1)
    )
    facts = TensorFacts(dtype="float32", itemsize=4, shapes={2: (2, 64)})
    inspection = Inspection(
        units=units,
        values=values,
        parameters=parameters,
        input=facts,
        target=facts,
        num_train=1 << 20,
        num_validation=0,
        load_seconds=1e-4,
        update_seconds=1e-3,
        metrics=(),
    )
    spec = JobSpec(
        job=JobSection(entry="bench.py:workload", steps=1000, batch_size=BATCH_SIZE),
        strategy=Strategy(stages=NUM_STAGES, microbatches=MICROBATCHES, clip_norm=clip_norm),
        directory="/",
    )
    return make_plan(spec, inspection, shared_bytes_free=1 << 40)


def exporting(plan: Plan) -> Exporter:
    """The exporter of a daemon in which each job has finished an iteration and been in every mode."""
    exporter = Exporter()
    metrics = JobMetrics(exporter)
    attempts = []
    for number in range(NUM_JOBS):
        workers = tuple(f"{kind}-{number * NUM_STAGES + i}" for i, kind in enumerate(plan.workers))
        attempt = PlannedAttempt(f"job-{number}", 1, plan, workers)
        attempts.append(attempt)
        metrics.begin(attempt)
        for index in range(2):
            _report_iteration(attempt, index)
            iteration = plan.itinerary.at(index)
            attempt.finish(iteration)
            metrics.iteration(attempt, iteration)
        for worker in workers:
            exporter.set("weft_worker_up", 1, worker=worker)
    metrics.tick(attempts, 0.0)
    for state in JobState:
        exporter.set("weft_jobs", 1, state=state)
    return exporter


def _report_iteration(attempt: PlannedAttempt, index: int) -> None:
    plan = attempt.plan
    for lane, program in plan.graph.programs.items():
        tasks = [plan.graph.tasks[task] for task in program]
        edges = [edge for task in program for edge in plan.graph.cross_lane_inputs(task)]
        modes = [KINDS[task.kind].mode for task in tasks] + [f"stall_{edge.cause}" for edge in edges]
        stamp = index << 32
        rows: list[Row] = []
        for mode in dict.fromkeys([*modes, "stall_dispatch"]):
            rows.append((MODE_INDEX[mode], program[0], index, -1, stamp, stamp + ROW_NS))
            stamp += ROW_NS
        values = [{"iteration": index, "means": {"loss": 1.0}, "facts": {"lr": 1e-3}}] if lane.name == "compute" else []
        attempt.add_report(attempt.workers[lane.worker], lane.name, packed_rows(rows), values)


def num_series(exporter: Exporter) -> int:
    return sum(not line.startswith(b"#") for line in exporter.render().splitlines())


async def scrape_seconds(exporter: Exporter, runs: int) -> list[float]:
    server = MetricsServer(exporter, "127.0.0.1", 0)
    try:
        url = await server.start()
        command = [sys.executable, "-c", SCRAPER, f"{url}/metrics", str(runs + 1)]
        scraper = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        output, _ = await scraper.communicate()
    finally:
        await server.stop()
    if scraper.returncode != 0:
        raise SystemExit(f"the scraper ended with exit code {scraper.returncode}")
    seconds = [float(line) for line in output.split()][1:]  # the first connects, and fills caches
    assert len(seconds) == runs
    return seconds


if __name__ == "__main__":
    main("scrape", collect)
