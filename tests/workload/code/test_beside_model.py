"""Modules beside the model: what a step refers to by a name of its own is found, however it is written."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from weft.workload.code.beside_model import modules_beside
from weft.workload.workload import Workload

criterion = nn.Sequential(nn.BatchNorm1d(2))  # with a module inside


class Trainer:
    def __init__(self, loss: nn.Module, model: nn.Module) -> None:
        self.loss, self.model, self.unused = loss, model, nn.Identity()

    def step(self, model: nn.Module, batch: Any) -> torch.Tensor:
        found: torch.Tensor = self.loss(self.model(batch)).mean()
        return found


def by_a_variable(model: nn.Module) -> Callable[..., Any]:
    loss = criterion

    def inner(output: torch.Tensor) -> Any:
        return loss(output).mean()

    return lambda model, batch: inner(model(batch))


def by_a_default(model: nn.Module) -> Callable[..., Any]:
    return lambda model, batch, loss=criterion: loss(model(batch)).mean()


def decorated(model: nn.Module) -> Callable[..., Any]:
    loss = criterion

    @torch.autocast("cpu", enabled=False)
    def step(model: nn.Module, batch: Any) -> Any:
        return loss(model(batch)).mean()

    return step


class DecoratedTrainer(Trainer):
    @torch.autocast("cpu", enabled=False)
    def step(self, model: nn.Module, batch: Any) -> torch.Tensor:
        found: torch.Tensor = self.loss(self.model(batch)).mean()
        return found


class CalledTrainer(Trainer):
    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return self.step(model, batch)


class DividedTrainer(Trainer):
    def step(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return self._mean(self.model(batch))

    def _mean(self, output: Any) -> torch.Tensor:
        found: torch.Tensor = self.own_loss(output).mean()
        return found

    @property
    def own_loss(self) -> nn.Module:
        return self.loss


STEPS: dict[str, Callable[[nn.Module], Callable[..., Any]]] = {
    "a variable": by_a_variable,
    "a default": by_a_default,
    "a global": lambda model: lambda model, batch: criterion(model(batch)).mean(),
    "an attribute": lambda model: Trainer(criterion, model).step,
    "a variable of a decorated function": decorated,
    "an attribute of a decorated method": lambda model: DecoratedTrainer(criterion, model).step,
    "an attribute of an object that is called": lambda model: CalledTrainer(criterion, model),
    "an attribute that another method asks for": lambda model: DividedTrainer(criterion, model).step,
    "a partial": lambda model: partial(lambda loss, model, batch: loss(model(batch)).mean(), criterion),
}


@pytest.mark.parametrize("how", STEPS)
def test_what_a_step_refers_to_is_found_with_what_is_inside_and_the_model_is_not(how: str) -> None:
    model = nn.Linear(2, 2)
    step = STEPS[how](model)
    found = modules_beside(Workload(model, [torch.zeros(2)], step=step, optimizer=torch.optim.Adam))
    assert list(map(id, found.values())) == [id(criterion), id(criterion[0])]
    outer, inner = found
    assert outer.startswith("Workload.step")
    assert inner == f"{outer}.0"


@pytest.mark.parametrize(("loss", "count"), [(nn.MSELoss(), 1), (nn.functional.mse_loss, 0)])
def test_a_loss_is_one(loss: Any, count: int) -> None:
    workload = Workload(nn.Linear(2, 2), (torch.zeros(2, 2),) * 2, loss=loss, optimizer=torch.optim.Adam)
    assert list(modules_beside(workload)) == ["Workload.loss"][:count]


def test_a_step_that_is_a_module_around_the_model_is_none() -> None:
    model = nn.Linear(2, 2)
    step = nn.ModuleDict({"model": model})
    assert modules_beside(Workload(model, [torch.zeros(2)], step=step, optimizer=torch.optim.Adam)) == {}
