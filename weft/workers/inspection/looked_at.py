"""Looked at: the batches that an inspection loads, of each size, for a model that is cut by its own forward.

Where samples differ in length so do batches of one size. Memory is planned for the largest of a few, and slots grow
where a larger one comes; times are planned for one between the smallest and the largest of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

import torch

from weft.plan.division import Part
from weft.workers.inspection.ran import first_batch
from weft.workers.inspection.times import loaded
from weft.workers.memory.packing import num_packed_bytes
from weft.workload.data.batches import Batches
from weft.workload.data.tree import Skeleton

NUM_OF_LARGEST = 3  # batches of the largest size: arbitrary; each costs what it takes to load

_Batch = tuple[list[torch.Tensor], Skeleton]


@dataclass(frozen=True, slots=True, kw_only=True)
class LookedAt:
    trained: Mapping[int, _Batch]  # by size; the largest that was seen
    held_out: Mapping[int, _Batch]
    least: _Batch | None  # the smallest of the largest size, where its batches are not alike
    others: tuple[_Batch | None, _Batch | None]  # one more of the largest size, trained and held out, if there is one
    between: float  # how far the mean of these is from the smallest, as a part of the way to the largest
    load_seconds: float  # of one that has as many samples as places
    varying_shapes: tuple[tuple[int, ...], ...]  # of one tensor, in batches of one size; none where all are alike

    @classmethod
    def of(cls, batches: Batches, sizes: Sequence[int]) -> LookedAt:
        trained: dict[int, list[_Batch]] = {}
        load_seconds = 0.0
        for size in sizes:
            iteration, part = first_batch(size, training=size <= batches.num_train)
            first, seconds = loaded(batches.anew(partial(batches.batch, iteration, part)), again=not batches.streams)
            trained[size] = [first]
            load_seconds += seconds * batches.part_of_loaded(iteration, part) / len(sizes)
        held_out = {
            size: [batches.batch(*first_batch(size, training=False))]
            for size in sizes
            if size <= batches.num_validation
        }
        for found, training in ((trained, max(sizes) <= batches.num_train), (held_out, False)):
            if found:
                found[max(found)] += _others(batches, max(found), training=training)
        sizes_of_largest = [_num_bytes(batch) for batch in trained[max(trained)]]
        way = max(sizes_of_largest) - min(sizes_of_largest)
        return cls(
            least=min(trained[max(trained)], key=_num_bytes) if way else None,
            others=(_last(trained), _last(held_out)),
            between=(fmean(sizes_of_largest) - min(sizes_of_largest)) / way if way else 1.0,
            trained={size: max(found, key=_num_bytes) for size, found in trained.items()},
            held_out={size: max(found, key=_num_bytes) for size, found in held_out.items()},
            load_seconds=load_seconds,
            varying_shapes=_varying(trained[size] + held_out.get(size, []) for size in reversed(sizes)),
        )

    def num_bytes(self) -> int:
        """Of the largest, packed."""
        return max(map(_num_bytes, (*self.trained.values(), *self.held_out.values())))


def _others(batches: Batches, size: int, *, training: bool) -> list[_Batch]:
    """The next after the first one of so many samples, as many as there are."""
    iteration, _ = first_batch(size, training=training)
    count = min(NUM_OF_LARGEST, (batches.num_train if training else batches.num_validation) // size)
    found: list[_Batch] = []
    with contextlib.suppress(Exception):  # what is wrong with a later sample is told when its turn comes
        found.extend(batches.batch(iteration, Part(number, number * size, size)) for number in range(1, count))
    return found


def _last(found: Mapping[int, Sequence[_Batch]]) -> _Batch | None:
    """Of several of the largest size."""
    largest = found[max(found)] if found else ()
    return largest[-1] if len(largest) > 1 else None


def _num_bytes(batch: _Batch) -> int:
    return num_packed_bytes(*batch)


def _varying(found: Iterable[Sequence[_Batch]]) -> tuple[tuple[int, ...], ...]:
    """found: batches of one size each, the largest size first."""
    return next((shapes for batches in found for shapes in _shapes_of_each(batches) if len(shapes) > 1), ())


def _shapes_of_each(batches: Sequence[_Batch]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Of each tensor, those that it has in any of the batches."""
    for same in zip(*(tensors for tensors, _ in batches), strict=False):
        yield tuple(dict.fromkeys(tuple(tensor.shape) for tensor in same))
