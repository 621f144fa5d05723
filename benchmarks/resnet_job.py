"""The other job of benchmarks/any_model.py: ResNet-18 (He et al., 2016) for images of 64 × 64, as an
`nn.Sequential` and as a class whose forward calls the same parts."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

import weft

WIDTHS = (1, 1, 2, 4, 8)  # times that of the stem; 64 in the paper
CLASSES = 100


class Block(nn.Module):
    """float32 (N, C, H, W) -> (N, D, H ÷ stride, W ÷ stride)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


class OwnForward(nn.Module):
    def __init__(self, parts: nn.Sequential) -> None:
        super().__init__()
        stem, *blocks, head = parts
        self.stem, self.blocks, self.head = stem, nn.ModuleList(blocks), head

    def forward(self, images: torch.Tensor) -> Any:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def workload(samples: int, width: int) -> weft.Workload:
    """Inputs are float32 (samples, 3, 64, 64), targets int64 (samples,)."""
    widths = [width * times for times in WIDTHS]
    stem = nn.Sequential(nn.Conv2d(3, widths[0], 7, 2, 3, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU())
    stem.append(nn.MaxPool2d(3, 2, 1))
    blocks = [
        Block(widths[number - 1] if first else widths[number], widths[number], 2 if first and number > 1 else 1)
        for number in range(1, 5)
        for first in (True, False)
    ]
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], CLASSES))
    data = torch.rand(samples, 3, 64, 64), torch.randint(CLASSES, (samples,))
    return weft.Workload(
        nn.Sequential(stem, *blocks, head),
        data,
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    )


def own_forward(samples: int, width: int) -> weft.Workload:
    made = workload(samples, width)
    assert isinstance(made.model, nn.Sequential)
    return dataclasses.replace(made, model=OwnForward(made.model))
