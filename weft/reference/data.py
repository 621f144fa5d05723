"""The oracle's data: the user's samples, and a batch of them in microbatches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import TensorDataset

from weft.plan.error_places import samples_place, within
from weft.spec.job_spec import JobSection
from weft.workload.data.collating import collate_items
from weft.workload.data.datasets import Field, Tensors
from weft.workload.data.given_batches import counted, divided, run_in, samples_in
from weft.workload.data.source import DataSource, source_of_job
from weft.workload.data.tree import build, flatten, with_tensors
from weft.workload.workload import Workload, WorkloadError


@dataclass(frozen=True, kw_only=True, slots=True)
class Microbatch:
    replica: int  # that trains on it
    number: int  # in the batch, over all replicas; it keys random numbers
    weight: float  # what it counts: its samples, or what the user's `Workload.weight` says
    count: int  # how many samples it adds to the batch
    batch: Any  # of a workload with a loss (inputs, targets), samples first
    samples: torch.Tensor  # their numbers in the data


@dataclass(frozen=True, slots=True)
class Batch:
    microbatches: list[Microbatch]  # those with samples, in the order of their numbers
    weight: float  # theirs together

    @property
    def count(self) -> int:
        return sum(microbatch.count for microbatch in self.microbatches)

    def fraction(self, microbatch: Microbatch) -> float:
        """The microbatch's part in the batch's loss and gradient; 0 for each one of a batch that counts nothing."""
        return microbatch.weight / self.weight if microbatch.weight else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """The user's training or validation data."""

    source: DataSource
    pairs: bool  # whether they are for a loss of (output, target)

    @classmethod
    def of(cls, workload: Workload, field: Field, job: JobSection) -> Data:
        source = source_of_job(workload, field, job)
        if source.size == 0:
            raise WorkloadError(f"Workload.{field} has no samples; give a dataset of at least one")
        return cls(source=source, pairs=workload.step is None)

    @property
    def size(self) -> int:
        """Samples of an epoch, at least one; of batches that the user makes their places."""
        return (self.source.epoch_size or self.source.size) * self.source.places

    def batch(self, order: torch.Tensor) -> tuple[Any, int, int]:
        """order: a part of an epoch's. Its samples together, as a step sees them, for a loss (inputs, targets); how
        many of them count; and how many they are for whoever is told."""
        batch = self._batch(self.source.samples(order))
        if not self.source.is_ready:
            return batch, self.source.count(order), self.source.count(order)
        whole, run = flatten(batch), run_in(order, self.source.places)[1]
        tensors, skeleton = divided(whole, run, self.source.field)
        return build(skeleton, tensors), counted(whole[0], run), samples_in(whole[0], run)

    def _batch(self, indices: torch.Tensor) -> Any:
        parts = self._collated(indices)
        if not self.pairs:
            with within(f"in a batch of {samples_place(self.source.field, indices.tolist())}"):
                return with_tensors(parts, lambda tensor: tensor)
        if not (isinstance(parts, (list, tuple)) and len(parts) == 2 and all(map(torch.is_tensor, parts))):
            raise WorkloadError(
                f"Workload.{self.source.field}: its items are not (input, target) pairs of tensors or numbers; "
                "return exactly these two from __getitem__"
            )
        return tuple(parts)

    def _collated(self, indices: torch.Tensor) -> Any:
        dataset, collate = self.source.dataset, self.source.collate
        if isinstance(dataset, Tensors) and collate is None:
            return dataset.rows(indices)
        if type(dataset) is TensorDataset and collate is None:
            return [tensor.index_select(0, indices) for tensor in dataset.tensors]
        items = self._items(indices.tolist())
        with within(f"in a batch of {samples_place(self.source.field, indices.tolist())}"):
            return (collate or collate_items)(items)

    def _items(self, numbers: list[int]) -> Any:
        dataset: Any = self.source.dataset
        if self.source.gives_several:
            with within(f"in {samples_place(self.source.field, numbers)}"):
                return dataset.__getitems__(numbers)
        items: list[Any] = []
        for number in numbers:
            with within(f"in sample {number} of Workload.{self.source.field}"):
                items.append(dataset[number])
        return items


def split(indices: torch.Tensor, size: int) -> tuple[torch.Tensor, ...]:
    """Batches of `size` indices; the last one has what is left."""
    return tuple(indices[start : start + size] for start in range(0, len(indices), size))
