"""The job of pipeline.py whose stages are unequal: each pass takes as long as it is told, and leaves the core free.

So any number of stages takes its time on any number of cores, as on machines of their own. The gradient of what a stage
received takes half of its backward and that of its parameters the other half, whole or in two parts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import weft

DIM = 4


class _Rest(torch.autograd.Function):
    """The same values; forward and backward take so many seconds."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: float, backward: float) -> torch.Tensor:
        ctx.seconds = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None, None


class Stage(nn.Module):
    """float32 (B, D) -> (B, D). seconds: of its forward and of its backward, for one microbatch."""

    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(DIM))
        self.seconds = forward, backward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        forward, backward = self.seconds
        scale = _Rest.apply(self.scale, 0.0, backward / 2 if x.requires_grad else backward)
        made: torch.Tensor = _Rest.apply(x, forward, backward / 2) * scale
        return made


def workload(milliseconds: Sequence[Sequence[float]], samples: int = 64) -> weft.Workload:
    """milliseconds: of each stage's forward and backward."""
    inputs = torch.randn(samples, DIM, generator=torch.Generator().manual_seed(1))
    return weft.Workload(
        model=nn.Sequential(*(Stage(forward / 1e3, backward / 1e3) for forward, backward in milliseconds)),
        loss=nn.functional.mse_loss,
        train=torch.utils.data.TensorDataset(inputs, inputs),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    )
