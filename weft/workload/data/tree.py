"""Trees: batches of any structure, taken apart into tensors and a skeleton, and put together again elsewhere.

    {"ids": tensor, "spans": [(0, 4), (4, 9)], "task": "qa"}
    tensors     [tensor]
    skeleton    {"ids": ·0, "spans": [(0, 4), (4, 9)], "task": "qa"}

Lists, tuples, mappings of any class, dataclasses, whatever torch's pytree knows and sparse tensors are branches; numpy
arrays become tensors; numbers, strings and None stay in the skeleton. An object of another class (a graph) is pickled
without its tensors. A tensor that stands twice is one, there and here. A class is named in the skeleton, not
stored, so it must be found where the skeleton is read.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import SUPPORTED_NODES, is_namedtuple_class

from weft.workload.aliases import SparseKind, dense_parts
from weft.workload.data.objects import object_of, packet_of
from weft.workload.workload import WorkloadError, kind_of

_NUMBERS = (bool, int, float, complex)
_CONSTANTS = (*_NUMBERS, str, bytes, type(None), Enum, torch.dtype, torch.device, torch.Size)
_MADE_OF = (
    "a batch is made of tensors, arrays, numbers, strings and None, in dicts, lists, tuples, dataclasses and objects "
    "that pickle takes"
)

_IN_OBJECT = "'s tensor {}"
MAX_DEPTH = 100  # arbitrary: far below what Python calls in one another
_OWN_WAY = (list, tuple, dict, OrderedDict)  # of what torch's pytree knows: told by their keys
_Path = tuple[str, ...]  # to a part of a batch, as Python writes it: ("the batch", "['spans']", "[0]")


@dataclass(frozen=True, slots=True)
class _Tensor:
    number: int  # among the tensors of the tree
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Constant:
    value: Any


@dataclass(frozen=True, slots=True)
class _Sequence:
    kind: type
    children: tuple[Skeleton, ...]


@dataclass(frozen=True, slots=True)
class _Mapping:
    kind: type
    keys: tuple[Hashable, ...]
    children: tuple[Skeleton, ...]


@dataclass(frozen=True, slots=True)
class _Record:
    """Of a dataclass."""

    kind: type
    names: tuple[str, ...]
    children: tuple[Skeleton, ...]


@dataclass(frozen=True, slots=True)
class _Registered:
    """Of a class that torch's pytree knows how to take apart."""

    kind: type
    key: Any  # of its functions in the register
    context: Any  # for them
    children: tuple[Skeleton, ...]


@dataclass(frozen=True, slots=True)
class _Object:
    """Of any other class, by its own way to be pickled."""

    kind: str
    packet: bytes  # with the children's numbers in their places
    own: tuple[Any, ...]  # classes and functions of the job's file, beside the packet
    children: tuple[Skeleton, ...]


@dataclass(frozen=True, slots=True)
class _Sparse:
    """A sparse tensor, of its indices and entries."""

    kind: SparseKind
    children: tuple[_Tensor, ...]


_NONE = _Constant(None)
_Branch = _Sequence | _Mapping | _Record | _Registered | _Object | _Sparse
Skeleton = _Tensor | _Constant | _Branch


def flatten(batch: Any, what: str = "the batch") -> tuple[list[torch.Tensor], Skeleton]:
    """The tensors of a batch, without gradients, and the rest of it.

    Two skeletons are equal where structures, constants and dtypes are. Raises WorkloadError for a part that is nothing
    of the kind, with the way to it. what: the batch, in that text.
    """
    tree = _Tree()
    skeleton = tree.skeleton(batch, (what,))
    return tree.tensors, skeleton


def build(skeleton: Skeleton, tensors: Sequence[torch.Tensor]) -> Any:
    """The batch, with new containers around these tensors."""
    match skeleton:
        case _Tensor(number):
            return tensors[number]
        case _Constant(value):
            return value
    parts = [build(child, tensors) for child in skeleton.children]
    match skeleton:
        case _Sequence(kind):
            return parts if kind is list else kind(parts)
        case _Mapping(kind, keys):
            return _mapping(kind, dict(zip(keys, parts, strict=True)))
        case _Object(_, packet, own):
            return object_of(packet, own, parts)
        case _Sparse(kind):
            return kind.built(parts)
        case _Registered(_, key, context):
            return SUPPORTED_NODES[key].unflatten_fn(parts, context)
        case _Record(kind, names):
            record: Any = object.__new__(kind)  # as it was, without what its __init__ would do to it
            for name, part in zip(names, parts, strict=True):
                object.__setattr__(record, name, part)
            return record


def kind_of_row(skeleton: Skeleton) -> type | None:
    """list or tuple, where the batch is all of its tensors in their order, each once, and nothing else."""
    if not isinstance(skeleton, _Sequence) or skeleton.kind not in (list, tuple):
        return None
    numbers = [child.number if isinstance(child, _Tensor) else None for child in skeleton.children]
    return skeleton.kind if numbers == list(range(len(numbers))) else None


def with_tensors(batch: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The batch as a step sees it, with what the function makes of each tensor."""
    kind = type(batch)
    if kind is tuple or kind is list or kind is dict:  # as most are, and a fifth of the time
        parts = list(batch.values()) if kind is dict else batch
        if _are_plain(parts):
            made = [function(part) for part in parts]
            return dict(zip(batch, made, strict=True)) if kind is dict else kind(made)
    tensors, skeleton = flatten(batch)
    return build(skeleton, [function(tensor) for tensor in tensors])


def part_of(skeleton: Skeleton, tensors: Sequence[torch.Tensor], length: int, rows: slice, depth: int = 0) -> Skeleton:
    """With these items of each list or tuple of so many that have no rows of their own: names, say, of samples. Raises
    WorkloadError for what does not tell where its samples are."""
    if isinstance(skeleton, (_Tensor, _Constant)):
        return skeleton
    parts = skeleton.children
    if isinstance(skeleton, _Sequence) and skeleton.kind in (list, tuple) and len(parts) == length > 1:
        if not any(tensor.dim() for tensor in flatten([build(each, tensors) for each in parts])[0]):
            return dataclasses.replace(skeleton, children=parts[rows])
        if depth and _are_alike(parts, True):
            raise WorkloadError(f"a {skeleton.kind.__name__} of {length} items with {length} rows each")
    made = build(skeleton, tensors) if isinstance(skeleton, _Object) else None
    sized = [each for each in (made, *getattr(made, "__dict__", {}).values()) if _num_rows(each) == length]
    if isinstance(skeleton, _Sparse) or sized:
        held = [f" with a {type(each).__name__} of {length} in it" for each in sized if each is not made]
        raise WorkloadError(f"{_described(skeleton)}{held[0] if held else ''}")
    children: Any = tuple(part_of(each, tensors, length, rows, depth + 1) for each in parts)
    return dataclasses.replace(skeleton, children=children)


def _num_rows(value: object) -> int | None:
    """Of what is no tensor: a list, an array, or whatever has a shape."""
    if isinstance(value, (list, tuple)):
        return len(value)
    shape = None if isinstance(value, torch.Tensor) else getattr(value, "shape", None)
    return shape[0] if isinstance(shape, tuple) and shape else None


def _are_plain(parts: Sequence[Any]) -> bool:
    """Tensors alone, and each once."""
    for part in parts:
        if type(part) is not torch.Tensor or part.requires_grad or part.layout is not torch.strided:
            return False
    return len(set(map(id, parts))) == len(parts)


def ways(skeleton: Skeleton) -> list[str]:
    """To each tensor, by its number, as Python writes it: "['spans'][0]"."""
    found: dict[int, str] = {}
    _find(skeleton, "", found)
    return [found[number] for number in range(len(found))]


def difference(
    skeleton: Skeleton, other: Skeleton, what: str = "the batch", where: str = "before", *, takes_none: bool = False
) -> str | None:
    """Where two structures part, in a phrase about the first, or None: "the batch['x'] is int, and was str before".

    The values of constants are no structure, and no more is the length of a list, or of a tuple of items that are all
    alike: those may be the samples. Nor is what an object holds that pickle has taken apart. takes_none: nor is which
    parts are None.
    """
    return next(_differences(skeleton, other, (what,), where, takes_none), None)


class _Tree:
    """One tree as it is taken apart."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self._known: dict[int, tuple[object, _Tensor]] = {}  # by the leaf's id; it is kept, or another would have that

    def skeleton(self, value: Any, path: _Path) -> Skeleton:
        if len(path) > MAX_DEPTH:
            raise WorkloadError(
                f"{''.join(path[:4])}… has containers within containers, more than {MAX_DEPTH} of them; a batch is no "
                "deeper, nor may a part of it hold itself"
            )
        kind = type(value)
        if isinstance(value, torch.Tensor) and len(dense := dense_parts(value)) > 1:
            return _Sparse(SparseKind.of(value), tuple(self._tensor(each, path) for each in dense))
        if isinstance(value, (torch.Tensor, np.ndarray)):
            return self._tensor(value, path)
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, _CONSTANTS):
            return _Constant(value)
        key = namedtuple if is_namedtuple_class(kind) else kind
        if kind not in _OWN_WAY and key in SUPPORTED_NODES:
            parts, context = SUPPORTED_NODES[key].flatten_fn(value)
            return _Registered(kind, key, context, self._children(enumerate(parts), path, "[{!r}]"))
        if isinstance(value, (list, tuple)):
            return _Sequence(kind, self._children(enumerate(value), path, "[{!r}]"))
        if isinstance(value, Mapping):
            return _Mapping(kind, tuple(value), self._children(value.items(), path, "[{!r}]"))
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            named = _state(value)
            return _Record(kind, tuple(named), self._children(named.items(), path, ".{}"))
        if kind.__module__ == "builtins" or isinstance(value, torch.nn.Module):
            raise WorkloadError(f"{''.join(path)} is {kind_of(value)}; {_MADE_OF}")
        return self._object(value, path)

    def _object(self, value: object, path: _Path) -> _Object:
        children: dict[Skeleton, int] = {}

        def number_of(tensor: torch.Tensor) -> int:
            child = self.skeleton(tensor, (*path, _IN_OBJECT.format(len(children))))
            return children.setdefault(child, len(children))

        try:
            packet, own = packet_of(value, number_of)
        except (pickle.PicklingError, AttributeError, TypeError, NotImplementedError) as error:
            raise WorkloadError(f"{''.join(path)} is {kind_of(value)}, and pickle: {error}; {_MADE_OF}") from error
        return _Object(type(value).__name__, packet, own, tuple(children))

    def _children(self, items: Iterable[tuple[Any, Any]], path: _Path, step: str) -> tuple[Skeleton, ...]:
        return tuple(self.skeleton(value, (*path, step.format(key))) for key, value in items)

    def _tensor(self, leaf: torch.Tensor | np.ndarray[Any, Any], path: _Path) -> _Tensor:
        if id(leaf) not in self._known:
            tensor = _plain(leaf, path)
            self._known[id(leaf)] = leaf, _Tensor(len(self.tensors), tensor.dtype)
            self.tensors.append(tensor)
        return self._known[id(leaf)][1]


def _plain(leaf: torch.Tensor | np.ndarray[Any, Any], path: _Path) -> torch.Tensor:
    if isinstance(leaf, np.ndarray):
        try:
            return torch.from_numpy(np.require(leaf, leaf.dtype.newbyteorder("="), ["C", "W"]))
        except TypeError:
            raise WorkloadError(
                f"{''.join(path)} is an array of {leaf.dtype}, which no tensor can hold; give numbers, or a "
                "list of strings"
            ) from None
    if leaf.is_meta:
        raise WorkloadError(f"{''.join(path)} is on torch's meta device, and has no values; give one on the CPU")
    if leaf.layout is not torch.strided or leaf.is_nested or leaf.is_quantized:
        kind = (
            "nested" if leaf.is_nested else str(leaf.dtype if leaf.is_quantized else leaf.layout).removeprefix("torch.")
        )
        raise WorkloadError(
            f"{''.join(path)} is a tensor of its own kind ({kind}); give a dense one, such as its .to_dense()"
            + ", or .dequantize()" * leaf.is_quantized
        )
    plain = leaf.detach()
    return plain if type(plain) is torch.Tensor else plain.as_subclass(torch.Tensor)


def _state(record: Any) -> dict[str, Any]:
    """Fields of a dataclass that have a value, and attributes that it was given beside them."""
    names = (field.name for field in dataclasses.fields(record))
    return {name: getattr(record, name) for name in names if hasattr(record, name)} | getattr(record, "__dict__", {})


def _mapping(kind: type, items: dict[Hashable, Any]) -> Any:
    if kind is dict:
        return items
    try:
        return kind(items)
    except TypeError as error:
        raise WorkloadError(
            f"a batch has a {kind.__name__}, which cannot be made of its items ({error}); give a dict"
        ) from error


def _differences(one: Skeleton, other: Skeleton, path: _Path, where: str, takes_none: bool) -> Iterator[str]:
    here = "".join(path)
    if takes_none and _NONE in (one, other):
        return
    if _described(one) != _described(other):
        yield f"{here} is {_described(one)}, and was {_described(other)} {where}"
        return
    if isinstance(one, (_Tensor, _Constant, _Object)):
        return
    assert not isinstance(other, (_Tensor, _Constant, _Object))
    if isinstance(one, _Registered) and isinstance(other, _Registered) and one.context != other.context:
        yield f"{here} is {one.kind.__name__} of other parts than {where}"
        return
    ours, theirs = _named(one), _named(other)
    if len(ours) != len(theirs) and all(_may_be_samples(each, takes_none) for each in (one, other)):
        theirs = _of_length(theirs, len(ours)) if ours and theirs else ours
    for name in theirs.keys() - ours.keys():
        yield f"{here} has no {name}, and had it {where}"
    for name in ours.keys() - theirs.keys():
        yield f"{here} has {name}, and had none {where}"
    for name in (name for name in ours if name in theirs):
        yield from _differences(ours[name], theirs[name], (*path, name), where, takes_none)


def _find(skeleton: Skeleton, way: str, found: dict[int, str]) -> None:
    if isinstance(skeleton, _Tensor):
        found.setdefault(skeleton.number, way)
    elif not isinstance(skeleton, _Constant):
        for step, child in _named(skeleton).items():
            _find(child, way + step, found)


def _described(skeleton: Skeleton) -> str:
    """What no other structure may have in its place."""
    match skeleton:
        case _Tensor(_, dtype):
            return f"a tensor of {str(dtype).removeprefix('torch.')}"
        case _Constant(value):
            return "a number" if isinstance(value, _NUMBERS) else kind_of(value)
        case _Object(kind):
            return kind
        case _Sparse(kind):
            return f"a tensor of layout {str(kind.layout).removeprefix('torch.')}"
    return skeleton.kind.__name__


def _named(branch: _Branch) -> dict[str, Skeleton]:
    """The children, by the last step of the way to them."""
    match branch:
        case _Mapping(_, keys, children):
            return {f"[{key!r}]": child for key, child in zip(keys, children, strict=True)}
        case _Record(_, names, children):
            return {f".{name}": child for name, child in zip(names, children, strict=True)}
        case _Object(_, _, _, children):
            return {_IN_OBJECT.format(number): child for number, child in enumerate(children)}
    return {f"[{number}]": child for number, child in enumerate(branch.children)}


def _may_be_samples(branch: _Branch, takes_none: bool) -> bool:
    """A list's items may be, and those of a tuple where they are all alike: `zip(*items)` gives such, and so torch's
    `default_collate` does with the names of samples (image, target, name)."""
    if isinstance(branch, (_Object, _Sparse)):
        return False
    if branch.kind is tuple:
        return _are_alike(branch.children, takes_none)
    return issubclass(branch.kind, list)


def _are_alike(items: Sequence[Skeleton], takes_none: bool) -> bool:
    first = next((item for item in items if not takes_none or item != _NONE), _NONE)
    return all(difference(each, first, takes_none=takes_none) is None for each in items)


def _of_length(items: dict[str, Skeleton], length: int) -> dict[str, Skeleton]:
    """Of a sequence, whose items may be samples: as many as another one has, the missing ones like the first."""
    first = items["[0]"]
    return {f"[{number}]": items.get(f"[{number}]", first) for number in range(length)}
