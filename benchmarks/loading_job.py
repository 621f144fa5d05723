"""The job of benchmarks/loading.py: a small net over images whose decoding costs more than training on them does.

peers/dataloader_loop.py trains the same from torch's DataLoader.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

import weft

SIZE, CLASSES = 32, 10
BLOCK = 8  # as of a JPEG


class Encoded(Dataset[tuple[torch.Tensor, int]]):
    """Blocks of coefficients, decoded by numpy as a picture is: an inverse cosine transform, colours, a resize."""

    def __init__(self, samples: int, pixels: int) -> None:
        """pixels: of a side before it is made smaller; they set what an item costs."""
        self._samples = samples
        shape = (3, pixels // BLOCK, pixels // BLOCK, BLOCK, BLOCK)
        self._coefficients = np.random.default_rng(0).integers(-64, 64, shape, dtype=np.int16)
        n = np.arange(BLOCK)
        self._basis = np.cos(np.pi * (2 * n[None] + 1) * n[:, None] / (2 * BLOCK))

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        blocks = (self._coefficients + index % 7).astype(np.float64)
        planes = np.matmul(np.matmul(self._basis.T, blocks), self._basis)
        side = planes.shape[1] * BLOCK
        image = planes.transpose(0, 1, 3, 2, 4).reshape(3, side, side)
        image = np.clip(np.einsum("cd,dhw->chw", _TO_RGB, image) + 128, 0, 255)
        small = image.reshape(3, SIZE, side // SIZE, SIZE, side // SIZE).mean(axis=(2, 4))
        return torch.from_numpy((small / 255 - 0.5).astype(np.float32)), index % CLASSES


_TO_RGB = np.array([[1.0, 0.0, 1.402], [1.0, -0.344, -0.714], [1.0, 1.772, 0.0]])


def workload(samples: int = 4096, pixels: int = 192, width: int = 8) -> weft.Workload:
    """float32 (B, 3, 32, 32) -> logits (B, 10)."""
    return weft.Workload(
        model=nn.Sequential(
            nn.Conv2d(3, width, 3, stride=2),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(49 * width, CLASSES),
        ),
        loss=nn.CrossEntropyLoss(),
        train=Encoded(samples, pixels),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    )
