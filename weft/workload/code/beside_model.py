"""Modules beside the model: a loss that keeps a running mean, a centre or a queue. Training changes them as it does the
model's, and no state dict of the model has them."""

from __future__ import annotations

from torch import nn

from weft.workload.code.functions import found_from
from weft.workload.workload import Workload


def modules_beside(workload: Workload) -> dict[str, nn.Module]:
    """The loss; or what the step refers to. With those inside of them, by names that no module of the model has."""
    function, name = (workload.loss, "loss") if workload.step is None else (workload.step, "step")
    of_model = set(map(id, workload.model.modules()))
    return {
        f"Workload.{outer}.{inner}".removesuffix("."): each
        for outer, found in found_from(function, name, nn.Module)
        if of_model.isdisjoint(map(id, found.modules()))
        for inner, each in found.named_modules()
    }
