"""A count of steps in a buffer that no module has, by which a weight in the loss goes: a step with one is cut anywhere,
wherever the lines stand that read it and write to it, also where validation only reads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from weft.spec.job_spec import JobSpec
from weft.workers.devices.host import HostDevice
from weft.workers.inspection.inspection import inspect
from weft.workload.workload import Workload

Step = Callable[[nn.Module, Any], Any]


class Counted(nn.Module):
    steps: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inlet, self.middle, self.head = (nn.Linear(4, 4) for _ in range(3))
        self.mean = nn.Parameter(torch.zeros(4, 4), requires_grad=False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def losses(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.middle(self.inlet(x).tanh()).tanh()
        return (self.head(hidden) - x).square().mean(), hidden.square().mean()

    def count(self) -> None:
        if self.training:
            self.steps += 1


def counts_first(model: Any, x: torch.Tensor) -> Any:
    weight = (model.steps / 10).clamp(max=1.0)
    model.count()
    loss, penalty = model.losses(x)
    return loss + weight * penalty


def counts_last(model: Any, x: torch.Tensor) -> Any:
    weight = (model.steps / 10).clamp(max=1.0)
    loss, penalty = model.losses(x)
    model.count()
    return loss + weight * penalty


def reads_behind(model: Any, x: torch.Tensor) -> Any:
    model.count()
    loss, penalty = model.losses(x)
    return loss + torch.clamp(model.steps / 10, max=1.0) * penalty


def needs_it_twice(model: Any, x: torch.Tensor) -> Any:
    weight = model.steps / 10
    model.count()
    loss, penalty = model.losses(x * (1 - weight))
    return loss + weight * penalty


def moves_a_mean(model: Any, x: torch.Tensor) -> Any:
    """By a rate that is annealed, where the weights are."""
    if model.training:
        rate = 1 / (model.steps + 1)
        model.mean.data.lerp_(model.inlet.weight.data, rate)
    model.count()
    loss, penalty = model.losses(x)
    return loss + penalty


def needs_it_between(model: Any, x: torch.Tensor) -> Any:
    """The last stage writes to what the first reads."""
    loss, penalty = model.losses(x * (1 - model.steps / 10))
    model.count()
    return loss + penalty


def told_of(step: Step) -> dict[str, Any]:
    workload = Workload(
        Counted(),
        torch.randn(8, 4),
        step=step,
        validation=torch.randn(8, 4),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    job = {"entry": "job.py:workload", "batch_size": 4, "epochs": 1}
    spec = JobSpec.parse({"job": job, "strategy": {"stages": 2}, "directory": "/jobs"})
    told: dict[str, Any] = inspect(workload, spec, HostDevice())
    return told


@pytest.mark.parametrize(
    ("step", "tied"),
    [
        (counts_first, False),
        (counts_last, False),
        (reads_behind, False),
        (needs_it_twice, False),
        (moves_a_mean, False),
        (needs_it_between, True),
    ],
)
def test_a_count_of_steps_stands_in_the_way_of_no_cut_but_where_it_goes_back(step: Step, tied: bool) -> None:
    told = told_of(step)
    assert told["cut_problems"] == []
    assert [unit["name"] for unit in told["units"]] == ["inlet", "middle", "head"]
    assert "steps" in told["written"]
    assert [parameter["units"] for parameter in told["parameters"]] == [[0], *([unit] for unit in (0, 0, 1, 1, 2, 2))]
    assert any(unit["tied_to"] for unit in told["units"]) is tied
