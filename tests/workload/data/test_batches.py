"""Batches: the samples of each microbatch, in the order that the spec fixes."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    TensorDataset,
    default_collate,
)

from weft.plan.division import Part, divide
from weft.plan.itinerary import Iteration, Itinerary
from weft.workload.data.batches import Batches
from weft.workload.workload import Workload, WorkloadError

WHOLE = Part(0, 0, 3)  # a batch of three


class Items(Dataset[Any]):
    """A map-style dataset of the items given."""

    def __init__(self, items: Sequence[Any]) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Any:
        return self._items[index]


class Drawn(Items):
    """Augments: each look at a sample draws a number."""

    def __getitem__(self, index: int) -> Any:
        return torch.rand(3), index


class Loaders:
    """As a LightningDataModule has them."""

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(pairs(4))


def workload(train: Any, validation: Any = None) -> Workload:
    return Workload(
        model=nn.Linear(1, 1),
        loss=nn.MSELoss(),
        train=train,
        validation=validation,
        optimizer=lambda parameters: torch.optim.SGD(parameters),
    )


def tensors(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(count, dtype=torch.float32)[:, None], torch.arange(count)


def pairs(count: int) -> Items:
    inputs, targets = tensors(count)
    return Items([(inputs[i], targets[i]) for i in range(count)])


def parts_of(iteration: Iteration, microbatches: int) -> list[Part]:
    """The microbatches of one replica."""
    return divide(iteration.size, [1.0], [microbatches])[0]


def targets_of(batches: Batches, itinerary: Itinerary, microbatches: int) -> list[list[list[int]]]:
    """Of each iteration, of each microbatch, the targets: they are the samples' numbers."""
    iterations = [itinerary.at(index) for index in range(itinerary.num_iterations)]
    return [
        [batches.load(iteration, part)[1].tolist() for part in parts_of(iteration, microbatches)]
        for iteration in iterations
    ]


@pytest.mark.parametrize("kind", [tensors, pairs, lambda count: TensorDataset(*tensors(count))])
@given(
    count=st.integers(1, 20),
    batch_size=st.integers(1, 25),
    microbatches=st.integers(1, 4),
    seed=st.integers(0, 2**63 - 1),
)
def test_training_goes_through_each_epochs_own_permutation(
    kind: Any, count: int, batch_size: int, microbatches: int, seed: int
) -> None:
    itinerary = Itinerary.of(num_train=count, num_validation=0, batch_size=batch_size, epochs=2, steps=None)
    batches = Batches(workload(kind(count)), seed=seed)
    sizes = [itinerary.at(index).size for index in range(itinerary.num_iterations)]
    if any(size < microbatches for size in sizes) and kind is pairs:
        return  # lanes pass over microbatches without samples
    told = targets_of(batches, itinerary, microbatches)
    expected = []
    for epoch in range(2):
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed + epoch))
        expected += [[part.tolist() for part in batch.tensor_split(microbatches)] for batch in order.split(batch_size)]
    assert told == expected


def test_validation_goes_through_its_own_samples_in_their_own_order() -> None:
    itinerary = Itinerary.of(num_train=2, num_validation=5, batch_size=2, epochs=1, steps=None)
    batches = Batches(workload(tensors(2), pairs(5)), seed=3)
    assert (batches.num_train, batches.num_validation) == (2, 5)
    assert targets_of(batches, itinerary, 1)[1:] == [[[0, 1]], [[2, 3]], [[4]]]


class Draws(Sampler[int]):
    """From torch's generator, or from one that nobody seeds."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self._own = generator

    def __len__(self) -> int:
        return 64

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(64, generator=self._own).tolist())


def test_a_sampler_that_would_tell_every_loader_something_else_is_refused() -> None:
    sound = DataLoader(pairs(64), sampler=Draws())
    Batches(workload(sound, sound), seed=0).check_sources(num_loaders=2)
    unseeded = DataLoader(pairs(64), sampler=Draws(torch.Generator()))
    with pytest.raises(
        WorkloadError,
        match=r"^Workload.validation: its sampler, a Draws, gave two orders when it was asked twice for epoch 0, "
        r"and with strategy.loaders above 1 each loader asks it; let it draw by torch's generator alone",
    ):
        Batches(workload(sound, unseeded), seed=0).check_sources(num_loaders=2)


class Counts(Draws):
    epoch = 0

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter(torch.randperm(64, generator=torch.Generator().manual_seed(self.epoch)).tolist())


class Once(Draws):
    rows = iter(range(64))

    def __iter__(self) -> Iterator[int]:
        return self.rows


@pytest.mark.parametrize(
    ("sampler", "shifts"),
    [
        (Draws(), False),
        (RandomSampler(range(64), replacement=True, generator=torch.Generator()), False),
        (Draws(torch.Generator()), True),
        (Counts(), True),
        (Once(), True),
    ],
)
def test_a_sampler_that_gives_another_order_when_it_is_asked_again_is_told(sampler: Any, shifts: bool) -> None:
    batches = Batches(workload(DataLoader(pairs(64), sampler=sampler)), seed=0)
    assert batches.shifting() == [f"Workload.train: its sampler, a {type(sampler).__name__}"] * shifts


def test_data_that_one_process_draws_are_told_by_their_fields() -> None:
    class Lines(IterableDataset[Any]):
        def __len__(self) -> int:
            return 3

        def __iter__(self) -> Iterator[Any]:
            return iter(pairs(3))

    assert Batches(workload(pairs(3), Lines()), seed=0, batch_size=1).streams == ["validation"]
    assert Batches(workload(pairs(3)), seed=0).streams == []


def test_an_epoch_can_be_gone_back_to() -> None:
    itinerary = Itinerary.of(num_train=9, num_validation=0, batch_size=3, epochs=3, steps=None)
    batches = Batches(workload(tensors(9)), seed=1)
    forward = targets_of(batches, itinerary, 1)
    backward = [batches.load(itinerary.at(index), WHOLE)[1].tolist() for index in reversed(range(9))]
    assert [[part] for part in reversed(backward)] == forward


@pytest.mark.parametrize("kind", [tensors, pairs])
def test_samples_are_written_into_the_slots_that_are_given(kind: Any) -> None:
    itinerary = Itinerary.of(num_train=8, num_validation=0, batch_size=4, epochs=1, steps=None)
    batches = Batches(workload(kind(8)), seed=1)
    slots = torch.zeros(2, 1), torch.zeros(2, dtype=torch.int64)
    second = parts_of(itinerary.at(1), 2)[1]
    expected = batches.load(itinerary.at(1), second)
    batches.load(itinerary.at(1), second, slots)
    assert torch.equal(slots[0], expected[0])
    assert torch.equal(slots[1], expected[1])


def test_augmentation_is_keyed_by_step_and_microbatch_and_not_by_the_order_of_loading() -> None:
    itinerary = Itinerary.of(num_train=4, num_validation=0, batch_size=4, epochs=3, steps=None)

    def drawn(places: list[tuple[int, int]], seed: int = 5) -> dict[tuple[int, int], list[Any]]:
        batches = Batches(workload(Drawn([0] * 4)), seed=seed)
        return {
            (index, m): batches.load(itinerary.at(index), parts_of(itinerary.at(index), 2)[m])[0].tolist()
            for index, m in places
        }

    places = [(index, m) for index in range(3) for m in range(2)]
    once = drawn(places)
    assert drawn(places[::-1]) == once
    assert len({str(value) for value in once.values()}) == len(places)
    assert drawn(places, seed=6) != once


class DrawnElsewhere(Items):
    def __getitem__(self, index: int) -> Any:
        return torch.tensor([random.random(), float(np.random.rand())]), 0


def test_so_is_what_python_and_numpy_draw() -> None:
    itinerary = Itinerary.of(num_train=4, num_validation=0, batch_size=4, epochs=3, steps=None)
    first, second = (
        [Batches(workload(DrawnElsewhere([0] * 4)), seed=5).load(itinerary.at(index), WHOLE)[0] for index in order]
        for order in ((0, 1, 2), (2, 1, 0))
    )
    assert all(map(torch.equal, first, second[::-1]))
    assert not torch.equal(first[0], first[1])


@pytest.mark.parametrize(
    ("items", "text"),
    [
        ([torch.zeros(2)] * 4, "the item is Tensor and no \\(input, target\\) pair; make __getitem__ return two"),
        ([(1, 2, 3)] * 4, "the item is tuple and no \\(input, target\\) pair"),
        ([("text", 1)] * 4, "its input or target is no tensor or number; make __getitem__ return those"),
        ([({"a": 1}, 1)] * 4, "its input or target is no tensor or number"),
    ],
)
def test_items_that_are_no_pairs_of_tensors_are_refused(items: list[Any], text: str) -> None:
    itinerary = Itinerary.of(num_train=4, num_validation=0, batch_size=4, epochs=1, steps=None)
    with pytest.raises(WorkloadError, match=f"sample 0 of Workload.train: {text}"):  # the first of this epoch
        Batches(workload(Items(items)), seed=0).load(itinerary.at(0), Part(0, 0, 4))


@pytest.mark.parametrize("kind", [TensorDataset, lambda *data: Items(list(zip(*data, strict=True)))])
@pytest.mark.parametrize(
    "inputs", [torch.zeros(2, 3), torch.zeros(2, 1, dtype=torch.float64)], ids=["another shape", "another dtype"]
)
def test_samples_that_do_not_fit_the_slots_are_refused(inputs: torch.Tensor, kind: Any) -> None:
    """Tensors of another shape were written beyond the slot, over its neighbours."""
    itinerary = Itinerary.of(num_train=2, num_validation=0, batch_size=2, epochs=1, steps=None)
    batches = Batches(workload(kind(inputs, torch.arange(2))), seed=0)
    block = torch.zeros(8)
    with pytest.raises(WorkloadError, match="every sample must have the same shape and dtype"):
        batches.load(itinerary.at(0), Part(0, 0, 2), (block[:2].view(2, 1), torch.zeros(2, dtype=torch.int64)))
    assert not block.any()


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ((torch.zeros(3, 1), torch.zeros(4)), r"Workload\.train: \(3, 1\) inputs and \(4,\) targets; the first dim"),
        (iter([]), r"Workload\.train is list_iterator; give a map-style dataset"),
        (Loaders(), r"Workload\.train is Loaders; give the DataLoader that its train_dataloader\(\) makes"),
        (torch.utils.data.Dataset, r"Workload\.train is the class Dataset; give an object of it, Dataset\(\.\.\.\)"),
        (torch.utils.data.IterableDataset, r"Workload\.train is the class IterableDataset; give an object of it"),
        (3, r"Workload\.train is int; give a map-style dataset with __len__ and __getitem__"),
    ],
)
def test_data_that_is_no_dataset_is_refused_by_its_field(data: Any, text: str) -> None:
    with pytest.raises(WorkloadError, match=text):
        Batches(workload(data), seed=0)


def test_samples_that_collate_leaves_out_are_told_where_microbatches_would_count_them() -> None:
    items = [None if number % 4 == 1 else (torch.ones(2), torch.ones(1)) for number in range(8)]

    def without_none(some: list[Any]) -> Any:
        return default_collate([item for item in some if item is not None])

    def instead_of_none(some: list[Any]) -> Any:
        return default_collate([item or (torch.zeros(2), torch.zeros(1)) for item in some])

    def made(collate: Any, **more: Any) -> Batches:
        return Batches(Workload(nn.Linear(2, 1), items, optimizer=torch.optim.SGD, collate=collate, **more), seed=0)

    whole = Iteration(index=0, training=True, epoch=0, step=0, start=0, size=8)
    half = Part(1, 4, 4)
    told = r"is None, and collate leaves it out, so this microbatch of 4 samples has 2; give Workload.weight"
    with_step: dict[str, Any] = {"step": lambda model, batch: model(batch[0]).mean()}
    with_loss: dict[str, Any] = {"loss": nn.functional.mse_loss}
    with pytest.raises(WorkloadError, match=told):
        made(without_none, **with_step).batch(whole, half)
    with pytest.raises(WorkloadError, match=told):
        made(without_none, **with_loss).load(whole, half)
    made(without_none, **with_step).batch(whole, Part(0, 0, 8))
    made(without_none, **with_step, weight=lambda batch: len(batch[0])).batch(whole, half)
    made(instead_of_none, **with_step).batch(whole, half)
