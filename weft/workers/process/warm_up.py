"""Warm up: what a process does for the first time, before a job waits for it."""

from __future__ import annotations

import torch
from torch import nn

from weft.workers.devices.device import Device


def warm_up(device: Device) -> None:
    """One tiny training step: the first one of a process builds kernels' tables, thread pools and optimizer modules."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2)).to(device.torch)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x, target = torch.randn(4, 8, device=device.torch), torch.zeros(4, dtype=torch.int64, device=device.torch)
    nn.functional.cross_entropy(model(x), target).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
