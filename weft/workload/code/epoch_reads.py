"""Epoch reads: what `Workload.on_epoch` asks for by name, and who keeps it: the forward of some layer, which is run in
the process of that layer's stage alone, or the step, which each replica runs for itself. And what it may set of what
steps go by.

    self.history.append(...)  in a forward       METER.update(...)  in the step       on_epoch: sum(model[0].history)
"""

from __future__ import annotations

import dis
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import CodeType, FunctionType
from typing import Any

import numpy as np
import torch
from torch import nn

from weft.workload.code.beside_model import modules_beside
from weft.workload.code.fingerprint import fingerprint
from weft.workload.code.functions import found_from, functions_from, names_in, words_in
from weft.workload.code.places import NEVER_PLAIN, Place, place_of
from weft.workload.code.variables import KEPT_OTHERWISE, VariableSearch
from weft.workload.workload import Workload

_TORCHS = frozenset(("forward", *vars(nn.Module())))
_NESTED = 3  # methods that call methods; arbitrary
_UNNAMED = {"__repr__", "__str__", "__format__", "__float__", "__len__", "__iter__", "__getitem__", "__contains__"}
_UNNAMED |= {"__setattr__", "__setitem__"}
BY_THE_STEP = ""  # in the place of a unit's name
_SETS = {"STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF", "DELETE_ATTR"}  # instructions, of a name
_SETS_INSIDE = {"STORE_SUBSCR", "STORE_SLICE", "DELETE_SUBSCR"}
_CHANGEABLE = (list, dict, set, deque, np.ndarray, torch.Tensor)
_CHANGE = {"append", "extend", "insert", "update", "setdefault", "pop", "popitem", "remove", "clear", "add", "discard"}


class EpochReads:
    def __init__(self, workload: Workload) -> None:
        """Before anything has run."""
        self._model, self._apart = workload.model, [*workload.model.modules(), *workload.model.parameters()]
        self._names = set[str]()
        self._search = VariableSearch({})
        self._first: dict[tuple[str, str], str | None] = {}
        self.sets = _set_for_steps(workload)
        if (function := workload.on_epoch) is None:
            return
        self._search = VariableSearch({"Workload.on_epoch": function}, into_modules=False)
        self._apart += self._search.objects  # whose attributes are looked at each by itself
        owners = [type(each) for each in self._search.objects]
        if any(found_from(function, "on_epoch", (nn.Module, Workload))):  # type: ignore[arg-type]
            owners += map(type, workload.model.modules())
            self._modules = dict(workload.model.named_modules())
        self._names = _asked_for(function, owners)
        self._first = dict(self._looks())

    def changed(self, units: Sequence[str], counted: Collection[str] = ()) -> list[tuple[str, str]]:
        """What has changed since, by name, each with the first unit whose forward keeps it. units: prefixes of the
        names of their modules, in the order in which they run. counted: attributes of modules that have changed and
        were put back."""
        now = [
            (holder, key)
            for (holder, key), look in self._looks()
            if self._first.get((holder, key), "") != look
            or (holder in self._modules and f"{holder}.{key}".removeprefix(".") in counted)
        ]
        if not now:
            return []
        keepers = list(self._keepers(units))
        found: dict[str, str] = {}
        for holder, key in now:
            places = self._places(holder, key)
            unit = next((unit for unit, kept in keepers if places & kept), BY_THE_STEP)
            found.setdefault(f"{holder}.{key}".removeprefix("."), unit)
        return list(found.items())

    _modules: Mapping[str, nn.Module] = {}

    def _looks(self) -> Iterator[tuple[tuple[str, str], str | None]]:
        state = {id(each) for each in (*self._model.parameters(), *self._model.buffers())}
        for holder, own in self._holders().items():
            for key, value in own.items():
                is_own = isinstance(value, torch.Tensor) and id(value) not in state
                if is_own or not isinstance(value, (*KEPT_OTHERWISE, *NEVER_PLAIN, nn.Module)):
                    yield (holder, key), fingerprint(value, apart=self._apart)

    def _holders(self) -> dict[str, Mapping[str, Any]]:
        found: dict[str, Mapping[str, Any]] = {
            name: {key: each for key, each in vars(module).items() if key in self._names - _TORCHS}
            for name, module in self._modules.items()
        }
        for name, own in self._search.variables.items():
            is_named = name.endswith((".around", ".parts", ".globals"))  # or what these have, whatever it is
            found[name] = {key: each for key, each in own.items() if is_named or key in self._names}
        return found

    def _places(self, holder: str, key: str) -> set[Place]:
        if (module := self._modules.get(holder)) is not None:
            return {place_of(vars(module), key), *_of_value(vars(module).get(key))}
        own = self._search.variables[holder]
        owner = {(id(each), "") for each in self._search.objects if getattr(each, "__dict__", None) is own}
        return {place_of(own, key), *_of_value(own.get(key)), *owner}

    def _keepers(self, units: Sequence[str]) -> Iterator[tuple[str, set[Place]]]:
        """What the forwards of each unit's modules refer to."""
        by_class: dict[type, set[Place]] = {}
        for unit in units:
            inside = [each for name, each in self._model.named_modules() if f"{name}.".startswith(unit)]
            kept: set[Place] = set()
            for module in inside:
                if type(module) not in by_class:
                    by_class[type(module)] = _referred({"": type(module)})
                hooks = {str(key): each for own in _hooks(module) for key, each in own.items()}
                kept |= by_class[type(module)] | (_referred(hooks) if hooks else set())
                names = _names_of([module.forward, *hooks.values()])
                own = vars(module)
                for key in names & own.keys() - _TORCHS:
                    kept |= {place_of(own, key), *_of_value(own[key])}
            yield unit, kept


def _asked_for(function: Any, owners: Sequence[type]) -> set[str]:
    """By a function, and by the methods of these classes that it names; what runs the model reads nothing of it."""
    return {name for each in _called_by(function, owners) for name in names_in(each.__code__)}


def _called_by(function: Any, owners: Sequence[type]) -> list[FunctionType]:
    found = [*functions_from(function)]
    for _ in range(_NESTED):
        names = {name for each in found for name in names_in(each.__code__)} - {"forward"} | _UNNAMED
        methods = [getattr(kind, name, None) for kind in dict.fromkeys(owners) for name in names]
        stored = {name for each in found for kind, name in _instructions(each.__code__) if kind == "STORE_ATTR"}
        own = (getattr(kind, name, None) for kind in dict.fromkeys(owners) for name in stored)
        methods += [each.fset for each in own if isinstance(each, property)]
        found += [own for each in methods for own in functions_from(each)]
    return list(dict.fromkeys(found))


def _names_of(functions: Sequence[Any]) -> set[str]:
    return {name for each in functions for own in functions_from(each) for name in names_in(own.__code__)}


def _set_for_steps(workload: Workload) -> str | None:
    """Something beside the model by which a step goes, and that `on_epoch` may set, by its name."""
    if (function := workload.on_epoch) is None:
        return None
    search = VariableSearch({"Workload.on_epoch": function}, into_modules=False)
    steps = {"step": workload.step, "loss": workload.loss, "weight": workload.weight}
    places = _referred({name: each for name, each in steps.items() if each is not None})
    variables = [(place_of(own, key), key, each) for own in search.variables.values() for key, each in own.items()]
    shared = [(key, each) for place, key, each in variables if not places.isdisjoint((place, *_of_value(each)))]
    modules = [each for model in search.models for each in model.modules()]
    for module in {*modules_beside(workload).values()}.intersection(modules):
        own = {**vars(module), **module._parameters, **module._buffers}
        shared += [(key, each) for key, each in own.items() if key not in _TORCHS]
    set_anew, changed = set[str](), set[str]()
    for called in _called_by(function, [*map(type, (*search.objects, *modules))]):
        _find_set(called.__code__, set_anew, changed)
    found = (key for key, each in shared if key in set_anew or (key in changed and isinstance(each, _CHANGEABLE)))
    return min(found, default=None)


def _find_set(code: CodeType, set_anew: set[str], changed: set[str]) -> None:
    """Names of what it may set. Of what it changes in place nobody knows which it is of all that it asks for."""
    own = _instructions(code)
    asked = [name for _, name in own if isinstance(name, str)]
    set_anew.update(name for kind, name in own if kind in _SETS or (isinstance(name, str) and "setattr" in asked))
    is_inside = not _SETS_INSIDE.isdisjoint(kind for kind, _ in own)
    if is_inside or any(name in _CHANGE or (name.endswith("_") and not name.endswith("__")) for name in asked):
        changed.update(words_in(code), code.co_varnames)
    for each in code.co_consts:
        if isinstance(each, CodeType):
            _find_set(each, set_anew, changed)


def _instructions(code: CodeType) -> list[tuple[str, Any]]:
    return [(each.opname, each.argval) for each in dis.get_instructions(code)]


def _hooks(module: nn.Module) -> Iterator[Mapping[int, Any]]:
    yield from (each for key, each in vars(module).items() if "hooks" in key and key in _TORCHS and each)


def _referred(roots: Mapping[str, Any]) -> set[Place]:
    search = VariableSearch(roots, into_modules=False)
    found = {(id(each), "") for each in search.objects}
    for own in search.variables.values():
        for key, value in own.items():
            found |= {place_of(own, key), *_of_value(value)}
    return found


def _of_value(value: Any) -> Iterator[Place]:
    """Of what may change inside, whoever holds it."""
    if value is not None and not isinstance(value, (bool, int, float, complex, str, bytes, tuple)):
        yield id(value), ""
