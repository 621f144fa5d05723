"""The job of switch.py: units that take as long as they are told and need no core for it, half of which grow slow."""

from __future__ import annotations

import torch
from sleeping_job import Sleep
from torch import nn

import weft

SLOWER = 10


class Tiring(nn.Module):
    """float32 (B, D) -> (B, D); a sample takes so many seconds forward, and SLOWER times that after so many forwards of
    training. The count is a buffer, so it is in the job's snapshots."""

    def __init__(self, dim: int, seconds: float, after: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.seconds, self.after = seconds, after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
        is_tired = 0 < self.after < int(self.calls)
        made: torch.Tensor = Sleep.apply(self.linear(x), self.seconds * (SLOWER if is_tired else 1))
        return made


def workload(sample_seconds: float, units: int, dim: int, after: int) -> weft.Workload:
    """sample_seconds: of one sample's forward through all units, before the second half of them has grown slow."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(64, dim, generator=generator)
    tires = [after if unit >= units // 2 else 0 for unit in range(units)]
    return weft.Workload(
        model=nn.Sequential(*(Tiring(dim, sample_seconds / units, each) for each in tires)),
        loss=nn.functional.mse_loss,
        train=(inputs, inputs),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
    )
