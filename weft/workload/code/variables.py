"""Variables: where a job's own code keeps what is in no module: a count in a global, a variable around a function, an
attribute of an object or of a class of the user's.

    Workload.step.globals      that it asks for by name             Workload.step.annealer      an object's attributes
    Workload.step.around       variables of the function around it  Workload.model.Net.class    a class's
    Workload.step.own          attributes of its own               Workload.step.defaults     what its arguments may be
    Workload.step.meter.parts  what is in an object that is a list, dict, set or deque of a class of the user's

Each is a mapping by name, which reads and writes the variables themselves. Of what is installed there is none, nor of
data, optimizers and schedulers, which are kept otherwise.
"""

from __future__ import annotations

import argparse
import opcode
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from functools import _lru_cache_wrapper, partial
from io import IOBase
from itertools import islice
from types import (
    CodeType,
    FunctionType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler

from weft.workload.code.functions import contents_of, names_in, undecorated
from weft.workload.code.places import (
    CODE,
    NEVER_PLAIN,
    PARTED,
    AllParts,
    Arguments,
    ByKey,
    Cells,
    Named,
    OfClass,
    Slots,
    Variables,
    parts_within,
)
from weft.workload.origin import is_users
from weft.workload.workload import Workload

MAX_LOOKED_AT = 2_000  # arbitrary: some milliseconds; the nearest come first
MAX_PARTS = 64  # of a list or dict, which may be objects of the user's; others come last
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
KEPT_OTHERWISE = (torch.Tensor, Dataset, DataLoader, Sampler, torch.optim.Optimizer, LRScheduler, Workload)
_NAMESPACES = (SimpleNamespace, argparse.Namespace)  # of nobody's code: what a job is set to, often
_TORCHS = frozenset(vars(nn.Module()))
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def variables_of(workload: Workload) -> dict[str, Variables]:
    """Of the functions that a process calls which trains, of the model's classes, and of what these refer to. By names
    that no module of the model has, the same in every process."""
    return VariableSearch(workload).variables


class VariableSearch:
    """What functions and classes refer to, from one to the other."""

    def __init__(self, workload: Workload | Mapping[str, Any], *, into_modules: bool = True) -> None:
        """Or what to begin with, by name."""
        self._into_modules = into_modules
        self.variables: dict[str, Variables] = {}
        self.objects: list[object] = []  # whose attributes are among these
        self.models: list[nn.Module] = []  # that something has hold of
        self.iterators: dict[str, object] = {}  # by name; a file is none, most often one that is written
        self._namespaces: dict[int, Named] = {}  # by the id of each
        self._seen: dict[int, Any] = {}  # what was looked at, so that nothing else gets its id
        self._left: list[tuple[str, Any]] = []
        self._later: list[tuple[str, Any]] = []  # from MAX_PARTS on
        for name, value in _roots_of(workload) if isinstance(workload, Workload) else workload.items():
            self._add(name, value)
        self._run()

    def _add(self, name: str, value: Any) -> None:
        if isinstance(value, CODE):
            self._left += ((f"{name}.wrapper{number}", each) for number, each in enumerate(_wrappers(value)))
            value = undecorated(value)
        if type(value) not in _PLAIN and not isinstance(value, KEPT_OTHERWISE):
            self._left.append((name, value))

    def _run(self) -> None:
        while self._left or self._later:
            for name, value in self._left:  # which grows meanwhile
                if len(self._seen) >= MAX_LOOKED_AT:
                    return
                if id(value) not in self._seen:
                    self._seen[id(value)] = value
                    self._look(name, value)
            self._left, self._later = self._later, []

    def _look(self, name: str, value: Any) -> None:
        match value:
            case FunctionType():
                if is_users(value.__code__.co_filename):
                    self._function(name, value)
            case MethodType():
                self._add(name, value.__self__)
                self._add(f"{name}.{value.__func__.__name__}", value.__func__)
            case partial():
                self._add(f"{name}.func", value.func)
                self._kept(f"{name}.args", Arguments((str(number), each) for number, each in enumerate(value.args)))
                self._kept(f"{name}.keywords", value.keywords)
            case _lru_cache_wrapper():
                self._add(name, value.__wrapped__)
            case type():
                if _is_own(value):
                    self._class(name, value)
            case nn.Module():
                self.models.append(value)
                if self._into_modules:
                    self._modules(name, value)
            case _ if _is_own(type(value)) or type(value) in _NAMESPACES:
                self._object(name, value)
            case list() | tuple() | deque() | dict():  # what is in a set has no place that another process would know
                self._parts(name, parts_within(value))
            case Iterator() if not isinstance(value, IOBase):
                self.iterators[name] = value

    def _object(self, name: str, value: Any) -> None:
        self.objects.append(value)
        self._add(f"{name}.{type(value).__name__}", type(value))
        if (own := _dict_of(value)) is not None:
            self.variables[name] = own
            self._named(name, own)
        if slots := Slots.of(value):
            self.variables[f"{name}.slots"] = slots
            self._named(name, slots)
        if isinstance(value, PARTED):
            self.variables[f"{name}.parts"] = ByKey(value) if _is_by_key(value) else AllParts(value)
        if isinstance(value, (dict, list, tuple, deque)):
            self._parts(name, parts_within(value))

    def _kept(self, name: str, values: dict[str, Any]) -> None:
        """Of arguments, which may change inside alone."""
        if any(type(value) not in _PLAIN and not isinstance(value, NEVER_PLAIN) for value in values.values()):
            self.variables[name] = values
        self._named(name, values)

    def _function(self, name: str, function: FunctionType) -> None:
        code, known = function.__code__, function.__globals__
        cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        if cells:
            self.variables[f"{name}.around"] = Cells(cells)
        self._named(name, {key: content for key, cell in cells.items() for content in contents_of(cell)})
        names = names_in(code)
        if vars(function) or not {function.__name__, code.co_name}.isdisjoint(names.union(cells)):
            self.variables[f"{name}.own"] = vars(function)
        self._namespace(name, known, names if _stores_globals(code) else names & known.keys())
        for key in sorted(names & known.keys()):
            if isinstance(module := known[key], ModuleType) and is_users(getattr(module, "__file__", None) or ""):
                self._namespace(f"{name}.{key}", vars(module), names & vars(module).keys())
        defaults = Arguments((str(number), each) for number, each in enumerate(function.__defaults__ or ()))
        defaults.update(function.__kwdefaults__ or {})
        self._kept(f"{name}.defaults", defaults)

    def _namespace(self, name: str, namespace: dict[str, Any], names: set[str]) -> None:
        """names: that a function asks for."""
        if id(namespace) not in self._namespaces:
            self.variables[f"{name}.globals"] = self._namespaces[id(namespace)] = Named(namespace)
        self._namespaces[id(namespace)].names |= names
        for key in sorted(names & namespace.keys()):
            self._add(f"{name}.{key}", namespace[key])

    def _class(self, name: str, kind: type) -> None:
        self.variables[f"{name}.class"] = OfClass(kind)
        for base in kind.__bases__:
            self._add(f"{name}.{base.__name__}", base)
        self._named(name, vars(kind))

    def _modules(self, name: str, root: nn.Module) -> None:
        """Their attributes are kept as modules'; what is in objects there is not."""
        for prefix, module in root.named_modules():
            self._add(f"{name}.{type(module).__name__}", type(module))
            own = {key: each for key, each in vars(module).items() if key not in _TORCHS}
            self._named(f"{name}.{prefix}".removesuffix("."), own)
            self._named(f"{name}.{prefix}.hooks", hooks_of(module))

    def _named(self, name: str, values: Mapping[str, Any]) -> None:
        for key, value in values.items():
            self._add(f"{name}.{key}", value)

    def _parts(self, name: str, values: Iterable[Any]) -> None:
        for number, value in enumerate(islice(values, 5 * MAX_LOOKED_AT)):
            if number < MAX_PARTS:
                self._add(f"{name}.{number}", value)
            elif type(value) not in _PLAIN and not isinstance(value, (*KEPT_OTHERWISE, *CODE)):
                self._later.append((f"{name}.{number}", value))


def hooks_of(module: nn.Module) -> dict[str, Any]:
    """Of its calls, and of its parameters' gradients."""
    holders = [(key, vars(module).get(key)) for key in _HOOKS]
    for name, each in module._parameters.items():
        holders += [(f"{name}.{key}", getattr(each, key, None)) for key in _TENSOR_HOOKS]
    return {f"{key}.{number}": each for key, own in holders for number, each in enumerate((own or {}).values())}


def _roots_of(workload: Workload) -> Iterator[tuple[str, Any]]:
    for name in ("step", "loss", "validate", "on_epoch", "model"):
        yield f"Workload.{name}", getattr(workload, name)


def _stores_globals(code: CodeType) -> bool:
    """Whether it may, or code within it; they need not be there before."""
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return opcode.opmap["STORE_GLOBAL"] in code.co_code[::2] or any(map(_stores_globals, inner))


def _is_own(kind: type) -> bool:
    """A class of the user's."""
    return is_users(getattr(sys.modules.get(kind.__module__), "__file__", None) or "")


def _wrappers(value: Any) -> Iterator[FunctionType]:
    """What decorators have made of a function, the outermost first."""
    value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    while isinstance(value, FunctionType) and (inner := vars(value).get("__wrapped__")) is not None:
        yield value
        value = inner


def _dict_of(value: Any) -> dict[str, Any] | None:
    """Past a `__getattr__` of its class."""
    try:
        own = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return own if isinstance(own, dict) else None


def _is_by_key(value: Any) -> TypeGuard[dict[str, Any]]:
    """Whether it is by keys that are text, and has objects in it that are looked at for themselves."""
    if not isinstance(value, dict) or not all(type(key) is str for key in dict.keys(value)):
        return False
    return any(_is_own(type(each)) for each in dict.values(value))
