"""The job of cpu_roles.py: units and a loader that take exactly as long as they are told, and need no core for it."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

import weft


class Sleep(torch.autograd.Function):
    """float32 (B, D) -> (B, D), the same values; a sample takes so many seconds forward, and twice as many back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds * len(x)
        time.sleep(ctx.seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradients[0], None


class Sleeper(nn.Module):
    """float32 (B, D) -> (B, D)."""

    def __init__(self, dim: int, seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = Sleep.apply(self.linear(x), self.seconds)
        return made


class Samples(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """float32 (D,) each, after so many seconds."""

    def __init__(self, num_samples: int, dim: int, seconds: float) -> None:
        self.inputs = torch.randn(num_samples, dim, generator=torch.Generator().manual_seed(1))
        self.seconds = seconds

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(self.seconds)
        return self.inputs[index], self.inputs[index]


def workload(
    sample_seconds: float = 1e-3, load_seconds: float = 0.0, units: int = 4, dim: int = 256, samples: int = 64
) -> weft.Workload:
    """sample_seconds: of one sample's forward through all units. load_seconds: of one sample."""
    return weft.Workload(
        model=nn.Sequential(*(Sleeper(dim, sample_seconds / units) for _ in range(units))),
        loss=nn.functional.mse_loss,
        train=Samples(samples, dim, load_seconds),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    )
