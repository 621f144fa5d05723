"""Plain values that the processes read which load data: a curriculum's level, what a collate function goes by.

They load ahead, and by their own copies of the dataset and of the user's globals.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from inspect import getattr_static
from types import FunctionType
from typing import Any

from torch.utils.data import DataLoader, Subset

from weft.workload.code.functions import found_from, functions_from, names_in, undecorated
from weft.workload.workload import Workload

MAX_ITEMS = 1000  # of a container that is looked into: arbitrary; larger ones are data
_Plain = int | float | str  # booleans are integers


class ReadElsewhere:
    """Of what `on_epoch` asks for by name in the data, and of what the collate function refers to. It keeps none of
    these: what `on_epoch` changes that has hold of."""

    def __init__(self, workload: Workload) -> None:
        self._names = set[str]().union(*(names_in(each.__code__) for each in functions_from(workload.on_epoch)))
        self._collate = weak(workload.collate)
        data = {"train": workload.train, "validation": workload.validation}
        self._data = {f"Workload.{name}": weak(_dataset(each)) for name, each in data.items()}

    def values(self) -> dict[str, Any]:
        """Copies of the plain ones, by how one comes there."""
        kinds = (int, float, str, list, dict)
        referred = found_from(self._collate(), "Workload.collate", kinds)  # type: ignore[arg-type, var-annotated]
        found = {key: each for key, value in referred if (each := _copied(value)) is not None}
        for name, dataset in self._data.items():
            made = dataset()
            values = ((key, value) for key, value in getattr(made, "__dict__", {}).items() if key in self._named(made))
            found |= {f"{name}.{key}": each for key, value in values if (each := _copied(value)) is not None}
        return found

    def changed(self, before: Mapping[str, Any]) -> list[str]:
        """By name, of what there was before. In lists, a nan is the same as itself."""
        now = self.values()
        return [name for name, value in before.items() if name in now and [value] != [now[name]]]

    def _named(self, dataset: Any) -> set[str]:
        """What runs over a dataset changes what that counts or keeps, and nobody is to hear of it."""
        methods = (undecorated(getattr_static(type(dataset), name, None)) for name in self._names)
        return self._names.union(*(names_in(each.__code__) for each in methods if isinstance(each, FunctionType)))


def weak(value: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(value)
    except TypeError:  # a tuple, None: it has no attributes either
        return lambda: None


def _dataset(data: Any) -> Any:
    while isinstance(data, (DataLoader, Subset)):
        data = data.dataset
    return data


def _copied(value: Any) -> Any:
    """None of what is not plain."""
    if isinstance(value, _Plain):
        return value
    if type(value) is dict and len(value) <= MAX_ITEMS:
        return {key: each for key, item in value.items() if (each := _copied(item)) is not None}
    if type(value) in (list, tuple) and len(value) <= MAX_ITEMS:
        return [_copied(item) for item in value]
    return None
