from __future__ import annotations

from collections import UserDict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import torch

from weft.workload.cutting.leaves import copied, replaced, tensors_in

Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Counted:
    """Knows how often it was copied."""

    tensor: Any
    copies: list[int] = field(default_factory=list)

    def __copy__(self) -> Counted:
        self.copies.append(1)
        return Counted(self.tensor, self.copies)


class Cache:
    """Of no kind that anybody takes apart."""

    def __init__(self) -> None:
        self.tensor = torch.zeros(1)


def structure() -> tuple[Any, list[torch.Tensor]]:
    tensors = [torch.full((1,), float(number)) for number in range(5)]
    first, second, third, fourth, fifth = tensors
    return [
        Pair(first, {"b": second, "a": None}),
        Counted(third),
        UserDict(c=(fourth, 3, "text")),
        Cache(),
        fifth,
    ], tensors


def test_tensors_are_found_in_the_order_in_which_they_stand() -> None:
    value, tensors = structure()
    found = tensors_in(value)
    assert len(found) == len(tensors)
    assert all(one is other for one, other in zip(found, tensors, strict=True))


def test_looking_makes_nothing_anew() -> None:
    value, _ = structure()
    tensors_in(value)
    assert value[1].copies == []
    assert replaced(value, lambda tensor: tensor) is value


def test_others_stand_in_the_same_places_and_the_first_value_is_as_it_was() -> None:
    value, tensors = structure()
    other = replaced(value, torch.neg)
    assert [float(tensor) for tensor in tensors_in(other)] == [-0.0, -1.0, -2.0, -3.0, -4.0]
    assert (type(other[0]), type(other[1]), type(other[2])) == (Pair, Counted, UserDict)
    assert other[3] is value[3]
    assert other[2]["c"][1:] == (3, "text")
    assert all(one is tensor for one, tensor in zip(tensors_in(value), tensors, strict=True))


def test_a_copy_has_the_same_tensors_in_containers_of_its_own() -> None:
    value, tensors = structure()
    other = copied({"all": value, "none": []})
    assert all(one is tensor for one, tensor in zip(tensors_in(other), tensors, strict=True))
    other["none"].append(1)
    first, second, third, cache, _ = other["all"]
    first.second["c"] = second.tensor = third["c"] = None
    assert cache is value[3]
    assert [len(value[0].second), value[1].tensor is None, value[2]["c"] is None] == [2, False, False]
