"""The wide MLP of data_parallel.py: few layers of many parameters, so that gradients and updates weigh most."""

from __future__ import annotations

import torch
from torch import nn

import weft


def workload(layers: int = 3, width: int = 4096, samples: int = 1024, optimizer: str = "AdamW") -> weft.Workload:
    """float32 (B, width) -> logits (B, width), with classes as targets; layers x width x (width + 1) parameters.
    optimizer: a class of torch.optim."""
    modules: list[nn.Module] = [nn.Linear(width, width)]
    for _ in range(layers - 1):
        modules += [nn.ReLU(), nn.Linear(width, width)]
    return weft.Workload(
        model=nn.Sequential(*modules),
        loss=nn.CrossEntropyLoss(),
        train=(torch.randn(samples, width), torch.randint(width, (samples,))),
        optimizer=lambda parameters: getattr(torch.optim, optimizer)(parameters, lr=1e-4),
    )
