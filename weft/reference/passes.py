"""The oracle's passes: what a microbatch goes through forward, and the random numbers that it meets there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from weft.plan.error_places import function_place, unit_place, within
from weft.workload.cutting.calls import SeededCalls
from weft.workload.step import (
    check_names,
    function_value,
    own_backward,
    step_source,
    step_values,
    training_step,
    validation_step,
)
from weft.workload.units import is_cut_by_calls, units
from weft.workload.workload import Workload

Seed = Callable[[int], None]  # seeds for one of the numbers that a pass counts


class Passes(Protocol):
    def forward(self, batch: Any, seed: Seed, *, learns: bool, counts: bool) -> dict[str, torch.Tensor]:
        """What is measured of a batch, scalars by name: "loss", and in training no more than a step reports.

        counts: where nothing in the batch does, the model runs, and what is measured, if anything, is 0.
        """

    def backward(self, loss: torch.Tensor, seed: Seed) -> None: ...


def passes_of(workload: Workload) -> Passes:
    return StepPasses(workload) if is_cut_by_calls(workload) else UnitPasses(workload)


class UnitPasses:
    """Unit by unit, each with numbers of its own; then the loss and each metric of (output, targets)."""

    def __init__(self, workload: Workload) -> None:
        self._units = units(workload.model)
        self._functions = workload.functions

    def forward(self, batch: Any, seed: Seed, *, learns: bool, counts: bool) -> dict[str, torch.Tensor]:
        value, targets = batch
        for index, (prefix, unit) in enumerate(self._units):
            seed(index)
            with within(unit_place(index, prefix, unit)):
                value = unit(value)
        values = {}
        for name in self._names(learns=learns) if counts else ():
            with within(function_place(name)):
                values[name] = function_value(self._functions[name](value, targets), name)
        return values

    def backward(self, loss: torch.Tensor, seed: Seed) -> None:
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it without annotations

    def _names(self, *, learns: bool) -> list[str]:
        return ["loss"] if learns else list(self._functions)


class StepPasses:
    """The user's step as a whole; the calls of the model's modules have numbers of their own."""

    def __init__(self, workload: Workload) -> None:
        self._model = workload.model
        self._steps = {True: training_step(workload), False: validation_step(workload)}  # by whether it learns
        self._sources = {learns: step_source(workload, learns=learns) for learns in (True, False)}
        self._names: dict[bool, list[str]] = {}  # by whether it learns: of what the first batch reported
        self._calls = SeededCalls(workload.model)

    def forward(self, batch: Any, seed: Seed, *, learns: bool, counts: bool) -> dict[str, torch.Tensor]:
        source = self._sources[learns]
        with self._calls.installed() as numbers, numbers.running(seed), within(f"in {source}"):
            returned = self._steps[learns](self._model, batch)
        if learns and learns not in self._names and any(each.grad is not None for each in self._model.parameters()):
            raise own_backward()
        if learns and not counts:
            return {}
        values = step_values(returned, source, learns=learns)
        check_names(values, self._names.setdefault(learns, list(values)), source)
        return values if counts else {name: torch.zeros(()) for name in values}

    def backward(self, loss: torch.Tensor, seed: Seed) -> None:
        with self._calls.installed() as numbers, numbers.running_again(seed):  # torch.utils.checkpoint calls once more
            loss.backward()  # type: ignore[no-untyped-call]


def modules_of(workload: Workload) -> list[nn.Module]:
    """All that has a state of its own: the model, and losses and metrics that are modules."""
    functions = workload.functions.values() if workload.step is None else ()
    return [workload.model, *(function for function in functions if isinstance(function, nn.Module))]
