"""What a script changes beside its model: the memory of a loss goes on where training goes on, and what is put in the
place of torch's own is there once, and for no other job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from weft.reference.loop import train
from weft.workload.code import torchs_own

MEMORY = """
import torch
from torch import nn

import weft


class Balanced(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how, self.scale = how, 1.0
        self.register_buffer("mean", torch.ones(()))

    def forward(self, output, target):
        loss = nn.functional.mse_loss(output, target)
        self.mean.mul_(0.9).add_(0.1 * loss.detach())
        self.scale = 0.9 * self.scale + 0.1 * float(loss.detach())
        return loss / (self.mean if self.how == "a buffer" else self.scale)


class Trainer:
    def __init__(self, criterion):
        self.criterion = criterion

    def step(self, model, batch):
        return self.criterion(model(batch["x"]), batch["y"])


def workload(how, where):
    global CRITERION
    CRITERION = criterion = Balanced(how)
    x = torch.randn(48, 8, generator=torch.Generator().manual_seed(1)) * 3
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    steps = {
        "a variable": lambda model, batch: criterion(model(batch["x"]), batch["y"]),
        "a global": lambda model, batch: CRITERION(model(batch["x"]), batch["y"]),
        "an attribute": Trainer(criterion).step,
    }
    if where == "the loss":
        return weft.Workload(model, (x, x.sin()), loss=criterion, optimizer=SGD)
    return weft.Workload(model, {"x": x, "y": x.sin()}, step=steps[where], optimizer=SGD)


def SGD(parameters):
    return torch.optim.SGD(parameters, lr=0.05)
"""

PATCHES = """
import torch
from torch import nn
from torch.nn.modules import module
from torch.optim import optimizer

import weft


def workload(how="nothing"):
    forward = nn.Linear.forward
    if how == "a hook of all modules":
        module.register_module_forward_hook(lambda each, args, output: output * 1.5)
    if how == "a hook of all optimizers":
        optimizer.register_optimizer_step_pre_hook(lambda each, args, kwargs: halve(each))
    if how == "a method of torch's":
        nn.Linear.forward = lambda self, x: forward(self, x) * 1.5
    x = torch.randn(48, 8, generator=torch.Generator().manual_seed(1))
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    return weft.Workload(model, (x, x.sin()), loss=nn.MSELoss(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))


def halve(optimizer):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad.mul_(0.5)
"""


@pytest.mark.pairs(
    2,
    how=("a buffer", "an attribute"),
    where=("the loss", "the loss of two stages", "a variable", "a global", "an attribute"),
)
@pytest.mark.slow(seconds=3)
def test_the_memory_of_a_loss_goes_on(daemon: Any, how: str, where: str) -> None:
    strategy, where = {"stages": 2 if "stages" in where else 1}, where.removesuffix(" of two stages")
    arguments = {"args": {"how": how, "where": where}, "strategy": strategy, "steps": 12}
    spec = daemon.spec(MEMORY, **arguments)
    whole = daemon.run(type(spec).parse(spec.to_wire() | {"checkpoint": {"every": "6 steps", "keep": 9}}))
    assert whole["state"] == "completed", whole["error"]
    middle = Path(whole["run_dir"]) / "checkpoints" / "step-00000006"
    resumed = daemon.run(daemon.spec(MEMORY, **arguments, resume_from=str(middle)))
    assert resumed["state"] == "completed", resumed["error"]
    one, other = load_file(whole["model"]), load_file(resumed["model"])
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.parametrize("how", ["a hook of all modules", "a hook of all optimizers", "a method of torch's"])
@pytest.mark.slow(seconds=3)
def test_what_is_put_in_the_place_of_torchs_own_is_there_once_and_for_no_other_job(daemon: Any, how: str) -> None:
    patched = daemon.run(daemon.spec(PATCHES, args={"how": how}, epochs=2))
    plain = daemon.run(daemon.spec(PATCHES, epochs=2))
    for result, arguments in ((plain, {}), (patched, {"how": how})):
        assert result["state"] == "completed", result["error"]
        torchs_own.note()
        try:
            expected = train(daemon.spec(PATCHES, args=arguments, epochs=2)).state
        finally:
            torchs_own.put_back()
        ours = load_file(result["model"])
        assert [name for name, value in expected.items() if not torch.equal(ours[name], value)] == []
