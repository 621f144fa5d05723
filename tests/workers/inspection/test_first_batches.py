"""Layers that begin with the first batch that they train on, and evaluate none before: no job validates untrained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from weft.plan.inspection import Inspection
from weft.spec.job_spec import JobSpec
from weft.workers.devices.host import HostDevice
from weft.workers.inspection.inspection import inspect
from weft.workload.workload import Workload

WIDTH, SAMPLES = 4, 8


class ActNorm(nn.Module):
    """As flows have it: the first batch gives what it shifts and scales by."""

    ready: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.scale = nn.Parameter(torch.zeros(WIDTH)), nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("ready", torch.tensor(False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.ready:
            if not self.training:
                raise ValueError("evaluated before it has been trained")
            with torch.no_grad():
                self.shift.copy_(-x.mean(0))
                self.ready.fill_(True)
        return (x + self.shift) * self.scale


class Buffered(ActNorm):
    """What it begins with is in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.ready and self.training:
            self.mean.copy_(x.detach().mean(0))
        return super().forward(x - self.mean)


class Failing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            raise ValueError("never evaluated")
        return x


def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = model(batch["x"]).square().mean()
    return loss


def found(layer: type[nn.Module], num_held_out: int = SAMPLES, **strategy: Any) -> Inspection:
    torch.manual_seed(3)
    model = nn.Sequential(layer(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), layer())
    train, held_out = torch.randn(SAMPLES, WIDTH) + 1, torch.randn(num_held_out, WIDTH)
    data: dict[str, Any] = {"train": {"x": train}, "validation": {"x": held_out}, "step": step}
    if strategy.pop("pairs", False):
        data = {"train": (train, train), "validation": (held_out, held_out), "loss": nn.MSELoss()}
    workload = Workload(model, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), **data)
    job = {"entry": "job.py:workload", "batch_size": SAMPLES // 2, "epochs": 1}
    spec = JobSpec.parse({"job": job, "strategy": strategy, "directory": "/jobs"})
    return Inspection.from_wire(inspect(workload, spec, HostDevice()))


@pytest.mark.parametrize("layer", [ActNorm, Buffered])
@pytest.mark.parametrize("strategy", [{}, {"stages": 2, "microbatches": 2}, {"preset": "auto"}], ids=str)
def test_validation_is_tried_with_what_a_step_of_training_has_left(layer: Any, strategy: dict[str, Any]) -> None:
    facts = found(layer, **strategy)
    assert [unit.kind for unit in facts.units] == [layer.__name__, "Linear", layer.__name__]
    assert dict(facts.cut_problems) == {}, "every cut gives what the whole step gives, in validation, too"


@pytest.mark.parametrize("pairs", [False, True], ids=["with a step", "with pairs"])
def test_so_is_a_size_that_only_validation_has(pairs: bool) -> None:
    facts = found(ActNorm, SAMPLES // 2 + 1, pairs=pairs)
    assert 1 in facts.values[0].shapes
    assert dict(facts.cut_problems) == {}


def test_what_validation_raises_after_training_too_passes_unchanged() -> None:
    with pytest.raises(ValueError, match="never evaluated") as raised:
        found(Failing)
    assert raised.value.__context__ is None, "it is told once"
