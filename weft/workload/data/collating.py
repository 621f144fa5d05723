"""Collating: a batch from its items as torch's `default_collate` makes it, of dataclasses and None, too."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, MutableMapping
from types import NoneType
from typing import Any

from torch.utils.data._utils.collate import collate, default_collate_fn_map

_Functions = dict[Any, Any]  # by the class of an item: what makes one of several


def collate_items(items: list[Any]) -> Any:
    """Tensors, arrays and numbers are stacked, strings listed, field by field of whatever holds them.

    Whatever does not go together raises an error of any class, as torch's own does.
    """
    return collate(items, collate_fn_map=_FUNCTIONS)


class _DataclassType(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return dataclasses.is_dataclass(instance) and not isinstance(instance, (type, Mapping))


class _Dataclass(metaclass=_DataclassType):
    """Stands for every dataclass where a class is asked for."""


def _record(items: list[Any], *, collate_fn_map: _Functions) -> Any:
    record = copy.copy(items[0])
    for field in dataclasses.fields(record):
        parts = [getattr(item, field.name) for item in items]
        object.__setattr__(record, field.name, collate(parts, collate_fn_map=collate_fn_map))
    return record


def _mapping(items: list[Mapping[Any, Any]], *, collate_fn_map: _Functions) -> Any:
    """As torch does it, but that items may not have more keys than the first one: those would be lost."""
    first = items[0]
    if not all(item.keys() == first.keys() for item in items):
        raise KeyError("items with different keys")
    parts = {key: collate([item[key] for item in items], collate_fn_map=collate_fn_map) for key in first}
    if not isinstance(first, MutableMapping):
        return type(first)(parts)  # type: ignore[call-arg]  # a Mapping that takes nothing raises TypeError here
    made = copy.copy(first)
    made.update(parts)
    return made


def _nothing(items: list[None], *, collate_fn_map: _Functions) -> None:
    if any(item is not None for item in items):
        raise TypeError("items of which only some are None")


_FUNCTIONS: _Functions = {**default_collate_fn_map, NoneType: _nothing, Mapping: _mapping, _Dataclass: _record}
