"""Peer of benchmarks/pipeline.py: the same stages and schedule under torch.distributed.pipelining with Gloo.

One process per stage. Reads "run K" lines, runs K iterations, and prints their seconds as a JSON list (rank 0 does).
Best settings that we know of: gradients are not scaled in a pass of their own (the loss is), the optimizer is fused,
one thread, pinned to a core, the allocator as in Weft's workers.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from measure import pin

from weft.spec.job_spec import JobSpec
from weft.workload.entry import load_workload
from weft.workload.optimizer import make_optimizer
from weft.workload.units import units


def main() -> None:
    config = json.loads(sys.argv[1])
    rank, microbatches = config["rank"], config["microbatches"]
    pin(config["core"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{config['rendezvous']}", rank=rank, world_size=2)
    spec = JobSpec.parse(config["spec"])
    workload = load_workload(spec)
    first, last = config["stages"][rank]
    module = nn.Sequential(*(unit for _, unit in units(workload.model)[first:last]))
    inputs, targets = (part[: spec.job.batch_size] for part in workload.train)
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule_type = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[config["schedule"]]
    schedule = schedule_type(
        stage,
        microbatches,
        loss_fn=lambda output, target: workload.loss(output, target) / microbatches,
        scale_grads=False,
    )
    optimizer = make_optimizer(workload.optimizer, list(module.parameters()))
    assert optimizer is not None

    def iterate() -> None:
        if rank == 0:
            schedule.step(inputs)
        else:
            losses: list[torch.Tensor] = []
            schedule.step(target=targets, losses=losses)
            sum(loss.item() for loss in losses)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for line in sys.stdin:
        seconds = []
        for _ in range(int(line.split()[1])):
            started = time.perf_counter()
            iterate()
            seconds.append(time.perf_counter() - started)
        print(json.dumps(seconds), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
