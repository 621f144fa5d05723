"""Peer of benchmarks/pipeline.py: the same stages and schedule under torch.distributed.pipelining with Gloo.

Two processes, each with one stage, or with two of the four that the schedule runs there and back. Reads "run K" lines,
runs K iterations, and prints their seconds as a JSON list (of both rank 0's count). The batches are those of an epoch
in a random order, as a job's are, and each rank takes of them what it needs. Best settings that we know of: gradients
are not scaled in a pass of their own (the loss is), the optimizer is fused, one thread, pinned to a core, the allocator
as in Weft's workers.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from measure import pin
from training_loop import Samples

from weft.spec.job_spec import JobSpec
from weft.workload.entry import load_workload
from weft.workload.optimizer import make_optimizer
from weft.workload.units import units

RANKS = 2
OF_ONE_STAGE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
OF_STAGES = {"interleaved-zero-bubble": ScheduleInterleavedZeroBubble, "zero-bubble-v": ScheduleZBVZeroBubble}


def main() -> None:
    config = json.loads(sys.argv[1])
    rank, microbatches = config["rank"], config["microbatches"]
    pin(config["core"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{config['rendezvous']}", rank=rank, world_size=RANKS)
    spec = JobSpec.parse(config["spec"])
    workload = load_workload(spec)
    count = len(config["stages"])
    own = [rank] if count == RANKS else [rank, count - 1 - rank]
    found = units(workload.model)
    modules = [nn.Sequential(*(unit for _, unit in found[slice(*config["stages"][number])])) for number in own]
    inputs, targets = workload.train
    needed = [part for part, is_needed in ((inputs, 0 in own), (targets, count - 1 in own)) if is_needed]
    samples = Samples(needed, spec, rank=0, num_ranks=1) if needed else None  # in the middle of a V
    stages = [
        PipelineStage(module, number, count, torch.device("cpu")) for number, module in zip(own, modules, strict=True)
    ]

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return workload.loss(output, target) / microbatches

    name = config["schedule"]
    schedule = (
        OF_ONE_STAGE[name](stages[0], microbatches, loss_fn=loss, scale_grads=False)
        if name in OF_ONE_STAGE
        else OF_STAGES[name](stages, microbatches, loss_fn=loss, scale_grads=False)
    )
    optimizer = make_optimizer(workload.optimizer, [each for module in modules for each in module.parameters()])
    assert optimizer is not None

    def iterate(step: int) -> None:
        losses: list[torch.Tensor] = []
        batch = [] if samples is None else samples.of(step)
        ends = {"target": batch.pop(), "losses": losses} if count - 1 in own else {}
        schedule.step(*batch, **ends)
        sum(loss.item() for loss in losses)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    steps = itertools.count()
    for line in sys.stdin:
        seconds = []
        for _ in range(int(line.split()[1])):
            started = time.perf_counter()
            iterate(next(steps))
            seconds.append(time.perf_counter() - started)
        print(json.dumps(seconds), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
