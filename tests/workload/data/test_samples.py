"""Batches of a workload with a step: any structure, and what is wrong with one is told by field and sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, StackDataset, Subset, TensorDataset

from weft.plan.division import Part
from weft.plan.error_places import places_of
from weft.plan.itinerary import Itinerary
from weft.workload.data.batches import Batches
from weft.workload.data.tree import build
from weft.workload.randomness import seed_loading
from weft.workload.workload import Workload, WorkloadError


@dataclass
class Item:
    x: torch.Tensor
    name: str


def batches(train: Any, **parts: Any) -> Batches:
    given = Workload(nn.Linear(1, 1), train, step=lambda model, batch: None, optimizer=torch.optim.SGD, **parts)
    return Batches(given, seed=0, batch_size=4)


def batch(made: Batches, index: int = 0, part: Part | None = None) -> Any:
    itinerary = Itinerary.of(num_train=made.num_train, num_validation=0, batch_size=4, epochs=9, steps=None)
    iteration = itinerary.at(index)
    tensors, skeleton = made.batch(iteration, part or Part(0, 0, iteration.size))
    return build(skeleton, tensors)


def numbers(count: int, seed: int = 0) -> list[int]:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()


def padded(items: Sequence[list[int]]) -> dict[str, Any]:
    longest = max(map(len, items))
    rows = [item + [0] * (longest - len(item)) for item in items]
    return {"ids": torch.tensor(rows), "lengths": [len(item) for item in items]}


def test_tensors_by_name_are_a_batch_of_the_same_names() -> None:
    made = batch(batches({"x": torch.arange(6) * 10, "y": torch.arange(6)}), part=Part(1, 2, 2))
    assert {name: value.tolist() for name, value in made.items()} == {
        "x": [10 * number for number in numbers(6)[2:4]],
        "y": numbers(6)[2:4],
    }


@pytest.mark.parametrize("kind", [TensorDataset, lambda *tensors: list(zip(*tensors, strict=True))])
def test_a_dataset_of_tensors_gives_lists_as_torch_collates_its_pairs(kind: Any) -> None:
    made = batch(batches(kind(torch.arange(4), torch.arange(4) * 2)))
    assert type(made) is list
    assert [part.tolist() for part in made] == [numbers(4), [2 * number for number in numbers(4)]]


def test_items_are_collated_with_their_strings() -> None:
    made = batch(batches([Item(torch.full((2,), number), f"sample {number}") for number in range(4)]))
    assert made.x[:, 0].tolist() == numbers(4)
    assert made.name == [f"sample {number}" for number in numbers(4)]


@pytest.mark.parametrize("of_loader", [False, True])
def test_a_collate_of_the_users_may_pad(of_loader: bool) -> None:
    items: Any = [[1] * (number + 1) for number in range(6)]
    made = batches(DataLoader(items, collate_fn=padded, shuffle=True)) if of_loader else batches(items, collate=padded)
    assert batch(made)["lengths"] == [number + 1 for number in numbers(6)[:4]]
    assert batch(made, 1)["ids"].shape == (2, max(numbers(6)[4:]) + 1), "the last batch, by its own longest"


def test_what_a_collate_draws_is_keyed_by_step_and_microbatch() -> None:
    def noisy(items: list[Any]) -> torch.Tensor:
        return torch.rand(2)

    made = batches([0] * 8, collate=noisy)
    again = {index: batch(made, index).tolist() for index in (1, 0)}
    assert batch(made, 0).tolist() == again[0] != again[1]


class Several(Dataset[Any]):
    """Read at once, by a database or of a file; what it draws it draws for all. It has no `__getitem__`."""

    def __init__(self, size: int = 6, given: Callable[[list[Any]], Any] = list) -> None:
        self.size, self.given = size, given
        self.asked: list[list[int]] = []

    def __len__(self) -> int:
        return self.size

    def __getitems__(self, numbers: list[int]) -> Any:
        self.asked.append(numbers)
        if 99 in numbers:
            raise KeyError("no such row")
        drawn = torch.rand(len(numbers))
        return self.given([{"n": number, "drawn": one} for number, one in zip(numbers, drawn, strict=True)])


@pytest.mark.parametrize("kind", ["itself", "subset", "stack"])
def test_a_dataset_is_asked_for_the_samples_of_a_microbatch_at_once_where_it_can_be(kind: str) -> None:
    several = Several()
    kinds: dict[str, Any] = {"itself": several, "subset": Subset(several, range(6)), "stack": StackDataset(several)}
    made = batch(batches(kinds[kind]), part=Part(1, 2, 2))
    made = made[0] if kind == "stack" else made
    seed_loading(0, 0, 1)
    assert (made["n"].tolist(), made["drawn"].tolist()) == (numbers(6)[2:4], torch.rand(2).tolist())
    assert several.asked[0] == numbers(6)[2:4]


def test_what_asks_for_several_samples_is_told_with_them_or_by_their_number() -> None:
    with pytest.raises(KeyError, match="no such row") as caught:
        batch(batches(Subset(Several(), [99] * 4)))
    assert places_of(caught.value) == ["in samples 0, 1, 3, 2 of Workload.train"]
    with pytest.raises(
        WorkloadError, match="__getitems__ of its Several returned list of 3 for 4 samples; let it return"
    ):
        batch(batches(Several(given=lambda items: items[:3])))
    with pytest.raises(WorkloadError, match="returned dict for 4 samples"):
        batch(batches(Several(given=lambda items: {"x": items})))
    whole = Several(given=lambda items: {"n": torch.tensor([item["n"] for item in items])})
    assert batch(batches(whole, collate=lambda given: given))["n"].tolist() == numbers(6)[:4], "a batch already"
    items: Any = [torch.zeros(1)]
    plain: Any = Subset(items, [0, 0, 5, 0])  # hands on to nobody: the sample is known
    with pytest.raises(IndexError) as failed:
        batch(batches(plain))
    assert places_of(failed.value) == ["in sample 2 of Workload.train"]


def test_a_loss_over_pairs_takes_a_collate_that_makes_pairs() -> None:
    def workload(collate: Any) -> Batches:
        given = Workload(nn.Linear(1, 1), [1, 2], loss=nn.MSELoss(), optimizer=torch.optim.SGD, collate=collate)
        return Batches(given, seed=0)

    iteration = Itinerary.of(num_train=2, num_validation=0, batch_size=2, epochs=1, steps=None).at(0)
    inputs, _ = workload(lambda items: (torch.tensor(items), torch.tensor(items))).load(iteration, Part(0, 0, 2))
    assert sorted(inputs.tolist()) == [1, 2]
    with pytest.raises(WorkloadError, match=r"Workload.collate returned dict and no pair of tensors .inputs, targets."):
        workload(lambda items: {"x": items}).load(iteration, Part(0, 0, 2))


def unlike(first: Any, second: Any) -> list[Any]:
    """Four items; the sample that comes second in the first epoch is another one."""
    items = [first] * 4
    items[numbers(4)[1]] = second
    return items


X = torch.zeros(3)


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        ({"x": X}, {"x": X, "y": 1}, r"the item has \['y'\], and had none in sample 0; every item must have the same"),
        ({"x": X, "y": 1}, {"x": X}, r"the item has no \['y'\], and had it in sample 0; every item must have the same"),
        (Item(X, "a"), Item(torch.zeros(4), "a"), r"the item\.x has shape \(4,\), and \(3,\) in sample 0; pad them to"),
        (Item(X, "a"), (X, "a"), "the item is tuple, and was Item in sample 0; every item must have"),
        (
            {"x": [X]},
            {"x": [X, X + 1]},
            "the item has 2 tensors, and 1 in sample 0; pad them to one length in ",
        ),
        ((X, 1), (X, None), r"the item\[1\] is None, and was a number in sample 0"),
        ((X, nn.Tanh()), (X, nn.Tanh()), r"the item\[1\] is Tanh; a batch is made of tensors, arrays"),
    ],
)
def test_items_that_do_not_go_together_are_told_by_sample(first: Any, second: Any, text: str) -> None:
    assert numbers(4)[:2] == [0, 1]
    with pytest.raises(WorkloadError, match=text) as caught:
        batch(batches(unlike(first, second)))
    if "is made of" not in text:
        assert str(caught.value).startswith("sample 1 of Workload.train: ")
    assert places_of(caught.value) == ["in a batch of samples 0, 1, 3, 2 of Workload.train"]


def test_a_structure_that_changes_between_batches_is_refused() -> None:
    made = batches(list(range(8)), collate=lambda items: {"x": torch.tensor(items)} | ({"y": 1} if 7 in items else {}))
    first = 0 if 7 in numbers(8)[:4] else 1
    batch(made, first)
    with pytest.raises(
        WorkloadError,
        match=r"a batch of samples \d, \d, \d, \d of Workload.train: the batch has no \['y'\], and had it before; e",
    ):
        batch(made, 1 - first)


def test_a_loader_that_did_not_have_the_first_batch_asks_what_its_structure_was() -> None:
    """Two loaders, each with batches of a structure of its own, would both have gone on."""
    made = batches(list(range(8)), collate=lambda items: {"x": torch.tensor(items)} | ({"y": 1} if 7 in items else {}))
    with pytest.raises(WorkloadError, match="every batch must have the same structure"):
        batch(made, 1)
    noisy = batches([X] * 8, collate=lambda items: {"x": torch.rand(len(items))})
    assert torch.equal(batch(noisy, 1)["x"], batch(noisy, 1)["x"]), "asking draws nothing from what is asked for"


def test_what_a_collate_raises_passes_with_its_samples() -> None:
    def collate(items: list[Any]) -> Any:
        raise ValueError("no such thing")

    with pytest.raises(ValueError, match="no such thing") as caught:
        batch(batches([0] * 4, collate=collate))
    assert places_of(caught.value) == [
        "in Workload.collate",
        "in a batch of samples 0, 1, 3, 2 of Workload.train",
    ]


def test_what_a_collate_returns_must_be_a_batch() -> None:
    with pytest.raises(WorkloadError, match=r"the batch\['x'\] is Tanh; a batch is made of tensors") as caught:
        batch(batches([0] * 4, collate=lambda items: {"x": nn.Tanh()}))
    assert places_of(caught.value) == ["in a batch of samples 0, 1, 3, 2 of Workload.train"]
