"""Two replicas of unequal speed: how much of both replicas' throughput together each way to share a batch reaches.

The second replica's worker repeats its forward work, so that it is about four times slower. The parties take turns on
one running daemon with a worker on each of two cores:

    apart      a job of one replica on each worker, at the same time: neither waits for the other, both cores are
               loaded as they are below. The sum of the two throughputs is what can be had.
    fixed      one job of both replicas; half of each batch to each, so the slow one sets the pace
    adaptive   halves at first, then by measured speed; looked at once the shares have had time to settle
    stealing   each takes microbatches as it comes along
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from job_steps import rows_of
from measure import Result, interleave, main, ratio_result

import weft.client.embedded
from weft.client.client import Client
from weft.spec.job_spec import JobSpec

HERE = Path(__file__).resolve().parent
BATCH_SIZE = 240
MICROBATCHES = 80  # of a batch: what the slow replica has last may end a twentieth of an iteration late
TURNS = 5
WARM_ITERATIONS = 5
SETTLING_ITERATIONS = 110  # ten measurements of eight iterations and more; each halves what is wrong with the shares


def collect(quick: bool) -> list[Result]:
    fast: list[float] = []
    slow: list[float] = []
    half = {"replicas": 2, "microbatches": MICROBATCHES // 2}
    with weft.client.embedded.Daemon(workers=2, threads=1, runs_dir=tempfile.mkdtemp(prefix="weft-bench-")) as client:
        sums, fixed, adaptive, stealing = interleave(
            1 if quick else TURNS,
            lambda: _apart(client, fast, slow),
            lambda: _together(client, half, iterations=20),
            lambda: _together(client, half | {"share": "adaptive"}, warm=SETTLING_ITERATIONS),
            lambda: _together(client, {"replicas": 2, "microbatches": MICROBATCHES, "share": "stealing"}),
        )
    what = f"samples/s ÷ the sum of both replicas apart; batch {BATCH_SIZE}"
    return [
        ratio_result("slow_replica", fast, slow, how="samples/s apart, the fast replica's ÷ the slow one's"),
        ratio_result("fixed_vs_sum", fixed, sums, how=f"{what}, halves"),
        ratio_result(
            "adaptive_vs_sum", adaptive, sums, how=f"{what}, settled shares by measured speed", goal=">= 0.95"
        ),
        ratio_result("stealing_vs_sum", stealing, sums, how=f"{what}, {MICROBATCHES} microbatches", goal=">= 0.96"),
    ]


def _apart(client: Client, fast: list[float], slow: list[float]) -> float:
    """The sum of both throughputs; each goes to its list. Free workers are given out in order, the fast one first."""
    jobs = [
        _submit(client, {"microbatches": MICROBATCHES}, steps) for steps in (WARM_ITERATIONS + 40, WARM_ITERATIONS + 5)
    ]
    for job, speeds in zip(jobs, (fast, slow), strict=True):
        speeds.append(_samples_per_second(client, job, WARM_ITERATIONS))
    return fast[-1] + slow[-1]


def _together(client: Client, strategy: dict[str, Any], *, iterations: int = 30, warm: int = WARM_ITERATIONS) -> float:
    return _samples_per_second(client, _submit(client, strategy, warm + iterations), warm)


def _submit(client: Client, strategy: dict[str, Any], steps: int) -> str:
    job = {"entry": "unequal_job.py:workload", "steps": steps, "batch_size": BATCH_SIZE, "seed": 1}
    name: str = client.submit(JobSpec.parse({"job": job, "strategy": strategy, "directory": str(HERE)}))["job"]
    return name


def _samples_per_second(client: Client, job: str, warm: int) -> float:
    """Of the iterations after the first `warm` ones, by their median."""
    return BATCH_SIZE / statistics.median(row["seconds"] for row in rows_of(client, job)[warm:])


if __name__ == "__main__":
    main("unequal", collect)
