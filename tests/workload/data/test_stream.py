"""An iterable dataset: its items in order, whoever asks for them when."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from weft.plan.division import Part
from weft.plan.itinerary import Iteration, Itinerary
from weft.workload.data.batches import Batches
from weft.workload.data.stream import ItemStream, stream_of
from weft.workload.data.tree import build
from weft.workload.workload import Workload, WorkloadError


class Numbers(IterableDataset[Any]):
    """Epoch e has e * 100 and what follows, each with a drawn number."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        shift = torch.rand(()).item()
        for number in range(self.count):
            yield {"number": self.epoch * 100 + number, "drawn": torch.rand(()).item() + shift}


class Sized(Numbers):
    def __len__(self) -> int:
        return self.count


class Reader(IterableDataset[int]):
    """Goes on where it was, as a file does."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        self.place += 1
        return self.place - 1

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def workload(train: Any, **parts: Any) -> Workload:
    return Workload(nn.Linear(1, 1), train, step=lambda model, batch: None, optimizer=torch.optim.SGD, **parts)


def batches(train: Any, **parts: Any) -> Batches:
    return Batches(workload(train, **parts), seed=0, batch_size=4, steps=3)


def itinerary(made: Batches) -> Itinerary:
    return Itinerary.of(num_train=made.num_train, num_validation=0, batch_size=4, epochs=2, steps=None)


def batch(made: Batches, iteration: Iteration, part: Part | None = None) -> Any:
    tensors, skeleton = made.batch(iteration, part or Part(0, 0, iteration.size))
    return build(skeleton, tensors)


@pytest.mark.parametrize(
    "wrap", [lambda data: data, lambda data: DataLoader(data, batch_size=4)], ids=["bare", "loader"]
)
def test_items_come_in_order_and_each_epoch_begins_again(wrap: Any) -> None:
    made = batches(wrap(Sized(6)))
    about = itinerary(made)
    told = [batch(made, about.at(index))["number"].tolist() for index in range(about.num_iterations)]
    assert told == [[0, 1, 2, 3], [4, 5], [100, 101, 102, 103], [104, 105]]
    assert batch(made, about.at(1))["number"].tolist() == [4, 5], "an epoch can be gone back to"


@pytest.mark.parametrize("steps", [1, 2, 4, 9])
def test_epochs_of_so_many_steps_go_on_where_the_stream_has_been(steps: int) -> None:
    def told(made: Batches, indices: list[int], halves: tuple[int, ...] = (0,)) -> dict[int, list[tuple[int, float]]]:
        items = dict[int, list[tuple[int, float]]]()
        for index in indices:
            at = about.at(index)
            for half in halves:
                part = Part(half, half * 2, 2) if len(halves) > 1 else Part(0, 0, at.size)
                drawn = batch(made, at, part)
                items.setdefault(index, []).extend(zip(drawn["number"].tolist(), drawn["drawn"].tolist(), strict=True))
        return {index: sorted(drawn) for index, drawn in items.items()}

    def anew() -> Batches:
        return Batches(workload(Sized(6)), seed=0, batch_size=4, steps_per_epoch=steps)

    about = Itinerary.of(num_train=6, num_validation=0, batch_size=4, epochs=None, steps=9, steps_per_epoch=steps)
    assert [about.at(index).size for index in range(9)] == [4] * 9
    whole = told(anew(), list(range(9)))
    numbers = [number for index in range(9) for number, _ in whole[index]]
    assert numbers == [each * 100 + number for each in range(6) for number in range(6)]
    assert len({drawn for items in whole.values() for _, drawn in items}) == 36
    assert told(anew(), list(range(9)), halves=(1, 0)) == whole, "whoever is fed first"
    assert told(anew(), [5, 6]) == {5: whole[5], 6: whole[6]}, "from the middle on"
    made = anew()
    told(made, [0, 1, 2])
    made.rewind()
    assert told(made, [1, 2, 3]) == {index: whole[index] for index in (1, 2, 3)}, "back"


def test_a_stream_without_a_length_has_epochs_of_so_many_steps() -> None:
    made = Batches(workload(Reader()), seed=0, batch_size=4, steps=5, steps_per_epoch=2)
    about = Itinerary.of(
        num_train=made.num_train, num_validation=0, batch_size=4, epochs=None, steps=5, steps_per_epoch=2
    )
    drawn = [batch(made, about.at(index)).tolist() for index in range(5)]
    assert drawn == [list(range(4 * index, 4 * index + 4)) for index in range(5)]
    assert [about.at(index).epoch for index in range(5)] == [0, 0, 1, 1, 2]


def test_a_loader_may_drop_the_last_batch() -> None:
    made = batches(DataLoader(Sized(6), batch_size=4, drop_last=True))
    assert made.num_train == 4
    assert batch(made, itinerary(made).at(1))["number"].tolist() == [100, 101, 102, 103]


def test_what_an_item_draws_does_not_depend_on_who_is_fed_first_nor_on_the_cut() -> None:
    def drawn(parts: list[Part]) -> dict[int, float]:
        made = batches(Sized(6))
        told: dict[int, float] = {}
        for part in parts:
            made_batch = batch(made, itinerary(made).at(0), part)
            told |= dict(zip(made_batch["number"].tolist(), made_batch["drawn"].tolist(), strict=True))
        return told

    whole = drawn([Part(0, 0, 4)])
    assert len(set(whole.values())) == 4
    assert drawn([Part(1, 2, 1), Part(0, 0, 2), Part(2, 3, 1)]) == whole


def test_what_a_collate_draws_is_keyed_as_for_any_other_data() -> None:
    def noisy(items: list[Any]) -> torch.Tensor:
        return torch.rand(2)

    parts = [Part(1, 2, 2), Part(0, 0, 2)]
    for data in (Sized(6), list(range(6))):
        made = batches(data, collate=noisy)
        told = {part.number: batch(made, itinerary(made).at(0), part).tolist() for part in parts}
        again = {part.number: batch(made, itinerary(made).at(0), part).tolist() for part in parts[::-1]}
        assert told == again


def test_a_dataset_with_a_state_is_brought_back_to_where_it_was_when_the_job_began() -> None:
    data = Reader()
    data.place = 10
    made = batches(data)
    assert (made.num_train, made.are_endless) == (12, True), "three steps of four"
    assert not batches(Sized(9)).are_endless
    first, second = itinerary(made).at(0), itinerary(made).at(1)
    assert [batch(made, first).tolist(), batch(made, second).tolist()] == [[10, 11, 12, 13], [14, 15, 16, 17]]
    assert batch(made, first).tolist() == [10, 11, 12, 13]


def test_no_more_is_kept_than_a_batch() -> None:
    stream = ItemStream(Sized(100), "train", size=100, keep=4)
    assert [stream[number]["number"] for number in (50, 49, 47)] == [50, 49, 47]
    assert len(stream._kept) <= 4
    assert stream[3]["number"] == 3, "begun again"


@pytest.mark.parametrize(
    ("data", "field", "steps", "text"),
    [
        (Numbers(3), "train", None, r"Workload.train is an IterableDataset \(Numbers\) without a length; give it"),
        (Reader(), "train", None, r"Workload.train .* \(Reader\) without a length; give it a __len__, or job.steps$"),
        (Reader(), "validation", 5, r"Workload.validation .* \(Reader\) without a length; give it a __len__$"),
    ],
)
def test_what_nobody_knows_the_end_of_is_refused(data: Any, field: str, steps: int | None, text: str) -> None:
    with pytest.raises(WorkloadError, match=text):
        stream_of(data, field, batch_size=4, steps=steps)


class Lines(IterableDataset[int]):
    """With neither a length nor a state, over an iterator that it has opened once."""

    def __init__(self, opened: Any) -> None:
        self.opened = opened

    def __iter__(self) -> Iterator[int]:
        yield from self.opened


def test_a_dataset_without_a_length_that_begins_again_needs_no_state() -> None:
    made = batches(Numbers(1000))
    assert (made.num_train, made.are_endless) == (12, True), "three steps of four"
    made.check_sources()
    first, second = itinerary(made).at(0), itinerary(made).at(1)
    told = [batch(made, at) for at in (first, second, first)]
    assert [each["number"].tolist() for each in told] == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]
    assert told[0]["drawn"].equal(told[2]["drawn"])


@pytest.mark.parametrize(
    "opened",
    [
        itertools.count(),
        ({"name": str(number)} for number in itertools.count()),
        iter([1, 2, 3]),
        (torch.tensor([float("nan"), number]) for number in itertools.count()),
    ],
    ids=["numbers", "texts", "ends", "tensors"],
)
def test_a_dataset_that_goes_on_where_it_was_needs_a_length_or_a_state(opened: Any) -> None:
    with pytest.raises(WorkloadError, match=r"Workload.train: the Lines has neither a length nor a state, and gave"):
        batches(Lines(opened)).check_sources()


@pytest.mark.parametrize(
    "data", [Lines([torch.tensor(float("nan"))] * 20), Lines([1]), Lines([object()] * 20), Lines(3), Reader(), Sized(2)]
)
def test_a_dataset_that_begins_again_or_cannot_be_looked_into_is_let_through(data: Any) -> None:
    batches(data).check_sources()


def test_a_dataset_without_a_length_that_ends_is_told_with_what_the_steps_need() -> None:
    made = batches(Numbers(6))
    with pytest.raises(WorkloadError, match=r"the Numbers ended after 6 items, and job\.steps need 12; give it a"):
        batch(made, itinerary(made).at(1))


def test_a_dataset_that_ends_before_its_length_is_told_with_both_numbers() -> None:
    stream = ItemStream(Sized(3), "train", size=5, keep=4)
    stream.begin(2, 0)
    with pytest.raises(
        WorkloadError, match="the Sized ended after 3 items of epoch 2, and 5 are needed; let its __len"
    ):
        stream[4]
