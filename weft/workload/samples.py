"""Samples: items of the user's data set, and the (input, target) tensors that a microbatch of them makes.

What is wrong with one is told with the data set and the sample's number in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, default_collate

from weft.plan.error_places import add_place, samples_place, within
from weft.workload.workload import WorkloadError, kind_of


def take_samples(field: str, dataset: Dataset[Any], numbers: Sequence[int]) -> list[Any]:
    """field: the Workload's that has the data set. What __getitem__ raises passes, with the sample's number."""
    items: list[Any] = []
    with within(lambda: f"in {samples_place(field, [numbers[len(items)]])}"):
        for number in numbers:
            items.append(dataset[number])  # noqa: PERF401  # what a comprehension has so far is lost with the error
    return items


def collate(field: str, numbers: Sequence[int], items: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """(inputs, targets), samples first. Raises WorkloadError for what are no pairs, or do not go together."""
    try:
        samples = default_collate(list(items))
    except Exception as error:
        _check_alike(field, numbers, items)
        add_place(error, f"in a batch of {samples_place(field, numbers)}")
        raise
    first = samples_place(field, numbers[:1])
    if not (isinstance(samples, (tuple, list)) and len(samples) == 2):
        raise WorkloadError(
            f"{first}: the item is {kind_of(items[0])} and no (input, target) pair; make __getitem__ return two values"
        )
    if not all(isinstance(part, torch.Tensor) for part in samples):
        raise WorkloadError(f"{first}: its input or target is no tensor or number; make __getitem__ return those")
    inputs, targets = samples
    return inputs, targets


def _check_alike(field: str, numbers: Sequence[int], items: Sequence[Any]) -> None:
    """Raises WorkloadError for the first item that differs from the one before it all."""
    for number, item in zip(numbers, items, strict=True):
        here, there = _described_item(item), _described_item(items[0])
        if here != there:
            raise WorkloadError(
                f"{samples_place(field, [number])}: {here}, and sample {numbers[0]} is {there}; every sample must have "
                "the same shape and dtype"
            )


def _described_item(item: Any) -> str:
    return f"({', '.join(map(described, item))})" if isinstance(item, (tuple, list)) else described(item)


def described(value: Any) -> str:
    """For whoever made it: the shape and dtype of a tensor or array, the kind of anything else."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return f"shape {tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return kind_of(value)
