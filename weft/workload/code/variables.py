"""Variables: where a job's own code keeps what is in no module: a count in a global, a variable around a function, an
attribute of an object or of a class of the user's.

    Workload.step.globals      that it asks for by name             Workload.step.annealer      an object's attributes
    Workload.step.around       variables of the function around it  Workload.model.Net.class    a class's
    Workload.step.own          attributes of its own

Each is a mapping by name, which reads and writes the variables themselves. Of what is installed there is none, nor of
data, optimizers and schedulers, which are kept otherwise.
"""

from __future__ import annotations

import argparse
import opcode
import sys
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from functools import partial
from itertools import islice
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler

from weft.workload.code.functions import contents_of, names_in, undecorated
from weft.workload.origin import is_users
from weft.workload.workload import Workload

Variables = MutableMapping[str, Any]

MAX_LOOKED_AT = 2_000  # arbitrary: some milliseconds; the nearest come first
MAX_PARTS = 64  # of a list or dict, which may be objects of the user's
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_KEPT_OTHERWISE = (torch.Tensor, Dataset, DataLoader, Sampler, torch.optim.Optimizer, LRScheduler, Workload)
_CODE = (FunctionType, MethodType, staticmethod, classmethod, property)
_NEVER_PLAIN = (*_CODE, BuiltinFunctionType, ModuleType, type)
_NAMESPACES = (SimpleNamespace, argparse.Namespace)  # of nobody's code: what a job is set to, often
_TORCHS = frozenset(vars(nn.Module()))


def variables_of(workload: Workload) -> dict[str, Variables]:
    """Of the functions that a process calls which trains, of the model's classes, and of what these refer to. By names
    that no module of the model has, the same in every process."""
    return _Search(workload).found


def objects_of(workload: Workload) -> list[object]:
    """Whose attributes these are."""
    return _Search(workload).objects


class _Search:
    def __init__(self, workload: Workload) -> None:
        self.found: dict[str, Variables] = {}
        self.objects: list[object] = []
        self._namespaces: dict[int, _Named] = {}  # by the id of each
        self._seen: dict[int, Any] = {}  # what was looked at, so that nothing else gets its id
        self._left: list[tuple[str, Any]] = []
        for name in ("step", "loss", "validate", "on_epoch", "model"):
            self._add(f"Workload.{name}", getattr(workload, name))
        self._run()

    def _add(self, name: str, value: Any) -> None:
        value = undecorated(value) if isinstance(value, _CODE) else value
        if type(value) not in _PLAIN and not isinstance(value, _KEPT_OTHERWISE):
            self._left.append((name, value))

    def _run(self) -> None:
        for name, value in self._left:  # which grows meanwhile
            if len(self._seen) >= MAX_LOOKED_AT:
                break
            if id(value) not in self._seen:
                self._seen[id(value)] = value
                self._look(name, value)

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
                self._parts(name, value.args)
                self._named(name, value.keywords)
            case type():
                if _is_own(value):
                    self._class(name, value)
            case nn.Module():
                self._modules(name, value)
            case list() | tuple():
                self._parts(name, value)
            case dict():
                self._parts(name, value.values())
            case _ if (_is_own(type(value)) or type(value) in _NAMESPACES) and isinstance(
                own := getattr(value, "__dict__", None), dict
            ):
                self.found[name] = own
                self.objects.append(value)
                self._add(f"{name}.{type(value).__name__}", type(value))
                self._named(name, own)

    def _function(self, name: str, function: FunctionType) -> None:
        code, known = function.__code__, function.__globals__
        cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        if cells:
            self.found[f"{name}.around"] = _Cells(cells)
        self._named(name, {key: content for key, cell in cells.items() for content in contents_of(cell)})
        names = names_in(code)
        if vars(function) or function.__name__ in names:
            self.found[f"{name}.own"] = vars(function)
        self._namespace(name, known, names if _stores_globals(code) else names & known.keys())
        for key in sorted(names & known.keys()):
            if isinstance(module := known[key], ModuleType) and is_users(getattr(module, "__file__", None) or ""):
                self._namespace(f"{name}.{key}", vars(module), names & vars(module).keys())
        self._parts(f"{name}.defaults", function.__defaults__ or ())
        self._named(name, function.__kwdefaults__ or {})

    def _namespace(self, name: str, namespace: dict[str, Any], names: set[str]) -> None:
        """names: that a function asks for."""
        if id(namespace) not in self._namespaces:
            self.found[f"{name}.globals"] = self._namespaces[id(namespace)] = _Named(namespace)
        self._namespaces[id(namespace)].names |= names
        for key in sorted(names & namespace.keys()):
            self._add(f"{name}.{key}", namespace[key])

    def _class(self, name: str, kind: type) -> None:
        if own := _OfClass(kind):
            self.found[f"{name}.class"] = own
        for base in kind.__bases__:
            self._add(f"{name}.{base.__name__}", base)
        self._named(name, vars(kind))

    def _modules(self, name: str, root: nn.Module) -> None:
        """Their attributes are kept as modules'; what is in objects there is not."""
        for prefix, module in root.named_modules():
            self._add(f"{name}.{type(module).__name__}", type(module))
            own = {key: each for key, each in vars(module).items() if key not in _TORCHS}
            self._named(f"{name}.{prefix}".removesuffix("."), own)

    def _named(self, name: str, values: Mapping[str, Any]) -> None:
        for key, value in values.items():
            self._add(f"{name}.{key}", value)

    def _parts(self, name: str, values: Iterable[Any]) -> None:
        for number, value in enumerate(islice(values, MAX_PARTS)):
            self._add(f"{name}.{number}", value)


def _stores_globals(code: CodeType) -> bool:
    """Whether it may, or code within it; they need not be there before."""
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return opcode.opmap["STORE_GLOBAL"] in code.co_code[::2] or any(map(_stores_globals, inner))


def _is_own(kind: type) -> bool:
    """A class of the user's."""
    return is_users(getattr(sys.modules.get(kind.__module__), "__file__", None) or "")


class _Named(MutableMapping[str, Any]):
    """Of a namespace, what is asked for by name, without its code."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        self.names: set[str] = set()
        self._namespace = namespace
        self._code = {key for key, each in namespace.items() if isinstance(each, _NEVER_PLAIN)}

    def __getitem__(self, key: str) -> Any:
        return self._namespace[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._namespace[key] = value

    def __delitem__(self, key: str) -> None:
        del self._namespace[key]

    def __iter__(self) -> Iterator[str]:
        return iter((self.names & self._namespace.keys()) - self._code)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _Cells(MutableMapping[str, Any]):
    """What is in variables around a function."""

    def __init__(self, cells: dict[str, CellType]) -> None:
        self._cells = cells

    def __getitem__(self, key: str) -> Any:
        for content in contents_of(self._cells[key]):
            return content
        raise KeyError(key)

    def __setitem__(self, key: str, value: Any) -> None:
        self._cells[key].cell_contents = value

    def __delitem__(self, key: str) -> None:
        del self._cells[key].cell_contents

    def __iter__(self) -> Iterator[str]:
        return (key for key, cell in self._cells.items() if contents_of(cell))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _OfClass(MutableMapping[str, Any]):
    """Those of a class's attributes that are no code."""

    def __init__(self, kind: type) -> None:
        self._kind = kind
        own = vars(kind).items()
        self._names = [name for name, each in own if name[:2] != "__" and not hasattr(type(each), "__get__")]

    def __getitem__(self, key: str) -> Any:
        return vars(self._kind)[key]

    def __setitem__(self, key: str, value: Any) -> None:
        setattr(self._kind, key, value)

    def __delitem__(self, key: str) -> None:
        delattr(self._kind, key)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._names if name in vars(self._kind))

    def __len__(self) -> int:
        return sum(1 for _ in self)
