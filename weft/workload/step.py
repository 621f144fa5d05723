"""Steps: the user's functions of a model and a batch, and what they return, checked.

A workload with a loss has a step, too: a batch is a pair, and validation reports the loss and each metric.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any, TypeGuard

import torch
from torch import nn

from weft.plan.error_places import function_place, within
from weft.spec.job_spec import is_unicode
from weft.workload.workload import StepFunction, Workload, WorkloadError, kind_of

_REMEDY = "it must return the loss, a scalar tensor, or a mapping with it as 'loss' and other scalars to report"


def training_step(workload: Workload) -> StepFunction:
    return workload.step or _step_of_functions(workload, ["loss"])


def validation_step(workload: Workload) -> StepFunction:
    """For every batch that is only measured."""
    return workload.validate or workload.step or _step_of_functions(workload, list(workload.functions))


def step_source(workload: Workload, *, learns: bool) -> str:
    """The field that the step comes from, as `step_values` tells it."""
    if workload.step is None:
        return "Workload.loss"
    return "Workload.validate" if workload.validate is not None and not learns else "Workload.step"


def step_values(result: Any, source: str, *, learns: bool) -> dict[str, torch.Tensor]:
    """What a step returned as scalar tensors by name: "loss" first, the rest, which is reported, without gradient.

    learns: whether the loss is to be differentiated. Raises WorkloadError, with the source ("Workload.step"), for what
    is no loss or cannot be reported.
    """
    returned = result if type(result) is dict or isinstance(result, Mapping) else {"loss": result}
    if "loss" not in returned:
        raise WorkloadError(f"{source} returned {kind_of(result)} without 'loss'; {_REMEDY}")
    if learns:
        _check_gradient(returned["loss"], source)
    values = {"loss": _scalar(returned["loss"], "loss", source)}
    for name, value in returned.items():
        if name != "loss":
            values[name] = _scalar(value, name, source).detach()
    return values


def own_backward(place: str = "") -> WorkloadError:
    """Of a step that differentiates by itself. place: where, with a space before it."""
    return WorkloadError(
        f"the step calls backward(){place}; leave it out, as what the optimizer does: Weft differentiates the loss "
        "that the step returns; two that take turns, each with an optimizer of its own (a GAN), are no job"
    )


def function_value(value: object, name: str) -> torch.Tensor:
    """What the loss, or the metric of that name, returned of (output, target), as a scalar tensor; a metric's may have
    been a number. Raises WorkloadError that names the function."""
    source = "Workload.loss" if name == "loss" else f"Workload.metrics[{name!r:.80}]"
    if name != "loss" and _is_number(value):
        return _number(value)
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        if value.is_complex():
            raise WorkloadError(f"{source} returned a complex number; it must return a real one, such as its .abs()")
        return value
    wanted = "a scalar tensor" if name == "loss" else "a scalar"
    raise WorkloadError(
        f"{source} returned {_described(value)}; it must return {wanted}, the mean over the samples given"
    )


def check_names(values: Mapping[str, object], names: list[str], source: str) -> None:
    """names: of what a batch before this one reported. A mean over some of the batches would pass for one over all."""
    if list(values) != names:
        raise WorkloadError(
            f"{source} reported {_listed(values)}, and for a batch before {_listed(names)}; "
            "return the same names, in the same order, for every batch"
        )


def _step_of_functions(workload: Workload, names: list[str]) -> StepFunction:
    functions = [(name, workload.functions[name], within(function_place(name))) for name in names]

    def step(model: nn.Module, batch: Any) -> dict[str, Any]:
        inputs, targets = batch
        output = model(inputs)
        values = {}
        for name, function, place in functions:
            with place:
                values[name] = function(output, targets)
        return values

    return step


def _check_gradient(loss: object, source: str) -> None:
    is_cut_off = isinstance(loss, torch.Tensor) and loss.numel() == 1 and not loss.requires_grad
    if is_cut_off or (not isinstance(loss, torch.Tensor) and isinstance(loss, numbers.Number)):
        raise WorkloadError(
            f"{source} returned a loss without a gradient ({kind_of(loss)}); return the tensor as the model's "
            "parameters have made it, without .item(), .detach() or torch.no_grad()"
        )


def _scalar(value: object, name: object, source: str) -> torch.Tensor:
    if not isinstance(name, str) or not is_unicode(name):
        raise WorkloadError(f"{source} returned a mapping with {name!r:.80}, which is no text; name what is reported")
    if _is_number(value):
        return _number(value)
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        if value.is_complex():
            raise WorkloadError(f"{source} returned a complex {name!r}; return a real one, such as its .abs()")
        return value
    shape = _described(value)
    if name == "loss":
        raise WorkloadError(f"{source} returned {shape} as the loss; {_REMEDY}")
    raise WorkloadError(
        f"{source} returned {shape} as {name!r:.80}; report scalars alone, means as the loss is, or return the loss "
        "alone (of what a model returns, output['loss'])"
    )


def _is_number(value: object) -> TypeGuard[numbers.Real]:
    return not isinstance(value, torch.Tensor) and isinstance(value, numbers.Real)


def _number(value: numbers.Real) -> torch.Tensor:
    return torch.tensor(float(value), dtype=torch.float64)


def _described(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else kind_of(value)


def _listed(names: Mapping[str, object] | list[str]) -> str:
    return ", ".join(f"{name!r:.80}" for name in names)
