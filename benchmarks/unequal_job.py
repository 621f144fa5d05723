"""The job of unequal.py: a model that takes several times as long in one worker as in the others."""

from __future__ import annotations

import os

import torch
from torch import nn

import weft

TIMES = 4
FORWARDS_OF_A_STEP = 3  # a backward is two forwards' work


class Layer(nn.Module):
    """float32 (B, T, D) -> (B, T, D). extra: forwards whose result nobody uses, before the one that counts."""

    def __init__(self, dim: int, extra: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)
        self.extra = extra

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for _ in range(self.extra):
                torch.tanh(self.linear(x))
        return torch.tanh(self.linear(x))


def workload(
    slow_worker: str = "cpu-1", layers: int = 3, dim: int = 256, tokens: int = 64, samples: int = 480
) -> weft.Workload:
    """float32 (B, T, D) -> (B, T, 1)."""
    is_slow = os.environ.get("WEFT_WORKER") == slow_worker
    extra = (TIMES - 1) * FORWARDS_OF_A_STEP if is_slow else 0
    inputs = torch.randn(samples, tokens, dim)
    return weft.Workload(
        model=nn.Sequential(*(Layer(dim, extra) for _ in range(layers)), nn.Linear(dim, 1)),
        loss=nn.functional.mse_loss,
        train=(inputs, inputs.mean(2, keepdim=True)),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    )
