"""Fingerprint: a digest of any Python values, the same in every process in which they are the same.

    numbers, strings, tensors   as they are; of what is large both ends
    objects                     their class and attributes
    functions and classes       of installed packages, when these were installed; of others, their code, what it closes
                                over, the globals that it names, and attributes
    anything else               its class

What is in a file that nobody has read yet does not show.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import random
import sys
from collections import deque
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path, PurePath
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from weft.workload.code.functions import contents_of, names_in
from weft.workload.code.installed import is_installed

MAX_VALUES: Final = 200_000  # arbitrary: a fraction of a second
WHOLE_BYTES: Final = 1 << 16  # of a tensor that is looked at whole; of a larger one as much, half of it at either end
WHOLE_ITEMS: Final = 10_000  # the same of a sequence

_PLAIN: Final = frozenset(
    (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(...), range)
)
_SEQUENCES: Final = (list, tuple, deque)
_SETS: Final = (set, frozenset)


class _TooMuch(Exception):
    """There are more values than are looked at."""


def fingerprint(*values: object, apart: Iterable[object] = ()) -> str | None:
    """None of what nobody can take apart: too much of it, or its own code raises. apart: what is known otherwise, and
    not looked into."""
    try:
        return _Walk(apart).of(values)
    except Exception:  # whatever an object of the user's raises
        return None


class _Walk:
    def __init__(self, apart: Iterable[object] = ()) -> None:
        self._hash = hashlib.sha256()
        self._text: list[str] = []
        self._left = MAX_VALUES
        # By id: its number, and the value, so that it keeps its id.
        self._seen: dict[int, tuple[int, object]] = {id(each): (number, each) for number, each in enumerate(apart)}
        self._owned: dict[ModuleType | None, bool] = {}  # modules: whether they are the user's

    def of(self, values: object) -> str:
        self._take(values)
        self._add_bytes("\0".join(self._text).encode(errors="surrogatepass"))
        return self._hash.hexdigest()

    def _add(self, *parts: object) -> None:
        self._text += map(repr, parts)  # in which a NUL is written otherwise

    def _add_bytes(self, data: bytes) -> None:
        self._hash.update(len(data).to_bytes(8))
        self._hash.update(data)

    def _take_all(self, values: Iterable[object]) -> None:
        for value in values:
            self._take(value)

    def _take(self, value: object) -> None:
        self._left -= 1
        if self._left < 0:
            raise _TooMuch
        kind = type(value)
        if kind in _PLAIN:
            self._text.append(repr(value))  # True and 1, 1 and 1.0, 1 and "1" are written otherwise
            return
        if id(value) in self._seen:
            self._add("again", self._seen[id(value)][0])
            return
        self._seen[id(value)] = len(self._seen), value
        if kind is dict or kind in _SEQUENCES:
            self._add(kind)
            self._contents(value)
        else:
            self._take_apart(value)

    def _take_apart(self, value: Any) -> None:
        if isinstance(value, type):
            self._class(value)
            return
        self._take(type(value))
        match value:
            case torch.Tensor():
                self._tensor(value)
            case np.ndarray():
                self._array(value)
            case np.generic() | PurePath() | Enum():
                self._add(value)
            case bytearray():
                self._add_bytes(bytes(value))
            case torch.Generator():
                self._tensor(value.get_state())
            case random.Random():
                self._take(value.getstate())
            case np.random.Generator():
                self._take(value.bit_generator.state)
            case ModuleType():
                self._module(value)
            case FunctionType():
                self._function(value)
            case BuiltinFunctionType():
                self._add(value.__module__, value.__qualname__)
            case MethodType():
                self._take_all((value.__self__, value.__func__))
            case functools.partial():
                self._take_all((value.func, value.args, value.keywords))
            case staticmethod() | classmethod():
                self._take(value.__func__)
            case property():
                self._take_all((value.fget, value.fset))
            case CodeType():
                self._code(value)
            case _:
                self._object(value)

    def _object(self, value: Any) -> None:
        self._contents(value)
        own = dict(getattr(value, "__dict__", {}))
        if isinstance(value, nn.Module):  # by numbers that a process gives one after another; most have none
            hooks = {name: each for name, each in own.items() if _are_hooks(name, each)}
            own = {name: each for name, each in own.items() if name not in hooks}
            own |= {name: list(each.values()) for name, each in hooks.items() if each}
        self._contents(own)
        for kind in type(value).__mro__:
            names = kind.__dict__.get("__slots__", ())
            for name in (names,) if isinstance(names, str) else names:
                if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                    self._take_all((name, getattr(value, name)))

    def _contents(self, value: Any) -> None:
        if isinstance(value, _SEQUENCES):
            self._items(list(value))
        elif isinstance(value, dict):
            self._items([part for item in dict.items(value) for part in item])
        elif isinstance(value, _SETS):
            self._add(*sorted(_Walk().of(each) for each in value))

    def _items(self, items: list[object]) -> None:
        self._add(len(items))
        half = WHOLE_ITEMS // 2
        self._take_all(items if len(items) <= WHOLE_ITEMS else items[:half] + items[-half:])

    def _tensor(self, tensor: torch.Tensor) -> None:
        self._add(tensor.dtype, tuple(tensor.shape), tensor.device, tensor.requires_grad, tensor.layout)
        if tensor.is_meta or tensor.layout is not torch.strided or not tensor.numel():
            return
        flat, half = tensor.detach().reshape(-1), max(1, WHOLE_BYTES // 2 // tensor.element_size())
        self._add(tensor.stride())
        for part in (flat,) if len(flat) <= 2 * half else (flat[:half], flat[-half:]):
            own = part.resolve_conj().resolve_neg().cpu().clone(memory_format=torch.contiguous_format)
            self._add_bytes(own.view(torch.uint8).numpy().tobytes())  # what numpy has seen is never resized again

    def _array(self, array: np.ndarray[Any, Any]) -> None:
        self._add(array.dtype, array.shape)
        if array.dtype.hasobject:
            self._items(array.ravel().tolist())
            return
        flat, half = array.reshape(-1), max(1, WHOLE_BYTES // 2 // max(1, array.itemsize))
        for part in (flat,) if len(flat) <= 2 * half else (flat[:half], flat[-half:]):
            self._add_bytes(part.tobytes())

    def _class(self, kind: type) -> None:
        self._add(kind.__module__, kind.__qualname__)
        if self._owns(sys.modules.get(kind.__module__)):
            self._take_all(kind.__bases__)
            self._take_all((name, each) for name, each in kind.__dict__.items() if name not in ("__dict__", "__doc__"))

    def _module(self, module: ModuleType) -> None:
        self._add(module.__name__)
        if self._owns(module):
            self._take_all((name, each) for name, each in vars(module).items() if not name.startswith("__"))

    def _function(self, function: FunctionType) -> None:
        self._add(function.__module__, function.__qualname__)
        if self._owns(sys.modules.get(function.__module__)):
            self._take(function.__code__)
            self._contents(function.__dict__)
            names = sorted(names_in(function.__code__) & function.__globals__.keys())
            self._take_all((name, function.__globals__[name]) for name in names)
        self._take_all((function.__defaults__, function.__kwdefaults__))
        for cell in function.__closure__ or ():
            self._take_all(contents_of(cell))

    def _code(self, code: CodeType) -> None:
        self._add(code.co_code, *code.co_names, *code.co_varnames)
        self._take_all(code.co_consts)

    def _owns(self, module: ModuleType | None) -> bool:
        if module not in self._owned:
            self._owned[module] = self._is_own(module)
        return self._owned[module]

    def _is_own(self, module: ModuleType | None) -> bool:
        """The user's, who may change it at any time. Of others it notes when they were installed."""
        file = getattr(module, "__file__", None)
        if module is None or file is None:
            return module is not None and module.__name__ == "__main__"
        if not _is_installed(file):
            return module.__name__.partition(".")[0] != "weft"
        for path in (file, getattr(sys.modules.get(module.__name__.partition(".")[0]), "__file__", None)):
            with contextlib.suppress(OSError, TypeError, ValueError):
                status = os.stat(path or "")
                self._add(status.st_size, status.st_mtime_ns)
        return False


def _are_hooks(name: str, value: object) -> bool:
    return "hooks" in name and isinstance(value, Mapping)


@functools.cache
def _is_installed(file: str) -> bool:
    return is_installed(Path(file).resolve())
