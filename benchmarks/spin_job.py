"""The job of whatif.py whose speed is planted: units that keep a core busy for a given time, longer in one worker."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch import nn

import weft

DIM = 16


def spin(seconds: float) -> None:
    """Computes for that long; a sleep would leave the core to others."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


class _Spin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds * len(x)
        spin(ctx.seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        spin(2 * ctx.seconds)
        return gradients[0], None


class Unit(nn.Module):
    """float32 (B, DIM) -> (B, DIM). seconds: of a forward, for each sample; a backward takes twice that."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = _Spin.apply(torch.tanh(self.linear(x)), self.seconds)  # type: ignore[no-untyped-call]
        return y


def workload(
    seconds: float = 50e-6, slow_worker: str = "", times: float = 1.0, units: int = 4, samples: int = 512
) -> weft.Workload:
    """float32 (B, DIM) -> (B, DIM). slow_worker: takes `times` as long as the others."""
    if os.environ.get("WEFT_WORKER") == slow_worker:
        seconds *= times
    inputs = torch.randn(samples, DIM)
    return weft.Workload(
        model=nn.Sequential(*(Unit(seconds) for _ in range(units))),
        loss=nn.functional.mse_loss,
        train=(inputs, inputs.sin()),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-2),
    )
