from __future__ import annotations

from collections import OrderedDict, UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from weft.workload.data.collating import collate_items


@dataclass(frozen=True)
class Item:
    image: Any
    label: int
    hint: str | None = None


class Point(NamedTuple):
    x: int
    y: float


@pytest.mark.parametrize(
    "items",
    [
        [(torch.ones(2), 1), (torch.zeros(2), 2)],
        [{"a": 1, "b": ["x", 2.0]}, {"b": ["y", 3.0], "a": 2}],
        [Point(1, 2.0), Point(3, 4.0)],
        [np.ones(3), np.zeros(3)],
        [OrderedDict(a="x"), OrderedDict(a="y")],
    ],
    ids=lambda items: type(items[0]).__name__,
)
def test_what_torch_collates_is_collated_as_torch_does_it(items: list[Any]) -> None:
    made, expected = collate_items(items), default_collate(items)
    assert type(made) is type(expected)
    assert repr(made) == repr(expected)


def test_dataclasses_are_collated_field_by_field_wherever_they_stand() -> None:
    made = collate_items([{"item": Item(np.full(2, number), number), "n": number} for number in range(3)])
    assert type(made["item"]) is Item
    assert made["item"].image.tolist() == [[0, 0], [1, 1], [2, 2]]
    assert (made["item"].label.tolist(), made["item"].hint) == ([0, 1, 2], None)


def test_mappings_keep_their_class() -> None:
    made = collate_items([UserDict(x=1), UserDict(x=2)])
    assert type(made) is UserDict
    assert made["x"].tolist() == [1, 2]


@pytest.mark.parametrize(
    "items",
    [[{"a": 1}, {"a": 1, "b": 2}], [{"a": 1, "b": 2}, {"a": 1}], [None, 1], [Item(1, 1, None), Item(1, 1, "x")]],
    ids=["more", "fewer", "none and a number", "a field that is none"],
)
def test_items_that_do_not_go_together_are_no_batch(items: list[Any]) -> None:
    """Of a key that only later items have, torch would say nothing."""
    with pytest.raises((KeyError, TypeError)):
        collate_items(items)
