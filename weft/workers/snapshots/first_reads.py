"""First reads: attributes of modules that a run reads before it writes to them, so what an earlier run has left there
counts.

A class has something in the attribute's place while it is watched, which is asked before the module itself; it reads
and writes what the module has there.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Collection, Iterator
from typing import Any

from torch import nn

Attribute = tuple[nn.Module, str]
_ABSENT = object()


class FirstReads:
    def __init__(self, attributes: Collection[Attribute] = ()) -> None:
        """Of these."""
        self._attributes = set(attributes)
        self._written: set[Attribute] = set()
        self.read: set[Attribute] = set()  # by any run, before it wrote to them

    def begin(self) -> None:
        """A run."""
        self._written.clear()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for kind, key in {(type(module), key) for module, key in self._attributes}:
                stack.enter_context(self._watched(kind, key))
            yield

    @contextlib.contextmanager
    def _watched(self, kind: type[nn.Module], key: str) -> Iterator[None]:
        default = inspect.getattr_static(kind, key, _ABSENT)
        if hasattr(type(default), "__get__"):  # a property, which reads other attributes
            yield
            return
        own = vars(kind).get(key, _ABSENT)
        setattr(kind, key, _Watched(self, key, default))
        try:
            yield
        finally:
            if own is _ABSENT:
                delattr(kind, key)
            else:
                setattr(kind, key, own)

    def note_read(self, attribute: Attribute) -> None:
        if attribute in self._attributes and attribute not in self._written:
            self.read.add(attribute)

    def note_written(self, attribute: Attribute) -> None:
        self._written.add(attribute)


class _Watched:
    """default: what the class has there."""

    def __init__(self, reads: FirstReads, key: str, default: Any) -> None:
        self._reads, self._key, self._default = reads, key, default

    def __get__(self, module: nn.Module | None, kind: type) -> Any:
        if module is not None:
            self._reads.note_read((module, self._key))
        value = self._default if module is None else vars(module).get(self._key, self._default)
        if value is _ABSENT:  # torch's __getattr__ looks on, and tells
            raise AttributeError(f"type object {kind.__name__!r} has no attribute {self._key!r}")
        return value

    def __set__(self, module: nn.Module, value: Any) -> None:
        self._reads.note_written((module, self._key))
        vars(module)[self._key] = value

    def __delete__(self, module: nn.Module) -> None:
        self._reads.note_written((module, self._key))
        if vars(module).pop(self._key, _ABSENT) is _ABSENT:
            raise AttributeError(self._key)
