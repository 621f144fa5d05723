"""What `on_epoch` changes beside parameters acts in all processes as in the plain loop, also where one of them dies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from weft.reference.loop import train
from weft.spec.presets import PRESETS

SOURCE = """
import os

import torch
from torch import nn

import weft

FILES = {files}
WAYS, CENTRES = {{}}, torch.zeros(3).double()


class Annealer:
    def __init__(self):
        self.value, self.past = 1.0, []

    def step(self):
        self.value *= 0.8
        self.past.append(self.value)


class Block(nn.Module):
    counts = True  # of several replicas each counts for itself

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("cap", torch.ones(3))
        self.calls = 0
        self.layer, self.heat, self.shift = nn.Linear(3, 3), 1.0, torch.zeros(3).double()
        self.ways = {{"gain": 1.0, "calls": 0}}

    def forward(self, x):
        if self.training and self.counts:
            self.calls += 1
        x = self.layer(x) * self.scale * self.heat * self.ways["gain"] * (1 + 0.01 * self.calls)
        return x.tanh() * self.cap + self.shift


class Counting(Block):
    def forward(self, x):
        if self.training and self.counts:
            self.ways["calls"] += 1
        return super().forward(x) * (1 + 0.01 * self.ways["calls"])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.slope = nn.ModuleList(Block() for _ in range(4)), 1.0

    def forward(self, x):
        for block in self.blocks:
            x = block(x) * self.slope
        return x


class Dying(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls == self.at:
            dies("a step")
        return x


def dies(at):
    mark = os.path.join(FILES, f"{{os.environ.get('WEFT_RUN_DIR', 'plain').rpartition('/')[2]}}-{{at}}")
    if "WEFT_RUN_DIR" in os.environ and not os.path.exists(mark):
        open(mark, "w").close()
        os.kill(os.getpid(), 9)


def workload(kind, dies_in="", alone=True):
    Block.counts = alone
    WAYS.clear()
    WAYS.update(weight=1.0, nested={{"scale": 1.0}}, best=0.0)
    CENTRES.zero_()
    annealer, power, steps = Annealer(), 1.0, 0

    def scaled(x):
        return x * annealer.value * power * WAYS["nested"]["scale"]

    def criterion(output, target):
        loss = nn.functional.mse_loss(output, target + CENTRES * sum(annealer.past)) * WAYS["weight"]
        if alone:
            WAYS["best"] = max(WAYS["best"], loss.item()) if "best" in WAYS else loss.item()
        return loss

    def step(model, batch):
        nonlocal steps
        steps += model.training
        if dies_in == "a step" and steps == 11:
            dies("a step")
        return criterion(model(scaled(batch[0])), batch[1])

    class Scale(nn.Module):
        def forward(self, x):
            return scaled(x)

    how = {{"step": step}}
    if kind == "a class":
        model = Net().double()
    elif kind == "a list":
        model = nn.Sequential(*(Block() for _ in range(4))).double()
    else:
        model = nn.Sequential(Scale(), Dying(), *(Counting() for _ in range(4))).double()
        model[1].at = 11 if dies_in == "a step" else -1
        how = {{"loss": criterion}}

    @torch.no_grad()
    def on_epoch(values):
        nonlocal power
        if dies_in == "on_epoch" and values["epoch"] == 2:
            dies("on_epoch")
        blocks = [each for each in model.modules() if isinstance(each, Block)]
        blocks[0].layer.weight.requires_grad_(values["epoch"] % 2 == 1)
        blocks[3].layer.weight.requires_grad_(values["epoch"] % 2 == 0)
        for number in 1, 2:
            blocks[number].layer.bias.requires_grad_(values["epoch"] > 0)
        for number, block in enumerate(blocks):
            block.heat *= 0.9 - 0.1 * number
            block.ways["gain"] += 0.1 * number
            block.shift.add_(0.1)
            block.cap.data.mul_(0.9)
            block.scale.mul_(1.1)
            if values["epoch"] % 3:
                block.layer.bias.data.add_(0.01)
        if kind == "a class":
            model.slope *= 1.1
        WAYS["weight"] *= 0.5 + WAYS.pop("best", 0.4)
        WAYS["nested"]["scale"] += 0.3
        CENTRES.sub_(0.05)
        annealer.step()
        power *= 1.2
        for group in made[-1].param_groups:
            group["lr"] *= 0.9
            group["momentum"] -= 0.1

    for number in 2, 3:
        [each for each in model.modules() if isinstance(each, Block)][number].layer.bias.requires_grad_(False)
    data = torch.randn(16, 3).double(), torch.randn(16, 3).double()
    made = []

    def optimizer(parameters):
        made.append(torch.optim.SGD(parameters, lr=0.02, momentum=0.9))
        return made[-1]

    return weft.Workload(model, data, **how, optimizer=optimizer, on_epoch=on_epoch)
"""
STRATEGIES: dict[str, dict[str, Any]] = {
    "one worker": {},
    "two stages": {"stages": 2},
    "four stages in two": {"schedule": "interleaved", "stages": 4, "microbatches": 2, "recompute": False},
    "a device": {"replicas": [{"device": "gpu"}]},
    "stages on devices": {"replicas": [{"device": "gpu", "stages": 2}]},
    "offloaded": {"preset": "zero-offload"},
    "clipped stages": {"stages": 2, "clip_norm": 0.5},
}
LAYERS_IN_TURN: dict[str, Any] = {"preset": "stronghold"}  # whose stages have a workload each


REPLICATED: dict[str, dict[str, Any]] = {
    "replicas": {"replicas": 2},
    "stages in replicas": {"replicas": [{"stages": 2}, {"stages": 2}]},
    "clipped": {"replicas": 2, "clip_norm": 0.5},
    # parameters of several ages, or that take turns in memory, it may not change
    **{preset: {"preset": preset} for preset in PRESETS if preset not in ("auto", "parameter-server", "stronghold")},
}


def spec_of(machine: Any, tmp_path: Path, strategy: dict[str, Any], **args: Any) -> Any:
    source = SOURCE.format(files=repr(str(tmp_path)))
    return machine.spec(source, strategy=strategy, args=args, epochs=6, batch_size=4 if args.get("alone", True) else 8)


def check(machine: Any, tmp_path: Path, spec: Any, dies_in: str) -> None:
    ended = machine.client.wait(machine.submit(spec), 90)
    assert ended["state"] == "completed", machine.log_of(ended["job"])
    assert bool(dies_in) == bool(list(tmp_path.glob("*-*")))
    saved = load_file(ended["model"])
    for name, value in train(spec).state.items():
        assert torch.allclose(saved[name], value, rtol=1e-11, atol=1e-11), name


@pytest.mark.pairs(
    2,
    kind=("a class", "a list", "layers"),
    dies_in=("", "a step", "on_epoch"),
    recovery=(None, "iteration"),
    on=tuple(STRATEGIES),
)
@pytest.mark.slow(seconds=4)
def test_it_acts_everywhere(
    machine: Any, tmp_path: Path, kind: str, dies_in: str, recovery: str | None, on: str
) -> None:
    strategy = STRATEGIES[on] | ({} if recovery is None else {"recovery": recovery})
    spec = spec_of(machine, tmp_path, strategy, kind=kind, dies_in=dies_in)
    check(machine, tmp_path, spec, dies_in)


@pytest.mark.pairs(2, kind=("a class", "a list", "layers"), dies_in=("", "on_epoch"), on=tuple(REPLICATED))
@pytest.mark.slow(seconds=4)
def test_it_acts_in_all_replicas(machine: Any, tmp_path: Path, kind: str, dies_in: str, on: str) -> None:
    spec = spec_of(machine, tmp_path, REPLICATED[on], kind=kind, dies_in=dies_in, alone=False)
    check(machine, tmp_path, spec, dies_in)


BESIDE = """
import torch
from torch import nn

import weft


class Config(dict):
    __getattr__, __setattr__ = dict.__getitem__, dict.__setitem__


class Criterion(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.layer = 1.0, nn.Linear(3, 3).requires_grad_(False)
        self.register_buffer("weight", torch.ones(3))

    def forward(self, output, target):
        return ((output - self.layer(target)).square() * self.weight).mean() * self.scale


def workload(kind):
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    config, rate = Config(gain=1.0, loss=Config(power=1.0)), {"value": 0.1, "hook": 1.0}
    criterion = Criterion().double()

    def step(model, batch, ways={"shift": 0.0}):
        output = model(batch[0] * config.gain * criterion.weight.sum() + ways["shift"])
        return criterion(output, batch[1]) * config.loss.power

    class Own(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                group["lr"] = rate["value"]
            return super().step(closure)

    ways = step.__defaults__[0]
    model[0].register_forward_hook(lambda module, inputs, output: output * rate["hook"])
    model[0].weight.register_hook(lambda gradient: gradient * rate["hook"])

    def on_epoch(values):
        if kind == "a loss":
            criterion.scale *= 0.8
            criterion.weight[1] *= 0.5
            criterion.layer.weight.data.mul_(1.1)
        elif kind == "updates":
            rate["value"] *= 0.7
        elif kind == "hooks":
            rate["hook"] *= 0.8
        else:
            config.gain *= 0.9
            config.loss.power *= 1.2
            ways["shift"] += 0.1

    data = torch.randn(16, 3).double(), torch.randn(16, 3).double()
    how = {"loss": criterion} if kind == "a loss" else {"step": step}
    optimizer = lambda parameters: Own(parameters, lr=0.1, momentum=0.9)
    return weft.Workload(model, data, **how, optimizer=optimizer, on_epoch=on_epoch)
"""


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        ("a loss", {"replicas": 2}),
        ("updates", {"stages": 2}),
        ("updates", {"preset": "zero-offload"}),
        ("hooks", {"stages": 2}),
        ("objects", {"stages": 2}),
    ],
)
def test_what_stands_beside_the_model_acts_everywhere(
    machine: Any, tmp_path: Path, kind: str, strategy: dict[str, Any]
) -> None:
    spec = machine.spec(BESIDE, strategy=strategy, args={"kind": kind}, epochs=4, batch_size=4)
    check(machine, tmp_path, spec, "")


SCHEDULED = """
import os

import torch
from torch import nn

import weft

FILES = {files}


def workload(kind, dies):
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(3)).double()
    data = x, torch.arange(24) % 3
    model, made = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double(), []

    def optimizer(parameters):
        made.append(torch.optim.AdamW(parameters, lr=0.05))
        return made[-1]

    def on_epoch(values):
        mark = f"{{FILES}}/{{os.environ.get('WEFT_RUN_DIR', 'plain').rpartition('/')[2]}}-died"
        if dies and values["epoch"] == 2 and "WEFT_RUN_DIR" in os.environ and not os.path.exists(mark):
            open(mark, "w").close()
            os.kill(os.getpid(), 9)
        (group,) = made[-1].param_groups
        group["lr"] *= 0.7
        group["weight_decay"] = group["lr"] ** 2

    how = {{
        "steps": {{"scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)}},
        "epochs": {{
            "scheduler": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
            "scheduler_every": "epoch",
        }},
        "plateau": {{
            "scheduler": lambda given: torch.optim.lr_scheduler.ReduceLROnPlateau(given, patience=0, threshold=0.5),
            "validation": data,
        }},
    }}[kind]
    return weft.Workload(model, data, loss=nn.functional.cross_entropy, optimizer=optimizer, on_epoch=on_epoch, **how)
"""


@pytest.mark.pairs(
    2, kind=("steps", "epochs", "plateau"), on=("two stages", "offloaded", "layers in turn"), dies=(False, True)
)
@pytest.mark.slow(seconds=2)
def test_options_go_on_with_what_a_scheduler_makes_of_them(
    machine: Any, tmp_path: Path, kind: str, on: str, dies: bool
) -> None:
    """With ZeRO offload the process that is asked updates nothing."""
    source, args = SCHEDULED.format(files=repr(str(tmp_path))), {"kind": kind, "dies": dies}
    spec = machine.spec(source, strategy=STRATEGIES.get(on, LAYERS_IN_TURN), args=args, epochs=5, batch_size=6)
    check(machine, tmp_path, spec, "on_epoch" if dies else "")
