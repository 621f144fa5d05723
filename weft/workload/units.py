"""Units: what a model is cut between, and the names of their state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from weft.workload.workload import Workload

_METHODS = ("__call__", "__iter__", "forward", "state_dict", "train")  # that a model may have of its own
_HOOKS = (
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
)
_STATE = ("_parameters", "_buffers")
EXTRA_STATE = "_extra_state"  # how torch ends a name, in a state dict, of what `get_extra_state` tells


def units(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """(prefix of its names in the state dict, module) for each unit, in the order in which they run."""
    if _is_plain(model):
        return [(f"{name}.", child) for name, child in model._modules.items() if child is not None]  # repeats too
    return [("", model)]


def _is_plain(model: nn.Module) -> bool:
    """Whether it is an `nn.Sequential` of which there is nothing but its children, one after the other: no hook on the
    whole, no parameter beside them, no method of its own."""
    if not isinstance(model, nn.Sequential) or len(model) == 0:
        return False
    is_torchs = all(getattr(type(model), name) is getattr(nn.Sequential, name) for name in _METHODS)
    own = vars(model)
    return is_torchs and not (own.keys() & {*_METHODS}) and not any(own[name] for name in (*_HOOKS, *_STATE))


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
    """(name in the whole model's state dict, tensor itself) of every parameter and persistent buffer. What a module's
    `get_extra_state` tells is among its attributes."""
    return [
        (name, tensor)
        for unit in units
        for name, tensor in unit.module.state_dict(prefix=unit.prefix, keep_vars=True).items()
        if isinstance(tensor, torch.Tensor) and not name.endswith(EXTRA_STATE)
    ]
