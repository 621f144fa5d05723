"""Batches: the samples of each microbatch, in the order that the spec fixes, loaded into slots.

The order of an epoch is its source's (`source.py`); a batch is a run of it, cut by `torch.tensor_split`. Where the user
makes the batches it is an order of their places (`given_batches.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Self, TypeVar

import torch
from torch.utils.data import TensorDataset

from weft.plan.division import Part
from weft.plan.error_places import samples_place
from weft.plan.itinerary import Iteration
from weft.spec.job_spec import JobSection
from weft.workload.data.given_batches import (
    PASSES_TRIED,
    READY_TRIED,
    Parts,
    PlaceRun,
    check_sizes,
    counted,
    divided,
    num_samples,
    run_in,
    samples_in,
)
from weft.workload.data.samples import batch_of, pair_of
from weft.workload.data.source import DataSource, source_of
from weft.workload.data.stream import ItemStream
from weft.workload.data.tree import Skeleton, build, difference, flatten
from weft.workload.randomness import seed_loading
from weft.workload.workload import Workload, WorkloadError, kind_of, weight_of

_Loaded = TypeVar("_Loaded")


class Batches:
    """Indices and samples of every microbatch of a job."""

    def __init__(
        self,
        workload: Workload,
        *,
        seed: int,
        batch_size: int | None = None,
        steps: int | None = None,
        steps_per_epoch: int | None = None,
    ) -> None:
        """batch_size and what follows it: the job's; without a batch size a DataLoader's own and its drop_last do not
        matter."""
        self._train = source_of(workload, "train", batch_size=batch_size, steps=steps, steps_per_epoch=steps_per_epoch)
        self._validation: DataSource | None = None
        if workload.validation is not None:
            self._validation = source_of(workload, "validation", batch_size=batch_size)
        self._seed = seed
        self._weight, self._is_pair = workload.weight, workload.step is None
        self._orders: dict[str, tuple[int, torch.Tensor]] = {}  # by field: an epoch, and the order of its samples
        self._structures: dict[str, Skeleton] = {}  # by field: of the first batch
        self._wholes = {source.field: source.whole for source in self.sources().values()}
        self._ready: dict[str, tuple[tuple[int, int], Parts]] = {}  # by field: of which iteration, which ready batch
        self.num_train = self._train.num_places
        self.num_validation = 0 if self._validation is None else self._validation.num_places

    @classmethod
    def of_job(cls, workload: Workload, job: JobSection) -> Self:
        """Errors: WorkloadError."""
        return cls(
            workload,
            seed=job.seed,
            batch_size=job.batch_size,
            steps=job.given_steps,
            steps_per_epoch=job.steps_per_epoch,
        )

    @property
    def streams(self) -> list[str]:
        """The fields of the workload whose items are drawn one after another."""
        return [source.field for source in self.sources().values() if isinstance(source.dataset, ItemStream)]

    @property
    def are_endless(self) -> bool:
        """Whether training draws from a stream, or by a sampler, without a length."""
        return self._train.is_endless

    def sources(self) -> dict[bool, DataSource]:
        """By whether they are for training."""
        return {True: self._train} | ({} if self._validation is None else {False: self._validation})

    def rewind(self) -> None:
        """What comes next may be any iteration: a stream begins its epoch again."""
        self._orders.clear()
        self._ready.clear()
        for source in self.sources().values():
            source.rewind()

    def order(self, iteration: Iteration) -> torch.Tensor:
        """The samples of its epoch, by their numbers in the data; the same tensor for all of the epoch."""
        source = self._source(iteration)
        epoch, order = self._orders.get(source.field, (-1, torch.empty(0)))
        if iteration.epoch != epoch:
            order = source.order(iteration.epoch, self._seed)
            self._orders[source.field] = iteration.epoch, order
        return order

    def check_sources(self, num_loaders: int = 1) -> None:
        """Raises WorkloadError for a stream that would give other items to whoever goes on with the job, for what a
        batch_sampler gives, batches that are none, or not of the size that the job says, and for a sampler that would
        not tell every loader the same."""
        for source in self.sources().values():
            if isinstance(source.dataset, ItemStream):
                source.dataset.check_begins_again()
            trains = source.field == "train"
            if source.batches is not None:
                for number in range(PASSES_TRIED if trains and not source.is_endless else 1):
                    source.order_of_pass(number, self._seed)
                if trains:
                    source.batches.check_sizes(0)
            elif source.is_ready and trains and not self._is_pair:
                self._check_first_sizes(source)
        for sampler in self.shifting() if num_loaders > 1 else ():
            raise WorkloadError(
                f"{sampler}, gave two orders when it was asked twice for epoch 0, and with strategy.loaders above 1 "
                "each loader asks it; let it draw by torch's generator alone, or use loaders = 1"
            )

    def _check_first_sizes(self, source: DataSource) -> None:
        sizes, places = list[int](), source.places
        with contextlib.suppress(Exception):  # what the user's code raises is told where the job itself loads it
            for start in range(0, min(READY_TRIED, source.size) * places, places):
                first = Iteration(index=0, training=True, epoch=0, step=0, start=start, size=places)
                (tensors, _), _ = self._whole(source, first, Part(0, 0, places))
                sizes.append(num_samples(tensors) or places)
        self.rewind()
        if sizes:
            check_sizes(f"Workload.{source.field}: its DataLoader with batch_size = None", sizes, places)

    def shifting(self) -> list[str]:
        """The samplers that give another order when they are asked again for an epoch, with the workload's field."""
        return [
            f"Workload.{source.field}: its sampler, a {kind_of(source.sampler)}"
            for source in self.sources().values()
            if source.sampler is not None and not source.keeps_its_order(self._seed)
        ]

    def weight(self, iteration: Iteration, part: Part, batch: Any) -> float:
        """What a microbatch counts in its batch. batch: what has been loaded. Raises WorkloadError for what
        `Workload.weight` returns."""
        source = self._source(iteration)
        if source.is_ready:
            (tensors, _), run = self._whole(source, iteration, part)
            count = counted(tensors, run)
        else:
            count = source.count(run_of(self.order(iteration), iteration, part))
        if self._weight is None or not count:
            return count
        return weight_of(batch[1] if self._is_pair else batch, self._weight)

    def count(self, iteration: Iteration, part: Part) -> int:
        """How many samples a microbatch adds to its batch; of a ready one that has none, as many as the job says."""
        source = self._source(iteration)
        if not source.is_ready:
            return source.count(run_of(self.order(iteration), iteration, part))
        (tensors, _), run = self._whole(source, iteration, part)
        return samples_in(tensors, run)

    def part_of_loaded(self, iteration: Iteration, part: Part) -> float:
        """Its places over the samples that are loaded for it: of a batch that is ready all, of others its own. So it is
        1 where the job makes the batches; what the user's take times this is what one takes that has average ones."""
        source = self._source(iteration)
        if not source.is_ready:
            return part.size / max(1, self.count(iteration, part))
        (tensors, _), _ = self._whole(source, iteration, part)
        return part.size / (num_samples(tensors) or source.places)

    def anew(self, load: Callable[[], _Loaded]) -> Callable[[], _Loaded]:
        """load, and not a part of the batch that was loaded last, where that can be loaded twice."""

        def loading() -> _Loaded:
            if not self.streams:
                self._ready.clear()
            return load()

        return loading

    def load(
        self, iteration: Iteration, part: Part, into: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(input, target) of one microbatch; written to `into`, whose shapes and dtypes must be theirs, if given."""
        source = self._source(iteration)
        indices = self._indices(iteration, part)
        dataset = source.dataset
        if type(dataset) is TensorDataset and len(dataset.tensors) == 2 and source.collate is None:  # items as they are
            if into is not None:
                for tensor, slot in zip(dataset.tensors, into, strict=True):
                    shape = (part.size, *tensor.shape[1:])
                    _check_fits(source.field, indices, shape, tensor.dtype, slot)  # torch would reshape the slot
                    torch.index_select(tensor, 0, indices, out=slot)
                return into
            inputs, targets = (tensor.index_select(0, indices) for tensor in dataset.tensors)
            return inputs, targets
        if source.is_ready:
            tensors, skeleton = divided(*self._whole(source, iteration, part), source.field)
            inputs, targets = build(skeleton, tensors)
            pair = inputs, targets
        else:
            seed_loading(self._seed, iteration.step, part.number)
            pair = pair_of(source, indices.tolist(), counts_all=self._counts_all(iteration, part))
        if into is not None:
            for value, slot in zip(pair, into, strict=True):
                _check_fits(source.field, indices, tuple(value.shape), value.dtype, slot)
                slot.copy_(value)
        return pair

    def batch(self, iteration: Iteration, part: Part) -> tuple[list[torch.Tensor], Skeleton]:
        """Of a workload with a step: what one microbatch is built of, by `weft.workload.data.tree.build`."""
        source, indices = self._source(iteration), self._indices(iteration, part)
        if (whole := self._wholes[source.field]) is not None:  # then nothing of the user's runs, and nothing differs
            return [tensor.index_select(0, indices) for tensor in whole[0]], whole[1]
        numbers, run = indices.tolist(), None
        if source.is_ready:
            (tensors, skeleton), run = self._whole(source, iteration, part)
        else:
            seed_loading(self._seed, iteration.step, part.number)
            tensors, skeleton = batch_of(source, numbers, counts_all=self._counts_all(iteration, part))
        told = difference(skeleton, self._first_structure(source, iteration, part, skeleton), takes_none=True)
        if told is not None:
            raise WorkloadError(
                f"a batch of {samples_place(source.field, numbers)}: {told}; every batch must have the same structure, "
                "with None for what it has not"
            )
        return (tensors, skeleton) if run is None else divided((tensors, skeleton), run, source.field)

    def _counts_all(self, iteration: Iteration, part: Part) -> bool:
        """Whether a microbatch counts as many samples as it is given, beside others."""
        return self._weight is None and part.size < iteration.size

    def _whole(self, source: DataSource, iteration: Iteration, part: Part) -> tuple[Parts, PlaceRun]:
        """A batch that is ready, and which of its places are asked for. Several microbatches have parts of one."""
        number, run = run_in(run_of(self.order(iteration), iteration, part), source.places)
        key, parts = self._ready.get(source.field, (None, None))
        if parts is None or key != (iteration.index, number):
            seed_loading(self._seed, iteration.step, 0)
            parts = flatten(pair_of(source, [number])) if self._is_pair else batch_of(source, [number])
            if self._is_pair and num_samples(parts[0]) != source.places:
                raise WorkloadError(
                    f"Workload.{source.field}: batch {number} of its DataLoader, tensors of shapes "
                    f"{' and '.join(str(tuple(each.shape)) for each in parts[0])}, has not job.batch_size = "
                    f"{source.places} samples; with a loss all batches have as many: make job.batch_size their size, "
                    "or give Workload.step, with which they may vary"
                )
            self._ready[source.field] = (iteration.index, number), parts
        return parts, run

    def _first_structure(self, source: DataSource, iteration: Iteration, part: Part, skeleton: Skeleton) -> Skeleton:
        """That of the first batch, by which all are judged; another loader may have loaded it. skeleton: this one's."""
        if source.field not in self._structures:
            is_first = iteration.epoch == 0 and iteration.start + part.start == 0
            if not is_first and not isinstance(source.dataset, ItemStream):
                seed_loading(self._seed, 0, 0)
                first = source.samples(source.order_of_pass(0, self._seed)[: part.size])
                skeleton = batch_of(source, first.tolist())[1]
            self._structures[source.field] = skeleton
        return self._structures[source.field]

    def _source(self, iteration: Iteration) -> DataSource:
        source = self._train if iteration.training else self._validation
        assert source is not None
        return source

    def _indices(self, iteration: Iteration, part: Part) -> torch.Tensor:
        return self._source(iteration).samples(run_of(self.order(iteration), iteration, part))


def _check_fits(
    name: str, indices: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, slot: torch.Tensor
) -> None:
    if shape != slot.shape or dtype is not slot.dtype:
        where = samples_place(name, indices.tolist())
        raise WorkloadError(
            f"{where}: a microbatch of {shape} {dtype}, and the first one was of {tuple(slot.shape)} {slot.dtype}; "
            "every sample must have the same shape and dtype"
        )


def sample_numbers(train: DataSource, seed: int, iteration: Iteration, part: Part) -> list[int]:
    """Which samples of the training data a microbatch has."""
    numbers: list[int] = train.samples(run_of(train.order(iteration.epoch, seed), iteration, part)).tolist()
    return numbers


def run_of(order: torch.Tensor, iteration: Iteration, part: Part) -> torch.Tensor:
    """order: of the iteration's epoch. What of it a microbatch has."""
    start = iteration.start + part.start
    return order[start : start + part.size]
