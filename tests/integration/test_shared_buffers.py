"""Buffers of a module around several stages, which each stage has: a schedule of noise, a scale of the data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from weft.reference.loop import train

SOURCE = """
import torch
from torch import nn

import weft


class Scaled(nn.Module):
    def __init__(self, changes_from):
        super().__init__()
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 0.5, 3.0]))
        self.calls = 0
        self.body, self.middle, self.head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.changes_from = changes_from

    def forward(self, x):
        self.calls += 1
        if self.training and self.calls > self.changes_from:
            self.scale.mul_(0.9)
        y = self.middle(self.body(x / self.scale).tanh()).tanh()
        return self.head(y) * self.scale


def workload(changes_from=1000, asks=False):
    model = Scaled(changes_from).double()
    data = torch.randn(16, 4, dtype=torch.float64), torch.randn(16, 4, dtype=torch.float64)

    def on_epoch(values):
        model.scale.mul_(0.9)

    return weft.Workload(
        model, data, loss=nn.MSELoss(), validation=data, on_epoch=on_epoch if asks else None,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    )
"""
STRATEGIES: dict[str, dict[str, Any]] = {
    "three stages": {"stages": 3, "microbatches": 2},
    "recomputed": {"stages": 2, "microbatches": 2, "recompute": True},
    "interleaved": {"stages": 2, "microbatches": 2, "schedule": "interleaved"},
    "on devices": {"replicas": [{"device": "gpu", "stages": 2}]},
}


def check_state(spec: Any, ended: dict[str, Any]) -> None:
    saved, plain = load_file(Path(ended["model"])), train(spec).state
    assert saved.keys() == plain.keys()
    for name, value in plain.items():
        assert torch.allclose(saved[name], value, rtol=1e-12, atol=1e-12), name


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
@pytest.mark.slow(seconds=2)
def test_a_model_is_cut_between_two_that_read_one(machine: Any, strategy: dict[str, Any]) -> None:
    spec = machine.spec(SOURCE, strategy=strategy, epochs=2, batch_size=8)
    ended = machine.client.wait(machine.submit(spec), 60)
    assert ended["state"] == "completed", machine.log_of(ended["job"])
    check_state(spec, ended)


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
@pytest.mark.slow(seconds=2)
def test_what_on_epoch_makes_of_it_all_stages_have(machine: Any, strategy: dict[str, Any]) -> None:
    spec = machine.spec(SOURCE, strategy=strategy, epochs=4, batch_size=8, args={"asks": True})
    ended = machine.client.wait(machine.submit(spec), 60)
    assert ended["state"] == "completed", machine.log_of(ended["job"])
    check_state(spec, ended)


@pytest.mark.slow(seconds=2)
def test_who_changes_it_later_is_told(machine: Any) -> None:
    args, strategy = {"changes_from": 5}, {"stages": 2, "split": ["middle"]}
    ended = machine.client.wait(
        machine.submit(machine.spec(SOURCE, strategy=strategy, epochs=4, batch_size=8, args=args)), 60
    )
    assert ended["state"] == "failed"
    assert "the buffer 'scale', which several stages have, is changed" in machine.log_of(ended["job"])
