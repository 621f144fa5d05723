"""Optimizers of the user's that do what torch's own do not, under several strategies: as the plain loop, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from weft.reference.loop import train

SOURCE = (
    Path(__file__).parents[1].joinpath("own_optimizer.py").read_text()
    + """
import weft


def workload(how):
    xs = torch.randn(48, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    layers = [each for _ in range(4) for each in (nn.Linear(8, 8, dtype=torch.float64), nn.Dropout(0.1), nn.Tanh())]
    return weft.Workload(
        nn.Sequential(*layers), (xs, xs.sin()), loss=nn.MSELoss(), validation=(xs, xs.sin()),
        optimizer=lambda parameters: Own(parameters, how),
    )
"""
)
STRATEGIES: dict[str, dict[str, Any]] = {
    "one worker": {},
    "stages": {"stages": 2, "microbatches": 3},
    "replicas": {"preset": "ddp", "bucket_mib": 0.001},
    "clipped replicas": {"preset": "ddp", "bucket_mib": 0.001, "clip_norm": 0.3},
    "offloaded": {"preset": "zero-offload", "bucket_mib": 0.001},
    "a device": {"replicas": [{"device": "gpu"}]},
}
HOWS = (
    "assigns .data",
    "keeps gradients",
    "changes gradients",
    "assigns .data of gradients",
    "draws",
    "keeps tensors by place",
)


@pytest.mark.pairs(2, how=HOWS, strategy=tuple(STRATEGIES))
@pytest.mark.slow(seconds=3)
def test_it_trains_what_the_plain_loop_does_or_is_refused(machine: Any, how: str, strategy: str) -> None:
    spec = machine.spec(SOURCE, strategy=STRATEGIES[strategy], args={"how": how}, epochs=3)
    ended = machine.client.wait(machine.submit(spec), 60)
    log = machine.log_of(ended["job"])
    if how == "keeps tensors by place" and strategy == "offloaded":  # who updates has no values when it is built
        assert (ended["state"], ended["reason"]) == ("failed", "invalid-workload"), log
        assert "Own keeps tensors in 'slow'" in ended["error"]
        return
    assert ended["state"] == "completed", log
    assert ("its step draws random numbers" in log) is (how == "draws" and strategy != "one worker")
    saved, plain = load_file(ended["model"]), train(spec).state
    is_the_same = how != "draws" or strategy == "one worker"
    for name, value in plain.items():
        near = torch.allclose(saved[name], value, rtol=1e-12, atol=1e-12)
        assert near is is_the_same, (name, float((saved[name] - value).abs().max()))
