"""What a step tells beside its loss is told of each step of training, as the plain loop has it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from weft.reference.loop import train

SOURCE = """
import torch
from torch import nn

import weft


def step(model, batch):
    difference = model(batch["x"]) - batch["y"]
    loss = difference.square().mean()
    return {"loss": loss, "error": difference.abs().mean(), "bias": difference.mean()}


def workload():
    x = torch.randn(44, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).double()
    return weft.Workload(model, {"x": x, "y": x.sin()}, step=step, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
"""
STRATEGIES: dict[str, dict[str, Any]] = {
    "stages": {"stages": 2, "microbatches": 3},
    "replicas": {"preset": "ddp", "microbatches": 2},
    "offloaded": {"preset": "zero-offload"},
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.slow(seconds=2)
def test_each_step_tells_what_the_plain_loop_measures(machine: Any, strategy: str) -> None:
    spec = machine.spec(SOURCE, strategy=STRATEGIES[strategy], epochs=2, batch_size=12)
    ended = machine.client.wait(machine.submit(spec), 60)
    assert ended["state"] == "completed", machine.log_of(ended["job"])
    lines = map(json.loads, Path(ended["run_dir"], "metrics.jsonl").read_text().splitlines())
    told = [{"loss": line["loss"], **line["measured"]} for line in lines]
    assert told == [pytest.approx(means, rel=1e-12, abs=1e-14) for means in train(spec).measured]
