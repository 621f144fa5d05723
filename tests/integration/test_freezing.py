"""Layers that are trained for a part of the training only, as fine-tuning has it: as in the plain loop, under each
strategy whose gradients go through buckets, or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from weft.reference.loop import train

SOURCE = """
import torch
from torch import nn

import weft


class Net(nn.Module):
    def __init__(self, how, epoch):
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.how, self.turns_at, self.epoch = how, epoch, -1
        self.body.requires_grad_(how == "is frozen")

    def train(self, mode=True):
        super().train(mode)
        if mode:
            self.epoch += 1
            self.body.requires_grad_((self.epoch < self.turns_at) == (self.how == "is frozen"))
        return self

    def forward(self, x):
        return self.head(self.body(x).tanh())


class Stepped(Net):
    def __init__(self, how, epoch):
        super().__init__(how, epoch)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def train(self, mode=True):
        return nn.Module.train(self, mode)


def step(model, batch):
    if isinstance(model, Stepped) and model.training:
        set_trained(model.body, bool(model.count < 2 * model.turns_at) == (model.how == "is frozen"))
        model.count += 1
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def set_trained(module, trained):
    for parameter in module.parameters():
        parameter.requires_grad = trained


def workload(how, epoch, where):
    x = torch.randn(24, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    kind = Net if where == "train()" else Stepped
    model = kind(how, epoch).double()
    data = {"x": x, "y": torch.arange(24) % 3}
    return weft.Workload(model, data, step=step, validation=data, optimizer=lambda p: torch.optim.Adam(p, lr=0.01))
"""
STRATEGIES: dict[str, dict[str, Any]] = {
    "one worker": {},
    "replicas": {"preset": "ddp"},
    "clipped": {"clip_norm": 1e9},
    "a device": {"replicas": [{"device": "gpu"}]},
    "offloaded": {"preset": "zero-offload"},
}
PIPELINES: dict[str, dict[str, Any]] = {
    "in order": {},
    "clipped": {"clip_norm": 1e9},
    "recomputed": {"recompute": True},
    "split": {"schedule": "zero-bubble"},
    "two replicas": {"replicas": [{"stages": 2}, {"stages": 2}]},
}
ALONE = [how for how in PIPELINES if how != "two replicas"]  # of two, each counts its own calls


@pytest.mark.pairs(
    2, how=("is frozen", "is thawed"), epoch=(1, 6), where=("train()", "the step"), strategy=tuple(STRATEGIES)
)
@pytest.mark.slow(seconds=2)
def test_a_layer_is_trained_when_it_is_in_the_plain_loop(
    machine: Any, how: str, epoch: int, where: str, strategy: str
) -> None:
    _compare(machine, STRATEGIES[strategy], how=how, epoch=epoch, where=where)


@pytest.mark.pairs(2, how=("is frozen", "is thawed"), epoch=(1, 6), strategy=tuple(PIPELINES))
@pytest.mark.slow(seconds=2)
def test_so_is_one_in_the_stage_before(machine: Any, how: str, epoch: int, strategy: str) -> None:
    pipeline = {"replicas": [{"stages": 2}], "microbatches": 2, **PIPELINES[strategy]}
    _compare(machine, pipeline, how=how, epoch=epoch, where="train()")


# One that is built to be trained, and that the first epoch, or the first steps, freeze.
LATER = """
import torch, weft
from torch import nn

class Net(nn.Module):
    def __init__(self, where):
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.where, self.epochs, self.calls = where, 0, 0

    def train(self, mode=True):
        self.epochs += mode
        if mode and self.where == "train()":
            self.body.requires_grad_(self.epochs > 1)
        return super().train(mode)

    def forward(self, x):
        self.calls += self.training
        if self.training and self.where == "forward":
            self.body.requires_grad_(self.calls > 3)
        return self.head(self.body(x).tanh())

def workload(where):
    x = torch.randn(24, 6), torch.arange(24) % 3
    optimizer = lambda given: torch.optim.SGD(given, lr=0.1)
    return weft.Workload(Net(where), x, loss=nn.CrossEntropyLoss(), optimizer=optimizer)
"""


@pytest.mark.parametrize("where", ["train()", "forward"])
@pytest.mark.slow(seconds=1)
def test_so_is_one_that_is_frozen_only_once_training_begins(machine: Any, where: str) -> None:
    """The stage behind it handed no gradient back, since no layer was built frozen, and the job failed later on."""
    pipeline = {"stages": 2, "split": [1]}
    spec = machine.spec(LATER, strategy=pipeline, args={"where": where}, epochs=3, batch_size=8)
    ended = machine.client.wait(machine.submit(spec), 60)
    assert ended["state"] == "completed", machine.log_of(ended["job"])
    saved, plain = load_file(ended["model"]), train(spec).state
    assert [name for name, value in plain.items() if not torch.equal(saved[name], value)] == []


# A layer freezes and thaws itself within an iteration, while earlier microbatches' backwards are still to come.
WITHIN = """
import torch
from torch import nn

import weft


class Freezing(nn.Linear):
    def __init__(self, width, period):
        super().__init__(width, width)
        self.calls, self.period = 0, period

    def forward(self, x):
        if self.training:
            self.calls += 1
            self.requires_grad_(self.calls % self.period < (self.period + 1) // 2)
        return super().forward(x).tanh()


def workload(own_forward, periods):
    layers = [layer for period in periods for layer in (nn.Linear(4, 4), Freezing(4, period))]

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(layers)

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    model = Net().double() if own_forward else nn.Sequential(*layers).double()
    x, y = torch.randn(2, 48, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return weft.Workload(model, (x, y), loss=nn.functional.mse_loss, optimizer=lambda p: torch.optim.Adam(p, lr=0.01))
"""


@pytest.mark.pairs(2, own_forward=(False, True), schedule=("gpipe", "1f1b", "zero-bubble"), how=ALONE)
@pytest.mark.slow(seconds=2)
def test_a_layer_that_freezes_between_two_microbatches_has_the_gradients_of_those_before(
    machine: Any, own_forward: bool, schedule: str, how: str
) -> None:
    pipeline = {"replicas": [{"stages": 2}], "microbatches": 5, "schedule": schedule, **PIPELINES[how]}
    args = {"own_forward": own_forward, "periods": [3, 4]}
    spec = machine.spec(WITHIN, strategy=pipeline, args=args, epochs=3, batch_size=16)
    ended = machine.client.wait(machine.submit(spec), 60)
    assert ended["state"] == "completed", machine.log_of(ended["job"])
    saved, plain = load_file(ended["model"]), train(spec).state
    assert [name for name, value in plain.items() if not torch.equal(saved[name], value)] == []


def _compare(machine: Any, strategy: dict[str, Any], **arguments: Any) -> None:
    spec = machine.spec(SOURCE, strategy=strategy, args=arguments, epochs=arguments["epoch"] + 2, batch_size=10)
    ended = machine.client.wait(machine.submit(spec), 60)
    assert ended["state"] == "completed", machine.log_of(ended["job"])
    saved, plain = load_file(ended["model"]), train(spec).state
    for name, value in plain.items():
        assert torch.allclose(saved[name], value, rtol=1e-12, atol=1e-12), name
