"""Batches that a `batch_sampler` of the user's makes, each of as many samples as it likes.

A job counts in batches of one size, so each of these has `job.batch_size` places, and a microbatch is a run of them.
Before place p of B stand the first n * p // B of its n samples: a batch of B has one at each place, a larger one
several at some, and of a smaller one a short run may have none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch.utils.data import BatchSampler, DataLoader

from weft.workload.workload import Workload, WorkloadError, kind_of

PASSES_TRIED: Final = 2  # before training


class _Pass(NamedTuple):
    samples: torch.Tensor  # int64: the numbers of all samples, batch by batch
    ends: torch.Tensor  # int64: before each place, and behind the last one, how many of these there are
    sizes: list[int]  # of the batches


def own_batches(data: object) -> Any:
    """The `batch_sampler` that is not torch's own; None of all other data."""
    sampler = data.batch_sampler if isinstance(data, DataLoader) else None
    return None if type(sampler) is BatchSampler else sampler


def is_weighed(workload: Workload) -> bool:
    """Whether a microbatch counts something else than its places. With a loss, batches are of one size."""
    if workload.weight is not None or workload.step is None:
        return workload.weight is not None
    return any(own_batches(data) is not None for data in (workload.train, workload.validation))


class GivenBatches:
    """Of the passes over the data that have been drawn, which samples stand at their places. These are counted over all
    passes, one behind another."""

    def __init__(self, sampler: Any, field: str, *, batch_size: int, num_batches: int, varies: bool) -> None:
        """batch_size: the job's. num_batches: of a pass. varies: whether they may be of other sizes."""
        self.batch_size, self.num_batches = batch_size, num_batches
        self._field, self._varies = field, varies
        self._what = f"Workload.{field}: its batch_sampler, a {kind_of(sampler)},"
        self._passes: dict[int, _Pass] = {}

    def draw(self, number: int, batches: Sequence[Any], expected: int) -> torch.Tensor:
        """batches: what the sampler gave for a pass, of which so many are expected. Returns their places, int64. Raises
        WorkloadError for what are no batches, and for another number of them."""
        if len(batches) != expected:
            raise WorkloadError(
                f"{self._what} gave {len(batches)} batches for epoch {number}, and its length, or what job.steps need, "
                f"is {expected}; let its __len__ tell how many it gives, as many in each epoch: make the batches once, "
                "and go through them in another order"
            )
        sizes = [self._size(each, number, place) for place, each in enumerate(batches)]
        places = torch.arange(self.batch_size)
        before = torch.tensor([0, *sizes]).cumsum(0)
        ends = torch.cat([begin + size * places // self.batch_size for begin, size in zip(before, sizes, strict=False)])
        numbers = [int(sample) for batch in batches for sample in batch]
        self._passes[number] = _Pass(torch.tensor(numbers), torch.cat([ends, before[-1:]]), sizes)
        return torch.arange(len(ends)) + number * self.num_batches * self.batch_size

    def _size(self, batch: Any, number: int, place: int) -> int:
        of_what = f"batch {place} of epoch {number}"
        if not isinstance(batch, (Sequence, torch.Tensor)) or not all(hasattr(each, "__index__") for each in batch):
            raise WorkloadError(f"{self._what} gave {kind_of(batch)} as {of_what}; let it give lists of sample numbers")
        if len(batch) == 0:
            raise WorkloadError(f"{self._what} gave no sample in {of_what}; let it leave out what is empty")
        if not self._varies and len(batch) != self.batch_size:
            raise WorkloadError(
                f"{self._what} gave {len(batch)} samples in {of_what}, and job.batch_size is {self.batch_size}; with a "
                "loss all batches have as many: leave out smaller ones, or give Workload.step, with which they may vary"
            )
        return len(batch)

    def check_size(self, number: int) -> None:
        """Raises WorkloadError where no batch of the pass is about as large as the job says."""
        sizes = self._passes[number].sizes
        if not min(sizes) <= self.batch_size <= max(sizes):
            mean = round(sum(sizes) / len(sizes))
            of_what = f"{sizes[0]}" if min(sizes) == max(sizes) else f"{min(sizes)} to {max(sizes)}"
            raise WorkloadError(
                f"{self._what} gives batches of {of_what} samples, and job.batch_size is {self.batch_size}; give "
                f"job.batch_size = {mean}, what they have on average"
            )

    def forget(self, before: int) -> None:
        """The passes with smaller numbers, until they are drawn again."""
        for number in [number for number in self._passes if number < before]:
            del self._passes[number]

    def drawn(self, number: int) -> tuple[list[int], list[int]]:
        """Of a pass all samples, and the sizes of its batches."""
        drawn = self._passes[number]
        return drawn.samples.tolist(), drawn.sizes

    def samples(self, places: torch.Tensor) -> torch.Tensor:
        """places: a run of them in one pass, int64. Of a run that has no sample the next one, which counts nothing."""
        drawn, first, end = self._run(places)
        return drawn.samples[first : max(end, first + 1)]

    def count(self, places: torch.Tensor) -> int:
        """Samples that count at a run of places."""
        _, first, end = self._run(places)
        return end - first

    def _run(self, places: torch.Tensor) -> tuple[_Pass, int, int]:
        number, place = divmod(int(places[0]), self.num_batches * self.batch_size)
        drawn = self._passes[number]
        return drawn, int(drawn.ends[place]), int(drawn.ends[place + len(places)])
