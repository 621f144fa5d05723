"""Samples: items of the user's data, and what a microbatch of them makes: a pair of tensors, or any batch.

What is wrong with one is told with the data and the sample's number in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from weft.plan.error_places import IN_COLLATE, samples_place, within
from weft.workload.data.collating import collate_items
from weft.workload.data.given_batches import num_samples
from weft.workload.data.source import DataSource
from weft.workload.data.tree import Skeleton, difference, flatten, ways
from weft.workload.workload import WorkloadError, kind_of

_Check = Callable[[str, Sequence[int], Sequence[Any]], None]


def pair_of(
    source: DataSource, numbers: Sequence[int], *, counts_all: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a workload with a loss: (inputs, targets), samples first. counts_all: they are a part of a batch, and all
    of them count.

    What __getitem__ and collate raise passes, with the samples' numbers. Raises WorkloadError for what are no pairs, or
    do not go together.
    """
    items = _items(source, numbers)
    samples = _collated(source, numbers, items, _check_pairs)
    if counts_all:
        _check_all_are_in(source, numbers, items, samples)
    first = samples_place(source.field, numbers[:1])
    is_two = isinstance(samples, (tuple, list)) and len(samples) == 2
    if source.collate is not None and not (is_two and all(isinstance(part, torch.Tensor) for part in samples)):
        raise WorkloadError(f"Workload.collate returned {kind_of(samples)} and no pair of tensors (inputs, targets)")
    if not is_two:
        raise WorkloadError(
            f"{first}: the item is {kind_of(items[0])} and no (input, target) pair; make __getitem__ return two values"
        )
    if not all(isinstance(part, torch.Tensor) for part in samples):
        raise WorkloadError(f"{first}: its input or target is no tensor or number; make __getitem__ return those")
    inputs, targets = samples
    return inputs, targets


def batch_of(
    source: DataSource, numbers: Sequence[int], *, counts_all: bool = False
) -> tuple[list[torch.Tensor], Skeleton]:
    """Of a workload with a step: the tensors of the samples' batch, and the skeleton that `tree.build` puts them in.
    counts_all: as of `pair_of`.

    Errors are those of `pair_of`; WorkloadError for what no batch is made of, too.
    """
    items = _items(source, numbers)
    batch = _collated(source, numbers, items, _check_items)
    if counts_all:
        _check_all_are_in(source, numbers, items, batch)
    with within(lambda: f"in a batch of {samples_place(source.field, numbers)}"):
        return flatten(batch)


def _items(source: DataSource, numbers: Sequence[int]) -> list[Any]:
    if source.gives_several:
        return _several(source, numbers)
    items: list[Any] = []
    with within(lambda: f"in {samples_place(source.field, [numbers[len(items)]])}"):
        for number in numbers:
            items.append(source.dataset[number])  # noqa: PERF401  # what a comprehension has so far is lost with the error
    return items


def _several(source: DataSource, numbers: Sequence[int]) -> list[Any]:
    """As `__getitems__` gives them: for a collate function of the user's, which takes them as they are, anything."""
    dataset: Any = source.dataset
    with within(lambda: f"in {samples_place(source.field, numbers)}"):
        items: Any = dataset.__getitems__(list(numbers))
    if source.collate is None and not (isinstance(items, (list, tuple)) and len(items) == len(numbers)):
        what = f"{kind_of(items)} of {len(items)}" if isinstance(items, (list, tuple)) else kind_of(items)
        raise WorkloadError(
            f"Workload.{source.field}: __getitems__ of its {kind_of(dataset)} returned {what} for {len(numbers)} "
            "samples; let it return a list with an item for each"
        )
    return items  # type: ignore[no-any-return]  # of the user's


def _collated(source: DataSource, numbers: Sequence[int], items: list[Any], check: _Check) -> Any:
    """check: raises WorkloadError for the first item that differs from the first one."""
    with within(lambda: f"in a batch of {samples_place(source.field, numbers)}"):
        if source.collate is not None:
            with within(IN_COLLATE):
                return source.collate(items)
        try:
            return collate_items(items)
        except Exception:
            check(source.field, numbers, items)
            raise


def _check_all_are_in(source: DataSource, numbers: Sequence[int], items: Sequence[Any], batch: Any) -> None:
    """Raises WorkloadError where collate leaves out samples that are None: microbatches would be weighed by the samples
    that they were given."""
    if all(item is not None for item in items):
        return
    left = [item for item in items if item is not None]
    if num_samples(flatten(batch)[0]) == len(left):
        number = next(number for number, item in zip(numbers, items, strict=True) if item is None)
        raise WorkloadError(
            f"{samples_place(source.field, [number])} is None, and collate leaves it out, so this microbatch of "
            f"{len(items)} samples has {len(left)}; give Workload.weight, a function that tells how many samples a "
            "batch has, or a dataset without such samples (torch.utils.data.Subset), or use strategy.microbatches = 1 "
            "and one replica"
        )


def _check_pairs(field: str, numbers: Sequence[int], items: Sequence[Any]) -> None:
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


def _check_items(field: str, numbers: Sequence[int], items: Sequence[Any]) -> None:
    first_tensors, first = flatten(items[0], "the item")
    where = f"in sample {numbers[0]}"
    for number, item in zip(numbers, items, strict=True):
        tensors, skeleton = flatten(item, "the item")
        place = samples_place(field, [number])
        told = difference(skeleton, first, "the item", where)
        if told is not None:
            raise WorkloadError(f"{place}: {told}; every item must have the same structure, or give Workload.collate")
        if len(tensors) != len(first_tensors):  # of lists, whose length is no structure
            raise WorkloadError(
                f"{place}: the item has {len(tensors)} tensors, and {len(first_tensors)} {where}; pad them to one "
                "length in Workload.collate"
            )
        for way, tensor, other in zip(ways(skeleton), tensors, first_tensors, strict=True):
            if tensor.shape != other.shape:
                raise WorkloadError(
                    f"{place}: the item{way} has shape {tuple(tensor.shape)}, and {tuple(other.shape)} {where}; pad "
                    "them to one shape in Workload.collate"
                )
