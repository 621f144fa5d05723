"""Warm up: what a process does for the first time, before a job waits for it.

Most of it is done once, by the fork server, whose children have it then. With a torch that has CUDA they do it
themselves: an optimizer's step asks the driver for GPUs, and no child of a process that has could use one.
"""

from __future__ import annotations

import gc

import torch
import torch.utils.serialization  # what the first torch.load of a process imports
from torch import nn

from weft.workers.devices.device import Device
from weft.workers.devices.host import HostDevice
from weft.workload.code import torchs_own


def warm_up_server() -> None:
    """In one thread, which stays the only one: what is forked has no others."""
    torchs_own.note()
    if _is_inherited():
        torch.set_num_threads(1)
        _train(HostDevice())


def warm_up(device: Device) -> None:
    if not _is_inherited():
        _train(device)
        gc.collect()


def _is_inherited() -> bool:
    return not torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]


def _train(device: Device) -> None:
    """One tiny step: the first one of a process builds kernels' tables, thread pools and optimizer modules."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2)).to(device.torch)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x, target = torch.randn(4, 8, device=device.torch), torch.zeros(4, dtype=torch.int64, device=device.torch)
    nn.functional.cross_entropy(model(x), target).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
