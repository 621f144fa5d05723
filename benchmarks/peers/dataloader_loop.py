"""Peer of benchmarks/loading.py: the plain loop of a job over torch's DataLoader.

Config: spec, workers (of the DataLoader). Reads "run K" lines, takes K steps, and prints {"seconds": [...]} as JSON:
each from the end of one step to the end of the next.

Best settings that we know of: workers persist over epochs, two batches ahead for each (its default), the optimizer is
fused, the allocator is as in Weft's workers.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch.utils.data import DataLoader

from weft.spec.job_spec import JobSpec
from weft.workload.entry import load_workload
from weft.workload.optimizer import make_optimizer


def main() -> None:
    config = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    spec = JobSpec.parse(config["spec"])
    workload = load_workload(spec)
    optimizer = make_optimizer(workload.optimizer, workload.model.parameters())
    assert optimizer is not None
    assert workload.loss is not None
    batches = _batches(workload.train, spec.job.batch_size, config["workers"])
    for line in sys.stdin:
        ends = [time.perf_counter()]
        for _ in range(int(line.split()[1])):
            inputs, targets = next(batches)
            loss = workload.loss(workload.model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            loss.item()
            ends.append(time.perf_counter())
        print(json.dumps({"seconds": [end - start for start, end in pairwise(ends)]}), flush=True)


def _batches(dataset: Any, batch_size: int, workers: int) -> Iterator[Any]:
    loader = DataLoader(
        dataset, batch_size=batch_size, shuffle=True, num_workers=workers, persistent_workers=True, drop_last=True
    )
    while True:
        yield from loader


if __name__ == "__main__":
    main()
