from __future__ import annotations

import pickle
import threading
import warnings
import weakref
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from weft.workload.data.packed import packed, unpacked
from weft.workload.data.tree import build, difference, flatten, with_tensors
from weft.workload.workload import WorkloadError


class Point(NamedTuple):
    x: torch.Tensor
    label: str


class Split(Enum):
    TRAIN = 1


@dataclass
class Graph:
    nodes: torch.Tensor
    names: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_nodes = len(self.nodes)  # no field


@dataclass(frozen=True, slots=True)
class Frozen:
    image: torch.Tensor
    scale: float

    def __post_init__(self) -> None:
        assert type(self.image) is torch.Tensor, "made again by its __init__"


class Store:
    """As those of torch_geometric's graphs: of no kind that a tree knows, and with a way back to what holds it."""

    def __init__(self, holder: Cells, x: torch.Tensor) -> None:
        self.holder = weakref.ref(holder)
        self.x, self.sizes = x, np.array([len(x)])
        self.again = None if x.is_sparse else x

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "holder": self.holder()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, holder=weakref.ref(state["holder"]))


class Cells:
    def __init__(self, *sizes: int, sparse: bool = False) -> None:
        self.stores = [Store(self, a(size).to_sparse() if sparse else a(size)) for size in sizes]

    def __repr__(self) -> str:
        return str([(store.x, store.sizes, store.holder() is self, store.again is store.x) for store in self.stores])


class Own(UserDict[str, Any]):
    pass


def a(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def there(batch: Any) -> Any:
    """As another process gets it."""
    tensors, skeleton = flatten(batch)
    return build(unpacked(packed(skeleton)), [tensor.clone() for tensor in tensors])


TREES: dict[str, Any] = {
    "a tensor": a(2),
    "a pair": (a(2), a(3)),
    "a list of strings": ["a", "b"],
    "nested": {"ids": a(2), "spans": [(0, 4), (4, 9)], "task": "qa", "none": None, "flag": True, "c": 1j, b"k": b""},
    "ordered": OrderedDict(b=a(2), a=1),
    "default": defaultdict(list, a=[a(1)]),
    "a UserDict": Own(x=a(2), y={"z": 2.5}),
    "a named tuple": Point(a(2), "left"),
    "one of torch's": torch.return_types.max((a(2), a(2))),  # type: ignore[attr-defined]
    "a shape": (torch.Size([2, 3]), torch.float16, torch.device("cpu"), Split.TRAIN),
    "empty": ({}, [], ()),
    "an object": {"cells": Cells(3, 2), "y": a(2)},
    "a picture's path": [Path("a/b.png"), a(2)],
    "sparse": [
        a(2).to_sparse(),
        torch.sparse_coo_tensor(torch.tensor([[1, 1]]), a(2, 3), (4, 3), check_invariants=True),
    ],
    "sparse in an object": {"x": Cells(3, sparse=True)},
    "a packed sequence": nn.utils.rnn.pack_sequence([a(3), a(2)]),
}


@pytest.mark.parametrize("name", TREES)
def test_a_tree_is_the_same_in_another_process(name: str) -> None:
    tree = TREES[name]
    again = there(tree)
    assert type(again) is type(tree)
    assert repr(again) == repr(tree)
    assert flatten(again)[1] == flatten(tree)[1]
    assert pickle.loads(pickle.dumps(flatten(tree)[1])) == flatten(tree)[1]


@pytest.mark.parametrize("layout", ["csr", "csc", "bsr", "bsc"])
def test_a_compressed_tensor_comes_as_it_was(layout: str) -> None:
    with warnings.catch_warnings(action="ignore"):  # torch says once that these are young
        block = (1, 2) if layout.startswith("b") else None
        made = a(4, 6).to_sparse(layout=getattr(torch, f"sparse_{layout}"), blocksize=block)
    again = there({"adjacency": made})["adjacency"]
    assert again.layout is made.layout
    assert torch.equal(again.to_dense(), a(4, 6))
    assert with_tensors([made], torch.Tensor.double)[0].dtype is torch.float64
    told = difference(flatten(made)[1], flatten(a(2))[1])
    assert told == f"the batch is a tensor of layout sparse_{layout}, and was a tensor of float32 before"


def test_dataclasses_come_as_they_were_without_being_initialised_again() -> None:
    graph = there({"graph": Graph(a(3), ["u", "v"])})["graph"]
    assert (type(graph), graph.names, graph.num_nodes) == (Graph, ["u", "v"], 3)
    frozen = with_tensors(Frozen(a(2), 0.5), lambda tensor: tensor.double())
    assert (frozen.image.dtype, frozen.scale) == (torch.float64, 0.5)


def test_arrays_become_tensors_and_their_scalars_numbers() -> None:
    unwritable = np.arange(3)
    unwritable.flags.writeable = False
    batch = there(
        {"a": unwritable, "b": np.arange(4.0)[::-1], "c": np.float32(0.5), "d": np.array(2), "e": np.str_("e")}
    )
    assert [value.tolist() for value in (batch["a"], batch["b"], batch["d"])] == [[0, 1, 2], [3, 2, 1, 0], 2]
    assert (batch["c"], type(batch["c"]), batch["e"], type(batch["e"])) == (0.5, float, "e", str)


def test_tensors_are_plain_and_without_gradient_and_one_that_stands_twice_is_one() -> None:
    weight = nn.Parameter(a(2))
    batch = {"weight": weight, "labels": weight, "doubled": weight * 2}
    assert len(flatten(batch)[0]) == 2
    again = there(batch)
    assert again["weight"] is again["labels"]
    assert not any(tensor.requires_grad for tensor in again.values())
    assert type(again["weight"]) is torch.Tensor


class Read(UserDict[str, Any]):
    """Makes its values when they are asked for, as a view of a file does."""

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key) + 0


def test_values_that_live_for_a_moment_are_each_one_of_its_own() -> None:
    """Tensors are told apart by their ids, and the second one had that of the first, which was gone: it was lost."""
    batch = there(Read({str(number): torch.full((2,), float(number)) for number in range(4)}))
    assert [batch[str(number)].tolist() for number in range(4)] == [[float(number)] * 2 for number in range(4)]


def test_each_build_has_containers_of_its_own() -> None:
    tensors, skeleton = flatten({"x": a(2), "names": ["a"]})
    build(skeleton, tensors)["names"].append("b")
    assert build(skeleton, tensors)["names"] == ["a"]


def test_what_a_tokenizer_returns_is_a_batch() -> None:
    transformers = pytest.importorskip("transformers")
    batch = there(transformers.BatchEncoding({"input_ids": a(2, 3), "attention_mask": a(2, 3)}))
    assert type(batch) is transformers.BatchEncoding
    assert batch.input_ids.shape == (2, 3)
    assert list({**batch}) == ["input_ids", "attention_mask"]


def _endless() -> list[Any]:
    batch: list[Any] = []
    batch.append(batch)
    return batch


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        (object(), "the batch is object; a batch is made of tensors, arrays, numbers, strings and None, in dicts"),
        ({"x": [1, {2}]}, r"the batch\['x'\]\[1\] is set; a batch is made of tensors"),
        (Graph(a(2), names=[nn.Tanh()]), r"the batch\.names\[0\] is Tanh; a batch is made of"),  # type: ignore[list-item]
        (
            {"x": threading.Lock()},
            r"the batch\['x'\] is lock, and pickle: cannot pickle '_thread.lock' object; a batch",
        ),
        (
            a(2).to_mkldnn(),
            r"the batch is a tensor of its own kind \(_mkldnn\); give a dense one, such",
        ),
        ([np.array(["a"])], r"the batch\[0\] is an array of <U1, which no tensor can hold; give numbers, or a list of"),
        ([a(2).to("meta")], r"the batch\[0\] is on torch's meta device, and has no values; give one on the CPU"),
        (_endless(), r"the batch\[0\]\[0\]\[0\]… has containers within containers, more than 100 of them"),
    ],
    ids=["object", "set", "module", "lock", "of its own kind", "strings", "meta", "in itself"],
)
def test_what_no_batch_is_made_of_is_told_with_the_way_to_it(batch: Any, text: str) -> None:
    with pytest.raises(WorkloadError, match=text):
        flatten(batch)


def test_a_class_that_another_process_would_not_find_is_refused() -> None:
    local = namedtuple("local", "x")
    with pytest.raises(WorkloadError, match=r"the batch's structure cannot go to another process .*define its"):
        packed(flatten(local(a(2)))[1])


class Picky(UserDict[str, Any]):
    def __init__(self, first: Any, second: Any) -> None:
        super().__init__(first=first, second=second)


def test_a_mapping_that_cannot_be_made_of_its_items_is_refused() -> None:
    with pytest.raises(WorkloadError, match=r"a batch has a Picky, which cannot be made of its items .*; give a dict"):
        there(Picky(1, 2))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"n": 1, "s": "a", "x": a(2)}, {"x": a(7, 3), "s": "b", "n": 2.5}),
        (["a", "b", "c"], ["a"]),
        ([], [{"boxes": a(2)}]),
        ([{"boxes": a(2)}, {"boxes": a(0)}], [{"boxes": a(1)}]),
        ([a(2), torch.tensor(1)], [a(3), torch.tensor(2)]),
        (("a", "b", "c"), ("a", "b")),
        ((a(2), a(3), a(1)), (a(1),)),
        (({"boxes": a(2), "kind": 1}, {"boxes": a(0), "kind": 2}), ({"boxes": a(1), "kind": 3},)),
        ((), ("a", "b")),
        (Cells(3, 2), Cells(2)),
    ],
)
def test_values_and_shapes_and_the_length_of_lists_and_of_tuples_of_samples_are_no_structure(
    one: Any, other: Any
) -> None:
    assert difference(flatten(one)[1], flatten(other)[1]) is None
    assert difference(flatten(other)[1], flatten(one)[1]) is None


@pytest.mark.parametrize(
    ("one", "other", "told"),
    [
        ({"x": 1}, {"x": 1, "y": 2}, "the batch has no ['y'], and had it before"),
        ({"x": {"y": 1}}, {"x": {}}, "the batch['x'] has ['y'], and had none before"),
        ((1, None), (1, 2), "the batch[1] is None, and was a number before"),
        ((1, "a"), (1, "a", 3), "the batch has no [2], and had it before"),
        ((1, 2), (1, 2, "a"), "the batch has no [2], and had it before"),
        (("a", "b", "c"), ("a", None), "the batch has [2], and had none before"),
        ([{"x": a(2)}, {"x": "a"}], [{"x": a(2)}], "the batch[1]['x'] is str, and was a tensor of float32 before"),
        (
            Point(a(2), "a"),
            Point(a(2).double(), "a"),
            "the batch[0] is a tensor of float32, and was a tensor of float64",
        ),
        (Own(x=1), {"x": 1}, "the batch is Own, and was dict before"),
        (defaultdict(int, x=1), defaultdict(int, y=1), "the batch is defaultdict of other parts than before"),
    ],
)
def test_the_first_difference_of_two_structures_is_told(one: Any, other: Any, told: str) -> None:
    assert str(difference(flatten(one)[1], flatten(other)[1])).startswith(told)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"x": a(2), "mask": None}, {"x": a(2), "mask": a(2)}),
        ((a(2), None), (a(2), ("a", 1))),
        (Point(a(2), None), Point(a(2), {"name": "a"})),
        ([a(2), None, a(1)], [None]),
        ((a(2), None, a(1)), (None, a(2))),
        ([{"boxes": None}], [{"boxes": None}, {"boxes": a(2)}]),
    ],
)
def test_none_in_the_place_of_anything_is_no_structure_where_it_may_be(one: Any, other: Any) -> None:
    both = [(flatten(one)[1], flatten(other)[1]), (flatten(other)[1], flatten(one)[1])]
    assert [difference(*each, takes_none=True) for each in both] == [None, None]
    assert any(map(difference, *zip(*both, strict=True)))


def test_none_is_not_what_all_the_others_are_compared_with() -> None:
    one, other = (None, a(2), "a"), (None, a(2))
    assert difference(flatten(one)[1], flatten(other)[1], takes_none=True) == "the batch has [2], and had none before"
