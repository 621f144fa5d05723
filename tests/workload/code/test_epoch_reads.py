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
