"""Compiled units: what they gain in an iteration, and what they cost before the first one.

eager_over_compiled    iteration of a GPT in a class of its own ÷ the same with strategy.compile, in one process;
                       jobs of both take turns on one daemon
stages_…               the same, in two stages
vs_plain_compiled      iteration of a plain loop over torch.compile(model), which may fuse across blocks ÷ ours in one
                       process
cold_prepare           seconds from submit to the end of the first iteration, where nothing has been compiled before
warm_prepare           the same on another daemon, with what the first has compiled
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from job_steps import rows_of
from measure import Result, main, ratio_result, value_result
from pipeline import ENVIRONMENT

from weft.client.client import Client
from weft.client.embedded import Daemon
from weft.spec.job_spec import JobSpec

HERE = Path(__file__).resolve().parent
ARGS = {"layers": 4, "dim": 256, "heads": 4, "context": 128, "vocabulary": 2048, "samples": 64}
BATCH_SIZE = 16
WARM_ITERATIONS = 5


def collect(quick: bool) -> list[Result]:
    turns, iterations = (1, 5) if quick else (3, 20)
    seconds: dict[tuple[bool, int], list[float]] = {(compiled, stages): [] for stages in (1, 2) for compiled in (0, 1)}
    plain, cold, warm = [], [], []
    for _ in range(turns):
        with tempfile.TemporaryDirectory(prefix="weft-bench-") as home:
            os.environ["WEFT_CACHE_DIR"] = home  # the daemon's
            cold.append(_prepare_seconds(home))
            warm.append(_prepare_seconds(home))
            with Daemon(workers=2, threads=1, runs_dir=home) as client:
                for (compiled, stages), found in seconds.items():
                    found.append(_iteration(client, _spec(iterations, compiled, stages)))
            plain.append(_plain_iteration(iterations, home))
    how = ", ".join(f"{key} {value}" for key, value in ARGS.items() if key != "samples")
    return [
        ratio_result("eager_over_compiled", seconds[False, 1], seconds[True, 1], goal=">= 1.0", how=f"GPT {how}"),
        ratio_result(
            "stages_eager_over_compiled", seconds[False, 2], seconds[True, 2], how="the same, 2 stages, 4 microbatches"
        ),
        ratio_result(
            "vs_plain_compiled",
            plain,
            seconds[True, 1],
            goal=">= 1.0",
            how="a plain loop over torch.compile(model) ÷ ours",
        ),
        value_result("cold_prepare", cold, "s", how="submit to the first iteration's end, nothing compiled before"),
        value_result("warm_prepare", warm, "s", how="the same by another daemon, with what the first has compiled"),
    ]


def _spec(steps: int, compiled: bool, stages: int) -> JobSpec:
    job = {"entry": "any_model_job.py:workload", "args": ARGS, "batch_size": BATCH_SIZE, "seed": 1}
    strategy = {"stages": stages, "microbatches": 4 if stages > 1 else 1, "compile": bool(compiled)}
    tables = {"job": job | {"steps": steps + WARM_ITERATIONS}, "strategy": strategy, "directory": str(HERE)}
    return JobSpec.parse(tables)


def _iteration(client: Client, spec: JobSpec) -> float:
    rows = rows_of(client, client.submit(spec)["job"])
    return statistics.median(row["seconds"] for row in rows[WARM_ITERATIONS:])


def _prepare_seconds(runs_dir: str) -> float:
    """Of a new daemon, whose workers have compiled nothing."""
    with Daemon(workers=1, threads=1, runs_dir=runs_dir) as client:
        result = client.wait(client.submit(_spec(1, True, 1))["job"], timeout=600)
    assert result["state"] == "completed", result
    return float(result["first_iteration_seconds"])


def _plain_iteration(iterations: int, cache: str) -> float:
    command = [
        sys.executable,
        str(Path(__file__).resolve()),
        "--plain",
        json.dumps(_spec(iterations, False, 1).to_wire()),
    ]
    environment = {**ENVIRONMENT, "TORCHINDUCTOR_CACHE_DIR": f"{cache}/plain"}
    told = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, timeout=600)
    return float(told.stdout)


def _plain(wire: Mapping[str, Any]) -> float:
    """The peer: one process, one thread, the whole model compiled, torch's fused optimizer as the job has it."""
    import torch

    from weft.workload.entry import load_workload

    torch.set_num_threads(1)
    spec = JobSpec.parse(wire)
    workload = load_workload(spec)
    model, optimizer = torch.compile(workload.model), workload.optimizer(workload.model.parameters())
    inputs, targets = workload.train.tensors if hasattr(workload.train, "tensors") else workload.train
    assert workload.loss is not None
    seconds = []
    for step in range(spec.job.steps or 0):
        begin = step * BATCH_SIZE % (len(inputs) - BATCH_SIZE + 1)
        started = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        workload.loss(model(inputs[begin : begin + BATCH_SIZE]), targets[begin : begin + BATCH_SIZE]).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[WARM_ITERATIONS:])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--plain"]:
        print(_plain(json.loads(sys.argv[2])))
    else:
        main("compiled_units", collect)
