"""Plain values beside the model that other processes read: a weight in the loss by epochs, a curriculum's level.

Each process has the user's file, and its globals, for itself. What a function of the user's changes in one of them no
other hears of.
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
_STEPS = ("Workload.step", "Workload.loss")  # which run here


class ReadElsewhere:
    """Of what `on_epoch` asks for by name in the data, which a process of its own loads, and of what the step or the
    loss refers to. It keeps none of these: what `on_epoch` changes that has hold of."""

    def __init__(self, workload: Workload, *, is_alone: bool, has_one_replica: bool) -> None:
        """is_alone: this process runs every stage, so its step reads what is here."""
        self._has_one_replica = has_one_replica
        functions = {"collate": workload.collate} | ({} if is_alone else {"step": workload.step, "loss": workload.loss})
        self._names = set[str]().union(*(names_in(each.__code__) for each in functions_from(workload.on_epoch)))
        data = {"train": workload.train, "validation": workload.validation}
        self._functions = {f"Workload.{name}": _weak(each) for name, each in functions.items()}
        self._built = self._of_functions()
        self._data = {f"Workload.{name}": _weak(_dataset(each)) for name, each in data.items()}

    def values(self) -> dict[str, Any]:
        """Copies of the plain ones, by how one comes there."""
        found = self._of_functions()
        for name, dataset in self._data.items():
            made = dataset()
            values = ((key, value) for key, value in getattr(made, "__dict__", {}).items() if key in self._named(made))
            found |= {f"{name}.{key}": each for key, value in values if (each := _copied(value)) is not None}
        return found

    def _of_functions(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, function in self._functions.items():
            referred = found_from(function(), name, (int, float, str, list, dict))  # type: ignore[arg-type, var-annotated]
            found |= {key: each for key, value in referred if (each := _copied(value)) is not None}
        return found

    def changed(self, before: Mapping[str, Any]) -> list[str]:
        """By name, of what there was before; but for what the steps of this very process have changed until then, which
        other stages never come to. Other replicas do, for themselves: of theirs a list alone may be left as it is,
        whose items nobody goes by, most often, such as losses; a number may anneal something."""
        now, built = self.values(), {name: value for name, value in self._built.items() if name.startswith(_STEPS)}
        return [
            name
            for name, value in before.items()
            if name in now and not self._is_of_steps(built.get(name, value), value, now[name])
        ]

    def begun_anew(self, before: Mapping[str, Any]) -> list[str]:
        """Of the step's, what is no list and another than before: an earlier stage may count it, too, and nobody tells
        that."""
        now = self._of_functions()
        of_step = [name for name in before if name.startswith(_STEPS[0]) and not isinstance(before[name], list)]
        return [name for name in of_step if name in now and [now[name]] != [before[name]]]

    def _is_of_steps(self, built: Any, before: Any, now: Any) -> bool:
        """Whether all that has changed since `before` had changed before, too; in a dictionary by its keys. In lists, a
        nan is the same as itself."""
        if [before] == [now]:
            return True
        if type(before) is type(now) is dict:
            own, keys = built if type(built) is dict else {}, before.keys() | now.keys()
            return all(self._is_of_steps(own.get(key), before.get(key), now.get(key)) for key in keys)
        return [built] != [before] and (self._has_one_replica or type(before) is type(now) is list)

    def _named(self, dataset: Any) -> set[str]:
        """What runs over a dataset changes what that counts or keeps, and nobody is to hear of it."""
        methods = (undecorated(getattr_static(type(dataset), name, None)) for name in self._names)
        return self._names.union(*(names_in(each.__code__) for each in methods if isinstance(each, FunctionType)))


def _weak(value: Any) -> Callable[[], Any]:
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
