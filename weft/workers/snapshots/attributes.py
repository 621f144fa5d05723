"""Attributes: what modules remember beside parameters and buffers, as snapshots and checkpoints have it.

    self.calls += 1      self.recent.append(float(loss))      self.generator      get_extra_state()

Only what is no longer as it was when the model was built is kept, so of most models nothing is. Numbers, text, small
tensors and arrays, lists, tuples, dicts, sets and deques of these, and generators come back as they were; of anything
else nobody knows how to write it down. A tensor with a graph is no memory but a result of the iteration under way, and
what lies in a parameter or buffer is kept with that.
"""

from __future__ import annotations

import itertools
import random
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from weft.workload.units import EXTRA_STATE

Kept = dict[str, dict[str, Any]]  # by the module's name and the attribute's

MAX_BYTES = 1 << 20  # arbitrary: of one tensor; a larger one is a result (a map of attention) more often than memory
MAX_PARTS = 256  # arbitrary: of one attribute, that are looked at; of more, those at both ends

TORCHS = frozenset(("forward", "_compiled_call_impl", *vars(nn.Module())))  # what each module has
_VALUES = frozenset((type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device))
_ABSENT = object()
_MARK = "weft: "  # begins what stands for objects that torch's loader of plain data does not take
_DELETED = (f"{_MARK}deleted", (), None)
_GENERATOR = f"{_MARK}generator"
_MAPPINGS = frozenset((dict, OrderedDict, Counter))
_PARTED = _MAPPINGS | {list, tuple, set, deque}
_NAMED: dict[str, type] = {kind.__name__: kind for kind in (set, OrderedDict, Counter)}
_GENERATORS: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], object]]] = {  # what they read and write
    torch.Generator: (torch.Generator.get_state, torch.Generator.set_state),
    random.Random: (random.Random.getstate, random.Random.setstate),
    np.random.Generator: (
        lambda own: own.bit_generator.state,
        lambda own, now: setattr(own.bit_generator, "state", now),
    ),
    np.random.RandomState: (np.random.RandomState.get_state, np.random.RandomState.set_state),
}


class _NotPlainError(Exception):
    """It cannot be written down, as what it is told to be; or, without a word, it is nothing to be kept."""


class Attributes:
    """Of some modules. What has changed is what is no longer as it was when this was made."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        """modules: by name, as they were built."""
        self._modules = dict(modules)
        self._first = {name: dict(map(_first_look, _own_of(each))) for name, each in modules.items()}

    def changed(self) -> Kept:
        """Plain data, whatever changes later."""
        kept: Kept = {}
        for name, key, written in self._changed():
            if not isinstance(written, _NotPlainError):
                kept.setdefault(name, {})[key] = written
        return kept

    def lost(self) -> list[str]:
        """What else has changed, by name, with what it is."""
        return [
            f"{name}.{key} ({why})".removeprefix(".")
            for name, key, why in self._changed()
            if isinstance(why, _NotPlainError) and str(why)
        ]

    def fits(self, kept: Mapping[str, Mapping[str, Any]]) -> bool:
        """Whether all that has changed can be put back from it."""
        return all(key in kept.get(name, ()) for name, values in self.changed().items() for key in values)

    def restore(self, kept: Mapping[str, Mapping[str, Any]]) -> None:
        """kept: as `changed` told, of these modules and perhaps others."""
        for name, module in self._modules.items():
            for key, value in kept.get(name, {}).items():
                if key == EXTRA_STATE:
                    module.set_extra_state(_read(value))
                else:
                    there = vars(module)
                    if _is_marked(value) and value[0] == _DELETED[0]:
                        there.pop(key, None)
                    else:
                        there[key] = _put_back(value, there.get(key))

    def _changed(self) -> Iterator[tuple[str, str, Any]]:
        """Names, and what is written of it or why nothing is."""
        state = _Places(self._modules.values())
        for name, module in self._modules.items():
            first, own = self._first[name], dict(_own_of(module))
            yield from ((name, key, _DELETED) for key in first.keys() - own.keys())
            for key, value in own.items():
                before, looked = first.get(key, (_ABSENT, None))
                if (before is value and type(value) in _VALUES) or looked == _look(value, [MAX_PARTS]):
                    continue
                try:
                    yield name, key, _written_as_it_is(value, state)
                except RecursionError:
                    yield name, key, _NotPlainError("it contains itself")
                except _NotPlainError as error:
                    yield name, key, error


class _Places:
    """The memory of parameters and buffers."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = modules
        self._known: set[int] | None = None

    def has(self, tensor: torch.Tensor) -> bool:
        if self._known is None:  # of most models nobody asks
            tensors = (each for m in self._modules for own in (m._parameters, m._buffers) for each in own.values())
            plain = (each for each in tensors if each is not None and type(each) in _WITH_STORAGE)
            self._known = {each.untyped_storage().data_ptr() for each in plain}
        return tensor.untyped_storage().data_ptr() in self._known


_WITH_STORAGE = (torch.Tensor, nn.Parameter)


def _own_of(module: nn.Module) -> Iterable[tuple[str, Any]]:
    """One that tells its extra state has told all."""
    if type(module).get_extra_state is not nn.Module.get_extra_state:
        return [(EXTRA_STATE, module.get_extra_state())]
    there = vars(module)
    return [(key, there[key]) for key in there.keys() - TORCHS]


# --- looks


def _first_look(own: tuple[str, Any]) -> tuple[str, tuple[Any, object]]:
    key, value = own
    return key, (value if type(value) in _VALUES else _ABSENT, _look(value, [MAX_PARTS]))


def _look(value: Any, left: list[int]) -> object:
    """Equal to another one as long as the value is the same. left: of parts."""
    kind = type(value)
    if kind in _VALUES:
        return kind, value
    if kind in _WITH_STORAGE:  # another kind of tensor need not answer this
        return _Same(value), -1 if value.is_inference() else value._version
    if kind in _PARTED:
        return kind, len(value), [_look(part, left) for part in _parts(value, left)]
    if kind is np.ndarray and value.nbytes <= MAX_BYTES:
        return value.shape, value.dtype.str, value.tobytes()
    if kind in _GENERATORS:
        state = _GENERATORS[kind][0](value)
        return state.numpy().tobytes() if isinstance(state, torch.Tensor) else _look(state, [MAX_PARTS])
    return _Same(value)


def _parts(value: Any, left: list[int]) -> Iterable[Any]:
    count = max(0, min(left[0], len(value)))
    left[0] -= count
    if type(value) is set:
        return sorted(map(repr, value)) if count == len(value) else ()
    parts = value.items() if type(value) in _MAPPINGS else value
    if count == len(value):
        return list(parts)
    return [*itertools.islice(parts, count // 2), *itertools.islice(reversed(parts), count // 2)]


class _Same:
    """Equal to another one of the same object, without keeping it alive where that can be."""

    __slots__ = ("_get",)

    def __init__(self, value: Any) -> None:
        try:
            self._get: Callable[[], Any] = weakref.ref(value)
        except TypeError:
            self._get = lambda: value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and (own := self._get()) is not None and own is other._get()

    def __hash__(self) -> int:
        return id(self._get())


# --- written down


def _written_as_it_is(value: Any, state: _Places) -> Any:
    """Errors: _NotPlainError."""
    if type(value) in _GENERATORS:
        read, _ = _GENERATORS[type(value)]
        return _GENERATOR, _written(read(value), state), None
    return _written(value, state)


def _written(value: Any, state: _Places) -> Any:
    kind = type(value)
    if kind in _VALUES or isinstance(value, np.generic):
        return value
    if isinstance(value, torch.Tensor):
        return _written_tensor(value, state)
    if kind is np.ndarray:
        try:
            return f"{_MARK}array", _written_tensor(torch.from_numpy(value), state), None
        except TypeError:
            raise _NotPlainError(f"an array of {value.dtype}") from None
    if kind in _MAPPINGS:
        items = {_written(key, state): _written(part, state) for key, part in value.items()}
        return items if kind is dict else (f"{_MARK}{kind.__name__}", items, None)
    if kind in _PARTED and not _is_marked(value):
        parts = [_written(part, state) for part in value]
        if kind is deque:
            return f"{_MARK}deque", parts, value.maxlen
        return (f"{_MARK}set", parts, None) if kind is set else kind(parts)
    raise _NotPlainError(f"a {kind.__name__}")


def _written_tensor(tensor: torch.Tensor, state: _Places) -> torch.Tensor:
    if type(tensor) is not torch.Tensor or tensor.requires_grad or tensor.layout is not torch.strided or tensor.is_meta:
        raise _NotPlainError
    if tensor.nbytes > MAX_BYTES or state.has(tensor):
        raise _NotPlainError
    return tensor.to("cpu", copy=True)


def _is_marked(value: Any) -> bool:
    return type(value) is tuple and len(value) == 3 and isinstance(value[0], str) and value[0].startswith(_MARK)


# --- read again


def check_kept(kept: object) -> Kept:
    """Errors: ValueError for what `Attributes.changed` would not tell."""
    if not isinstance(kept, dict) or not all(isinstance(own, dict) for own in kept.values()):
        raise ValueError("attributes are no mappings by module and name")
    for name, key, value in ((name, key, value) for name, own in kept.items() for key, value in own.items()):
        if not isinstance(name, str) or not isinstance(key, str) or key in TORCHS:
            raise ValueError(f"{key!r:.80} is no attribute of {name!r:.80}")
        try:
            if not _is_marked(value) or value[0] not in (_GENERATOR, _DELETED[0]):
                _read(value)
            elif value[0] == _GENERATOR:
                _read(value[1])
        except (TypeError, ValueError, LookupError, AttributeError, RuntimeError) as error:
            raise ValueError(f"{name}.{key} cannot be read: {error!s:.100}") from error
    return kept


def _put_back(value: Any, there: Any) -> Any:
    """there: what stands in its place, and may stand elsewhere, too."""
    if isinstance(value, torch.Tensor) and type(there) in _WITH_STORAGE:
        is_memory = there.is_contiguous() and not (there.requires_grad or there.is_inference())
        if is_memory and there.shape == value.shape and there.dtype is value.dtype:
            return there.copy_(value)
        return value.to(there.device, copy=True)
    if _is_marked(value) and value[0] == _GENERATOR:
        if type(there) in _GENERATORS:
            _GENERATORS[type(there)][1](there, _read(value[1]))
        return there
    return _read(value)


def _read(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if _is_marked(value):
        name, parts, bound = value[0].removeprefix(_MARK), _read(value[1]), value[2]
        if name == "array":
            return parts.numpy()
        return deque(parts, bound) if name == "deque" else _NAMED[name](parts)
    if type(value) in (list, tuple):
        return type(value)(map(_read, value))
    if type(value) is dict:
        return {_read(key): _read(part) for key, part in value.items()}
    return value
