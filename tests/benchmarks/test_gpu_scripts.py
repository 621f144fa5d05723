"""The GPU benchmarks from end to end on a stand-in: every step but the GPU's, and no figure."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from run import merged

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(script: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / f"{script}.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


OPTIONS = {
    "gpu_offload": ["--only", "0.1b"],
    "gpu_hybrid": ["--only", "embedding"],
    "gpu_accounting": ["--only", "local"],
}
ROWS = {
    "gpu_offload": {"practicality_2k_0.1b", "vs_fsdp2_offload_16k_0.1b", "ours_16k_0.1b"},
    "gpu_hybrid": {"embedding_hyscale_vs_gpu", "embedding_gpu", "hybrid_never_slower"},
    "gpu_transfers": {"up_vs_pinned", "down_vs_pinned"},
    "gpu_accounting": {"local_stall_vs_profiler", "local_overlap_vs_profiler", "local_gaps"},
    "gpu_largest": {"largest_vs_plain", "throughput_vs_no_offload"},
}


@pytest.mark.days(6)
@pytest.mark.slow(seconds=7)
@pytest.mark.timeout(600)  # five processes and more: ten times as long beside eight busy loops
@pytest.mark.pairs(script=tuple(ROWS))  # one a day
def test_a_stand_in_goes_through_all_steps_and_says_what_it_is(script: str) -> None:
    options, rows = OPTIONS.get(script, []), ROWS[script]
    finished = run(script, "--stand-in", "--quick", "--json", *options)
    assert finished.returncode == 0, finished.stderr
    report = json.loads(finished.stdout)
    assert report["device"] == "stand-in"
    assert rows <= {row["name"] for row in report["results"]}
    assert all(row["goal"] is None for row in report["results"])


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_a_script_says_so_with_a_code_of_its_own() -> None:
    finished = run("gpu_transfers", "--json")
    assert (finished.returncode, finished.stdout) == (69, "")
    assert "there is no GPU" in finished.stderr
    assert "--stand-in" in finished.stderr


def test_a_stand_ins_numbers_are_not_kept(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    report.write_text(json.dumps({"benchmark": "gpu_offload", "device": "stand-in", "results": [{}]}))
    finished = run("run", "--keep", str(report))
    assert finished.returncode == 1
    assert "nothing to keep: stand-in" in finished.stderr


def kept(device: str, **rows: float) -> dict[str, Any]:
    machine = {"cpu": "a", "cores": 2, "gpus": [device], "memory_gib": 1.0}
    results = [{"name": name, "value": value} for name, value in rows.items()]
    return {"device": device, "machine": machine, "versions": {"torch": "2"}, "results": results}


def test_parts_of_a_benchmark_are_kept_together_and_the_newest_of_each_row() -> None:
    together = merged(kept("H200", first=1.0, second=2.0), kept("H200", second=3.0, third=4.0))
    assert {row["name"]: row["value"] for row in together["results"]} == {"first": 1.0, "second": 3.0, "third": 4.0}


def test_rows_of_another_device_are_not_mixed_in() -> None:
    assert merged(kept("H200", first=1.0), kept("A100", second=2.0)) == kept("A100", second=2.0)
