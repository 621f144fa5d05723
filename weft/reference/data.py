"""The oracle's data: the user's samples, and a batch of them in microbatches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Dataset, TensorDataset, default_collate

from weft.plan.error_places import samples_place, within
from weft.workload.workload import WorkloadError, as_dataset


@dataclass(frozen=True, kw_only=True, slots=True)
class Microbatch:
    replica: int  # that trains on it
    number: int  # in the batch, over all replicas; it keys random numbers
    weight: float  # what it counts: its samples, or what the user's `Workload.weight` says
    inputs: torch.Tensor  # samples first
    targets: torch.Tensor
    samples: torch.Tensor  # their numbers in the data


@dataclass(frozen=True, slots=True)
class Batch:
    microbatches: list[Microbatch]  # those with samples, in the order of their numbers
    weight: float  # theirs together

    def fraction(self, microbatch: Microbatch) -> float:
        """The microbatch's part in the batch's loss and gradient; 0 for each one of a batch that counts nothing."""
        return microbatch.weight / self.weight if microbatch.weight else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """The user's training or validation data."""

    dataset: Dataset[Any]
    size: int  # samples, at least one
    field_name: str  # the Workload's, for errors

    @classmethod
    def of(cls, data: Any, field_name: str) -> Data:
        dataset: Any = as_dataset(data, field_name)
        if len(dataset) == 0:
            raise WorkloadError(f"Workload.{field_name} has no samples; give a dataset of at least one")
        return cls(dataset=dataset, size=len(dataset), field_name=field_name)

    def samples(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(inputs, targets) with the samples along the first dimension."""
        if type(self.dataset) is TensorDataset:
            parts: Any = [tensor[indices].contiguous() for tensor in self.dataset.tensors]
        else:
            items: list[Any] = []
            for index in indices.tolist():
                with within(f"in sample {index} of Workload.{self.field_name}"):
                    items.append(self.dataset[index])
            with within(f"in a batch of {samples_place(self.field_name, indices.tolist())}"):
                parts = default_collate(items)
        if not (isinstance(parts, (list, tuple)) and len(parts) == 2 and all(map(torch.is_tensor, parts))):
            raise WorkloadError(
                f"Workload.{self.field_name}: its items are not (input, target) pairs of tensors or numbers; "
                "return exactly these two from __getitem__"
            )
        return parts[0], parts[1]


def split(indices: torch.Tensor, size: int) -> tuple[torch.Tensor, ...]:
    """Batches of `size` indices; the last one has what is left."""
    return tuple(indices[start : start + size] for start in range(0, len(indices), size))
