"""What a function that is asked after each epoch finds in the model: what training has come to, as in the plain loop,
however the model is divided. What it changes acts as there, or is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from weft.reference.loop import train

SOURCE = """
import copy
import os

import torch
from torch import nn

import weft


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.norm, self.drop = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2)
        self.head = nn.Linear(8, 3)
        self.bound = nn.Parameter(torch.ones(3, dtype=torch.float32), requires_grad=False)
        self.extra = nn.Parameter(torch.empty(0, 3))  # of as many rows as somebody asked for
        self.cap = 9.0

    def forward(self, x):
        return self.head(self.drop(self.norm(self.body(x)).tanh())).clamp(max=self.cap) * self.bound


def workload(kind, use, out):
    x = torch.randn(24, 6, generator=torch.Generator().manual_seed(1))
    layers = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3)
    model = Net() if kind == "a class" else nn.Sequential(*layers)
    model = model.double()
    if kind == "a class":
        model.bound.data = model.bound.data.float()  # another dtype in the same file
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)

    made = {}

    def make(parameters):
        made["optimizer"] = optimizer if use != "an option of one made later" else torch.optim.Adam(parameters, lr=0.05)
        return made["optimizer"]

    @torch.no_grad()
    def change(what):
        if what == "a parameter":
            model.head.weight.mul_(0.5)
        elif what == "one that is not trained":
            model.bound.mul_(0.5)
        elif what == "a buffer":
            model.norm.running_mean.zero_()
        elif what == "what is trained":
            model.head.weight.requires_grad = False
        elif what == "an attribute":
            model.cap = 0.1
        elif what == "an option":
            optimizer.param_groups[0]["lr"] *= 0.1
        elif what == "an option of one made later":
            made["optimizer"].param_groups[0]["lr"] *= 0.1

    def on_epoch(values):
        if use == "saves it":
            told = model.state_dict()
        elif use == "copies it":
            told = copy.deepcopy(model).state_dict()
        elif use == "runs it":
            model.eval()
            with torch.no_grad():
                told = {"output": model(x.double())}
        else:
            told = {}
            change(use)
        where = os.environ.get("WEFT_RUN_DIR", out)
        torch.save(told, f"{where}/told-{values['epoch']}.pt")

    data = (x.double(), torch.arange(24) % 3)
    return weft.Workload(model, data, loss=nn.CrossEntropyLoss(), optimizer=make, on_epoch=on_epoch)
"""
STRATEGIES: dict[str, dict[str, Any]] = {
    "one worker": {},
    "two stages": {"stages": 2},
    "clipped stages": {"stages": 2, "clip_norm": 1e9},
    "a device": {"replicas": [{"device": "gpu"}]},
    "stages on devices": {"replicas": [{"device": "gpu", "stages": 2}]},
    "offloaded": {"preset": "zero-offload"},
}


@pytest.mark.pairs(2, kind=("a class", "a list"), use=("saves it", "copies it", "runs it"), strategy=tuple(STRATEGIES))
@pytest.mark.slow(seconds=2)
def test_it_finds_the_model_as_it_is(machine: Any, tmp_path: Path, kind: str, use: str, strategy: str) -> None:
    arguments = {"kind": kind, "use": use, "out": str(tmp_path)}
    spec = machine.spec(SOURCE, strategy=STRATEGIES[strategy], args=arguments, epochs=2, batch_size=12)
    ended = machine.client.wait(machine.submit(spec), 60)
    assert ended["state"] == "completed", machine.log_of(ended["job"])
    train(spec)
    for epoch in range(2):
        name = f"told-{epoch}.pt"
        told, plain = torch.load(Path(ended["model"]).parent / name), torch.load(tmp_path / name)
        assert told.keys() == plain.keys()
        for key, value in plain.items():
            assert torch.allclose(told[key], value, rtol=1e-12, atol=1e-12), (key, epoch)


CHANGES = (
    "a parameter",
    "one that is not trained",
    "a buffer",
    "what is trained",
    "an attribute",
    "an option",
    "an option of one made later",
)
TRAINS = {**STRATEGIES, "replicas": {"preset": "ddp", "microbatches": 1}, "clipped": {"clip_norm": 1e9}}


@pytest.mark.pairs(2, change=CHANGES, strategy=tuple(TRAINS))
@pytest.mark.slow(seconds=2)
def test_a_change_of_it_acts(machine: Any, tmp_path: Path, change: str, strategy: str) -> None:
    arguments = {"kind": "a class", "use": change, "out": str(tmp_path)}
    spec = machine.spec(SOURCE, strategy=TRAINS[strategy], args=arguments, epochs=2, batch_size=12)
    ended = machine.client.wait(machine.submit(spec), 60)
    assert ended["state"] == "completed", machine.log_of(ended["job"])
    saved = load_file(ended["model"])
    for name, value in train(spec).state.items():
        assert torch.allclose(saved[name], value, rtol=1e-12, atol=1e-12), name


KEPT = """
import torch
from torch import nn

import weft


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.bound = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x):
        return self.head(self.body(x).tanh()) * self.bound


def workload(fails):
    model = Net()

    def on_epoch(values):
        if values["epoch"] == fails:
            raise RuntimeError("that is enough")
        with torch.no_grad():
            model.bound.add_(values["epoch"] + 1)

    return weft.Workload(
        model,
        (torch.randn(16, 6, generator=torch.Generator().manual_seed(1)), torch.arange(16) % 3),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD([each for each in parameters if each.requires_grad], lr=0.01),
        on_epoch=on_epoch,
    )
"""


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.slow(seconds=3)
def test_what_it_has_changed_of_what_nobody_trains_is_gone_on_with(machine: Any, stages: int) -> None:
    """Parameters that no step changes were copied once into each place of a snapshot, as they were then."""
    how: dict[str, Any] = {"strategy": {"stages": stages, "recovery": "iteration"}, "epochs": 8, "batch_size": 4}
    ended = machine.client.wait(machine.submit(machine.spec(KEPT, args={"fails": 5}, **how)), 60)
    assert "that is enough" in machine.log_of(ended["job"])
    goes_on = machine.spec(KEPT, args={"fails": -1}, resume_from=ended["run_dir"], **how)
    ended = machine.client.wait(machine.submit(goes_on), 60)
    assert ended["state"] == "completed", machine.log_of(ended["job"])
    saved = load_file(ended["model"])
    for name, value in train(machine.spec(KEPT, args={"fails": -1}, **how)).state.items():
        assert torch.equal(saved[name], value), name


@pytest.mark.slow(seconds=2)
@pytest.mark.parametrize("preset", ["parameter-server", "stronghold"])
def test_parameters_of_several_ages_or_that_take_turns_it_does_not_change(
    machine: Any, tmp_path: Path, preset: str
) -> None:
    arguments = {"kind": "a class", "use": "a parameter", "out": str(tmp_path)}
    spec = machine.spec(SOURCE, strategy={"preset": preset}, args=arguments, epochs=2, batch_size=12)
    ended = machine.client.wait(machine.submit(spec), 60)
    assert ended["state"] == "failed"
    assert "Workload.on_epoch has changed head.weight, of which other processes have parts or copies" in ended["error"]


CHOSEN = """
import torch
from torch import nn

import weft


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.act, self.head = nn.Linear(6, 8), torch.tanh, nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.act(self.body(x)))


def workload():
    model = Net()

    def on_epoch(values):
        model.act = torch.relu

    data = torch.randn(16, 6), torch.arange(16) % 3
    return weft.Workload(model, data, loss=nn.functional.cross_entropy, optimizer=torch.optim.SGD, on_epoch=on_epoch)
"""


@pytest.mark.slow(seconds=2)
@pytest.mark.parametrize("stages", [1, 2])
def test_a_function_that_it_sets_is_in_no_snapshot_and_told_to_nobody(machine: Any, stages: int) -> None:
    """After a lost worker, and in another stage, the one before would be called."""
    spec = machine.spec(CHOSEN, strategy={"stages": stages}, epochs=4, batch_size=4)
    ended = machine.client.wait(machine.submit(spec), 60)
    lost = "on_epoch has set act (a builtin_function_or_method), which no snapshot or checkpoint has"
    assert machine.log_of(ended["job"]).count(lost) == 1
    assert ended["state"] == ("completed" if stages == 1 else "failed")
    if stages == 2:
        assert "on_epoch has changed act, of which other processes have parts or copies" in ended["error"]


BESIDE = """
import torch
from torch import nn

import weft

WEIGHT = {"now": 1.0}


def step(model, batch):
    return WEIGHT["now"] * model(batch[0]).square().mean()


def on_epoch(values):
    WEIGHT["now"] *= 0.5


def workload():
    WEIGHT["now"] = 1.0
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    return weft.Workload(model, (torch.randn(8, 4).double(),), step=step, optimizer=torch.optim.SGD, on_epoch=on_epoch)
"""


@pytest.mark.slow(seconds=2)
@pytest.mark.parametrize("strategy", [{"stages": 1}, {"stages": 2}, {"replicas": 2}, {"preset": "zero-offload"}])
def test_a_global_that_the_step_reads_acts(machine: Any, strategy: dict[str, Any]) -> None:
    """It runs in one process; all others are told what it has changed."""
    spec = machine.spec(BESIDE, strategy=strategy, epochs=3, batch_size=4)
    ended = machine.client.wait(machine.submit(spec), 60)
    assert ended["state"] == "completed", ended["error"]
    saved = load_file(ended["model"])
    for name, value in train(spec).state.items():
        assert torch.allclose(saved[name], value, rtol=1e-12, atol=1e-12), name


INTERLEAVED = {"schedule": "interleaved", "stages": 4, "microbatches": 2}
KEEPS = """
import torch
from torch import nn

import weft

LOSSES, COUNTS = [], {"steps": 0}


class Meter:
    total = 0.0

    def update(self, value):
        self.total += value


def workload():
    LOSSES.clear()
    COUNTS["steps"] = 0
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(4)]
    model, meter = nn.Sequential(*blocks).double(), Meter()
    model.kept = []

    def step(model, batch):
        loss = model(batch[0]).square().mean()
        if model.training:
            LOSSES.append(loss.item())
            COUNTS["steps"] += 1
            model.kept.append(loss.detach())
            meter.update(loss.item())
        return loss

    def on_epoch(values):
        kept = {"of_list": sum(LOSSES), "steps": COUNTS["steps"], "kept": sum(model.kept), "of_meter": meter.total}
        return kept | {"buffers": sum(each[1].running_mean.sum() for each in model)}

    data, names = (torch.randn(8, 4).double(),), ["of_list", "steps", "kept", "of_meter", "buffers"]
    return weft.Workload(model, data, step=step, optimizer=torch.optim.SGD, on_epoch=on_epoch, epoch_metrics=names)
"""


@pytest.mark.slow(seconds=2)
@pytest.mark.parametrize("strategy", [{"stages": 1}, {"stages": 2}, INTERLEAVED], ids=["1", "2", "interleaved"])
def test_it_reads_what_the_step_has_kept_beside_the_model(machine: Any, strategy: dict[str, Any]) -> None:
    """Of two stages the first was asked, which has left the step before: lists were empty, and sums were 0. And where a
    worker has two stages, each with a model of its own, the first one's, which has not the second one's buffers."""
    spec = machine.spec(KEEPS, strategy=strategy, epochs=2, batch_size=4)
    ended = machine.client.wait(machine.submit(spec), 60)
    assert ended["state"] == "completed", ended["error"]
    assert ended["validation"] == train(spec).validations[-1]
    assert ended["validation"]["steps"] == 4 * strategy.get("microbatches", 1)


METRIC = """
import torch
from torch import nn

import weft


LOSSES, WAYS = [], {"heat": 1.0, "steps": 0}


class Distance(nn.Module):  # as metrics of torchmetrics are, which keep what they sum in attributes
    def __init__(self):
        super().__init__()
        self.reset()

    def update(self, output, target):
        self.updates += 1
        self.total = self.total + (output.detach() - target).abs().sum()
        self.seen.append(len(target))

    def compute(self):
        return {"distance": self.total / sum(self.seen), "updates": self.updates}

    def reset(self):
        self.total, self.updates, self.seen = torch.tensor(0.0, dtype=torch.float64), 0, []


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.distance, self.heat, self.count = Distance(), 1.0, 0

    def forward(self, x):
        for layer in self.layers:
            x = layer(x * self.heat).tanh()
        return x


def workload(fails=-1, heats=""):
    torch.manual_seed(1)
    LOSSES.clear()
    WAYS.update(heat=1.0, steps=0)
    model = Net().double()

    def step(model, batch):
        model.count += 1
        output = model(batch[0] * WAYS["heat"])
        loss = nn.functional.mse_loss(output, batch[1])
        if model.training:
            model.distance.update(output, batch[1])
            LOSSES.append(loss.item())
            WAYS["steps"] += 1
        return loss

    def on_epoch(values):
        if values["epoch"] == fails:
            raise RuntimeError("that is enough")
        if heats == "model":
            model.heat *= 0.5
        elif heats == "count":
            model.count = 0
        elif heats:
            WAYS["heat"] *= 0.5
        told = {**model.distance.compute(), "sum": sum(LOSSES), "steps": WAYS["steps"]}
        model.distance.reset()
        LOSSES.clear()
        WAYS["steps"] = 0
        return told

    data = torch.randn(24, 4).double(), torch.rand(24, 4).double()
    return weft.Workload(model, data, step=step, optimizer=torch.optim.SGD, on_epoch=on_epoch,
                         epoch_metrics=["distance", "updates", "sum", "steps"])
"""


@pytest.mark.slow(seconds=3)
@pytest.mark.parametrize("strategy", [{"stages": 1}, {"stages": 2}, INTERLEAVED], ids=["1", "2", "interleaved"])
def test_it_may_begin_anew_what_the_step_sums(machine: Any, strategy: dict[str, Any]) -> None:
    """`losses.clear()`, or a metric's reset, ended a job of two stages after the first epoch; so did what anneals."""
    how: dict[str, Any] = {"strategy": {**strategy, "recovery": "iteration"}, "epochs": 5, "batch_size": 4}
    for heats in "", "model", "count", "ways":
        ended = machine.client.wait(machine.submit(machine.spec(METRIC, args={"fails": 3, "heats": heats}, **how)), 60)
        assert "that is enough" in machine.log_of(ended["job"])
        goes_on = machine.spec(METRIC, resume_from=ended["run_dir"], args={"heats": heats}, **how)
        ended = machine.client.wait(machine.submit(goes_on), 60)
        assert ended["state"] == "completed", (heats, ended["error"])
        plain, saved = train(machine.spec(METRIC, args={"heats": heats}, **how)), load_file(ended["model"])
        assert ended["validation"] == plain.validations[-1], heats
        for name, value in plain.state.items():
            assert torch.allclose(saved[name], value, rtol=1e-12, atol=1e-12), (heats, name)


REPLICATED = """
import torch
from torch import nn

import weft

LOSSES, COUNTS = [], {"steps": 0, "scale": 10}


def workload():
    LOSSES.clear()
    COUNTS.update(steps=0, scale=10)
    model = nn.Linear(4, 4)
    model.kept = []

    def step(model, batch):
        loss = nn.functional.mse_loss(model(batch[0]), batch[1])
        LOSSES.append(loss.item())
        model.kept.append(loss.detach())
        COUNTS["steps"] += 1
        return loss

    def on_epoch(values):
        found = len(LOSSES) + len(model.kept)
        LOSSES.clear()
        model.kept.clear()
        found += COUNTS["steps"] * COUNTS["scale"]
        COUNTS["steps"] = 0
        COUNTS["scale"] *= 10
        return {"found": found}

    data = torch.randn(16, 4), torch.randn(16, 4)
    return weft.Workload(model, data, step=step, optimizer=torch.optim.SGD, on_epoch=on_epoch, epoch_metrics=["found"])
"""


@pytest.mark.slow(seconds=2)
def test_what_it_begins_anew_all_replicas_do(machine: Any) -> None:
    spec = machine.spec(REPLICATED, strategy={"replicas": 2}, epochs=3, batch_size=4)
    ended = machine.client.wait(machine.submit(spec), 60)
    log = machine.log_of(ended["job"])
    assert re.search("on_epoch: it refers to .*LOSSES.*, which a step changes; of several replicas it finds", log)
    assert ended["state"] == "completed", log
    assert ended["validation"] == {"found": 8.0 + 4 * 1000}, "of an epoch of four steps"


SAVES = """
import torch
from torch import nn

import weft


def workload():
    model, made = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), []

    def optimizer(parameters):
        made.append(torch.optim.Adam(parameters))
        return made[-1]

    def on_epoch(values):
        print("states:", len(made[-1].state_dict()["state"]))

    data = torch.randn(8, 4), torch.randn(8, 4)
    return weft.Workload(model, data, loss=nn.MSELoss(), optimizer=optimizer, on_epoch=on_epoch)
"""


@pytest.mark.slow(seconds=2)
@pytest.mark.parametrize(
    ("strategy", "num_states"), [({}, 8), ({"stages": 2}, None), ({"replicas": 2}, 0)], ids=["1", "stages", "replicas"]
)
def test_an_optimizers_state_that_is_not_all_of_it_is_told(
    machine: Any, strategy: dict[str, Any], num_states: int | None
) -> None:
    """A script's own checkpoint had the state of one stage, or of no parameter, and nothing said so."""
    ended = machine.client.wait(machine.submit(machine.spec(SAVES, strategy=strategy, epochs=3, batch_size=4)), 60)
    log = machine.log_of(ended["job"])
    assert ended["state"] == "completed", log
    assert log.count("asks for the state of an optimizer, which has in this process") == (1 if strategy else 0)
    found = {int(line.rpartition(" ")[2]) for line in log.splitlines() if "states: " in line}
    assert found == {num_states} if num_states is not None else max(found) < 8


KEPT_BY_FORWARD = """
import torch
from torch import nn

import weft


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.history = nn.Linear(4, 4), []

    def forward(self, x):
        y = self.linear(x)
        self.history.append(y.mean().item())
        return y


def workload(reads: int = 0):
    model, data = nn.Sequential(Layer(), Layer()), (torch.randn(8, 4), torch.randn(8, 4))

    def on_epoch(values):
        print("it has", len(model[reads].history))

    return weft.Workload(model, data, loss=nn.MSELoss(), optimizer=torch.optim.SGD, on_epoch=on_epoch)
"""


@pytest.mark.slow(seconds=2)
@pytest.mark.parametrize("stages", [1, 2])
def test_what_a_forward_keeps_in_an_earlier_stage_is_told_by_name(machine: Any, stages: int) -> None:
    """It is empty where on_epoch reads it, and nothing else says so."""
    spec = machine.spec(KEPT_BY_FORWARD, strategy={"stages": stages}, epochs=1, batch_size=4)
    job = machine.submit(spec)
    assert machine.client.wait(job, 60)["state"] == "completed"
    assert ("on_epoch: it refers to 0.history, which a forward in an earlier" in machine.log_of(job)) == (stages == 2)


LEAVES_GRADIENTS = """
import torch
from torch import nn

import weft


def workload(backward: bool = True):
    model, data = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double(), torch.randn(8, 4).double()

    def on_epoch(values):
        if backward:
            model(data).square().sum().backward()

    pairs, optimizer = (data, torch.randn(8, 4).double()), lambda parameters: torch.optim.SGD(parameters, 0.1)
    return weft.Workload(model, pairs, loss=nn.MSELoss(), optimizer=optimizer, on_epoch=on_epoch)
"""


@pytest.mark.slow(seconds=2)
@pytest.mark.parametrize("strategy", [{}, {"stages": 2}, {"replicas": 2}], ids=["alone", "stages", "replicas"])
def test_gradients_that_it_leaves_are_no_part_of_the_next_step(machine: Any, strategy: dict[str, Any]) -> None:
    """A loop's `zero_grad()` stands before each backward; they were added to those of the judging stage's next step."""
    spec = machine.spec(LEAVES_GRADIENTS, strategy=strategy, epochs=3, batch_size=4)
    without = train(machine.spec(LEAVES_GRADIENTS, strategy=strategy, epochs=3, batch_size=4, args={"backward": False}))
    assert train(spec).losses == without.losses
    ended = machine.client.wait(machine.submit(spec), 60)
    assert ended["state"] == "completed", ended["error"]
    assert ended["loss"] == pytest.approx(without.losses[-1], rel=1e-12, abs=0)
