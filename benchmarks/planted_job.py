"""The job of planted_stalls.py and whatif.py: stages and a loader that take exactly as long as they are told.

They spin, as computing does, until a clock has gone on by so much; what they hand on are a few numbers.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch import nn

import weft


class Spin(torch.autograd.Function):
    """float32 (B, D) -> (B, D), the same values; forward and backward take so many seconds."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: float, backward: float) -> torch.Tensor:
        ctx.seconds = backward
        _spin(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        _spin(ctx.seconds)
        return gradients[0], None, None


class Stage(nn.Module):
    """float32 (B, D) -> (B, D). seconds: of its forward and of its backward, for one microbatch."""

    def __init__(self, dim: int, forward: float, backward: float) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)
        self.seconds = forward, backward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = Spin.apply(self.linear(x), *self.seconds)
        return made


class Samples(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """float32 (D,) each. seconds: of the first sample of each batch, which all others follow at once."""

    def __init__(self, num_samples: int, dim: int, batch_size: int, seconds: float) -> None:
        self.inputs = torch.randn(num_samples, dim, generator=torch.Generator().manual_seed(1))
        self.batch_size, self.seconds = batch_size, seconds
        self.loaded = 0

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.loaded % self.batch_size == 0:
            _spin(self.seconds)
        self.loaded += 1
        return self.inputs[index], self.inputs[index]


def workload(
    stage_seconds: float = 2e-3,
    load_seconds: float = 0.0,
    stages: int = 2,
    slow_worker: str = "",
    slow_seconds: float = 0.0,
    batch_size: int = 8,
    batches: int = 8,
    dim: int = 4,
) -> weft.Workload:
    """stage_seconds: of a stage's forward, and of its backward. slow_seconds: of a forward, more, in one worker."""
    extra = slow_seconds if os.environ.get("WEFT_WORKER") == slow_worker else 0.0
    return weft.Workload(
        model=nn.Sequential(*(Stage(dim, stage_seconds + extra, stage_seconds) for _ in range(stages))),
        loss=nn.functional.mse_loss,
        train=Samples(batches * batch_size, dim, batch_size, load_seconds),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    )


def _spin(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass
