"""Peer of benchmarks/data_parallel.py: the plain loop of a job, in one process or in one of several under DDP.

Config: spec, cores (of this process, a thread for each), rank, num_ranks, and where these are several the port of the
store in which they meet. Reads "run K" lines, takes K steps, and prints {"seconds": [...], "losses": [...]} as JSON; a
loss is the mean over this rank's part of the batch. Samples come in the order in which Weft takes them.

Best settings that we know of: gradients are views of DDP's buckets, the graph is static, the optimizer is fused,
gradients are set to None (to zero them costs a pass more than to copy them in), the allocator is as in Weft's workers.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported, if not in __all__
from torch.nn.parallel import DistributedDataParallel

from weft.spec.job_spec import JobSpec
from weft.workload.entry import load_workload
from weft.workload.optimizer import make_optimizer

PATIENCE = datetime.timedelta(seconds=60)  # a rank whose peer is gone ends, and the benchmark with it


class Samples:
    """This rank's equal part of each batch."""

    def __init__(self, train: Sequence[torch.Tensor], spec: JobSpec, rank: int, num_ranks: int) -> None:
        self._train = train
        self._seed, self._batch_size = spec.job.seed, spec.job.batch_size
        self._batches_per_epoch = len(train[0]) // self._batch_size
        self._rank, self._num_ranks = rank, num_ranks
        self._order = torch.empty(0, dtype=torch.int64)

    def of(self, step: int) -> list[torch.Tensor]:
        epoch, batch = divmod(step, self._batches_per_epoch)
        if batch == 0:
            self._shuffle(epoch)
        indices = self._order[batch * self._batch_size : (batch + 1) * self._batch_size]
        own = indices.tensor_split(self._num_ranks)[self._rank]
        return [part.index_select(0, own) for part in self._train]

    def skip(self, steps: int) -> None:
        """The next step is number `steps`."""
        self._shuffle(steps // self._batches_per_epoch)

    def _shuffle(self, epoch: int) -> None:
        generator = torch.Generator().manual_seed(self._seed + epoch)
        self._order = torch.randperm(len(self._train[0]), generator=generator)


def main() -> None:
    config = json.loads(sys.argv[1])
    os.sched_setaffinity(0, config["cores"])
    torch.set_num_threads(len(config["cores"]))
    iterate = _iteration(config)
    step = 0
    for line in sys.stdin:
        seconds, losses = [], []
        for _ in range(int(line.split()[1])):
            started = time.perf_counter()
            losses.append(iterate(step))
            seconds.append(time.perf_counter() - started)
            step += 1
        print(json.dumps({"seconds": seconds, "losses": losses}), flush=True)
    if config["num_ranks"] > 1:
        dist.destroy_process_group()


def _iteration(config: dict[str, Any]) -> Callable[[int], float]:
    """Takes the step of that number and returns its loss."""
    rank, num_ranks = config["rank"], config["num_ranks"]
    spec = JobSpec.parse(config["spec"])
    workload = load_workload(spec)
    samples = Samples(workload.train, spec, rank, num_ranks)
    optimizer = make_optimizer(workload.optimizer, workload.model.parameters())
    assert optimizer is not None
    model: nn.Module = workload.model
    if num_ranks > 1:
        store = TCPStore("127.0.0.1", config["port"], num_ranks, is_master=False, timeout=PATIENCE)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=PATIENCE)
        model = DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)

    def iterate(step: int) -> float:
        inputs, targets = samples.of(step)
        loss = workload.loss(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return iterate


if __name__ == "__main__":
    main()
