"""Data: the samples of each microbatch, in the order that the spec fixes, loaded into slots.

The order of epoch e is `torch.randperm(n, generator=torch.Generator().manual_seed(seed + e))`; a batch is a run of it,
cut by `torch.tensor_split`. Validation goes through its samples in their own order.
"""

from __future__ import annotations

import torch
from torch.utils.data import TensorDataset

from weft.plan.division import Part
from weft.plan.error_places import samples_place
from weft.plan.itinerary import Iteration
from weft.workload.randomness import seed_unit
from weft.workload.samples import collate, take_samples
from weft.workload.workload import Workload, WorkloadError, as_dataset

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
        name, dataset = ("train", self._train) if iteration.training else ("validation", self._validation)
        assert dataset is not None
        if type(dataset) is TensorDataset and len(dataset.tensors) == 2:  # a subclass may change its items
            if into is not None:
                for tensor, slot in zip(dataset.tensors, into, strict=True):
                    shape = (part.size, *tensor.shape[1:])
                    _check_fits(name, indices, shape, tensor.dtype, slot)  # torch would reshape the slot
                    torch.index_select(tensor, 0, indices, out=slot)
                return into
            inputs, targets = (tensor.index_select(0, indices) for tensor in dataset.tensors)
            return inputs, targets
        seed_unit(self._seed, iteration.step, part.number, LOADING)
        numbers = indices.tolist()
        pair = collate(name, numbers, take_samples(name, dataset, numbers))
        if into is not None:
            for value, slot in zip(pair, into, strict=True):
                _check_fits(name, indices, tuple(value.shape), value.dtype, slot)
                slot.copy_(value)
        return pair

    def _indices(self, iteration: Iteration, part: Part) -> torch.Tensor:
        start = iteration.start + part.start
        if not iteration.training:
            return torch.arange(start, start + part.size)
        if iteration.epoch != self._epoch:
            self._order = _order(iteration.epoch, self.num_train, self._seed)
            self._epoch = iteration.epoch
        return self._order[start : start + part.size]


def _check_fits(
    name: str, indices: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, slot: torch.Tensor
) -> None:
    if shape != slot.shape or dtype is not slot.dtype:
        where = samples_place(name, indices.tolist())
        raise WorkloadError(
            f"{where}: a microbatch of {shape} {dtype}, and the first one was of {tuple(slot.shape)} {slot.dtype}; "
            "every sample must have the same shape and dtype"
        )


def sample_numbers(iteration: Iteration, part: Part, num_train: int, seed: int) -> torch.Tensor:
    """Which samples of the training data a microbatch has."""
    start = iteration.start + part.start
    return _order(iteration.epoch, num_train, seed)[start : start + part.size]


def _order(epoch: int, num_train: int, seed: int) -> torch.Tensor:
    return torch.randperm(num_train, generator=torch.Generator().manual_seed(seed + epoch))
