"""The GPU benchmarks on a GPU, each as short as it goes: that they measure, not what."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SECONDS = 300


@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize(
    ("script", "options", "row"),
    [
        ("gpu_transfers", [], "both_vs_pinned"),
        ("gpu_accounting", ["--only", "zero_offload"], "zero_offload_overlap_vs_profiler"),
        ("gpu_offload", ["--only", "0.1b"], "practicality_16k_0.1b"),
        ("gpu_hybrid", ["--only", "gpt"], "hybrid_never_slower"),
        ("gpu_largest", ["--gpu-gib", "8"], "largest_vs_plain"),
    ],
)
def test_a_gpu_benchmark_measures_on_the_gpu(script: str, options: list[str], row: str) -> None:
    command = [sys.executable, str(BENCHMARKS / f"{script}.py"), "--quick", "--json", "--seconds", str(SECONDS)]
    finished = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    report = json.loads(finished.stdout)
    assert report["device"] in report["machine"]["gpus"]
    assert row in {result["name"] for result in report["results"]}
