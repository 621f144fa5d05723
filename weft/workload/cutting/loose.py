"""Loose results: what a step computes between the calls of its modules, by names that are the same in every stage.

    x = self.one(x)        one:0                        what a call returns has the call's name
    y = 2 * x              ~one mul model.py:12#0:0     a loose result that of the call before it, with operation and
    z = self.two(x) + y                                 line, and a number, since a line may run several times

Every stage runs the same lines, so these names need no numbering beyond a line. Looking at each operation costs some
microseconds, so only a stage does it that sends or receives such a result.

A line behind an `if` on the batch may run in some batches only, and before training in none. What it makes then has no
name by which it would cross, but every stage runs it: where one is called with that, it computes it from what has come.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Self

import torch
from torch import overrides
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from weft.plan.plan import Border
from weft.workload.cutting.leaves import places_in, replaced, tensors_in
from weft.workload.cutting.modes import aside
from weft.workload.cutting.operation import generators, name_of, user_line, writes
from weft.workload.cutting.placeholder import Placeholder, PlaceholderError, base_of

_SETTERS = ("__setitem__", "__set__")
_WITHOUT_NUMBERS = {Placeholder, type(None), bool, int, float, str}
Seen = Callable[[str, torch.Tensor], None]  # the name of a loose result, and it


def made_by(func: Callable[..., Any], args: tuple[Any, ...], result: Any) -> list[torch.Tensor]:
    """The tensors that an operation has made, or written to: through a view to what it is one of, too."""
    made = tensors_in(result) or (tensors_in(args)[:1] if sets(func) else [])
    if made and writes(func.__name__) and (base := base_of(made[0])) is not None:
        return [made[0], base]
    return made


def sets(func: Callable[..., Any]) -> bool:
    return func.__name__ in _SETTERS


def is_loose(name: str) -> bool:
    return name.startswith("~")


class LooseNames:
    """Of one run. call: the name of the last call of an opaque module that has begun."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self.call = ""

    def begin(self) -> None:
        self.call = ""
        self._counts.clear()

    def next(self, func: Callable[..., Any]) -> str:
        """Of an operation that makes tensors; without the number of the tensor."""
        key = f"~{self.call} {name_of(func)} {os.path.basename(user_line())}"
        number = self._counts[key]
        self._counts[key] += 1
        return f"{key}#{number}"


class LooseResults(TorchFunctionMode):
    """While a stage runs a step: tells of each loose result that is made."""

    def __init__(self, names: LooseNames, seen: Seen) -> None:
        super().__init__()
        self._names, self._seen = names, seen
        self._is_paused = False
        self._asked = overrides.has_torch_function

    def __enter__(self) -> Self:
        """Between its blocks a module of torch may ask whether somebody looks, as an `nn.TransformerEncoder` does, and
        it computes in another way then."""
        self._asked, overrides.has_torch_function = overrides.has_torch_function, self._has_torch_function
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *of_error: Any) -> None:
        super().__exit__(*of_error)  # type: ignore[no-untyped-call]
        overrides.has_torch_function = self._asked

    def _has_torch_function(self, args: Iterable[Any]) -> bool:
        with aside(self):
            return bool(self._asked(args))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Within a call of an opaque module, whose operations are nobody's business."""
        was, self._is_paused = self._is_paused, True
        try:
            with aside(self):
                yield
        finally:
            self._is_paused = was

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._is_paused:
            return result
        made = made_by(func, args, result)
        if made:
            name = self._names.next(func)
            for leaf, tensor in enumerate(made):
                self._seen(f"{name}:{leaf}", tensor)
        return result


class _Line(NamedTuple):
    function: Callable[..., Any]
    given: tuple[Any, ...]  # arguments, and those by keyword
    result: Any
    has_gradients: bool
    autocast: list[tuple[str, torch.dtype]]
    versions: list[int]  # of what it is given


class _CannotBeComputed(Exception):
    """With a reason."""


class Lines:
    """Of a run, what its lines have made of what had no numbers, and how to make it once that has come. A line's number
    is its place in the run."""

    def __init__(self) -> None:
        self._lines: list[_Line] = []
        self._made: dict[int, list[tuple[int, int]]] = {}  # by id: lines that make it or write to it, and leaves
        self._written: dict[int, int] = {}  # by id: the last line that has
        self._results: dict[int, list[torch.Tensor]] = {}  # of each line that was run again
        self._numbers: dict[int, torch.Tensor] = {}  # by id

    def note(self, function: Callable[..., Any], given: tuple[Any, ...], result: Any) -> None:
        """function: an operation, or a module's forward."""
        about = torch.is_grad_enabled(), _autocast(), _versions(given)
        self._lines.append(_Line(function, _apart(given) if about[-1] else given, result, *about))

    def _look(self) -> None:
        """What comes back of what a line was given may have been written to; of `out` nobody knows what it was."""
        for number, line in enumerate(self._lines):
            before, (args, kwargs) = tensors_in(line.given), line.given
            made = tensors_in(line.result) or (tensors_in(args)[:1] if sets(line.function) else [])
            for leaf, tensor in enumerate(made):
                if all(tensor is not each for each in before):
                    self._made[id(tensor)] = [(number, leaf)]
                    continue
                base = base_of(tensor)
                if id(tensor) in self._made and base is None and "out" not in kwargs:
                    self._made[id(tensor)].append((number, leaf))
                for each in (tensor, base):
                    if each is not None:
                        self._written[id(each)] = number

    def computed(self, given: tuple[Any, ...], begins: Border) -> dict[str, Placeholder]:
        """Those arguments of the stage's first call that no other stage has sent, with their numbers; by names that no
        value has. Errors: PlaceholderError, where something was sent in the place of one."""
        found, sent = {}, {leaf for leaf, _ in begins.given}
        for leaf, tensor in enumerate(places_in(given)):
            if not isinstance(tensor, Placeholder) or tensor.came is not None:
                continue
            if not self._made:
                self._look()
            if id(tensor) not in self._made:
                continue
            try:
                tensor.comes(self._of(tensor))
                found[f"{leaf} {tensor.what}"] = tensor
            except _CannotBeComputed as error:
                if leaf in sent:
                    raise PlaceholderError(
                        f"{begins.modules[0]}, with which a stage begins, is called with {tensor.what}, and was called "
                        f"with something else when the step was tried before training; the stage runs that line, and "
                        f"cannot here: {error}; make one nn.Module of the line and the `if` around it, which is called "
                        "for every batch, or cut elsewhere (strategy.split)"
                    ) from None
        return found

    def _of(self, tensor: torch.Tensor) -> torch.Tensor:
        """With numbers."""
        if not isinstance(tensor, Placeholder):
            return tensor
        if tensor.came is not None:
            return tensor.came
        if id(tensor) not in self._numbers:
            made = self._made.get(id(tensor))
            if made is None:
                raise _CannotBeComputed(f"{tensor.what} does not come to it")
            if self._is_written_after(tensor, made[-1][0]):
                raise _CannotBeComputed(f"{tensor.what} is written to through another tensor")
            for number, leaf in made:
                result = self._run(number, tensor)
                if result:
                    self._numbers[id(tensor)] = result[leaf]
        return self._numbers[id(tensor)]

    def _run(self, number: int, target: Placeholder) -> list[torch.Tensor]:
        """target: what the line makes or writes to."""
        if number in self._results:
            return self._results[number]
        line = self._lines[number]
        if _versions(line.given) != line.versions:
            raise _CannotBeComputed(f"what {target.what} is made of is written to behind that")
        if _autocast() != line.autocast:
            raise _CannotBeComputed(f"{target.what} is computed under another autocast")

        def source(tensor: torch.Tensor) -> torch.Tensor:
            if tensor is target:
                return self._numbers[id(target)]
            if self._is_written_after(tensor, number):
                raise _CannotBeComputed(f"what {target.what} is made of is written to behind that")
            return self._of(tensor)

        args, kwargs = replaced(line.given, source)
        before = generators()
        # What it keeps for a backward is no matter of the torch.utils.checkpoint that calls the stage's module.
        with torch.set_grad_enabled(line.has_gradients), saved_tensors_hooks(torch.Tensor.detach, _as_it_is):
            result = self._results[number] = tensors_in(line.function(*args, **kwargs))
        if not all(map(torch.equal, before, generators())):
            raise _CannotBeComputed(f"{target.what} is drawn at random")
        return result

    def _is_written_after(self, tensor: torch.Tensor, number: int) -> bool:
        both = tensor, base_of(tensor) if isinstance(tensor, Placeholder) else None
        return any(self._written.get(id(each), -1) > number for each in both)


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _apart(value: Any) -> Any:
    """As it is now: a list may grow behind the line."""
    kind = type(value)
    if kind is tuple or kind is list:
        return kind(map(_apart, value))
    return {key: _apart(part) for key, part in value.items()} if kind is dict else value


def _versions(given: tuple[Any, ...]) -> list[int]:
    """How often each tensor of what is given was written to; -1 of what has no numbers."""
    args, kwargs = given
    if not kwargs and all(type(each) in _WITHOUT_NUMBERS for each in args):  # nearly all lines, in a third of the time
        return []
    tensors = tensors_in(given)
    return [-1 if isinstance(each, Placeholder) or each.is_inference() else each._version for each in tensors]


def _autocast() -> list[tuple[str, torch.dtype]]:
    return [(kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
