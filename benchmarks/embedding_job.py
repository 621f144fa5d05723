"""The embedding-heavy job of gpu_hybrid.py: almost all parameters are in tables of which a batch reads a few rows."""

from __future__ import annotations

import torch
from torch import nn

import weft


class Tables(nn.Module):
    """int64 (B, F) -> float32 (B, F x dim): a table of `rows` for each of F features."""

    def __init__(self, features: int, rows: int, dim: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, dim) for _ in range(features))

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return torch.cat([table(indices[:, number]) for number, table in enumerate(self.tables)], dim=1)


def workload(
    features: int = 8, rows: int = 100_000, dim: int = 64, width: int = 512, samples: int = 8192
) -> weft.Workload:
    """int64 (B, features) -> logits (B, 2); features x rows x dim parameters in tables. Gradients are dense."""
    return weft.Workload(
        model=nn.Sequential(
            Tables(features, rows, dim), nn.Linear(features * dim, width), nn.ReLU(), nn.Linear(width, 2)
        ),
        loss=nn.CrossEntropyLoss(),
        train=(torch.randint(rows, (samples, features)), torch.randint(2, (samples,))),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
    )
