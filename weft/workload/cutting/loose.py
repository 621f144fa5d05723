"""Loose results: what a step computes between the calls of its modules, by names that are the same in every stage.

    x = self.one(x)        one:0                        what a call returns has the call's name
    y = 2 * x              ~one mul model.py:12#0:0     a loose result that of the call before it, with operation and
    z = self.two(x) + y                                 line, and a number, since a line may run several times

Every stage runs the same lines, so these names need no numbering beyond a line. Looking at each operation costs some
microseconds, so only a stage does it that sends or receives such a result.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from weft.workload.cutting.leaves import tensors_in
from weft.workload.cutting.modes import aside
from weft.workload.cutting.operation import name_of, user_line, writes
from weft.workload.cutting.placeholder import base_of

_SETTERS = ("__setitem__", "__set__")
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
