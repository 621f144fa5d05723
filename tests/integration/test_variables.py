"""What a job's functions keep in globals, variables around them, objects and classes is a part of training, as what
modules remember is: it goes on after a loss and a resume."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from weft.reference.loop import train

_RECOVERY = runpy.run_path(str(Path(__file__).with_name("test_recovery.py")))
held_behind_a_snapshot, check_is_undisturbed, kill_worker, PASS_GATE, until = (
    _RECOVERY[name] for name in ("held_behind_a_snapshot", "check_is_undisturbed", "kill_worker", "PASS_GATE", "until")
)

# A global, a window, a generator, a variable around a function, an object, its class, and one in the model.
COUNTING = (
    PASS_GATE
    + """
import collections, random
import torch, weft

steps, recent, drawing = 0, collections.deque(maxlen=3), random.Random(3)

class Annealer:
    asked = 0

    def __init__(self, every):
        self.every, self.values = every, {"now": 1.0}

    def __call__(self):
        Annealer.asked += 1
        if Annealer.asked % self.every == 0:
            self.values["now"] *= 0.9
        return self.values["now"]

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.annealer = torch.nn.Linear(8, 8), [Annealer(5)]

    def forward(self, x):
        return self.inner(x) * (1 + self.annealer[0]()) if self.training else self.inner(x)

def workload(gates=("", ""), calls_at=(0, 0), plain=False):
    turns, annealer = 0, Annealer(7)

    def step(model, batch):
        global steps
        nonlocal turns
        steps += 1
        turns += 1
        for gate, at in zip(gates, calls_at):
            if steps == at:
                pass_gate(gate, f"of call {at}")
        loss = torch.nn.functional.mse_loss(model(batch[0]), batch[1])
        recent.append(float(loss.detach()))
        weight = annealer() + sum(recent) + 1 / steps + (turns % 3) / 9
        return loss * (weight + drawing.random() / 9)

    def validate(model, batch):
        return {"loss": torch.nn.functional.mse_loss(model(batch[0]), batch[1])}

    data = torch.randn(48, 8), torch.randn(48, 8)
    optimizer = lambda parameters: torch.optim.Adam(parameters, lr=0.01)
    return weft.Workload(Model(), data, step=step, validate=validate, validation=data, optimizer=optimizer)
"""
)


@pytest.mark.slow(seconds=4)
@pytest.mark.pairs(victim=("cpu", "loader"))  # one a day
def test_they_go_on_behind_a_loss(daemon: Any, victim: str) -> None:
    """With the worker that has them lost, and without."""
    with held_behind_a_snapshot(daemon, {"microbatches": 2}, source=COUNTING, batch_size=8) as (job, spec, gate):
        kill_worker(daemon, job, victim)
        daemon.until_logged(job, "goes on after step")
        gate.open()
        check_is_undisturbed(daemon, job, spec)
        plain = train(spec).state
        ours = load_file(Path(daemon.client.show(job)["run_dir"], "model.safetensors"))
        assert [name for name in plain if not torch.equal(plain[name], ours[name])] == []


@pytest.mark.slow(seconds=2)
def test_they_go_on_in_a_resumed_job(daemon: Any) -> None:
    def spec(steps: int, **fields: Any) -> Any:
        return daemon.spec(COUNTING, strategy={"microbatches": 2}, batch_size=8, steps=steps, **fields)

    half = spec(14)
    first = daemon.run(type(half).parse(half.to_wire() | {"checkpoint": {"every": "2 steps"}}))
    on = daemon.run(spec(33, resume_from=first["run_dir"]))
    for result, steps in ((first, 14), (on, 33)):
        assert result["state"] == "completed", result["error"]
        plain, ours = train(spec(steps)).state, load_file(Path(result["model"]))
        assert [name for name in plain if not torch.equal(plain[name], ours[name])] == []


# What is asked after each epoch changes the model, keeps what it has seen in an object, and goes by that.
ASKED = (
    PASS_GATE
    + """
import torch, weft

class Patience:
    def __init__(self, epochs):
        self.epochs, self.losses = epochs, []

    def __call__(self, values):
        self.losses.append(values["loss"])
        print(f"asked of epoch {values['epoch']}, {len(self.losses)} so far", flush=True)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(1 - 0.001 * len(self.losses))
        return "stop" if len(self.losses) == self.epochs else {"told": sum(self.losses)}

steps = 0

def workload(gate="", at=0):
    def step(model, batch):
        global steps
        steps += model.training
        if steps == at:
            pass_gate(gate, f"of call {at}")
        return torch.nn.functional.mse_loss(model(batch[0]), batch[1])

    on_epoch = Patience(30)
    model = on_epoch.model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
    data = torch.randn(24, 4), torch.randn(24, 4)
    return weft.Workload(
        model, data, step=step, on_epoch=on_epoch, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05),
        epoch_metrics=["told"], scheduler_metric="told",
        scheduler=lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0))
"""
)


@pytest.mark.slow(seconds=3)
@pytest.mark.parametrize("behind", [1, 2])
@pytest.mark.parametrize("victim", ["cpu", "loader"])
def test_an_epoch_counts_once_in_what_is_asked_after_it(daemon: Any, victim: str, behind: int) -> None:
    """Whether the job goes on from the end of an epoch, or from the middle of one."""
    gate = daemon.gate()
    strategy = {"recovery": "iteration", "microbatches": 1}
    args = {"gate": str(gate), "at": 20 * 3 + behind}
    spec = daemon.spec(ASKED, strategy=strategy, batch_size=8, epochs=40, args=args)
    job = daemon.submit(spec)
    daemon.until_logged(job, f"at the gate of call {args['at']}")
    until(lambda: daemon.client.show(job)["snapshot_step"] == args["at"] - 1, "a snapshot")
    kill_worker(daemon, job, victim)
    daemon.until_logged(job, "goes on after step")
    gate.open()
    result = daemon.client.wait(job, 60)
    assert result["state"] == "completed", daemon.log_of(job)
    assert result["steps"] == 30 * 3
    plain, ours = train(spec).state, load_file(Path(result["model"]))
    assert [name for name in plain if not torch.equal(plain[name], ours[name])] == []
    asked = daemon.log_of(job).count("asked of epoch 19, 20 so far")
    assert asked == 1 + (behind == 1)  # again, where that is what the job goes on behind
    check_is_undisturbed(daemon, job, spec)
