"""Peer of benchmarks/recovery.py: a job as a script for torchrun, data parallel, that goes on from its own checkpoint.

Config: spec, folder, every. The first rank writes `folder`/checkpoint.pt each `every` steps; every process appends
"STEP NANOSECONDS" to `folder`/RANK-PID after a step, by CLOCK_MONOTONIC. It trains until it is ended.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from training_loop import Samples

from weft.spec.job_spec import JobSpec
from weft.workload.entry import load_workload
from weft.workload.optimizer import make_optimizer

CHECKPOINT = "checkpoint.pt"


def main() -> None:
    config = json.loads(sys.argv[1])
    folder = Path(config["folder"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    spec = JobSpec.parse(config["spec"])
    workload = load_workload(spec)
    samples = Samples(workload.train, spec, rank, dist.get_world_size())
    optimizer = make_optimizer(workload.optimizer, workload.model.parameters())
    assert optimizer is not None
    assert workload.loss is not None
    step = _load(folder / CHECKPOINT, workload.model, optimizer)
    samples.skip(step)
    model = DistributedDataParallel(workload.model, gradient_as_bucket_view=True, static_graph=True)
    with open(folder / f"{rank}-{os.getpid()}", "w", buffering=1) as stamps:
        while True:
            inputs, targets = samples.of(step)
            workload.loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            stamps.write(f"{step} {time.monotonic_ns()}\n")
            if rank == 0 and step % config["every"] == 0:
                _save(folder / CHECKPOINT, step, workload.model, optimizer)


def _load(path: Path, model: torch.nn.Module, optimizer: Any) -> int:
    """The steps that are done."""
    if not path.exists():
        return 0
    saved = torch.load(path, mmap=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return int(saved["step"])


def _save(path: Path, step: int, model: torch.nn.Module, optimizer: Any) -> None:
    partial = path.with_suffix(".tmp")
    torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, partial)
    os.replace(partial, path)


if __name__ == "__main__":
    main()
