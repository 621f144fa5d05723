"""An optimizer that counts in its groups goes on with what it has counted, wherever its parameters are updated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from weft.reference.loop import train

# It counts its steps, or those of its parameters that have a gradient: of which each stage sees its own. The model
# trains its first layer in even epochs, and its third in odd ones; its second one never.
SOURCE = """
import os, signal, torch, weft

class Counting(torch.optim.Optimizer):
    def __init__(self, parameters, joint):
        super().__init__([{"params": parameters[:-1], "lr": 0.05}, {"params": parameters[-1:], "lr": 0.03}], {})
        self.joint = joint
        for group in self.param_groups:
            group["seen"], group["past"] = 0, [0.0]

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["seen"] += sum(each.grad is not None for each in group["params"]) if self.joint else 1
            group["past"].append(1 / group["seen"] if group["seen"] else 0)
            for each in group["params"]:
                if each.grad is not None:
                    each.add_(each.grad, alpha=-group["lr"] * (1 + sum(group["past"][-3:])))

class Model(torch.nn.Module):
    def __init__(self, frozen):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8, bias=False) for _ in range(5))
        self.frozen, self.epochs, self.calls = frozen, 0, 0

    def train(self, mode=True):
        super().train(mode)
        self.epochs += mode
        if mode:
            self.layers[0].requires_grad_(self.epochs % 2 == 0)
            self.layers[1].weight.requires_grad = not self.frozen
            self.layers[2].requires_grad_(self.epochs % 2 == 1)
        return self

    def forward(self, x):
        self.calls += self.training
        for layer in self.layers:
            x = layer(x).tanh()
        return x

def workload(once="", at=0, joint=False, frozen=True):
    def step(model, batch):
        if once and model.training and model.calls == at - 1 and not os.path.exists(once):
            open(once, "x").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.nn.functional.mse_loss(model(batch[0]), batch[1])

    data = torch.randn(32, 8), torch.randn(32, 8)
    return weft.Workload(Model(frozen), data, step=step, optimizer=lambda given: Counting(list(given), joint))
"""


def of(daemon: Any, strategy: dict[str, Any], steps: int = 16, **args: Any) -> Any:
    strategy = {"recovery": "iteration", **strategy}
    return daemon.spec(SOURCE, strategy=strategy, batch_size=8, steps=steps, args=args)


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    return [name for name in one if not torch.equal(one[name], other[name])]


@pytest.mark.slow(seconds=2)
@pytest.mark.parametrize("at", [7, 11])
@pytest.mark.parametrize("bucket_mib", [0.001, 25])
def test_a_group_that_is_updated_in_buckets_goes_on_though_some_of_it_is_frozen_then(
    daemon: Any, tmp_path: Path, bucket_mib: float, at: int
) -> None:
    """What is frozen in an epoch had the options of the user's object, which never steps, and the bucket took those."""
    how = {"skip_nonfinite": True, "bucket_mib": bucket_mib}
    result = daemon.run(of(daemon, how, once=str(tmp_path / "once"), at=at))
    assert result["state"] == "completed", result["error"]
    assert "goes on after step" in daemon.log_of(result["job"])
    assert differing(train(of(daemon, how)).state, load_file(Path(result["model"]))) == []


@pytest.mark.slow(seconds=2)
def test_each_stage_goes_on_with_what_it_has_counted(daemon: Any, tmp_path: Path) -> None:
    """Not with what the first stage has of the same group."""
    how, frozen = {"stages": 2, "split": [2]}, False
    whole = daemon.run(of(daemon, how, joint=True, frozen=frozen))
    killed = daemon.run(of(daemon, how, joint=True, frozen=frozen, once=str(tmp_path / "once"), at=9))
    assert (whole["state"], killed["state"]) == ("completed", "completed"), killed["error"]
    assert "goes on after step" in daemon.log_of(killed["job"])
    assert differing(load_file(Path(whole["model"])), load_file(Path(killed["model"]))) == []


@pytest.mark.slow(seconds=2)
def test_what_buckets_have_counted_goes_on_in_a_plan_without(daemon: Any) -> None:
    """Of a group whose first parameters are in no bucket, too."""
    buckets = {"skip_nonfinite": True, "bucket_mib": 0.001}
    half = of(daemon, buckets, steps=6)
    first = daemon.run(type(half).parse(half.to_wire() | {"checkpoint": {"every": "2 steps"}}))
    assert first["state"] == "completed", first["error"]
    whole = of(daemon, {}).to_wire()
    whole["job"]["resume_from"] = first["run_dir"]
    on = daemon.run(type(half).parse(whole))
    assert on["state"] == "completed", on["error"]
    assert differing(train(of(daemon, {})).state, load_file(Path(on["model"]))) == []
