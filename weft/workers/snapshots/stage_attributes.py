"""Stage attributes: what modules keep that is no parameter, buffer, module or setting, as each stage of a trial has it.

Containers stay the objects that they are, since other modules, hooks and functions may hold them too: each stage has
contents of its own, which are put into them while it runs.
"""

from __future__ import annotations

import contextlib
import copy
import numbers
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import nn

from weft.workers.snapshots.attributes import MAX_PARTS, TORCHS
from weft.workers.snapshots.remembered import PARTED, first_parts, put_into
from weft.workload.cutting.names import Attribute

# Of torch's own, what a module may come to have while it runs, and an attribute says that it has.
_HOOKS = [name for name in TORCHS if name.startswith(("_forward_", "_backward_")) and "hooks" in name]
_CONTAINERS = PARTED - {tuple}
_NUMBERS = (int, float)
_SINGLE = (numbers.Number, np.generic, str, type(None))  # and what is of a class of these
Numbers = Mapping[int, Mapping[str, float]]  # by the id of a module
_Kept = Mapping[int, Mapping[str, Any]]  # by that
_Contents = dict[int, tuple[Any, Any]]  # by the id of a container: that, and a copy of it


class StageAttributes:
    """Of all modules: a stage's own are as in a process that runs no other stage, so nobody sees there what skipped
    modules would have kept."""

    def __init__(self, modules: Sequence[nn.Module], kept: _Kept, contents: _Contents) -> None:
        self.modules, self._kept, self._contents = modules, kept, contents

    @classmethod
    def of(cls, model: nn.Module) -> StageAttributes:
        """As they are now."""
        modules = [*model.modules()]
        kept = {id(module): _own_of(module) for module in modules}
        contents: _Contents = {}
        for own in kept.values():
            for key in own.keys() - TORCHS:
                _note(own[key], contents, [MAX_PARTS])
        return cls(modules, kept, contents)

    def copied(self) -> StageAttributes:
        return StageAttributes(self.modules, self._kept, self._contents)  # which are replaced, and not written to

    def with_those(self, others: _Kept) -> StageAttributes:
        kept = {module: {**own, **others.get(module, {})} for module, own in self._kept.items()}
        return StageAttributes(self.modules, kept, self._contents)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """What is in the modules at the end is the stage's from then on."""
        before = self.copied()
        before._take()
        self.put_back()
        try:
            yield
        finally:
            self._take()
            before.put_back()

    def is_as(self, built: StageAttributes, *, but_for_numbers: bool = False) -> bool:
        """Whether each is the same object with the same parts, or another container with the same. Of one model."""
        return all(
            own.keys() == built._kept[module].keys()
            and all(
                (but_for_numbers and type(value) in _NUMBERS) or self._is_one(value, built, built._kept[module][key])
                for key, value in own.items()
            )
            for module, own in self._kept.items()
        ) and all(self._is_one(there, built, there) for there, _ in self._contents.values())

    def numbers(self) -> Numbers:
        """The numbers among them."""
        return {module: numbers_of(own) for module, own in self._kept.items()}

    def left(self, built: StageAttributes) -> dict[Attribute, Any]:
        """Numbers, texts and None that are others than they were, or were not there."""
        return {
            Attribute(module, key): value
            for module in self.modules
            for key, value in self._kept[id(module)].items()
            if isinstance(value, _SINGLE) and built.differs(module, key, value)
        }

    def differs(self, module: nn.Module, key: str, value: Any) -> bool:
        """From what is there."""
        there = self._kept[id(module)].get(key, self)
        return type(there) is not type(value) or bool(there != value and (there == there or value == value))

    def value(self, module: nn.Module, key: str) -> Any:
        """As it is there; as the class has it where the module has none."""
        return self._kept[id(module)].get(key, getattr(type(module), key, None))

    def _is_one(self, value: Any, built: StageAttributes, other: Any) -> bool:
        if type(value) in _CONTAINERS and type(value) is type(other):
            return _has_same(self._content(value), built._content(other))
        return value is other

    def _content(self, container: Any) -> Any:
        return self._contents.get(id(container), (container, container))[1]

    def _take(self) -> None:
        self._kept = {id(module): _own_of(module) for module in self.modules}
        self._contents = {each: (there, copy.copy(there)) for each, (there, _) in self._contents.items()}

    def put_back(self) -> None:
        for module in self.modules:
            now, kept = vars(module), self._kept[id(module)]
            for key in now.keys() - TORCHS - kept.keys():
                del now[key]
            now.update((key, value) for key, value in kept.items() if key not in TORCHS)
            for key in _HOOKS:
                if now[key] or key in kept:  # the same dict, which handles know
                    now[key].clear()
                    now[key].update(kept.get(key, ()))
        for there, content in self._contents.values():
            put_into(there, content)


def numbers_of(own: Mapping[str, Any]) -> dict[str, float]:
    """own: attributes of a module."""
    return {key: value for key, value in own.items() if type(value) in _NUMBERS}


def singles_of(own: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers, texts and None among attributes of a module."""
    return {key: value for key, value in own.items() if key not in TORCHS and isinstance(value, _SINGLE)}


def _own_of(module: nn.Module) -> dict[str, Any]:
    there = vars(module)
    hooks = {key: dict(there[key]) for key in _HOOKS if there[key]}
    return {key: there[key] for key in there.keys() - TORCHS} | hooks


def _note(value: Any, contents: _Contents, left: list[int]) -> None:
    """With containers in it. left: of parts that are looked at."""
    if type(value) in _CONTAINERS:
        if id(value) in contents:
            return
        contents[id(value)] = value, copy.copy(value)
    for part in first_parts(value, left):
        _note(part, contents, left)


def _has_same(one: Any, other: Any) -> bool:
    """Parts, of containers of one type."""
    if type(one) is set:
        return set(map(id, one)) == set(map(id, other))
    both = [[*each, *each.values()] if isinstance(each, dict) else each for each in (one, other)]
    return len(one) == len(other) and all(map(operator.is_, *both))
