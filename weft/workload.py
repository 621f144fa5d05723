"""Workload: what the user's entry function returns. Plain PyTorch objects, nothing of ours inside.

The model is cut into *units*: the children of a plain `nn.Sequential`, or the whole model where it is something else.
A stage is a contiguous run of units. Units, not stages, key the random numbers, so a result does not depend on where
the planner cuts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

BatchFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class WorkloadError(Exception):
    """The user's workload cannot be trained as the spec asks. The text says what to change."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """A model and what it takes to train it.

    model: any `nn.Module`; an `nn.Sequential` can be cut between its children into stages.
    loss: (output, target) -> scalar tensor, the mean over the samples given.
    train, validation: a `TensorDataset`, a pair of tensors (inputs, targets) with equal first dimension, or any
        map-style dataset whose items are (input, target) pairs of tensors or numbers.
    optimizer: called with an iterable of parameters (those of one stage), returns a `torch.optim.Optimizer`.
    metrics: name -> (output, target) -> scalar tensor, the mean over the samples given; reported for validation.
    """

    model: nn.Module
    loss: BatchFunction
    train: Any
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    validation: Any = None
    metrics: Mapping[str, BatchFunction] = field(default_factory=dict)


def as_dataset(data: Any, field_name: str) -> Dataset[Any]:
    """A sized map-style dataset from what the user gave; raises WorkloadError that names the field."""
    if isinstance(data, (tuple, list)) and len(data) == 2 and all(isinstance(part, torch.Tensor) for part in data):
        inputs, targets = data
        if inputs.shape[:1] != targets.shape[:1]:
            raise WorkloadError(
                f"Workload.{field_name}: {tuple(inputs.shape)} inputs and {tuple(targets.shape)} targets; "
                "the first dimensions must be equal"
            )
        return TensorDataset(inputs, targets)
    if not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        raise WorkloadError(
            f"Workload.{field_name} is {type(data).__name__}; give a map-style dataset with __len__ and __getitem__, "
            "or a pair of tensors (inputs, targets)"
        )
    dataset: Dataset[Any] = data
    return dataset


def units(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """(prefix of its names in the state dict, module) for each unit, in the order in which they run."""
    if type(model).forward is nn.Sequential.forward and isinstance(model, nn.Sequential) and len(model) > 0:
        return [(f"{name}.", child) for name, child in model._modules.items() if child is not None]  # repeats too
    return [("", model)]
