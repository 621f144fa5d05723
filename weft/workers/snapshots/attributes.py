"""Attributes: what modules remember beside parameters and buffers, as snapshots and checkpoints have it.

    self.calls += 1      self.recent.append(float(loss))      self.generator      get_extra_state()

Only what is no longer as it was when the model was built is kept, so of most models nothing is. Numbers, text, small
tensors and arrays, lists, tuples, dicts, sets and deques of these, and generators come back as they were; of anything
else nobody knows how to write it down. What two modules hold in common is one when it comes back, and where it is what
they were built with, it is that very object, whoever else holds it. A tensor with a graph is no memory but a result of
the iteration under way, and what lies in a parameter or buffer is kept with that.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from weft.workers.snapshots.remembered import (
    DELETED,
    GENERATORS,
    MAPPINGS,
    MAX_BYTES,
    MAX_DEPTH,
    PARTED,
    VALUES_AS_THEY_ARE,
    WITH_STORAGE,
    BuiltObjects,
    LargeError,
    NotPlainError,
    RestoredValues,
    SameObject,
    WrittenValues,
    is_marked,
)
from weft.workload.code.places import Variables
from weft.workload.units import EXTRA_STATE

Kept = dict[str, dict[str, Any]]  # by the module's name and the attribute's
Modes = dict[str, tuple[bool, dict[str, bool]]]  # of modules: `training`, and of each own parameter `requires_grad`

MAX_PARTS = 10_000  # arbitrary: of one attribute, that are looked at; of more, those at both ends
MAX_LOOKED_AT = 4 * MAX_BYTES  # arbitrary: of one attribute's tensors and arrays; of more, only what autograd counts

LEAST_BYTES = 1 << 14  # arbitrary: a look at a smaller one takes as long

TORCHS = frozenset(("forward", "_compiled_call_impl", *vars(nn.Module())))  # what each module has
VARIABLES = "Workload."  # begins their names, and no module's of a model
_ABSENT = object()
_NONE = (type(None), None)  # its look


class Attributes:
    """Of some modules, and variables. What has changed is what is no longer as it was when this was made."""

    def __init__(
        self, modules: Mapping[str, nn.Module | Variables], elsewhere: Mapping[str, nn.Module] | None = None
    ) -> None:
        """modules: by name, as they were built. elsewhere: others that another process tells of; they are put back."""
        self._holders = dict(modules)
        self._elsewhere = Attributes(elsewhere) if elsewhere else None
        self._first: dict[str, dict[str, tuple[Any, object]]] = {}
        self._restored: dict[tuple[str, str], object] = {}  # looks
        self._built = BuiltObjects()
        self._modes = {name: _mode_of(module) for name, module in self.modules.items()}
        for name, module in modules.items():
            own = dict(own_of(module))
            self._first[name] = {key: _first_look(value) for key, value in own.items()}
            for key in own.keys() - {EXTRA_STATE}:
                self._built.add(own[key], (name, key), [MAX_PARTS])

    @property
    def holders(self) -> Mapping[str, nn.Module | Variables]:
        """Those elsewhere, too."""
        return self._holders if self._elsewhere is None else {**self._elsewhere.holders, **self._holders}

    @property
    def modules(self) -> dict[str, nn.Module]:
        return {name: each for name, each in self._holders.items() if isinstance(each, nn.Module)}

    @property
    def with_buffers(self) -> dict[str, nn.Module]:
        """Whose buffers are put back: those beside the model elsewhere, too."""
        elsewhere = {} if self._elsewhere is None else self._elsewhere.modules
        return {name: each for name, each in elsewhere.items() if name.startswith(VARIABLES)} | self.modules

    def changed(self) -> Kept:
        """Plain data, whatever changes later."""
        kept: Kept = {}
        for name, key, written in self.all_changed():
            if not isinstance(written, NotPlainError):
                kept.setdefault(name, {})[key] = written
        return kept

    def as_restored(self) -> list[tuple[str, str]]:
        """Of what has changed, what is as it was restored: another stage may have changed it since."""
        places = ((name, key, namespace_of(self._holders[name])) for name, key in self._restored)
        return [
            (name, key)
            for name, key, there in places
            if key in there and _look(there[key], _Left()) == self._restored[name, key]
        ]

    def lost(self) -> list[str]:
        """What else has changed, by name, with what it is."""
        return [
            f"{name}.{key} ({why})".removeprefix(".")
            for name, key, why in self.all_changed()
            if isinstance(why, NotPlainError) and str(why)
        ]

    def fits(self, kept: Mapping[str, Mapping[str, Any]]) -> bool:
        """Whether all that has changed can be put back from it."""
        changed = self.changed() if self._elsewhere is None else self._elsewhere.changed() | self.changed()
        return all(key in kept.get(name, ()) for name, values in changed.items() for key in values)

    def restore(self, kept: Mapping[str, Mapping[str, Any]]) -> None:
        """kept: as `changed` told, of these modules and perhaps others."""
        if self._elsewhere is not None:
            self._elsewhere.restore(kept)
        restoring = RestoredValues(self._built)
        self._restored.clear()
        for name, module in self._holders.items():
            for key, value in kept.get(name, {}).items():
                there = namespace_of(module)
                if key == EXTRA_STATE and isinstance(module, nn.Module):
                    module.set_extra_state(restoring.restored(value, None, (name, key)))
                elif key in TORCHS and isinstance(module, nn.Module):
                    continue
                elif is_marked(value) and value[0] == DELETED[0]:
                    there.pop(key, None)
                else:
                    there[key] = restoring.restored(value, there.get(key), (name, key))
                    self._restored[name, key] = _look(there[key], _Left())

    def note_restored(self, places: Iterable[tuple[str, str]]) -> None:
        """Of what somebody else has put back, or set."""
        for name, key in places:
            if name in self._holders and key in (there := namespace_of(self._holders[name])):
                self._restored[name, key] = _look(there[key], _Left())

    def modes(self) -> Modes:
        """Of those that are in another one than as they were built."""
        now = {name: _mode_of(module) for name, module in self.modules.items()}
        return {name: mode for name, mode in now.items() if mode != self._modes[name]}

    def restore_modes(self, modes: Modes) -> None:
        """modes: as `modes` told."""
        for name, module in self.modules.items():
            module.training, trained = modes.get(name, self._modes[name])
            for key, parameter in module._parameters.items():
                if parameter is not None and trained.get(key, parameter.requires_grad) != parameter.requires_grad:
                    parameter.requires_grad_(trained[key])

    def all_changed(
        self, also: Collection[tuple[str, str]] = (), max_bytes: int = MAX_BYTES
    ) -> Iterator[tuple[str, str, Any]]:
        """By module and name, and what is written of each, or the NotPlainError that says why nothing is. also: that
        are told, changed or not. max_bytes: of a tensor."""
        writing = WrittenValues(self._built, _Places(self._holders.values()).has, max_bytes)
        for name, module in self._holders.items():
            first, own = self._first[name], dict(own_of(module))
            yield from ((name, key, DELETED) for key in first.keys() - own.keys())
            for key, value in own.items():
                before, looked = first.get(key, (_ABSENT, None))
                is_same = before is value and type(value) in VALUES_AS_THEY_ARE
                if (name, key) not in also and (is_same or looked == _look(value, _Left())):
                    continue
                try:
                    yield name, key, writing.written(value, (name, key))
                except RecursionError:
                    yield name, key, NotPlainError("it contains itself")
                except NotPlainError as error:
                    is_result = isinstance(error, LargeError) and looked in (None, _NONE)  # nothing was built there
                    yield name, key, NotPlainError() if is_result else error


class _Places:
    """The memory of parameters and buffers."""

    def __init__(self, modules: Iterable[nn.Module | Variables]) -> None:
        self._modules = [each for each in modules if isinstance(each, nn.Module)]
        self._known: set[int] | None = None

    def has(self, tensor: torch.Tensor) -> bool:
        if self._known is None:  # of most models nobody asks
            tensors = (each for m in self._modules for own in (m._parameters, m._buffers) for each in own.values())
            plain = (each for each in tensors if each is not None and type(each) in WITH_STORAGE)
            self._known = {each.untyped_storage().data_ptr() for each in plain}
        return tensor.untyped_storage().data_ptr() in self._known


def _mode_of(module: nn.Module) -> tuple[bool, dict[str, bool]]:
    own = module._parameters.items()
    return module.training, {key: each.requires_grad for key, each in own if each is not None}


def namespace_of(module: nn.Module | Variables) -> Variables:
    return vars(module) if isinstance(module, nn.Module) else module


def own_of(module: nn.Module | Variables) -> Iterable[tuple[str, Any]]:
    """One that tells its extra state has told all."""
    if not isinstance(module, nn.Module):
        return list(module.items())
    if type(module).get_extra_state is not nn.Module.get_extra_state:
        return [(EXTRA_STATE, module.get_extra_state())]
    there = vars(module)
    return [(key, there[key]) for key in there.keys() - TORCHS]


# --- looks


@dataclass(slots=True)
class _Left:
    """What of one attribute is still to be looked at."""

    parts: int = MAX_PARTS
    num_bytes: int = MAX_LOOKED_AT

    def takes(self, num_bytes: int) -> bool:
        if num_bytes > min(MAX_BYTES, self.num_bytes):
            return False
        self.num_bytes -= max(num_bytes, LEAST_BYTES)
        return True


def _first_look(value: Any) -> tuple[Any, object]:
    return value if type(value) in VALUES_AS_THEY_ARE else _ABSENT, _look(value, _Left())


def _look(value: Any, left: _Left, depth: int = 0) -> object:
    """Equal to another one as long as the value is the same. left: of it."""
    kind = type(value)
    if kind in VALUES_AS_THEY_ARE:
        return kind, value
    if kind in WITH_STORAGE:  # another kind of tensor need not answer this
        return SameObject(value), -1 if value.is_inference() else value._version, _elements(value, left)
    if kind in PARTED and depth < MAX_DEPTH:
        return kind, len(value), _look_at_parts(value, left, depth)
    if kind is np.ndarray and left.takes(value.nbytes):
        return value.shape, value.dtype.str, value.tobytes()
    if kind in GENERATORS:
        state = GENERATORS[kind][0](value)
        return state.numpy().tobytes() if isinstance(state, torch.Tensor) else _look(state, _Left())
    return SameObject(value)


def _elements(tensor: torch.Tensor, left: _Left) -> bytes:
    """Of a small one: who writes by `.data`, by numpy or in inference mode leaves its version as it is."""
    is_plain = tensor.is_cpu and not tensor.requires_grad and tensor.layout is torch.strided
    if not (is_plain and left.takes(tensor.nbytes)):
        return b""
    own = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).reshape(-1)
    return bytes(own.view(torch.uint8).numpy())  # what numpy has seen is never resized again


def _look_at_parts(value: Any, left: _Left, depth: int) -> object:
    """Where none can change in place, they are compared at once."""
    parts = _parts(value, left)
    kinds = [*map(type, parts)]
    if VALUES_AS_THEY_ARE.issuperset(kinds):
        return frozenset(zip(kinds, parts, strict=True)) if type(value) is set else (kinds, parts)
    return sorted(map(repr, parts)) if type(value) is set else [_look(part, left, depth + 1) for part in parts]


def _parts(value: Any, left: _Left) -> list[Any]:
    count = max(0, min(left.parts, len(value)))
    left.parts -= count
    rows = (value.keys(), value.values()) if type(value) in MAPPINGS else (value,)
    if count == len(value):
        return [part for row in rows for part in row]
    if type(value) is set:
        return []
    half = count // 2
    return [part for row in rows for end in (row, reversed(row)) for part in itertools.islice(end, half)]


# --- read again


def check_modes(modes: object) -> Modes:
    """Errors: ValueError for what `Attributes.modes` would not tell."""
    if not isinstance(modes, dict):
        raise ValueError("modes are no mapping by module")
    for name, mode in modes.items():
        training, trained = mode if type(mode) is tuple and len(mode) == 2 else (None, None)
        if type(training) is not bool or not isinstance(trained, dict):
            raise ValueError(f"{mode!r:.80} is no mode of {name!r:.80}")
        if not all(type(key) is str and type(each) is bool for key, each in trained.items()):
            raise ValueError(f"{trained!r:.80} tells not which parameters of {name!r:.80} are trained")
    return modes


def check_kept(kept: object) -> Kept:
    """Errors: ValueError for what `Attributes.changed` would not tell."""
    if not isinstance(kept, dict) or not all(isinstance(own, dict) for own in kept.values()):
        raise ValueError("attributes are no mappings by module and name")
    for name, key, value in ((name, key, value) for name, own in kept.items() for key, value in own.items()):
        is_modules = isinstance(name, str) and not name.startswith(VARIABLES)
        if not isinstance(name, str) or not isinstance(key, str) or (is_modules and key in TORCHS):
            raise ValueError(f"{key!r:.80} is no attribute of {name!r:.80}")
        try:
            if not is_marked(value) or value[0] != DELETED[0]:
                RestoredValues(BuiltObjects()).restored(value, None, (name, key))
        except (TypeError, ValueError, LookupError, AttributeError, RuntimeError) as error:
            raise ValueError(f"{name}.{key} cannot be read: {error!s:.100}") from error
    return kept
