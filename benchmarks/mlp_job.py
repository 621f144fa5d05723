"""The small job of warm_start.py: five units on random numbers. peers/torchrun_mlp.py trains the same without Weft."""

from __future__ import annotations

import torch
from torch import nn

import weft


def workload(hidden: int = 256) -> weft.Workload:
    """float32 (B, 64) -> logits (B, 10)."""
    return weft.Workload(
        model=nn.Sequential(
            nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 10)
        ),
        loss=nn.CrossEntropyLoss(),
        train=(torch.randn(1000, 64), torch.randint(10, (1000,))),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    )
