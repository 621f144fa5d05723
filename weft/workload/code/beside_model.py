"""Modules beside the model: a loss that keeps a running mean, a centre or a queue. Training changes them as it does the
model's, and no state dict of the model has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from weft.workload.code.functions import parts_of
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
        for key, part in parts_of(value):
            yield from _found_in(part, f"{name}.{key}", seen)
