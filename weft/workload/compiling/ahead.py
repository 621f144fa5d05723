"""Ahead: units are compiled before they are needed, for the calls that the inspection has seen of them.

    inspection    notes the calls ──▶ makes them again, backwards too: the files are there
    worker        makes those of its own stages' units while it prepares: it reads the files before an iteration waits

They are made with zeros, of a copy of the unit, so that nothing of the job is changed. What fails there is compiled
when its turn comes, and told then.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import pickle
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
from torch import nn

from weft.workload.compiling.compiled import Call, CompiledForward
from weft.workload.cutting.leaves import replaced, tensors_in

Precision = Callable[[], contextlib.AbstractContextManager[object]]


def note_calls(model: nn.Module) -> None:
    for _, forward in _compiled(model):
        forward.calls = {}


def noted_calls(model: nn.Module) -> str:
    """For the other workers of the job, in base64; of what cannot be pickled nothing."""
    noted = {name: list(forward.calls.values()) for name, forward in _compiled(model) if forward.calls}
    with contextlib.suppress(Exception):  # whatever an argument of the user's raises
        return base64.b64encode(pickle.dumps(noted, pickle.HIGHEST_PROTOCOL)).decode() if noted else ""
    return ""


def compile_ahead(
    model: nn.Module, noted: str, own: Collection[nn.Parameter], device: torch.device, precision: Precision
) -> None:
    """noted: as `noted_calls` has them. own: parameters; units that have none of them are others'."""
    if not noted:
        return
    calls: Mapping[str, Sequence[Call]] = pickle.loads(base64.b64decode(noted))
    numbers = {id(parameter) for parameter in own}
    modules = dict(model.named_modules())
    for name, _ in _compiled(model):
        if not any(id(parameter) in numbers for parameter in modules[name].parameters()):
            continue
        for call in calls.get(name, ()):
            with contextlib.suppress(Exception):  # told when it comes to that
                _make(modules[name], call, device, precision)


def _compiled(model: nn.Module) -> Iterator[tuple[str, CompiledForward]]:
    for name, module in model.named_modules():
        if isinstance(forward := module.__dict__.get("forward"), CompiledForward):
            yield name, forward


def _make(module: nn.Module, call: Call, device: torch.device, precision: Precision) -> None:
    alike = copy.deepcopy(module).to(device).train(call.training)
    wanting = iter(call.wanting)

    def zeros(meta: torch.Tensor) -> torch.Tensor:
        made = torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype, device=device).zero_()
        return torch.ops.aten.alias.default(made.requires_grad_()) if next(wanting) else made  # no leaf, as in a stage

    args, kwargs = replaced(call.given, zeros)
    with torch.set_grad_enabled(call.learns), precision():
        result = alike.forward(*args, **kwargs)
        outputs = [each for each in tensors_in(result) if each.requires_grad]
    if outputs:
        torch.autograd.backward(outputs, [torch.zeros_like(each) for each in outputs])
