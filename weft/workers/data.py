"""Data: the samples of each microbatch, in the order that the spec fixes, loaded into slots.

The order of epoch e is `torch.randperm(n, generator=torch.Generator().manual_seed(seed + e))`; a batch is a run of it,
cut by `torch.tensor_split`. Validation goes through its samples in their own order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset, TensorDataset, default_collate

from weft.division import Part
from weft.itinerary import Iteration
from weft.workers.randomness import seed_unit
from weft.workload import Workload, WorkloadError, as_dataset

LOADING = -1  # stands for the unit in the key of random numbers that a dataset draws (augmentation)


class Batches:
    """Indices and samples of every microbatch of a job."""

    def __init__(self, workload: Workload, *, seed: int) -> None:
        self._train = as_dataset(workload.train, "train")
        self._validation = None if workload.validation is None else as_dataset(workload.validation, "validation")
        self._seed = seed
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.int64)
        self.num_train = len(self._train)  # type: ignore[arg-type]  # as_dataset has checked for __len__
        self.num_validation = 0 if self._validation is None else len(self._validation)  # type: ignore[arg-type]

    def load(
        self, iteration: Iteration, part: Part, into: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(input, target) of one microbatch; written to `into`, whose shapes and dtypes must be theirs, if given."""
        indices = self._indices(iteration, part)
        dataset = self._train if iteration.training else self._validation
        assert dataset is not None
        if type(dataset) is TensorDataset and len(dataset.tensors) == 2:  # a subclass may change its items
            if into is not None:
                for tensor, slot in zip(dataset.tensors, into, strict=True):
                    _check_fits(
                        (part.size, *tensor.shape[1:]), tensor.dtype, slot
                    )  # index_select resizes what it fills
                    torch.index_select(tensor, 0, indices, out=slot)
                return into
            inputs, targets = (tensor.index_select(0, indices) for tensor in dataset.tensors)
            return inputs, targets
        seed_unit(self._seed, iteration.step, part.number, LOADING)
        pair = _collate(dataset, indices)
        if into is not None:
            for value, slot in zip(pair, into, strict=True):
                _check_fits(tuple(value.shape), value.dtype, slot)
                slot.copy_(value)
        return pair

    def _indices(self, iteration: Iteration, part: Part) -> torch.Tensor:
        start = iteration.start + part.start
        if not iteration.training:
            return torch.arange(start, start + part.size)
        if iteration.epoch != self._epoch:
            generator = torch.Generator().manual_seed(self._seed + iteration.epoch)
            self._order = torch.randperm(self.num_train, generator=generator)
            self._epoch = iteration.epoch
        return self._order[start : start + part.size]


def _check_fits(shape: tuple[int, ...], dtype: torch.dtype, slot: torch.Tensor) -> None:
    if shape != slot.shape or dtype is not slot.dtype:
        raise WorkloadError(
            f"a microbatch of the data is {shape} {dtype} and the first one was {tuple(slot.shape)} {slot.dtype}; "
            "every sample must have the same shape and dtype"
        )


def _collate(dataset: Dataset[Any], indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    samples = default_collate([dataset[index] for index in indices.tolist()])
    if not (isinstance(samples, (tuple, list)) and len(samples) == 2):
        raise WorkloadError("an item of the dataset is no (input, target) pair; make __getitem__ return two values")
    if not all(isinstance(part, torch.Tensor) for part in samples):
        raise WorkloadError("an item's input or target is no tensor or number; make __getitem__ return those")
    inputs, targets = samples
    return inputs, targets
