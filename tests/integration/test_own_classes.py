"""Batches and outputs of classes that the job's file defines: a step finds them to be of its own, in each stage of a
worker that has several and has run the file for each of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from weft.reference.loop import train

SOURCE = """
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

import weft


class Named(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@dataclass
class Record:
    x: torch.Tensor
    y: torch.Tensor


class Plain:
    def __init__(self, x, y):
        self.x, self.y = x, y


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        return Record(self.layer(x).tanh(), x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(3)), nn.Linear(6, 3)

    def forward(self, x):
        for block in self.blocks:
            made = block(x)
            assert isinstance(made, Record), type(made)
            x = made.x + made.y
        return self.head(x)


def workload(kind):
    made = {"named": Named, "record": Record, "plain": Plain}[kind]

    def collate(items):
        return made(*map(torch.stack, zip(*items)))

    def step(model, batch):
        assert isinstance(batch, made), type(batch)
        return nn.functional.cross_entropy(model(batch.x), batch.y)

    x = torch.randn(24, 6, generator=torch.Generator().manual_seed(1))
    items = list(zip(x.double(), torch.arange(24) % 3))
    model = Net().double()
    return weft.Workload(
        model, items, step=step, collate=collate, validation=items, optimizer=lambda p: torch.optim.SGD(p, lr=0.1)
    )
"""
STRATEGIES: dict[str, dict[str, Any]] = {
    "interleaved": {"schedule": "interleaved", "stages": 4},
    "one device": {"replicas": [{"device": "gpu", "stages": 3, "gpus": 1}]},
    "streamed": {"preset": "stronghold"},
    "two pipelines": {"replicas": [{"device": "gpu", "stages": 2, "gpus": 1}] * 2},
}


@pytest.mark.pairs(1, kind=("named", "record", "plain"), strategy=tuple(STRATEGIES))
@pytest.mark.slow(seconds=2)
def test_a_batch_is_of_the_class_that_the_step_knows(machine: Any, kind: str, strategy: str) -> None:
    how = {"microbatches": 2, **STRATEGIES[strategy]}
    spec = machine.spec(SOURCE, strategy=how, args={"kind": kind}, epochs=2, batch_size=8)
    ended = machine.client.wait(machine.submit(spec), 60)
    assert ended["state"] == "completed", machine.log_of(ended["job"])
    saved, plain = load_file(ended["model"]), train(spec).state
    for name, value in plain.items():
        assert torch.allclose(saved[name], value, rtol=1e-12, atol=1e-12), name
