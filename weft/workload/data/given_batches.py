"""Batches that the user makes, each of as many samples as it likes: those that a `batch_sampler` gives, and items of a
dataset that are batches already (a DataLoader with `batch_size = None`).

A job counts in batches of one size, so each of these has `job.batch_size` places, and a microbatch is a run of them.
Before place p of B stand the first n * p // B of its n samples: a batch of B has one at each place, a larger one
several at some, and of a smaller one a short run may have none. Such a run gets the next sample, which counts nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader

from weft.workload.data.sampler import checked_rows
from weft.workload.data.tree import Skeleton, build, flatten, part_of
from weft.workload.workload import Workload, WorkloadError, kind_of

PASSES_TRIED: Final = 2  # before training
READY_TRIED: Final = 4  # batches that are ready, likewise; arbitrary


class PlaceRun(NamedTuple):
    """Of the places of one batch."""

    first: int
    end: int
    places: int  # of the batch

    @property
    def is_whole(self) -> bool:
        return self.end - self.first == self.places

    def rows(self, num_samples: int) -> slice:
        """Which of the batch's samples stand there; at least one."""
        start = num_samples * self.first // self.places
        return slice(start, max(start + 1, num_samples * self.end // self.places))

    def count(self, num_samples: int) -> int:
        """How many of them count."""
        return num_samples * self.end // self.places - num_samples * self.first // self.places


def run_in(order: torch.Tensor, places: int) -> tuple[int, PlaceRun]:
    """order: a run of places, counted over all batches, each of which has so many. The number of the batch in which it
    begins, and what it has of that."""
    number, first = divmod(int(order[0]), places)
    return number, PlaceRun(first, min(places, first + len(order)), places)


def makes_batches(data: object) -> bool:
    """Whether it is a DataLoader whose batches are the user's."""
    return isinstance(data, DataLoader) and type(data.batch_sampler) is not BatchSampler


def is_weighed(workload: Workload) -> bool:
    """Whether a microbatch counts something else than its places. With a loss, batches are of one size."""
    if workload.weight is not None or workload.step is None:
        return workload.weight is not None
    return makes_batches(workload.train) or makes_batches(workload.validation)


def check_sizes(what: str, sizes: Sequence[int], batch_size: int) -> None:
    """batch_size: the job's. Raises WorkloadError where no batch is about as large. what: gives them, for the error."""
    if not min(sizes) <= batch_size <= max(sizes):
        mean = round(sum(sizes) / len(sizes))
        of_what = f"{mean}" if min(sizes) == max(sizes) else f"{min(sizes)} to {max(sizes)}"
        raise WorkloadError(
            f"{what} gives batches of {of_what} samples, and job.batch_size is {batch_size}; give "
            f"job.batch_size = {mean}, what they have on average"
        )


def as_given(batch: Any) -> Any:
    """What a sampler gives as a batch, as a list, where it can be gone through. It is taken before the next is asked
    for, as a DataLoader takes it: a sampler may fill one list, or one array, again for each batch."""
    if isinstance(batch, (torch.Tensor, np.ndarray)):
        return batch.tolist()
    return list(batch) if isinstance(batch, Iterable) and not isinstance(batch, str) else batch


class GivenBatches:
    """Of a `batch_sampler`: what it gave for the passes over the data that have been drawn. Batches are counted over
    all passes, one behind another."""

    def __init__(
        self, sampler: Any, field: str, *, places: int, num_batches: int, num_rows: int | None, varies: bool
    ) -> None:
        """places: the job's batch size. num_batches: of a pass. num_rows: as of `checked_rows`. varies: whether they
        may be of other sizes."""
        self._places, self._num_batches, self._varies = places, num_batches, varies
        self._num_rows = num_rows
        self._what = f"Workload.{field}: its batch_sampler, a {kind_of(sampler)},"
        self._passes: dict[int, list[list[int]]] = {}

    def draw(self, number: int, batches: Sequence[Any], expected: int) -> torch.Tensor:
        """batches: what the sampler gave for a pass, of which so many are expected. Returns their numbers, int64.
        Raises WorkloadError for what are no batches, and for another number of them."""
        if len(batches) != expected:
            raise WorkloadError(
                f"{self._what} gave {len(batches)} batches for epoch {number}, and its length, or what job.steps need, "
                f"is {expected}; let its __len__ tell how many it gives, as many in each epoch: make the batches once, "
                "and go through them in another order"
            )
        self._passes[number] = [self._numbers(batch, f"batch {n} of epoch {number}") for n, batch in enumerate(batches)]
        return torch.arange(expected) + number * self._num_batches

    def _numbers(self, batch: Any, which: str) -> list[int]:
        if not isinstance(batch, list) or not all(hasattr(each, "__index__") for each in batch):
            raise WorkloadError(f"{self._what} gave {kind_of(batch)} as {which}; let it give lists of sample numbers")
        if len(batch) == 0:
            raise WorkloadError(f"{self._what} gave no sample in {which}; let it leave out what is empty")
        if not self._varies and len(batch) != self._places:
            raise WorkloadError(
                f"{self._what} gave {len(batch)} samples in {which}, and job.batch_size is {self._places}; with a loss "
                "all batches have as many: leave out smaller ones, or give Workload.step, with which they may vary"
            )
        numbers = torch.tensor([int(each) for each in batch], dtype=torch.int64)
        rows: list[int] = checked_rows(numbers, self._num_rows, self._what).tolist()
        return rows

    def check_sizes(self, number: int) -> None:
        """Raises WorkloadError where no batch of the pass is about as large as the job says."""
        check_sizes(self._what, self.sizes(number), self._places)

    def sizes(self, number: int) -> list[int]:
        """Of the batches of a pass."""
        return [len(batch) for batch in self._passes[number]]

    def drawn(self, number: int) -> list[list[int]]:
        return self._passes[number]

    def forget(self, before: int) -> None:
        """The passes with smaller numbers, until they are drawn again."""
        for number in [number for number in self._passes if number < before]:
            del self._passes[number]

    def samples(self, order: torch.Tensor) -> torch.Tensor:
        """order: as of `run_in`. int64."""
        batch, run = self._run(order)
        return torch.tensor(batch[run.rows(len(batch))])

    def count(self, order: torch.Tensor) -> int:
        """How many of them count."""
        batch, run = self._run(order)
        return run.count(len(batch))

    def _run(self, order: torch.Tensor) -> tuple[list[int], PlaceRun]:
        number, run = run_in(order, self._places)
        return self._passes[number // self._num_batches][number % self._num_batches], run


# --- batches that are ready

Parts = tuple[list[torch.Tensor], Skeleton]  # as of `tree.flatten`


def num_samples(tensors: Sequence[torch.Tensor]) -> int | None:
    """Along the first dimension, which all that have any share; None where they do not."""
    lengths = {len(tensor) for tensor in tensors if tensor.dim()}
    return lengths.pop() if len(lengths) == 1 else None


def counted(tensors: Sequence[torch.Tensor], run: PlaceRun) -> int:
    """What a run of a ready batch counts. One that cannot be divided counts as one."""
    found = num_samples(tensors)
    return int(run.is_whole) if found is None else run.count(found)


def samples_in(tensors: Sequence[torch.Tensor], run: PlaceRun) -> int:
    """As many for whoever is told of samples. What cannot be divided has as many as the job says."""
    found = num_samples(tensors)
    return run.end - run.first if found is None else run.count(found)


def divided(batch: Parts, run: PlaceRun, field: str) -> Parts:
    """What a ready batch has at a run of its places. Raises WorkloadError for one that cannot be divided."""
    tensors, skeleton = batch
    if run.is_whole:
        return batch
    found = num_samples(tensors)
    if not found:
        raise _undivided(field, f"tensors of shapes {', '.join(str(tuple(tensor.shape)) for tensor in tensors)}")
    rows = run.rows(found)
    try:
        part = part_of(skeleton, tensors, found, rows)
    except WorkloadError as error:
        raise _undivided(field, f"{error}, beside tensors of {found} samples") from None
    parted = [tensor[rows] if tensor.dim() else tensor for tensor in tensors]
    return flatten(build(part, parted))


def _undivided(field: str, what: str) -> WorkloadError:
    return WorkloadError(
        f"Workload.{field}: its DataLoader has batch_size = None, and a batch of it, {what}, cannot be divided into "
        "microbatches: let all of its tensors have the samples along the first dimension, let the dataset give single "
        "samples, or use strategy.microbatches = 1 and one replica"
    )
