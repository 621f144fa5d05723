"""Sources: what a user gives as data, and which of its samples an epoch has, in which order.

    a pair, or with a step any tree, of tensors   samples along the first dimension
    a map-style dataset                           `__getitems__` where it has one, or `__getitem__`, and `__len__`;
                                                  `set_epoch(e)`, where it has one, before those of epoch e
    an iterable dataset                           its items as they come (`weft.workload.data.stream`)
    a DataLoader                                  its dataset, collate_fn, drop_last, and sampler or batch_sampler; its
                                                  workers are not; with batch_size = None its items are batches

Without a sampler of the user's, epoch e of training has the order `torch.randperm(n)` by a generator of seed + e, and
validation the order of the data. A user's sampler is asked anew for each epoch: after its `set_epoch(e)` where it has
one, and with torch's default generator, Python's, numpy's, and its own `generator`, seeded with seed + e. So an epoch's
order follows from the seed alone, unless a sampler draws elsewhere or remembers the epochs that it was asked for. Where
the job has so many steps, no more is drawn of it than they take; one without a length lasts for all of them. A
`batch_sampler` of the user's is asked likewise. Where the user makes the batches, they are the items that are counted
here, and an order told to others has their places (`given_batches.py`).

Where a job gives an epoch a number of steps (`job.steps_per_epoch`), e counts passes over the data, one behind another,
and an epoch is a run of these: it may be a part of one, or reach over the ends of several, as a batch may.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
    default_collate,
    default_convert,
)

from weft.plan.error_places import within
from weft.spec.job_spec import JobSection
from weft.workload.data.datasets import Field, Tensors, Whole, dataset_of, gives_several
from weft.workload.data.given_batches import GivenBatches, as_given
from weft.workload.data.sampler import checked_order, checked_rows, is_plain, lasting, length_of
from weft.workload.data.stream import ItemStream, stream_of
from weft.workload.data.tree import flatten
from weft.workload.randomness import seed_others
from weft.workload.workload import CollateFunction, Workload, WorkloadError, kind_of

_ITERATING = ("__iter__", "_get_iterator")  # of a DataLoader; those of these packages change no batch
_PLAINLY_ITERATED = frozenset({"torch", "torchdata"})


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSource:
    field: Field  # of the workload, for errors
    dataset: Dataset[Any]
    collate: CollateFunction | None = None  # the user's
    sampler: Iterable[Any] | None = None  # the user's, of samples or of batches
    places: int = 1  # of an item: where the user makes the batches, each is an item, and has a batch's places
    batches: GivenBatches | None = None  # of a sampler of batches
    is_ready: bool = False  # what the dataset gives are batches
    in_order: bool  # without a sampler: as the data stand
    num_items: int  # of a pass over the data in all
    size: int  # of them, those that are not dropped with a last, smaller batch
    epoch_size: int | None = None  # items of an epoch that is no pass: it goes on where the one before has ended
    needed: int | None = None  # items that the whole job takes, where that is known: of a sampler no more are drawn
    is_endless: bool = False  # what gives the samples or their order has no length of its own
    # Of the newest pass that an epoch has begun or gone on with, its order.
    _newest: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict, init=False, repr=False)

    @property
    def gives_several(self) -> bool:
        """Whether it is asked for the samples of a microbatch at once, by `__getitems__`, as a DataLoader does."""
        return not self.is_ready and gives_several(self.dataset)

    @property
    def num_places(self) -> int:
        """Of an epoch that is a pass: its samples, where the job makes the batches."""
        return self.size * self.places

    @property
    def whole(self) -> Whole | None:
        """All of the data, where items are rows of tensors and batches nothing else; None otherwise."""
        if self.collate is not None:
            return None
        if isinstance(self.dataset, Tensors):
            return self.dataset.whole
        if type(self.dataset) is TensorDataset:  # a subclass may change its items
            return flatten([tensor.view_as(tensor) for tensor in self.dataset.tensors])  # one that stands twice is two
        return None

    def order(self, epoch: int, seed: int) -> torch.Tensor:
        """The samples of an epoch, by their numbers in the dataset; of a stream, from the first of the pass on with
        which the epoch begins. What is asked for from now on is of this epoch."""
        return self._places_of(self._order(epoch, seed))

    def _order(self, epoch: int, seed: int) -> torch.Tensor:
        if self.epoch_size is None:
            self.rewind()
            self._begin(epoch, seed)
            return self._pass(epoch, seed)
        first, skipped = divmod(epoch * self.epoch_size, self.size)
        self._begin(first, seed)
        parts, missing = list[torch.Tensor](), self.epoch_size
        while missing:
            number = first + len(parts)
            part = self._kept_order(number, seed)[skipped:][:missing]
            parts.append(part + (number - first) * self.num_items if isinstance(self.dataset, ItemStream) else part)
            missing, skipped = missing - len(part), 0
        return torch.cat(parts)

    def order_of_pass(self, number: int, seed: int) -> torch.Tensor:
        """The samples of one pass over the data."""
        return self._places_of(self._pass(number, seed))

    def _places_of(self, items: torch.Tensor) -> torch.Tensor:
        if self.places == 1:
            return items
        return (items[:, None] * self.places + torch.arange(self.places)).flatten()

    def _pass(self, number: int, seed: int) -> torch.Tensor:
        if self.batches is not None:
            return self.batches.draw(number, self._drawn(number, seed), expected=self._length)
        if self.sampler is not None:
            return self._sampled(number, seed)[: self.size]
        if self.in_order:
            return torch.arange(self.size)
        return torch.randperm(self.num_items, generator=torch.Generator().manual_seed(seed + number))[: self.size]

    def keeps_its_order(self, seed: int) -> bool:
        """Whether a sampler of the user's gives the same when it is asked again. torch's own go by the seed."""
        if type(self.sampler).__module__.partition(".")[0] == "torch":
            return True
        first = self._as_drawn(0, seed)
        with contextlib.suppress(WorkloadError):  # an iterator has nothing left
            return bool(first == self._as_drawn(0, seed))
        return False

    def _kept_order(self, number: int, seed: int) -> torch.Tensor:
        """A pass may be many epochs."""
        if number not in self._newest:
            self._newest.clear()
            self._newest[number] = self._pass(number, seed)
        return self._newest[number]

    def rewind(self) -> None:
        """What is asked for next may be anything: a stream begins its pass again."""
        if isinstance(self.dataset, ItemStream):
            self.dataset.rewind()

    def _begin(self, number: int, seed: int) -> None:
        """A dataset's samples may depend on the pass (a curriculum), as a stream's do."""
        if self.batches is not None:
            self.batches.forget(before=number)
        if isinstance(self.dataset, ItemStream):
            self.dataset.begin(number, seed)
        elif callable(set_epoch := getattr(self.dataset, "set_epoch", None)):
            with _seeded(seed + number), within(f"in set_epoch of Workload.{self.field}, epoch {number}"):
                set_epoch(number)

    def samples(self, order: torch.Tensor) -> torch.Tensor:
        """order: a run of an epoch's order that lies in one batch. The numbers of its samples in the dataset; of a
        batch that is ready, its own."""
        if self.is_ready:
            return order[:1] // self.places
        return order if self.batches is None else self.batches.samples(order)

    def count(self, order: torch.Tensor) -> int:
        """How many samples of such a run count; 0 where it has but one, so that there is any."""
        return len(order) if self.batches is None else self.batches.count(order)

    def _as_drawn(self, number: int, seed: int) -> list[Any]:
        order = self._pass(number, seed)
        return order.tolist() if self.batches is None else self.batches.drawn(number)

    def _sampled(self, number: int, seed: int) -> torch.Tensor:
        numbers = self._drawn(number, seed)
        order = checked_order(numbers, self.field, number, self._length, is_endless=self.is_endless)
        what = f"Workload.{self.field}: its sampler, a {kind_of(self.sampler)},"
        return checked_rows(order, None if self.whole is None else _len(self.dataset), what)

    @property
    def _length(self) -> int:
        """Of a pass, as much as the job needs."""
        return self.num_items if self.needed is None else min(self.num_items, self.needed)

    def _drawn(self, number: int, seed: int) -> list[Any]:
        """What the sampler gives for a pass."""
        sampler: Any = self.sampler
        with _seeded(seed + number), within(f"in the sampler of Workload.{self.field}, epoch {number}"):
            for each in (sampler, getattr(sampler, "sampler", None)):
                if callable(set_epoch := getattr(each, "set_epoch", None)):
                    set_epoch(number)
                    _seed(seed + number)
                if isinstance(own := getattr(each, "generator", None), torch.Generator):
                    own.manual_seed(seed + number)
            is_part = self.is_endless or self._length < self.num_items
            given = islice(sampler, self._length) if is_part else sampler
            numbers = list(given if self.batches is None else map(as_given, given))
        if isinstance(sampler, Iterator) and self._length and not numbers:
            raise WorkloadError(
                f"Workload.{self.field}: its sampler, a {kind_of(sampler)}, has nothing left: an iterator is "
                "gone through once, and it is asked several times; give a list, or an object whose __iter__ begins anew"
            )
        return numbers


def source_of(
    workload: Workload,
    field: Field,
    *,
    batch_size: int | None = None,
    steps: int | None = None,
    steps_per_epoch: int | None = None,
) -> DataSource:
    """batch_size, steps, steps_per_epoch: the job's; None where nothing follows from them. Raises WorkloadError that
    names the field."""
    source = _passing(workload, field, batch_size=batch_size, steps=steps)
    if field != "train" or batch_size is None or steps_per_epoch is None:
        return source
    if 0 < source.num_places < batch_size:
        samples = "one sample" if source.size == 1 else f"{source.size} samples"
        raise WorkloadError(
            f"Workload.{field} has {samples}, and with job.steps_per_epoch every batch has job.batch_size "
            f"= {batch_size} of them; give a smaller batch, or leave steps_per_epoch out"
        )
    return replace(source, epoch_size=steps_per_epoch * batch_size // source.places)


def source_of_job(workload: Workload, field: Field, job: JobSection) -> DataSource:
    """Errors: WorkloadError, which names the field."""
    return source_of(
        workload,
        field,
        batch_size=job.batch_size,
        steps=job.given_steps,
        steps_per_epoch=job.steps_per_epoch,
    )


def _passing(workload: Workload, field: Field, *, batch_size: int | None, steps: int | None) -> DataSource:
    """One whose epochs are passes over the data."""
    data = _as_given(workload.train if field == "train" else workload.validation)
    given = data.dataset if isinstance(data, DataLoader) else data
    is_ready = isinstance(data, DataLoader) and data.batch_sampler is None
    if isinstance(given, IterableDataset):
        dataset: Dataset[Any] = stream_of(
            given, field, batch_size=1 if is_ready else batch_size, steps=steps, again=is_ready
        )
    else:
        dataset = dataset_of(given, field, workload)
    if isinstance(data, DataLoader):
        return _of_loader(data, dataset, workload, field, batch_size, steps if field == "train" else None)
    size = _len(dataset)
    return DataSource(
        field=field,
        dataset=dataset,
        collate=workload.collate,
        in_order=field == "validation" or isinstance(dataset, ItemStream),
        num_items=size,
        size=size,
        is_endless=isinstance(dataset, ItemStream) and dataset.is_endless,
    )


def _as_given(data: Any) -> Any:
    """What `accelerate` has prepared moves batches to a device, and no more, where it is to skip none of them."""
    is_prepared = type(data).__module__.partition(".")[0] == "accelerate" and not getattr(data, "skip_batches", 0)
    return getattr(data, "base_dataloader", data) if is_prepared else data


def _of_loader(
    loader: DataLoader[Any],
    dataset: Dataset[Any],
    workload: Workload,
    field: Field,
    batch_size: int | None,
    steps: int | None,
) -> DataSource:
    for name in _ITERATING:
        if getattr(type(loader), name).__module__.partition(".")[0] not in _PLAINLY_ITERATED:
            raise WorkloadError(
                f"Workload.{field}: its DataLoader, a {kind_of(loader)}, has a {name} of its own, and here nobody "
                "iterates over it; let the dataset, `collate_fn` or the step do what that does with batches"
            )
    batches = loader.batch_sampler
    if type(batches) is not BatchSampler:
        return _of_users_batches(loader, dataset, workload, field, batch_size, steps)
    sampler, drop_last, its_size = batches.sampler, batches.drop_last, batches.batch_size
    if field == "train" and batch_size is not None and its_size not in (1, batch_size):
        raise WorkloadError(
            f"Workload.{field}: its DataLoader has batch_size = {its_size}, and job.batch_size is {batch_size}; make "
            "them equal, or leave the DataLoader's out"
        )
    needed = None if batch_size is None or steps is None else batch_size * steps
    divisor = batch_size if field == "train" or its_size in (None, 1) else its_size
    num_items = _len(dataset)
    own = None if isinstance(dataset, ItemStream) or is_plain(sampler, num_items) else sampler
    length = num_items if own is None else length_of(own, field)
    size = lasting(own, field, needed) if length is None else length
    return DataSource(
        field=field,
        dataset=dataset,
        collate=_users_collate(loader, workload),
        sampler=own,
        in_order=field == "validation" or isinstance(dataset, ItemStream) or isinstance(sampler, SequentialSampler),
        num_items=size,
        size=_kept(size, divisor, field) if drop_last and divisor is not None else size,
        needed=needed,
        is_endless=length is None or (isinstance(dataset, ItemStream) and dataset.is_endless),
    )


def _of_users_batches(
    loader: DataLoader[Any],
    dataset: Dataset[Any],
    workload: Workload,
    field: Field,
    places: int | None,
    steps: int | None,
) -> DataSource:
    """Of a batch_sampler, or of items that are batches. places: the job's batch size."""
    is_ready, is_stream = loader.batch_sampler is None, isinstance(dataset, ItemStream)
    if is_ready and workload.collate is not None:
        raise WorkloadError(
            f"Workload.collate makes batches of samples, and with batch_size = None the items of Workload.{field}'s "
            "DataLoader are batches; leave out the one or the other"
        )
    num_items: int = _len(dataset)
    sampler: Any = loader.sampler if is_ready else loader.batch_sampler
    own = None if is_ready and (is_stream or is_plain(sampler, num_items)) else sampler
    length = num_items if own is None else length_of(own, field)
    size = lasting(own, field, steps, of_what="batches") if length is None else length
    collate = (lambda items: loader.collate_fn(*items)) if is_ready else _users_collate(loader, workload)
    batches, varies = None, workload.step is not None or places is None
    if not is_ready:
        num_rows = num_items if collate is None and type(dataset) in (Tensors, TensorDataset) else None
        batches = GivenBatches(sampler, field, places=places or 1, num_batches=size, num_rows=num_rows, varies=varies)
    return DataSource(
        field=field,
        dataset=dataset,
        collate=collate,
        sampler=own,
        places=places or 1,
        batches=batches,
        is_ready=is_ready,
        in_order=field == "validation" or is_stream or isinstance(sampler, SequentialSampler),
        num_items=size,
        size=size,
        needed=steps,
        is_endless=length is None or (isinstance(dataset, ItemStream) and dataset.is_endless),
    )


@contextlib.contextmanager
def _seeded(key: int) -> Iterator[None]:
    """What runs inside draws by the key, and torch's generator is behind it what it was."""
    with torch.random.fork_rng(devices=[]):
        _seed(key)
        yield


def _seed(key: int) -> None:
    torch.default_generator.manual_seed(key)
    seed_others(key)


def _len(dataset: Any) -> int:
    return len(dataset)


def _kept(size: int, batch_size: int, field: Field) -> int:
    """Without the last, smaller batch."""
    if 0 < size < batch_size:
        raise WorkloadError(
            f"Workload.{field}: its DataLoader has drop_last = True, and its {size} samples are no whole batch of "
            f"{batch_size}, so none is left; leave drop_last out, or make the batch smaller"
        )
    return size - size % batch_size


def _users_collate(loader: DataLoader[Any], workload: Workload) -> CollateFunction | None:
    own = loader.collate_fn
    return workload.collate or (None if own in (default_collate, default_convert) else own)
