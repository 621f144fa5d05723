"""The classes of one load of a job's file.

A worker that has several stages runs the file for each of them, so each has classes of its own. A batch that is
unpickled for a stage has to be of those: `isinstance(batch, Scene)` asks for the Scene of that very load.
"""

from __future__ import annotations

import functools
import pickle
import sys
from collections.abc import Mapping
from io import BytesIO
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

Modules = Mapping[str, ModuleType]  # by name


_modules: WeakKeyDictionary[nn.Module, Modules] = WeakKeyDictionary()


def note_module(model: nn.Module, name: str) -> None:
    """That the job's file, which was loaded last by this name, has made this model."""
    module = sys.modules.get(name)
    _modules[model] = {} if module is None else {name: module}


def forget_modules() -> None:
    """A module may hold its model, so neither would go by itself."""
    _modules.clear()


def modules_of(model: nn.Module) -> Modules:
    """With the classes that the model's step knows."""
    return _modules.get(model, {})


class Unpickling(pickle.Unpickler):
    """modules: where classes and functions of theirs are looked up; unset, where they were loaded last."""

    def __init__(self, packet: bytes, modules: Modules | None) -> None:
        super().__init__(BytesIO(packet))
        self._modules = modules or {}

    def find_class(self, module: str, name: str) -> Any:
        if module not in self._modules:
            return super().find_class(module, name)
        return functools.reduce(getattr, name.split("."), self._modules[module])
