"""Jobs whose data are tensors: pairs for an nn.Sequential and for a class of its own, and a tree of them for a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import weft


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


def step(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch["x"] * batch["scale"]), batch["y"])


def tree(size: int) -> dict[str, Any]:
    x, y = torch.randn(size, 6), torch.randn(size, 3)
    return {"x": x, "y": y, "again": x, "scale": torch.rand(size, 1)}


def workload(kind: str) -> weft.Workload:
    torch.set_default_dtype(torch.float64)
    model: nn.Module = Own()
    if kind == "sequential":
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    parts: dict[str, Any] = {"loss": nn.CrossEntropyLoss()}
    train, validation = ((torch.randn(size, 6), torch.arange(size) % 3) for size in (20, 9))
    if kind == "weighed":
        parts["weight"] = lambda target: (target > 0).sum()
    if kind == "step":
        train, validation, parts = tree(20), tree(9), {"step": step}  # type: ignore[assignment]
    torch.set_default_dtype(torch.float32)
    return weft.Workload(
        model, train, validation=validation, optimizer=lambda params: torch.optim.SGD(params, lr=0.1), **parts
    )
