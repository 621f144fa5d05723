"""A small network on 1,797 real handwritten digits of 8 x 8 pixels, which come with scikit-learn: no download."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits  # type: ignore[import-untyped]  # scikit-learn ships no annotations
from torch import nn

import weft

HELD_OUT = 0.2  # of the samples
SPLIT_SEED = 0  # the split is part of the data: the same whatever the job's seed


def workload(hidden: int = 256, learning_rate: float = 1e-3) -> weft.Workload:
    """An MLP of five units, two hidden layers of `hidden`; accuracy is measured on the held-out fifth."""
    inputs, targets = _digits()
    num_train = len(inputs) - round(HELD_OUT * len(inputs))
    return weft.Workload(
        model=nn.Sequential(
            nn.Linear(64, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, 10),
        ),
        loss=nn.CrossEntropyLoss(),
        train=(inputs[:num_train], targets[:num_train]),
        validation=(inputs[num_train:], targets[num_train:]),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=learning_rate),
        metrics={"accuracy": accuracy},
    )


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The share of samples whose largest output is the target's."""
    return (output.argmax(dim=1) == target).float().mean()


def _digits() -> tuple[torch.Tensor, torch.Tensor]:
    """(1797, 64) float32 in 0 to 1 and (1797,) int64, shuffled: unshuffled, the last fifth is of other writers."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SPLIT_SEED))
    inputs = torch.as_tensor(images, dtype=torch.float32) / 16
    return inputs[order], torch.as_tensor(labels, dtype=torch.int64)[order]
