"""Peer of benchmarks/optimizer.py: AdamW over the same parameters in one process with a thread for each core.

Reads "run CLIP K" lines, CLIP 0 or 1, takes K steps, and prints their seconds as a JSON list. Config: cores, layers,
width, optimizer ("torch": torch.optim.AdamW with its fused kernel, "deepspeed": DeepSpeedCPUAdam).
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time

import torch
from torch import nn

MAX_NORM = 1e9  # clip_grad_norm_ multiplies whether or not it clips: the same work


def main() -> None:
    config = json.loads(sys.argv[1])
    os.sched_setaffinity(0, config["cores"])
    torch.set_num_threads(len(config["cores"]))
    width = config["width"]
    parameters = [nn.Parameter(torch.randn(width, width) / width**0.5) for _ in range(config["layers"])]
    for parameter in parameters:
        parameter.grad = torch.randn(width, width) / width
    optimizer = make_optimizer(config["optimizer"], parameters)
    for line in sys.stdin:
        _, clip, count = line.split()
        seconds = []
        for _ in range(int(count)):
            started = time.perf_counter()
            if int(clip):
                nn.utils.clip_grad_norm_(parameters, MAX_NORM, foreach=True)
            optimizer.step()
            seconds.append(time.perf_counter() - started)
        print(json.dumps(seconds), flush=True)


def make_optimizer(name: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if name == "torch":
        return torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    deepspeed = importlib.import_module("deepspeed.ops.adam")  # asked for only where it is installed
    optimizer = deepspeed.DeepSpeedCPUAdam(parameters, lr=1e-4, weight_decay=1e-2, adamw_mode=True)
    assert isinstance(optimizer, torch.optim.Optimizer)
    return optimizer


if __name__ == "__main__":
    main()
