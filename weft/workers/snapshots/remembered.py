"""What is remembered: values of attributes, written down as plain data and put back as the objects that they were.

    (_BUILT, value, path)    is the object that stood at the path when the model was built: it is put into that one
    (_SAME, value, path)     is one object with all others that tell this path, and none that was built

A part that is met for the first time tells nothing; of attributes each does. Each has all of its value, so that no
path needs to lead anywhere.
"""

from __future__ import annotations

import copy
import itertools
import random
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from weft.workers.snapshots.fixed import fixed_of, is_fixed, name_of, parts_of_fixed
from weft.workload.optimizer import made_optimizers

Path = tuple[str | int, ...]  # the module's name, the attribute's, and numbers of parts in parts

MAX_BYTES = 1 << 20  # arbitrary: of one tensor; a larger one is a result (a map of attention) more often than memory

MAX_DEPTH = 64  # arbitrary: of parts in parts that are looked at, since one may contain itself
_PYTHONS = frozenset((type(None), bool, int, float, complex, str, bytes))
VALUES_AS_THEY_ARE = _PYTHONS | {torch.Size, torch.dtype, torch.device}
_ABSENT = object()
_MARK = "weft: "  # begins what stands for objects that torch's loader of plain data does not take
DELETED = (f"{_MARK}deleted", (), None)
_GENERATOR = f"{_MARK}generator"
_BUILT = f"{_MARK}built"  # the object that stood at a path when the model was built
_SAME = f"{_MARK}same"  # the object that was written at a path, which need not be there
MAPPINGS = frozenset((dict, OrderedDict, Counter, defaultdict))
PARTED = MAPPINGS | {list, tuple, set, deque}
_KEY = "key"  # in a path
_NAMED: dict[str, type] = {kind.__name__: kind for kind in (set, OrderedDict, Counter)}
_OWN = ""  # a function of the user's, which the object that was built has
_FACTORIES: dict[str | None, Any] = {
    kind.__name__: kind for kind in (int, float, list, dict, set, str)
}  # of defaultdict
_FACTORIES |= {None: None, _OWN: None}
WITH_STORAGE = (torch.Tensor, nn.Parameter)
GENERATORS: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], object]]] = {  # what they read and write
    torch.Generator: (torch.Generator.get_state, torch.Generator.set_state),
    random.Random: (random.Random.getstate, random.Random.setstate),
    np.random.Generator: (
        lambda own: own.bit_generator.state,
        lambda own, now: setattr(own.bit_generator, "state", now),
    ),
    np.random.RandomState: (np.random.RandomState.get_state, np.random.RandomState.set_state),
}
_CONTAINERS = (PARTED - {tuple}) | {np.ndarray}
_SHAREABLE = _CONTAINERS | {torch.Tensor} | GENERATORS.keys()  # who changes one changes it for all that hold it


class NotPlainError(Exception):
    """It cannot be written down, as what it is told to be; or, without a word, it is nothing to be kept."""


class CodeError(NotPlainError):
    """It is something to be called: a function, a class, a module."""


class LargeError(NotPlainError):
    """It would be too large, if it is something to be kept."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(f"of {num_bytes / (1 << 20):.3g} MiB")


class BuiltObjects:
    """What stood in modules as they were built and can change in place."""

    def __init__(self) -> None:
        self._paths: dict[int, Path] = {}  # the first one of each, by its id
        self._objects: dict[Path, SameObject] = {}
        self.kinds: dict[str, type] = {}  # by name, of the user's values that cannot change in place

    def add(self, value: Any, path: Path, left: list[int]) -> None:
        """With its parts. left: of parts."""
        if type(value) in _SHAREABLE:
            self._objects[path] = SameObject(value)
            self._paths.setdefault(id(value), path)
        elif is_fixed(type(value)):
            self.kinds[name_of(type(value))] = type(value)
        if len(path) < MAX_DEPTH:
            for number, part in enumerate(first_parts(value, left)):
                self.add(part, (*path, number), left)

    def path_of(self, value: Any) -> Path | None:
        path = self._paths.get(id(value))
        return path if path is not None and self.at(path) is value else None

    def at(self, path: Path) -> Any:
        """None where nothing is any more."""
        return self._objects[path].get() if path in self._objects else None


def first_parts(value: Any, left: list[int]) -> Iterator[Any]:
    """Of a container, those that may be containers. left: of parts."""
    kind = type(value)
    if (kind in PARTED and kind is not set) or is_fixed(kind):
        parts = parts_of_fixed(value) if is_fixed(kind) else value
        for part in itertools.islice(value.values() if kind in MAPPINGS else parts, max(0, left[0])):
            left[0] -= 1
            yield part


class SameObject:
    """Equal to another one of the same object, without keeping it alive where that can be."""

    __slots__ = ("get",)

    def __init__(self, value: Any) -> None:
        try:
            self.get: Callable[[], Any] = weakref.ref(value)
        except TypeError:
            self.get = lambda: value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SameObject) and (own := self.get()) is not None and own is other.get()

    def __hash__(self) -> int:
        return id(self.get())


# --- written down


class WrittenValues:
    """Attributes, one after the other. What is met again is written again, with the path at which it was first."""

    def __init__(
        self, built: BuiltObjects, is_kept: Callable[[torch.Tensor], bool], max_bytes: int = MAX_BYTES
    ) -> None:
        """is_kept: whether a tensor is in the memory of what is kept as a parameter or buffer. max_bytes: of one."""
        self._built, self._is_kept, self._max_bytes = built, is_kept, max_bytes
        self._met: dict[int, tuple[Path, Any]] = {}  # with the object, so that no other one gets its id

    def written(self, value: Any, path: Path) -> Any:
        """Errors: NotPlainError."""
        if type(value) not in GENERATORS:
            return self._written(value, path)
        read, _ = GENERATORS[type(value)]
        return self._told(value, (_GENERATOR, self._written(read(value), (*path, 0)), None), path)

    def _written(self, value: Any, path: Path) -> Any:
        plain = self._plain(value, path)
        return self._told(value, plain, path) if type(value) in _SHAREABLE else plain

    def _told(self, value: Any, plain: Any, path: Path) -> Any:
        if (built := self._built.path_of(value)) is not None:
            return _BUILT, plain, built
        first, _ = self._met.setdefault(id(value), (path, value))
        is_attribute = len(path) == 2  # of which older releases have told nothing
        return (_SAME, plain, first) if is_attribute or first != path else plain

    def _plain(self, value: Any, path: Path) -> Any:
        kind = type(value)
        if kind in VALUES_AS_THEY_ARE or isinstance(value, np.generic):
            return value
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if kind is np.ndarray:
            try:
                return f"{_MARK}array", self._tensor(torch.from_numpy(value)), None
            except TypeError:
                raise NotPlainError(f"an array of {value.dtype}") from None
        if kind in MAPPINGS:
            items = dict(self._items(value, path))
            return items if kind is dict else (f"{_MARK}{kind.__name__}", items, self._factory(value))
        if is_fixed(kind) and self._built.kinds.get(name_of(kind)) is kind:
            return f"{_MARK}fixed", self._parts(parts_of_fixed(value), path), name_of(kind)
        if kind in PARTED and not is_marked(value):
            parts = self._parts(value, path)
            if kind is deque:
                return f"{_MARK}deque", parts, value.maxlen
            return (f"{_MARK}set", parts, None) if kind is set else kind(parts)
        if isinstance(value, torch.optim.Optimizer) and any(value is own for own in made_optimizers()):
            raise NotPlainError  # it is kept by itself
        raise (CodeError if callable(value) else NotPlainError)(f"a {kind.__name__}")

    def _factory(self, value: Any) -> str | None:
        """As what makes a defaultdict's parts is written."""
        factory = value.default_factory if type(value) is defaultdict else None
        known = next((name for name, each in _FACTORIES.items() if each is factory), _OWN)
        if known == _OWN and self._built.path_of(value) is None:
            raise NotPlainError(f"a defaultdict of {getattr(factory, '__name__', factory)!s:.40}")
        return known

    def _items(self, items: Mapping[Any, Any], path: Path) -> Iterator[tuple[Any, Any]]:
        for number, (key, part) in enumerate(items.items()):
            yield self._plain(key, (*path, _KEY, number)), self._written(part, (*path, number))

    def _parts(self, parts: Iterable[Any], path: Path) -> list[Any]:
        return [self._written(part, (*path, number)) for number, part in enumerate(parts)]

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) is not torch.Tensor or tensor.requires_grad or tensor.is_meta:
            raise NotPlainError
        if tensor.layout is not torch.strided or self._is_kept(tensor):
            raise NotPlainError
        if tensor.nbytes > self._max_bytes:
            raise LargeError(tensor.nbytes)
        return tensor.to("cpu", copy=True)


def _is_generator(value: Any) -> bool:
    return is_marked(value) and bool(value[0] == _GENERATOR)


def is_marked(value: Any) -> bool:
    return type(value) is tuple and len(value) == 3 and isinstance(value[0], str) and value[0].startswith(_MARK)


# --- put back


class RestoredValues:
    """Attributes, one after the other: what was one object is one again."""

    def __init__(self, built: BuiltObjects) -> None:
        self._built = built
        self._made: dict[tuple[bool, Path], Any] = {}  # by whether it was built, and its path
        self._used: set[int] = set()  # ids of these
        self._untold: dict[int, list[tuple[Any, Any, Any]]] = {}  # by the id of what stood there: that, written, made

    def restored(self, value: Any, there: Any, path: Path) -> Any:
        """there: what stands in its place, and may stand elsewhere, too; _ABSENT for a part. Errors: TypeError,
        ValueError, LookupError, AttributeError and RuntimeError for what WrittenValues would not tell."""
        told, named = None, path
        if is_marked(value) and value[0] in (_BUILT, _SAME):
            told, value, named = value
        elif type(there) in _CONTAINERS and not _is_generator(value):
            return self._untold_one(value, there, path)
        place = (told == _BUILT, named)
        if place not in self._made:
            target = self._built.at(named) if told == _BUILT else None
            own = self._made[place] = self._one(value, there if target is None else target, there, path, told)
            self._used.add(id(own))
        return self._made[place]

    def _untold_one(self, value: Any, there: Any, path: Path) -> Any:
        """Older releases have not told what was one: what is equal and has the same object in its place."""
        known = self._untold.setdefault(id(there), [])
        for _, written, own in known:
            if are_equal(written, value):
                return own
        own = self._read(value, path)
        known.append((there, value, own))
        return own

    def _one(self, value: Any, target: Any, there: Any, path: Path, told: str | None) -> Any:
        # It was another one than what the model was built with, or than what has come back in another place.
        is_other = told == _SAME and (self._built.path_of(there) is not None or id(there) in self._used)
        if _is_generator(value):
            if there is _ABSENT:
                raise LookupError("a generator is no part")
            state = self._read(value[1], (*path, 0))
            own = copy.deepcopy(there) if is_other else target
            if type(own) in GENERATORS:
                GENERATORS[type(own)][1](own, state)
            return own
        own = self._read(value, path)
        if isinstance(own, torch.Tensor):
            own = own.to(there.device) if type(there) in WITH_STORAGE else own
            return own if is_other else _tensor_into(target, own)
        return put_into(target, own) if told == _BUILT else own

    def _read(self, value: Any, path: Path) -> Any:
        if isinstance(value, torch.Tensor):
            return value.clone()
        if is_marked(value):
            name, parts, bound = value[0].removeprefix(_MARK), self._read(value[1], path), value[2]
            if name == "array":
                return parts.numpy()
            if name == "fixed":
                return fixed_of(self._built.kinds.get(bound), parts)
            if name == "defaultdict":
                return defaultdict(_FACTORIES[bound], parts)
            return deque(parts, bound) if name == "deque" else _NAMED[name](parts)
        if type(value) in (list, tuple):
            return type(value)(self._parts(value, path))
        if type(value) is dict:
            keys = [self._read(key, (*path, _KEY, number)) for number, key in enumerate(value)]
            return dict(zip(keys, self._parts(value.values(), path), strict=True))
        return value

    def _parts(self, parts: Iterable[Any], path: Path) -> list[Any]:
        return [self.restored(part, _ABSENT, (*path, number)) for number, part in enumerate(parts)]


def _tensor_into(there: Any, made: torch.Tensor) -> torch.Tensor:
    """The one that has the elements then."""
    if type(there) not in WITH_STORAGE or there.requires_grad or there.is_inference() or not there.is_contiguous():
        return made
    return there.copy_(made) if there.shape == made.shape and there.dtype is made.dtype else made


def put_into(there: Any, made: Any) -> Any:
    """The one that has the parts then."""
    kind = type(made)
    if kind is not type(there) or kind not in _CONTAINERS:
        return made
    if kind is np.ndarray:
        if (there.shape, there.dtype, there.flags.writeable) != (made.shape, made.dtype, True):
            return made
        there[...] = made
    elif kind is deque and there.maxlen != made.maxlen:
        return made
    else:
        there.clear()
        (there.extend if kind in (list, deque) else there.update)(made)
    return there


def written_alone(value: Any) -> Any:
    """None of what cannot be."""
    try:
        return WrittenValues(BuiltObjects(), lambda tensor: False).written(value, ("", ""))
    except (NotPlainError, RecursionError):
        return None


def are_equal(one: Any, other: Any) -> bool:
    """Of what was written."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype is other.dtype and torch.equal(one, other)
    if type(one) in (list, tuple):
        return len(one) == len(other) and all(map(are_equal, one, other))
    if type(one) is dict:
        return list(one) == list(other) and all(map(are_equal, one.values(), other.values()))
    return bool(one == other)
