"""Freezing: layers that are trained for a part of the training only, as fine-tuning has it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from weft.workload.code.functions import functions_from, names_in
from weft.workload.workload import Workload

_NAMES = frozenset({"requires_grad", "requires_grad_"})


def trainable(workload: Workload) -> set[int]:
    """Ids of the parameters that require gradients as the model is built, or may come to: some function of the user's
    that runs later, and that is installed nowhere, asks for what decides that. Integers have none."""
    functions = (function for value in _called_later(workload) for function in functions_from(value))
    thaws = any(not _NAMES.isdisjoint(names_in(function.__code__)) for function in functions)
    return {
        id(each)
        for each in workload.model.parameters()
        if each.requires_grad or (thaws and (each.is_floating_point() or each.is_complex()))
    }


def _called_later(workload: Workload) -> Iterator[Any]:
    yield from (workload.step, workload.on_epoch)
    for kind in {kind for module in workload.model.modules() for kind in type(module).__mro__ if kind is not nn.Module}:
        yield from (each for name, each in vars(kind).items() if name != "__init__")
