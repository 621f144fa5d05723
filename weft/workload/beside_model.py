"""Modules beside the model: a loss that keeps a running mean, a centre or a queue. Training changes them as it does the
model's, and no state dict of the model has them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from weft.workload.code.fingerprint import names_in
from weft.workload.code.installed import is_installed
from weft.workload.workload import Workload


def modules_beside(workload: Workload) -> dict[str, nn.Module]:
    """The loss; or what the step has by a name of its own, a variable of the function around it, a global, an attribute
    of its object, itself or in a function that it calls. With those inside of them, by names that no module of the
    model has."""
    function, name = (workload.loss, "loss") if workload.step is None else (workload.step, "step")
    of_model = set(map(id, workload.model.modules()))
    return {
        f"Workload.{outer}.{inner}".removesuffix("."): each
        for outer, found in _found_in(function, name, set())
        if of_model.isdisjoint(map(id, found.modules()))
        for inner, each in found.named_modules()
    }


def _found_in(value: Any, name: str, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, nn.Module):
        yield name, value
    else:
        for key, part in _parts(value):
            yield from _found_in(part, f"{name}.{key}", seen)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    match value:
        case partial():
            yield "func", value.func
            yield from ((str(number), each) for number, each in enumerate(value.args))
            yield from value.keywords.items()
        case MethodType(__func__=FunctionType() as function):
            own, names = getattr(value.__self__, "__dict__", {}), names_in(function.__code__)
            yield from ((key, each) for key, each in own.items() if key in names)
            yield function.__name__, function
        case FunctionType() if not is_installed(Path(value.__code__.co_filename)):
            for key, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                try:
                    yield key, cell.cell_contents
                except ValueError:  # nothing is in it yet
                    continue
            yield from ((key, value.__globals__[key]) for key in names_in(value.__code__) & value.__globals__.keys())
            yield from ((str(number), each) for number, each in enumerate(value.__defaults__ or ()))
            yield from (value.__kwdefaults__ or {}).items()
