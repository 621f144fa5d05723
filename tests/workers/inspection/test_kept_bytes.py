"""What units keep for a backward is found out in a run that is made anyway."""

from __future__ import annotations

import contextlib
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from weft.spec.job_spec import JobSpec
from weft.workers.compute.backward.saved import SavedBytes
from weft.workers.devices.host import HostDevice
from weft.workers.inspection.inspection import inspect
from weft.workload.workload import Workload

TESTS = Path(__file__).resolve().parents[2]
ANY = runpy.run_path(str(TESTS / "any_models.py"))
_SPLIT = runpy.run_path(str(Path(__file__).with_name("test_split_times.py")))
MODELS: dict[str, Callable[..., nn.Module]] = _SPLIT["MODELS"]
TIMED = ("_seconds", "_part", "kept_bytes")

BATCH, WIDTH = 6, 16
ONE = 4 * BATCH * WIDTH  # an activation, in float32


class Sine(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(torch.sin(x))


class Again(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sine = Sine()

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.sine, x, use_reentrant=False)


class Refusing(nn.Module):
    """Refuses to be looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        slope = torch.func.vmap(torch.func.grad(lambda row: torch.sin(row).sum()))
        return self.linear(slope(x))


def facts_of(model: nn.Module, mode: str = "train", **strategy: Any) -> dict[str, Any]:
    job = {"entry": "job.py:workload", "batch_size": BATCH, "steps": 1, "mode": mode}
    spec = JobSpec.parse({"job": job, "strategy": strategy, "directory": "/jobs"})

    workload = Workload(
        model,
        train=(torch.randn(10, WIDTH), torch.randn(10, WIDTH)),
        loss=nn.MSELoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    return dict(inspect(workload, spec, HostDevice()))


@pytest.mark.parametrize("kind", MODELS)
def test_a_units_forward_keeps_its_output_and_what_is_saved(kind: str) -> None:
    layers = [nn.Linear(WIDTH, WIDTH), Sine(), Again(), nn.Linear(WIDTH, WIDTH)]
    kept = [unit["kept_bytes"] for unit in facts_of(MODELS[kind](*layers))["units"]]
    before, behind = {"sequential": ([ONE, 2 * ONE, ONE], ONE), "by calls": ([3 * ONE], 2 * ONE)}[kind]
    assert kept[:-1] == before, "modules without parameters are of the unit before them"
    assert behind <= kept[-1] <= behind + ONE, "a mean of squares may keep as much as it is made of"


@pytest.mark.parametrize("kind", MODELS)
def test_a_step_that_refuses_a_look_is_inspected_all_the_same(kind: str) -> None:
    units = facts_of(MODELS[kind](nn.Linear(WIDTH, WIDTH), Refusing(), nn.Linear(WIDTH, WIDTH)))["units"]
    assert all(unit["forward_seconds"] > 0 for unit in units)
    assert units[1]["kept_bytes"] == 0


@pytest.mark.days(3)
@pytest.mark.slow(seconds=2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ANY["NAMES"])
def test_a_look_changes_nothing_of_what_is_found_out_of_any_model(
    monkeypatch: pytest.MonkeyPatch, name: str, precision: str
) -> None:
    """Skipped calls return what has no numbers, and a copy of that is refused as an operation of the step's."""
    job = {"entry": "any_models.py:workload", "args": {"name": name}, "batch_size": BATCH, "steps": 1}
    strategy = {"stages": 2, "microbatches": 2, "precision": precision}
    spec = JobSpec.parse({"job": job, "strategy": strategy, "directory": str(TESTS)})

    def found() -> dict[str, Any]:
        torch.manual_seed(0)
        return dict(inspect(ANY["workload"](name), spec, HostDevice()))

    looked_at = found()
    counted = sum(unit["kept_bytes"] for unit in looked_at["units"])
    assert (counted > 0) == (name != "residual"), "which checkpoints what has no numbers"
    monkeypatch.setattr(SavedBytes, "noting", contextlib.nullcontext)
    unseen = found()
    assert looked_at["cut_problems"] == unseen["cut_problems"]
    for unit, other in zip(looked_at["units"], unseen["units"], strict=True):
        assert {key for key in unit if unit[key] != other[key] and not key.endswith(TIMED)} == set()


@pytest.mark.parametrize("kind", MODELS)
def test_where_nothing_is_trained_nothing_is_kept(kind: str) -> None:
    units = facts_of(MODELS[kind](nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), mode="forward")["units"]
    assert [unit["kept_bytes"] for unit in units] == [0, 0]
