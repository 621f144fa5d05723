"""Units: what a model is cut between, the names of their state, and whether each takes its mode."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from weft.workload.workload import Workload, WorkloadError

_METHODS = ("__call__", "__iter__", "eval", "forward", "state_dict", "train")  # that a model may have of its own
_HOOKS = (
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
)
_OTHER_NAMES = {"train": "fit", "eval": "evaluate"}  # of what is neither
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


def enter_mode(model: nn.Module, training: bool) -> None:
    """As a loop does it: what a model does in an `eval()` of its own is not in its `train(False)`."""
    if training:
        model.train()
    else:
        model.eval()


def check_modes(model: nn.Module) -> None:
    """Raises WorkloadError for a `train` or `eval` that is no such call."""
    calls: list[tuple[str, nn.Module, str, tuple[str, ...]]] = [("", model, "train", ()), ("", model, "eval", ())]
    calls += [(name, module, "train", ("mode",)) for name, module in model.named_modules() if name]
    for name, module, method, arguments in calls:
        function = getattr(module, method)
        if getattr(function, "__func__", None) is getattr(nn.Module, method):
            continue
        signature = inspect.signature(function)
        try:
            signature.bind(*arguments)
        except TypeError:
            raise WorkloadError(
                f"Workload.model: {name or 'it'!r} has a {method}{signature} of its own, and model.{method}() is "
                f"called in each epoch; give that method another name, such as {_OTHER_NAMES[method]}"
            ) from None


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
