"""Epoch reads: what on_epoch asks for, and a forward or the step keeps, is told apart from what nobody asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from weft.workload.code.epoch_reads import EpochReads
from weft.workload.workload import Workload

RECENT: list[float] = []
TABLE: dict[str, float] = {}
OF_STEP: list[float] = []
count = 0


class Meter:
    def __init__(self) -> None:
        self.total, self.other = 0.0, 0.0

    def update(self, value: float) -> None:
        self.total += value
        self.other -= value

    def mean(self) -> float:
        return self.total

    def __str__(self) -> str:
        return f"{self.total:.3g}"


METER = Meter()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.history, self.meter = nn.Linear(2, 2), list[float](), Meter()
        self.summed = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global count
        y: torch.Tensor = self.linear(x)
        mean = y.mean().item()
        count += 1
        self.history.append(mean)
        self.newest, self.summed = mean, self.summed + mean
        self.meter.update(mean)
        METER.update(mean)
        RECENT.append(mean)
        TABLE["mean"] = mean
        return y

    def summary(self) -> float:
        return sum(self.history)


def changed_for(made: Callable[[nn.Module], Any]) -> dict[str, str]:
    model = nn.Sequential(nn.Linear(2, 2), Layer())
    RECENT.clear()
    OF_STEP.clear()
    TABLE.clear()

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = model(batch[0]).mean()
        OF_STEP.append(loss.item())
        return loss

    workload = Workload(
        model, (torch.ones(2, 2),), step=step, optimizer=torch.optim.SGD, on_epoch=made(model), epoch_metrics=["a"]
    )
    reads = EpochReads(workload)
    assert reads.changed(["0.", "1."]) == []
    step(model, (torch.ones(1, 2),))
    return dict(reads.changed(["0.", "1."]))


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (lambda model: lambda values: model[1].history[-1], {"1.history": "1."}),
        (lambda model: lambda values: model[1].newest, {"1.newest": "1."}),
        (lambda model: lambda values: model[1].summed / 2, {"1.summed": "1."}),
        (lambda model: lambda values: model[1].summary(), {"1.history": "1."}),
        (lambda model: lambda values: model[1].meter.total, {"1.meter": "1."}),
        (lambda model: lambda values: RECENT[-1], {"Workload.on_epoch.globals.RECENT": "1."}),
        (lambda model: lambda values: TABLE.get("mean"), {"Workload.on_epoch.globals.TABLE": "1."}),
        (lambda model: lambda values: count, {"Workload.on_epoch.globals.count": "1."}),
        (lambda model: lambda values: METER.mean(), {"Workload.on_epoch.METER.total": "1."}),
        (lambda model: lambda values: print(METER), {"Workload.on_epoch.METER.total": "1."}),
        (lambda model: lambda values: sum(OF_STEP), {"Workload.on_epoch.globals.OF_STEP": ""}),
        (lambda model: lambda values: values["loss"], {}),
        (lambda model: lambda values: model(torch.ones(1, 2)).sum(), {}),
        (lambda model: lambda values: model[1].linear.weight.sum(), {}),
    ],
)
def test_what_it_asks_for_is_told_with_the_unit_that_keeps_it(
    made: Callable[[nn.Module], Any], told: dict[str, str]
) -> None:
    assert changed_for(made) == told


def test_a_list_that_layers_hold_by_an_attribute_is_the_one_that_it_asks_for() -> None:
    kept: list[float] = []

    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kept = kept

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.kept.append(x.sum().item())
            return x

    model = nn.Sequential(Holds(), nn.Linear(2, 2))
    data = (torch.ones(2, 2), torch.ones(2, 2))
    workload = Workload(
        model, data, loss=nn.MSELoss(), optimizer=torch.optim.SGD, on_epoch=lambda values: print(len(kept))
    )
    reads = EpochReads(workload)
    model(data[0])
    assert reads.changed(["0.", "1."]) == [("Workload.on_epoch.around.kept", "0.")]


def test_what_a_hook_keeps_is_its_layers() -> None:
    outputs = dict[str, torch.Tensor]()

    def keep(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        outputs["newest"] = output.detach()

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].register_forward_hook(keep)
    data = (torch.ones(2, 2), torch.ones(2, 2))
    workload = Workload(
        model, data, loss=nn.MSELoss(), optimizer=torch.optim.SGD, on_epoch=lambda values: print(outputs)
    )
    reads = EpochReads(workload)
    model(data[0])
    assert reads.changed(["0.", "1."]) == [("Workload.on_epoch.around.outputs", "0.")]


class Weighted(nn.Module):
    weights: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.table = 1.0, {"name": "mse"}
        self.register_buffer("weights", torch.ones(2))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target).square().mean() * self.scale


class Config:
    __slots__ = ("_rate", "name")

    def __init__(self) -> None:
        self._rate, self.name = 1.0, "a"

    @property
    def rate(self) -> float:
        return self._rate

    @rate.setter
    def rate(self, value: float) -> None:
        self._rate = value


CRITERION, CONFIG, SETTINGS, BEST = Weighted(), Config(), {"kl": 1.0}, [0.0]


def sets_an_option(values: Any) -> None:
    CONFIG.rate = 0.5


def logs(values: Any) -> None:
    global count
    BEST.append(values["loss"])
    count = len(BEST)
    print(CONFIG.name, CRITERION.scale, SETTINGS["kl"] if len(BEST) > 99 else "", CRITERION.table["name"])


def logs_beside_what_changes(values: Any) -> None:
    names = {"name": CONFIG.name}
    BEST.append(len(names))
    print(CONFIG.rate)


@pytest.mark.parametrize(
    ("on_epoch", "told"),
    [
        (lambda values: setattr(CRITERION, "scale", 2.0), "CRITERION"),
        (lambda values: CRITERION.weights.mul_(0.5), "weights"),
        (lambda values: SETTINGS.update(kl=2.0), "SETTINGS"),
        (sets_an_option, "_rate"),
        (logs_beside_what_changes, None),
        (lambda values: print(CONFIG.rate, CRITERION.weights), None),
        (None, None),
    ],
)
def test_what_steps_go_by_and_it_may_set_is_told(on_epoch: Callable[[Any], Any] | None, told: str | None) -> None:
    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = CRITERION(model(batch[0]), 0.0) * CONFIG.rate * SETTINGS["kl"]
        return loss

    data = (torch.ones(2, 2),)
    workload = Workload(nn.Linear(2, 2), data, step=step, optimizer=torch.optim.SGD, on_epoch=on_epoch)
    assert EpochReads(workload).sets == told
