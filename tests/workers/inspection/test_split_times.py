"""What both parts of a backward take is found out where a schedule of the job may split it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from weft.plan.inspection import UnitFacts
from weft.spec.job_spec import JobSpec
from weft.workers.devices.host import HostDevice
from weft.workers.inspection.inspection import inspect
from weft.workload.workload import Workload

SPLIT = ("zero-bubble", "zero-bubble-v", "measured", "F0 I0 W0\nF0 B0\n")
WHOLE = ("gpipe", "1f1b", "dynamic")


class Again(nn.Module):
    """Runs its forward again in a backward, by a way that autograd cannot split."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.linear, x, use_reentrant=True)


class Called(nn.Module):
    """Cut by its own forward."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


MODELS: dict[str, Callable[..., nn.Module]] = {"sequential": nn.Sequential, "by calls": Called}


def units_of(model: nn.Module, **strategy: Any) -> list[dict[str, Any]]:
    job = {"entry": "job.py:workload", "batch_size": 4, "steps": 1}
    spec = JobSpec.parse({"job": job, "strategy": strategy, "directory": "/jobs"})
    workload = Workload(
        model,
        train=(torch.randn(10, 3), torch.randn(10, 2)),
        loss=nn.MSELoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    units: list[dict[str, Any]] = inspect(workload, spec, HostDevice())["units"]
    return units


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("schedule", [*SPLIT, *WHOLE])
def test_of_each_unit_where_the_schedule_may_split_it(model: str, schedule: str) -> None:
    layers = nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)
    stages = 4 if schedule == "zero-bubble-v" else 2
    units = units_of(MODELS[model](*layers, nn.Tanh()), stages=stages, microbatches=1, schedule=schedule)
    parts = [(unit.get("input_part"), unit.get("weight_part")) for unit in units]
    if schedule in WHOLE:
        assert parts == [(None, None)] * len(units)
        return
    for of_input, of_weight in parts:
        assert of_input is not None
        assert of_weight is not None
        assert 0 < of_input <= 1 <= of_input + of_weight + 1e-9


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")  # of a run for shapes alone
@pytest.mark.parametrize("model", MODELS)
def test_not_of_a_model_whose_backward_cannot_be_split(model: str) -> None:
    layers = nn.Linear(3, 5), Again(), nn.Linear(5, 2)
    units = units_of(MODELS[model](*layers), preset="auto")
    assert units[1].get("input_part") is None
    assert min(unit["backward_seconds"] for unit in units) > 0


def test_what_was_not_found_out_is_half_of_a_backward_with_parameters() -> None:
    facts: dict[str, Any] = {"name": "0", "buffer_bytes": 0, "forward_seconds": 1.0, "backward_seconds": 2.0}
    times = {"small_forward_seconds": 0.25, "small_backward_seconds": 0.5}
    found = UnitFacts(**facts, **times, parameter_bytes=4, input_part=0.75, weight_part=0.5)
    assert (found.input_seconds, found.weight_seconds) == (1.5, 1.0)
    assert (found.small_input_seconds, found.small_weight_seconds) == (0.375, 0.25)
    unknown = UnitFacts(**facts, **times, parameter_bytes=4)
    assert (unknown.input_seconds, unknown.weight_seconds) == (1.0, 1.0)
    without = UnitFacts(**facts, **times, parameter_bytes=0)
    assert (without.input_seconds, without.weight_seconds) == (2.0, 0.0)
