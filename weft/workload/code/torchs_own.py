"""Torch's own: its functions, methods and hooks for all modules, in whose places a job's code may put its own. They are
put back where that code is loaded anew, since it would patch what it has patched, and where another job comes. Kernels
of torch's operators cannot be: a process that has others is told."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch

from weft.workload.code.installed import is_installed

_MODULES = ("torch.nn.functional", "torch.nn.init", "torch.nn.modules", "torch.nn.parameter", "torch.nn.utils")
_WITH_HOOKS = ("torch.nn.modules.module", "torch.optim.optimizer")
_KINDS = (FunctionType, BuiltinFunctionType, staticmethod, classmethod, property)

_Owner = ModuleType | type
_functions: list[tuple[_Owner, dict[str, Any], frozenset[str]]] = []  # and all names that it has
_hooks: list[tuple[ModuleType, str, Any, Any]] = []  # whose, its name, what it is, and what was in it
_kernels: set[str] = set()  # that are written in Python: "aten/relu/CPU"


def note() -> None:
    """As they are in a process that has run no code of a job's."""
    _functions[:] = [
        (owner, {name: each for name, each in vars(owner).items() if isinstance(each, _KINDS)}, frozenset(vars(owner)))
        for owner in _owners()
    ]
    _hooks[:] = [
        (module, name, each, each.copy() if isinstance(each, dict) else each)
        for module in map(sys.modules.__getitem__, _WITH_HOOKS)
        for name, each in vars(module).items()
        if name.startswith("_global_") and not callable(each)
    ]
    _kernels.clear()
    _kernels.update(torch.library._impls)


def put_back() -> None:
    """As they were noted; where nothing was, nothing is done. What torch or another package has patched stays."""
    for owner, kept, names in _functions:
        now = vars(owner)
        for name, each in kept.items():
            if (there := now.get(name)) is not each and not _is_of_package(there):
                setattr(owner, name, each)
        if isinstance(owner, type) and now.keys() != names:  # before one that it inherits
            for name in [name for name in now.keys() - names if callable(now[name]) and not _is_of_package(now[name])]:
                delattr(owner, name)
    for module, name, each, content in _hooks:
        setattr(module, name, each)
        if isinstance(each, dict) and each != content:
            each.clear()
            each.update(content)


def has_other_kernels() -> bool:
    """Whether operators of torch's, not those of other packages or of the job itself, have got kernels since."""
    now = torch.library._impls
    return bool(_kernels) and len(now) != len(_kernels) and any(key.startswith("aten/") for key in now - _kernels)


def _owners() -> Iterator[_Owner]:
    modules = [each for name, each in sys.modules.items() if name.startswith((*_MODULES, "torch.optim"))]
    classes = {each for module in modules for each in vars(module).values() if isinstance(each, type)}
    yield from [torch, *modules]
    yield torch.Tensor
    yield from (each for each in classes if each.__module__.startswith("torch."))


def _is_of_package(value: object) -> bool:
    code = getattr(value, "__code__", None)
    return code is not None and is_installed(Path(code.co_filename))
