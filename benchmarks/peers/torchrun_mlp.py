"""Peer of benchmarks/warm_start.py: the job of mlp_job.py as a script for torchrun, data parallel over two processes.

Prints the CLOCK_MONOTONIC nanoseconds at which its first training iteration was finished. Everything that it does is
what such a script has to do, and no more.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

HIDDEN, BATCH_SIZE = 256, 100


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10))
    inputs, targets = torch.randn(1000, 64), torch.randint(10, (1000,))
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(replica.parameters(), lr=1e-3)
    share = slice(dist.get_rank(), BATCH_SIZE, dist.get_world_size())
    nn.functional.cross_entropy(replica(inputs[share]), targets[share]).backward()
    optimizer.step()
    print(f"first iteration {time.monotonic_ns()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
