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


MEAN = """
import torch
from torch import nn

import weft


class Averaged(nn.Module):
    def __init__(self, where):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        zeros = torch.zeros(8, 8)
        self.mean = nn.Parameter(zeros, requires_grad=False) if where == "a parameter" else nn.Buffer(zeros)

    def forward(self, x):
        return self.second(self.first(x).tanh())


def workload(where="a buffer", validates=False):
    x = torch.randn(48, 8, generator=torch.Generator().manual_seed(1))
    model = Averaged(where)

    def optimizer(parameters):
        made = torch.optim.AdamW([each for each in parameters if each.requires_grad], lr=0.05)
        made.register_step_post_hook(lambda *_: model.mean.lerp_(model.second.weight.detach(), 0.1))
        return made

    data = x, x.sin()
    return weft.Workload(model, data, loss=nn.MSELoss(), optimizer=optimizer, validation=data if validates else None)
"""


@pytest.mark.parametrize(("where", "validates"), [("a buffer", False), ("a buffer", True), ("a parameter", False)])
@pytest.mark.slow(seconds=2)
def test_a_mean_that_a_hook_around_the_optimizers_step_keeps_has_all_steps(
    daemon: Any, where: str, validates: bool
) -> None:
    """What others read of a stage was put there behind its last backward: the last step's was not in it."""
    spec = daemon.spec(MEAN, args={"where": where, "validates": validates}, epochs=2)
    result = daemon.run(spec)
    assert result["state"] == "completed", result["error"]
    ours, expected = load_file(result["model"]), train(spec).state
    assert expected["mean"].abs().max() > 0
    assert [name for name, value in expected.items() if not torch.equal(ours[name], value)] == []


@pytest.mark.slow(seconds=1)
def test_it_is_refused_where_stages_have_a_step_each(daemon: Any) -> None:
    result = daemon.run(daemon.spec(MEAN, strategy={"stages": 2}, epochs=2))
    assert (result["state"], result["reason"]) == ("failed", "invalid-plan")
    assert "register_step_post_hook(workload.<locals>.optimizer.<locals>.<lambda>)" in result["error"]
