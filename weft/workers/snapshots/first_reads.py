"""First reads: attributes of modules that a run reads before it writes to them, so what an earlier run has left there
counts; and attributes that a stage is not to read, since other stages change theirs.

A class has something in the attribute's place while it is watched, which is asked before the module itself; it reads
and writes what the module has there.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Collection, Iterator
from typing import Any, Protocol

from torch import nn

from weft.workload.cutting.names import Attribute
from weft.workload.cutting.tape import playing
from weft.workload.workload import WorkloadError

_ABSENT = object()


class FirstReads:
    def __init__(self, attributes: Collection[Attribute] = ()) -> None:
        """Of these."""
        self._attributes = set(attributes)
        self.written: set[Attribute] = set()  # by this run
        self.read: set[Attribute] = set()  # by any run, before it wrote to them

    def begin(self) -> None:
        """A run."""
        self.written.clear()

    def watching(self) -> contextlib.AbstractContextManager[object]:
        return _watched(self, self._attributes)

    def note_read(self, attribute: Attribute) -> None:
        if attribute in self._attributes and attribute not in self.written:
            self.read.add(attribute)

    def note_written(self, attribute: Attribute) -> bool:
        if attribute in self._attributes:
            self.written.add(attribute)
        return True


class _Asking(threading.local):
    asks = False  # a function of the user's, beside the runs


_asking = _Asking()


@contextlib.contextmanager
def asking() -> Iterator[None]:
    """Attributes that are counted elsewhere are not to be read either in what runs inside, in this thread."""
    _asking.asks = True
    try:
        yield
    finally:
        _asking.asks = False


def is_asking() -> bool:
    """In this thread."""
    return _asking.asks


class CountedElsewhere:
    """Attributes that other stages change, and this one, when it was tried, neither changed nor read: what it has there
    is as old as the attempt, and what a step wrote there the others would not have. Those that the stages before change
    as this one does are not to be changed where they have left the step."""

    def __init__(self, model: nn.Module, names: Collection[str], before: Collection[str]) -> None:
        """names, before: of attributes, behind that of their module, which a forward may have to make first; those that
        this stage does not change, and those that a stage before does."""
        modules = dict(model.named_modules())
        places = ((name, *name.rpartition(".")) for name in {*names, *before})
        found = {Attribute(modules[path], key): name for name, path, _, key in places if path in modules}
        self._names = {attribute: name for attribute, name in found.items() if name in names}
        self._before = {attribute: name for attribute, name in found.items() if name not in names}
        self._run: object | None = None
        self._set_anew: dict[Attribute, bool] = {}  # whether the run has begun so, before the stage's own part
        self._watching = contextlib.ExitStack()
        self._watching.enter_context(_watched(self, found))

    def close(self) -> None:
        self._watching.close()

    def note_read(self, attribute: Attribute) -> None:
        self._goes_by_earlier(attribute, read=True)
        if attribute in self._names and (playing.run is not None or _asking.asks):
            raise WorkloadError(
                f"the attribute {self._names[attribute]!r:.80} is used in the process of a stage that does not change "
                "it, as another one does; keep it in a buffer, change it before the first call of the step, or use "
                "strategy.stages = 1"
            )

    def note_written(self, attribute: Attribute) -> bool:
        if attribute in self._names and not _asking.asks:  # what that changes is told elsewhere
            self.note_read(attribute)
        if self._goes_by_earlier(attribute, read=False) and playing.lines is None:
            raise WorkloadError(
                f"the attribute {self._before[attribute]!r:.80} is changed where stages have left the step that change "
                "it, too, and was not when the step was tried; keep it in a buffer, change it before the first call of "
                "the step, or use strategy.stages = 1"
            )
        return not (playing.tries and attribute in self._names)  # which counts nowhere

    def _goes_by_earlier(self, attribute: Attribute, *, read: bool) -> bool:
        """Whether this run goes by what an earlier one has left there, of what the stages before change, too."""
        if attribute not in self._before or playing.run is None:
            return False
        if self._run is not playing.run:
            self._run = playing.run
            self._set_anew.clear()
        return not self._set_anew.setdefault(attribute, not read and playing.lines is not None)


class _Watching(Protocol):
    def note_read(self, attribute: Attribute) -> None: ...

    def note_written(self, attribute: Attribute) -> bool:
        """Whether it keeps what is written."""


@contextlib.contextmanager
def _watched(watching: _Watching, attributes: Collection[Attribute]) -> Iterator[None]:
    """It hears of these attributes, and of those that other modules of their classes have by the same name."""
    there = list(filter(None, (_Watched.of(*each) for each in {(type(module), key) for module, key in attributes})))
    for each in there:
        each.watching.append(watching)
    try:
        yield
    finally:
        for each in there:
            each.leave(watching)


class _Watched:
    """default: what the class has there, or has from another one."""

    @classmethod
    def of(cls, kind: type[nn.Module], key: str) -> _Watched | None:
        """What stands in the class; None where a property does, which reads other attributes."""
        default = inspect.getattr_static(kind, key, _ABSENT)
        if isinstance(default, cls):
            if default is vars(kind).get(key):
                return default
            default = default._default
        if hasattr(type(default), "__get__"):
            return None
        made = cls(kind, key, default)
        setattr(kind, key, made)
        return made

    def __init__(self, kind: type[nn.Module], key: str, default: Any) -> None:
        self._kind, self._key, self._default = kind, key, default
        self._own = vars(kind).get(key, _ABSENT)
        self.watching: list[_Watching] = []

    def leave(self, watching: _Watching) -> None:
        self.watching.remove(watching)
        if self.watching:
            return
        if self._own is _ABSENT:
            delattr(self._kind, self._key)
        else:
            setattr(self._kind, self._key, self._own)

    def __get__(self, module: nn.Module | None, kind: type) -> Any:
        value = self._default
        if module is not None:
            for each in self.watching:
                each.note_read(Attribute(module, self._key))
            value = vars(module).get(self._key, self._default)
        if value is _ABSENT:  # torch's __getattr__ looks on, and tells
            raise AttributeError(f"type object {kind.__name__!r} has no attribute {self._key!r}")
        return value

    def __set__(self, module: nn.Module, value: Any) -> None:
        if all(each.note_written(Attribute(module, self._key)) for each in self.watching):
            vars(module)[self._key] = value

    def __delete__(self, module: nn.Module) -> None:
        if not all(each.note_written(Attribute(module, self._key)) for each in self.watching):
            return
        if vars(module).pop(self._key, _ABSENT) is _ABSENT:
            raise AttributeError(self._key)
