"""Names of values, as every process that runs a step gives them, and of what a model's modules hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


def call_name(module: str, occurrence: int) -> str:
    """occurrence: of the module in the step, from 0."""
    return f"{module}@{occurrence}" if occurrence else module


def output_name(module: str, occurrence: int, leaf: int) -> str:
    """Of a tensor that a module's call has returned."""
    return f"{call_name(module, occurrence)}:{leaf}"


def is_argument(value: str) -> bool:
    return value.startswith(">")


def maker_of(value: str) -> str:
    """The module that returns it, or is called with it."""
    return value.strip(">~").rpartition(":")[0].partition(" ")[0]


def argument_name(module: str, leaf: int) -> str:
    """Of a tensor that a stage which begins at this module is called with."""
    return f">{module}:{leaf}"


def is_beside(unit: str, name: str) -> bool:
    """In one list."""
    (stack, _, number), (own, _, _) = unit.rpartition("."), name.rpartition(".")
    return stack == own and number.isdigit()


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Each parameter and buffer once, by its first name."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def names_by_place(model: nn.Module) -> dict[tuple[nn.Module, str], str]:
    """The first name of each tensor, by every place in a module where it stands."""
    names = {id(tensor): name for name, tensor in named_tensors(model)}
    return {
        (module, key): names[id(tensor)]
        for module in model.modules()
        for slots in slots_of(module)
        for key, tensor in slots.items()
        if tensor is not None
    }


def slots_of(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Where a module holds its own parameters and buffers, by key."""
    return module._parameters, module._buffers
