"""A tape: what a stage's run of a step has met before its own call, in order, so that the next need not compute it.

A step is Python, and runs as a whole each time. But what it asks of placeholders is the same from one microbatch of a
shape to the next, so each question is compared with the one at the same place of the last run, and where they are alike
the answer is that one. Real tensors among the arguments are alike by shape and dtype, and other objects than plain
values by their class and what they are made of, where `leaves` can tell: of neither anything is kept. An answer that
gives an argument back gives back the one that came, and what has no numbers is another object than one that somebody
has kept from an earlier run, and may give to torch beside it.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from operator import is_
from types import SimpleNamespace
from typing import Any, TypeVar

import torch

from weft.workload.cutting.leaves import parts_of, replaced, tensors_in

Made = TypeVar("Made")


class _Like:
    """A real tensor among arguments, without keeping it."""

    __slots__ = ("dtype", "shape")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype = tensor.shape, tensor.dtype


@dataclass(frozen=True, slots=True)
class _OfClass:
    """An object that a step makes anew each time, without keeping it: a packed sequence, say, whose parts are told, or
    a cache of keys and values, of which nobody knows any."""

    kind: type
    parts: Any  # as `_kept` keeps them; None where they are not known


class Renewed(torch.Tensor):
    """What has no numbers, of one run."""

    run: object | None  # of which it is; None of what every run has, as parameters
    mark: object  # as those have that stand in its place in other runs
    base: Renewed | None  # of which it is a view

    def again(self) -> Renewed:
        """For the run that this thread makes."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class TapeEntry:
    asker: object
    given: Any  # as `_kept` keeps it
    answer: Any  # with a hole in the place of each real tensor
    passed: Mapping[int, int]  # leaf of the answer -> which tensor of what is given stands there
    views: Mapping[int, int]  # leaf of the answer -> which tensor of what is given it is a view of

    def answered(self, given: Any) -> Any:
        again = _Again()  # what stands twice in the answer is one tensor this time, too
        if not (self.passed or self.views):
            return self.answer.again() if isinstance(self.answer, Renewed) else replaced(self.answer, again)
        arguments, leaves = tensors_in(given), itertools.count()

        def filled(tensor: torch.Tensor) -> torch.Tensor:
            leaf = next(leaves)
            number = self.passed.get(leaf)
            if number is not None:
                return arguments[number]
            made = again(tensor)
            if leaf in self.views and isinstance(made, Renewed):
                made.base = _root(arguments[self.views[leaf]])
            return made

        return replaced(self.answer, filled)


class _Again(dict[int, Renewed]):
    """Those of this run, by those that they are made of."""

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, Renewed):
            return tensor
        if id(tensor) not in self:
            self[id(tensor)] = tensor.again()
        return self[id(tensor)]


def _root(tensor: torch.Tensor) -> Renewed | None:
    if not isinstance(tensor, Renewed):
        return None
    return tensor if tensor.base is None else tensor.base


_HOLE = torch.empty(0)


class Tape:
    def __init__(self) -> None:
        self._entries: list[TapeEntry] = []
        self._place = 0

    def rewind(self) -> None:
        self._place = 0

    def recall(self, asker: object, given: Any) -> TapeEntry | None:
        """The answer at this place, if this is the question that it had. given: arguments, and those by keyword."""
        if self._place < len(self._entries):
            known = self._entries[self._place]
            if known.asker == asker and (_is_one(known.given, given) or _is_alike(known.given, given)):
                self._place += 1
                return known
        return None

    def answer(self, asker: object, given: Any, compute: Callable[[], Any]) -> Any:
        known = self.recall(asker, given)
        if known is not None:
            return known.answered(given)
        place, entries = self._place, self._entries
        self._place = place + 1
        del entries[place:]
        found = compute()
        entry = _entry(asker, given, found)
        if entry is not None and len(entries) == place:
            entries.append(entry)
        return found


class _Playing(threading.local):
    tape: Tape | None = None
    run: object | None = None  # another one for each
    tries: bool = False  # a module that is skipped, on placeholders
    redraws: Collection[str] = ()  # names of operations that draw their numbers though nobody has what they are of
    keeps: Callable[[torch.Tensor], bool] | None = None  # whether the model keeps a tensor from run to run
    lines: Any = None  # Lines of the run, as long as a stage's own call has not begun
    lost: list[tuple[torch.Tensor, type[torch.Tensor]]] | None = None  # of a trial, those that have lost their numbers


playing = _Playing()  # the tape of the run that this thread makes


def answered(asker: object, given: Any, compute: Callable[[], Any]) -> Any:
    """By the tape of this thread's run, where there is one. What is asked while it computes is not kept."""
    tape = playing.tape
    if tape is None:
        return compute()
    return tape.answer(asker, given, lambda: alone(compute))


def alone(compute: Callable[..., Made], *args: Any) -> Made:
    """Beside the run: nothing of it is kept, nothing is drawn."""
    before = playing.tape, playing.redraws, playing.lines
    playing.tape, playing.redraws, playing.lines = None, (), None
    try:
        return compute(*args)
    finally:
        playing.tape, playing.redraws, playing.lines = before


@contextlib.contextmanager
def of_no_run() -> Iterator[None]:
    """What is made within has no numbers in any run; a module is tried."""
    run, playing.run, tries, playing.tries = playing.run, None, playing.tries, True
    try:
        yield
    finally:
        playing.run, playing.tries = run, tries


def _entry(asker: object, given: Any, found: Any) -> TapeEntry | None:
    """None where the answer has a real tensor that is none of what was given: it is another one each time."""
    leaves, arguments = tensors_in(found), tensors_in(given)
    numbers = {id(tensor): number for number, tensor in enumerate(arguments)}
    passed = {leaf: numbers[id(tensor)] for leaf, tensor in enumerate(leaves) if id(tensor) in numbers}
    if any(type(tensor) in _REAL and leaf not in passed for leaf, tensor in enumerate(leaves)):
        return None
    roots = {id(_root(tensor)): number for number, tensor in enumerate(arguments) if isinstance(tensor, Renewed)}
    bases = {leaf: id(tensor.base) for leaf, tensor in enumerate(leaves) if isinstance(tensor, Renewed)}
    views = {leaf: roots[base] for leaf, base in bases.items() if base in roots}
    return TapeEntry(
        asker, _kept(given), replaced(found, lambda tensor: _HOLE if type(tensor) in _REAL else tensor), passed, views
    )


def _kept(value: Any) -> Any:
    kind = type(value)
    if kind in _REAL:
        return _Like(value)
    if kind is tuple or kind is list:
        return kind([_kept(part) for part in value])
    if kind is dict:
        return {key: _kept(part) for key, part in value.items()}
    if kind in _PLAIN or isinstance(value, (torch.Tensor, Enum)) or hasattr(value, "__array__"):
        return value
    return _OfClass(kind, _kept(parts_of(value)))


def _is_one(known: Any, given: Any) -> bool:
    """The very object that it was, alone, as most modules are given: looked at first, in a third of the time."""
    (args, kwargs), (known_args, known_kwargs) = given, known
    if len(args) != 1 or len(known_args) != 1 or kwargs or known_kwargs:
        return False
    return args[0] is known_args[0] or _is_renewed(known_args[0], args[0])


def _is_alike(known: Any, value: Any) -> bool:
    if known is value:
        return True
    kind = type(known)
    if kind is type(value):
        if kind is tuple or kind is list:
            return len(known) == len(value) and (all(map(is_, known, value)) or all(map(_is_alike, known, value)))
        if kind is dict:
            return not (known or value) or (
                known.keys() == value.keys() and all(_is_alike(part, value[key]) for key, part in known.items())
            )
        return _is_renewed(known, value) or (kind in _PLAIN and bool(known == value))
    if kind is _Like:
        return type(value) in _REAL and value.shape == known.shape and value.dtype is known.dtype
    return kind is _OfClass and type(value) is known.kind and _is_alike(known.parts, parts_of(value))


def _is_renewed(known: Any, value: Any) -> bool:
    return isinstance(known, Renewed) and isinstance(value, Renewed) and value.mark is known.mark


_REAL = {torch.Tensor, torch.nn.Parameter}
_PLAIN = {type(None), int, float, complex, bool, str, bytes, slice, range, type}
_PLAIN |= {torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format}


def _of_nobody_else() -> int:
    holder = SimpleNamespace(spare=object())
    spare = holder.spare
    count = sys.getrefcount(spare)
    assert spare is holder.spare  # both have it still
    return count


OF_NOBODY_ELSE = _of_nobody_else()  # as sys.getrefcount tells it, in a variable and an attribute; interpreters differ
