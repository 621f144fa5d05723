"""The model's memory, as the user's code has left it, and as every part of a job wants to find it.

A stage moves its parameters into shared memory, each dense and by itself. Whoever computes with them elsewhere (the
reference, the inspection, another stage) has to have them in the same order of elements, since kernels round by it.
So the model is settled as soon as it is loaded; what would mean something else once it is moved is refused.
"""

from __future__ import annotations

import functools

import torch
from safetensors import SafetensorError
from safetensors.torch import save
from torch import nn
from torch.nn.parameter import is_lazy

from weft.spec.job_spec import is_unicode
from weft.workload.building import Sink
from weft.workload.workload import WorkloadError


def check_values(model: nn.Module) -> None:
    """Raises WorkloadError for a parameter or buffer that has none: nobody here would ever give it some."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise WorkloadError(
                f"Workload.model: {name!r} has no shape yet; call the model once with a batch like yours where it is "
                "built (under torch.no_grad(), in eval()), or say how many inputs its layer has"
            )
        if tensor.is_meta:
            raise WorkloadError(
                f"Workload.model: {name!r} is on torch's meta device, and has no values; build the model without that: "
                "each worker has memory for its own stages alone anyway"
            )


def check_plain(model: nn.Module) -> None:
    """Raises WorkloadError for what cannot be listened to, in a model that is cut by its own forward."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise WorkloadError(
                f"Workload.model: {name or 'it'!r} is of torch.jit; give the nn.Module that it was made of (for speed "
                "there is strategy.compile)"
            )


def settle(model: nn.Module, sink: Sink | None = None) -> None:
    """Gives each parameter that has gaps in its memory (a slice of a larger tensor) a dense place.

    sink: what it has stays there.

    Raises WorkloadError for parameters that share memory without being one parameter, which would part ways, and for
    what model.safetensors cannot hold.
    """
    named = [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if not is_lazy(parameter) and (sink is None or not sink.has(parameter))
    ]
    for _, parameter in named:
        if parameter.stride() != torch.empty_like(parameter, device="meta").stride():
            parameter.data = parameter.data.clone()
    _check_apart(named)
    _check_saved(model)


def _check_apart(named: list[tuple[str, nn.Parameter]]) -> None:
    spans = sorted(
        (each.data_ptr(), each.data_ptr() + each.numel() * each.itemsize, name)
        for name, each in named
        if each.requires_grad and not each.is_meta
    )
    end, before = 0, ""
    for start, stop, name in spans:
        if start < min(end, stop):
            raise WorkloadError(
                f"Workload.model: the parameters {before!r} and {name!r} share memory and are two parameters, so each "
                "would be trained by itself; make them one: assign the parameter (a.weight = b.weight), not its data"
            )
        if stop > end:
            end, before = stop, name


def _check_saved(model: nn.Module) -> None:
    for name in (*model.state_dict(), *(name for name, _ in model.named_modules())):
        if not is_unicode(name):
            raise WorkloadError(f"Workload.model: the name {name!r:.80} is no text; give one in UTF-8")
    saved = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, torch.Tensor)}
    for name, tensor in saved.items():
        if tensor.layout is not torch.strided:
            raise WorkloadError(
                f"Workload.model: {name!r} is no dense tensor but {str(tensor.layout).removeprefix('torch.')}, which "
                "model.safetensors cannot hold; keep it with register_buffer(..., persistent=False)"
            )
    for dtype, name in {tensor.dtype: name for name, tensor in saved.items()}.items():
        if not _can_be_saved(dtype):
            raise WorkloadError(
                f"Workload.model: {name!r} is {str(dtype).removeprefix('torch.')}, which model.safetensors cannot "
                "hold; use another dtype (complex64 for complex numbers), or keep a buffer with persistent=False"
            )


@functools.cache
def _can_be_saved(dtype: torch.dtype) -> bool:
    try:
        save({"": torch.empty(0, dtype=dtype)})
    except (KeyError, SafetensorError):
        return False
    return True
