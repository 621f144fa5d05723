"""Two replicas of unequal speed: how much of both replicas' throughput together each way to share a batch reaches.

The second replica's worker repeats its forward work, so that it is about four times slower. Jobs take turns on one
running daemon with a worker on each of two cores:

    alone      the whole batch to one replica, then to the other; the sum of the two throughputs is what can be had
    fixed      half of each batch to each: the slow one sets the pace
    adaptive   halves at first, then by measured speed; looked at once the shares have had time to settle
    stealing   each takes microbatches as it comes along

The loader shares the cores with both, and a core shares its memory's bandwidth: that is why the sum is hard to reach.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from measure import Result, interleave, main, value_result

import weft.embedded
from weft.client import Client
from weft.spec import JobSpec

HERE = Path(__file__).resolve().parent
BATCH_SIZE = 160
MICROBATCHES = 40  # of a batch: a slow replica's last one may be a twentieth of an iteration late
TURNS = 5
WARM_ITERATIONS = 5
SETTLING_ITERATIONS = 110  # ten measurements of eight iterations and more; each halves what is wrong with the shares


def collect(quick: bool) -> list[Result]:
    turns = 1 if quick else TURNS
    half = {"microbatches": MICROBATCHES // 2}
    with weft.embedded.Daemon(workers=2, threads=1, runs_dir=tempfile.mkdtemp(prefix="weft-bench-")) as client:
        fast, slow, fixed, adaptive, stealing = interleave(
            turns,
            lambda: _samples_per_second(client, half | {"shares": [1, 0]}),
            lambda: _samples_per_second(client, half | {"shares": [0, 1]}, iterations=10),
            lambda: _samples_per_second(client, half),
            lambda: _samples_per_second(client, half | {"share": "adaptive"}, warm=SETTLING_ITERATIONS),
            lambda: _samples_per_second(client, {"microbatches": MICROBATCHES, "share": "stealing"}),
        )
    sums = [a + b for a, b in zip(fast, slow, strict=True)]
    what = f"samples/s ÷ the sum of both replicas alone; batch {BATCH_SIZE}, one replica slower"
    return [
        value_result(
            "slow_replica", [a / b for a, b in zip(fast, slow, strict=True)], "x", how="throughput alone, fast ÷ slow"
        ),
        _ratio("fixed_vs_sum", fixed, sums, how=f"{what}; halves"),
        _ratio("adaptive_vs_sum", adaptive, sums, how=f"{what}; settled shares by measured speed", goal=">= 0.95"),
        _ratio("stealing_vs_sum", stealing, sums, how=f"{what}; {MICROBATCHES} microbatches stolen", goal=">= 0.95"),
    ]


def _ratio(name: str, ours: list[float], sums: list[float], *, how: str, goal: str | None = None) -> Result:
    return value_result(name, [a / b for a, b in zip(ours, sums, strict=True)], "x", how=how, goal=goal)


def _samples_per_second(
    client: Client, strategy: dict[str, Any], *, iterations: int = 30, warm: int = WARM_ITERATIONS
) -> float:
    """Of the iterations after the first `warm` ones, by their median."""
    job = {"entry": "unequal_job.py:workload", "steps": warm + iterations, "batch_size": BATCH_SIZE, "seed": 1}
    spec = JobSpec.parse({"job": job, "strategy": {"replicas": 2} | strategy, "directory": str(HERE)})
    result = client.wait(client.submit(spec)["job"], timeout=600)
    assert result["state"] == "completed", result
    lines = Path(result["run_dir"], "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return BATCH_SIZE / statistics.median(json.loads(line)["seconds"] for line in lines[warm:])


if __name__ == "__main__":
    main("unequal", collect)
