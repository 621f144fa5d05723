"""A module of a class with a hash that changes with what it keeps, and with equality that is no answer, as a metric of
torchmetrics has both; and containers of a class of their own."""

from __future__ import annotations

from collections import OrderedDict, deque
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from weft.spec.job_spec import JobSpec
from weft.workers.devices.host import HostDevice
from weft.workers.inspection.inspection import inspect
from weft.workload.workload import Workload


class Metric(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.total, self.updates = torch.zeros(()), 0

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.total, self.updates = self.total + value.detach(), self.updates + 1
        return self.total / self.updates

    def __hash__(self) -> int:
        return hash((id(self), self.total, self.updates))

    def __eq__(self, other: object) -> bool:
        return True


class Measured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.middle, self.head = (nn.Linear(4, 4) for _ in range(3))
        self.mean, self.other = Metric(), Metric()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.middle(self.inlet(x).tanh()).tanh())
        return out


def step(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (model(x) - x).square().mean()
    model.mean(loss)
    model.other(loss)
    return loss


def test_a_model_with_metrics_in_it_is_cut_like_one_without() -> None:
    workload = Workload(
        Measured(),
        torch.randn(8, 4),
        step=step,
        validation=torch.randn(8, 4),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    job = {"entry": "job.py:workload", "batch_size": 4, "epochs": 1}
    spec = JobSpec.parse({"job": job, "strategy": {"stages": 2}, "directory": "/jobs"})
    told: dict[str, Any] = inspect(workload, spec, HostDevice())
    assert told["cut_problems"] == []
    assert [unit["name"] for unit in told["units"]] == ["inlet", "middle", "head"]


def refused(*_: Any) -> Any:
    raise NotImplementedError


OWN = {"__len__": refused, "__iter__": refused, "values": refused}
CONTAINERS = [type(f"Own{base.__name__}", (base,), OWN) for base in (list, tuple, set, deque, dict, OrderedDict)]


@pytest.mark.parametrize("strategy", [{"stages": 2}, {"replicas": 2}, {"recompute": True}])
@pytest.mark.parametrize("kind", CONTAINERS)
def test_a_container_of_a_class_that_refuses_to_be_gone_through_is_nobodys_business(
    kind: type, strategy: dict[str, Any]
) -> None:
    """As the irreps of e3nn refuse `len()`: the job ended with what they raise."""
    model, beside = Measured(), kind()
    model.inlet.own, model.own = kind(), [kind()]

    def own_step(model: Any, x: torch.Tensor) -> torch.Tensor:
        return (model(x) - x).square().mean() if beside is not None else x

    workload = Workload(model, torch.randn(8, 4), step=own_step, optimizer=partial(torch.optim.SGD, lr=0.1))
    job = {"entry": "job.py:workload", "batch_size": 4, "epochs": 1}
    told = inspect(workload, JobSpec.parse({"job": job, "strategy": strategy, "directory": "/jobs"}), HostDevice())
    assert [unit["name"] for unit in told["units"]] == ["inlet", "middle", "head"]
    assert not told["cut_problems"]
