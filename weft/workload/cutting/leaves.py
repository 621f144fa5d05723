"""Leaves: the tensors in what a module is given and returns, in a fixed order, and the same with others in their place.

What torch's pytree knows (tuples, dicts, transformers' outputs), and dataclasses and mappings that it need not know.
Any other object is left as it is: a cache of keys and values that blocks fill by themselves, for example.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

_PLAIN = {type(None), bool, int, float, str}  # as most of what is no tensor


def tensors_in(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    _find(value, found)
    return found


def places_in(given: tuple[Any, ...]) -> list[torch.Tensor | None]:
    """Of arguments, and those by keyword: the tensors, and None for each None, so that what stands behind one has the
    same place where it is a tensor, as a mask is that hides nothing in some batches."""
    args, kwargs = given
    found: list[torch.Tensor | None] = []
    for value in (*args, *kwargs.values()):
        if value is None:
            found.append(None)
        else:
            found += tensors_in(value)
    return found


def _find(value: Any, found: list[torch.Tensor]) -> None:
    """In the order of `replaced`."""
    if isinstance(value, torch.Tensor):
        found.append(value)
        return
    kind = type(value)
    if kind in _PLAIN:
        return
    if kind is tuple or kind is list:
        for part in value:
            _find(part, found)
    elif kind is dict:
        for part in value.values():
            _find(part, found)
    else:

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            found.append(tensor)
            return tensor

        replaced(value, keep)


def parts_of(value: Any) -> tuple[Any, ...] | list[Any] | dict[Any, Any] | None:
    """What `tensors_in` looks into of an object; None of one that is a leaf, or is left as it is."""
    if value is None or isinstance(value, (int, float, str, torch.Tensor)):
        return None
    if isinstance(value, tuple):
        return tuple(value)
    if isinstance(value, list):
        return list(value)
    if isinstance(value, Mapping):
        return dict(value)
    leaves, _ = tree_flatten(value)
    if len(leaves) == 1 and leaves[0] is value:
        return _fields_of(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else None
    return leaves


def replaced(value: Any, by: Callable[[torch.Tensor], Any]) -> Any:
    """The value with each tensor replaced by what `by` returns for it; itself where nothing but itself comes back."""
    if isinstance(value, torch.Tensor):
        return by(value)
    if value is None or isinstance(value, (int, float, str)):
        return value
    kind = type(value)
    if kind is tuple or kind is list:  # as pytree has these and dicts, in a fifth of its time
        parts = [replaced(part, by) for part in value]
        return value if all(map(is_, parts, value)) else kind(parts)
    if kind is dict:
        values = {key: replaced(part, by) for key, part in value.items()}
        return value if all(map(is_, values.values(), value.values())) else values
    leaves, spec = tree_flatten(value)
    if len(leaves) == 1 and leaves[0] is value:
        return _replaced_in_object(value, by)
    made = [replaced(leaf, by) for leaf in leaves]
    if all(new is old for new, old in zip(made, leaves, strict=True)):
        return value
    return tree_unflatten(made, spec)


def copied(value: Any) -> Any:
    """The same tensors, in containers of its own, which may be written to."""
    if value is None or isinstance(value, (int, float, str, torch.Tensor)):
        return value
    leaves, spec = tree_flatten(value)
    if len(leaves) != 1 or leaves[0] is not value:
        return tree_unflatten([copied(leaf) for leaf in leaves], spec)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _put(value, {name: copied(part) for name, part in _fields_of(value).items()}, _set_field)
    if isinstance(value, Mapping):
        return _put(value, {key: copied(part) for key, part in value.items()}, _set_item)
    return value


def _replaced_in_object(value: Any, by: Callable[[torch.Tensor], Any]) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _with(value, _fields_of(value), by, _set_field)
    if isinstance(value, Mapping):
        return _with(value, dict(value), by, _set_item)
    return value


def _fields_of(value: Any) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(value)]
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def _with(
    value: Any, parts: dict[Any, Any], by: Callable[[torch.Tensor], Any], put: Callable[[Any, Any, Any], None]
) -> Any:
    made = {key: replaced(part, by) for key, part in parts.items()}
    changed = {key: part for key, part in made.items() if part is not parts[key]}
    if not changed:
        return value
    return _put(value, changed, put)


def _put(value: Any, parts: dict[Any, Any], put: Callable[[Any, Any, Any], None]) -> Any:
    """A copy, with these."""
    other = copy.copy(value)
    for key, part in parts.items():
        put(other, key, part)
    return other


def _set_field(value: Any, name: str, part: Any) -> None:
    object.__setattr__(value, name, part)  # frozen ones, too


def _set_item(value: Any, key: Any, part: Any) -> None:
    value[key] = part


def lying_as(alike: Sequence[torch.Tensor], shape: torch.Size) -> torch.Tensor | None:
    """One of this shape, its dimensions in the order in memory of these; None where they differ, or have gaps."""
    if all(each.is_contiguous() for each in alike):
        return alike[0].new_empty(shape)
    for each in alike:
        order = sorted(range(each.dim()), key=each.stride().__getitem__, reverse=True)
        if all(other.dim() == len(order) == len(shape) and other.permute(order).is_contiguous() for other in alike):
            return each.new_empty([shape[dim] for dim in order]).permute([order.index(dim) for dim in sorted(order)])
    return None
