"""Units: what a model is cut between, and the names of their state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from weft.workload.workload import Workload


def units(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """(prefix of its names in the state dict, module) for each unit, in the order in which they run."""
    if type(model).forward is nn.Sequential.forward and isinstance(model, nn.Sequential) and len(model) > 0:
        return [(f"{name}.", child) for name, child in model._modules.items() if child is not None]  # repeats too
    return [("", model)]


def is_cut_by_calls(workload: Workload) -> bool:
    """By the model's own forward; otherwise between the children of a plain `nn.Sequential`."""
    return workload.step is not None or units(workload.model) == [("", workload.model)]


@dataclass(frozen=True, slots=True)
class Unit:
    index: int  # in the whole model; it keys its random numbers
    prefix: str  # of its names in the state dict
    module: nn.Module

    def __str__(self) -> str:
        return f"unit {self.index} ({type(self.module).__name__})"


def named_state(units: Sequence[Unit]) -> list[tuple[str, torch.Tensor]]:
    """(name in the whole model's state dict, tensor itself) of every parameter and persistent buffer."""
    return [
        (name, tensor)
        for unit in units
        for name, tensor in unit.module.state_dict(prefix=unit.prefix, keep_vars=True).items()
        if isinstance(tensor, torch.Tensor)
    ]
