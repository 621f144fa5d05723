"""Stages of a model that is cut by its own forward: what a step writes to is its own, wherever the stages begin."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from weft.reference import loop as reference

_ATTEMPT = runpy.run_path(str(Path(__file__).parents[1] / "lanes" / "test_attempt.py"))
Turns, planned_workload = _ATTEMPT["Turns"], _ATTEMPT["planned_workload"]

SOURCE = """
import random

import numpy as np
import torch
from torch import nn

import weft


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        return (gradient * 64 + torch.rand_like(gradient)).floor() / 64


class Shift(nn.Module):
    # its backward needs nothing of what it got
    def __init__(self):
        super().__init__()
        self.by = nn.Parameter(torch.ones(6))

    def forward(self, x):
        return x + self.by


class Counting(Shift):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return super().forward(x) / self.calls.clone()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inlet, self.shift, self.middle, self.outlet = nn.Linear(4, 6), {shift}(), nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, x):
        x = self.inlet(x)
        {middle}
        return self.outlet(x)


def whole(model, batch):
    x, mask = batch["x"], batch["mask"]
    return ((model(x * (mask > 0)) - x.sum(1, keepdim=True)) * (mask + 0)).square().mean()


def step(model, batch):
    {before}
    loss = whole(model, batch)
    {after}
    return loss


def validate(model, batch):
    {validate}
    return whole(model, batch)


def workload():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(24, 4, generator=generator)
    items = [{{"x": row, "mask": (row[:1] > -0.5).float() - 0.25}} for row in x]
    return weft.Workload(model=Model(), step=step, validate=validate, train=items, validation=items[:6],
                         optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05))
"""
SOUND = {
    "shift": "Shift",
    "middle": "x = x + self.middle(self.shift(x).tanh())",
    "before": "pass",
    "after": "pass",
    "validate": "pass",
}
WRITES = {
    "to what came from two stages before": {"middle": "h = self.shift(x).tanh(); x += self.middle(h)"},
    "to the batch before the model": {"before": "batch['mask'].mul_(-2)"},
    "to a part of the batch that it takes out": {
        "before": "mask = batch.pop('mask'); batch['mask'] = mask + 0; mask.mul_(-2)",
        "after": "batch['mask'].zero_()",
    },
    "to the batch after the model": {"after": "batch['mask'].zero_()"},
    "to the batch in validation alone": {"validate": "batch['mask'].mul_(-2)"},
}


BETWEEN = {
    "a result of no module that jumps over stages": {
        "middle": "twice, total = 2 * x, x.mean(); h = self.shift(x); total = total + h.std(); "
        "x = self.middle(h) * twice + total"
    },
    "modules that are called for two inputs": {
        "middle": "x = self.middle(self.shift(x).tanh()) + self.middle(self.shift(x + 2 * x).tanh()) / 2"
    },
    "modules that are left out at random": {
        "middle": "x = nn.functional.dropout(x, 0.2, self.training); "
        "x = x if self.training and torch.rand(()) < 0.5 else self.shift(x); x = x.tanh(); "
        "x = x if self.training and torch.rand(()) < 0.5 else self.middle(x); x = 2 * x"
    },
    "modules that are left out by Python's random numbers, and numpy's beside them": {
        "middle": "x = x + float(np.random.rand()); "
        "x = x if self.training and random.random() < 0.5 else self.shift(x); x = x.tanh(); "
        "x = x if self.training and random.random() < 0.5 else self.middle(x); x = x * np.random.choice([1.0, 2.0])"
    },
    "numbers that leave the generator as it was": {
        "middle": "h = self.shift(x).tanh()\n        with torch.random.fork_rng(devices=[]):\n"
        "            noise = torch.rand(6)\n        x = self.middle(h * noise)"
    },
    "numbers that are drawn for some batches alone": {
        "before": "model.odd = bool(batch['x'].sum() > 0)",
        "validate": "model.odd = False",
        "middle": "x = self.middle(self.shift(x).tanh() * (torch.rand(6) if self.odd else 0.5))",
    },
    "numbers that are drawn for none of the first batches, behind what changes a buffer": {
        "before": "model.odd = bool(batch['x'].sum() < -2)",
        "shift": "Counting",
        "validate": "model.odd = False",
        "middle": "x = self.middle(self.shift(x).tanh() * (torch.rand(6) if self.odd else 0.5))",
    },
}


@pytest.fixture
def turns_of(planned: Any, tmp_path: Path) -> Callable[..., tuple[Any, Any]]:
    def build(parts: dict[str, str], **how: Any) -> tuple[Any, Any]:
        (tmp_path / "job.py").write_text(SOURCE.format(**SOUND | parts))
        plan = planned(planned_workload(tmp_path), steps=4, directory=str(tmp_path), batch_size=8, **how)
        return Turns(plan, plan.new_directory()), plan.spec

    return build


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("split", [["shift"], ["middle"], ["shift", "middle", "outlet"]])
@pytest.mark.parametrize("kind", WRITES)
def test_a_step_that_writes_to_what_it_is_given_trains_as_the_plain_loop(
    turns_of: Callable[..., tuple[Any, Any]], kind: str, split: list[str], recompute: bool
) -> None:
    """What the first unit of a stage did was looked at alone, and of the batch only what training did. Other stages, or
    the same one in its second forward, then read from the slot what had been written there."""
    trains_as_the_plain_loop(
        *turns_of(WRITES[kind], stages=len(split) + 1, split=split, microbatches=2, recompute=recompute)
    )


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", BETWEEN)
def test_so_does_one_with(turns_of: Callable[..., tuple[Any, Any]], kind: str, recompute: bool) -> None:
    split = ["shift", "middle", "outlet"]
    trains_as_the_plain_loop(*turns_of(BETWEEN[kind], stages=4, split=split, microbatches=4, recompute=recompute))


def test_so_does_one_whose_gradients_are_rounded_at_random(turns_of: Callable[..., tuple[Any, Any]]) -> None:
    """Its forward draws nothing, so the numbers that its backward drew were not the plain loop's."""
    trains_as_the_plain_loop(*turns_of({"middle": "x = self.middle(Rounded.apply(self.shift(x)))"}, microbatches=2))


def trains_as_the_plain_loop(turns: Any, spec: Any) -> None:
    turns.run(min)
    expected = reference.train(spec)
    means, facts = turns.measured()
    steps = [index for index, values in sorted(facts.items()) if "lr" in values]
    assert [means[index]["loss"] for index in steps] == expected.losses
    assert all(torch.equal(turns.state()[name], tensor) for name, tensor in expected.state.items())
    validated = [means[index]["loss"] for index in sorted(means) if index not in steps]
    assert validated == pytest.approx([values["loss"] for values in expected.validations], rel=1e-6)
    assert len(validated) > 0


@pytest.mark.parametrize("kind", ["to what came from two stages before", "to the batch in validation alone"])
def test_so_does_one_of_a_job_that_only_runs_forward(turns_of: Callable[..., tuple[Any, Any]], kind: str) -> None:
    turns, spec = turns_of(WRITES[kind], mode="forward", stages=3, split=["shift", "middle"], microbatches=2)
    turns.run(min)
    means, _ = turns.measured()
    assert [means[index]["loss"] for index in sorted(means)] == pytest.approx(reference.train(spec).losses, rel=1e-6)


OTHER_STRUCTURE = """
import torch
from torch import nn

import weft

LENGTHS = [3, 4, 5, 4, 8, 9, 3, 10, 7, 5]


class First(nn.Linear):
    def forward(self, x):
        h = super().forward(x).tanh()
        return (h, h.mean()) if x.shape[1] > 6 else (h, None)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = First(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        self.register_buffer("calls", torch.zeros(()))
        self.runs = 0

    def forward(self, x):
        self.calls += 1
        self.runs += 1
        h, extra = self.first(x)
        length = h.shape[1]
        y = self.last(self.middle(h).tanh().sum(1)) / length * (1 + self.calls / 10)
        return y if extra is None else y + extra


def workload():
    torch.manual_seed(1)
    items = [torch.randn(length, 4) for length in LENGTHS for _ in range(2)]
    collate = lambda rows: nn.utils.rnn.pad_sequence(rows, batch_first=True)
    step = lambda model, x: {"loss": model(x).square().mean(), "runs": torch.tensor(float(model.runs))}
    return weft.Workload(model=Model(), step=step, train=items, collate=collate,
                         optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05))
"""


@pytest.mark.parametrize("recompute", [False, True])
def test_a_run_that_is_made_again_begins_with_what_the_first_one_did(
    planned: Any, tmp_path: Path, recompute: bool
) -> None:
    """Where a skipped module returned other things for other lengths, the others counted the microbatch twice."""
    (tmp_path / "job.py").write_text(OTHER_STRUCTURE)
    how = {"stages": 3, "split": ["middle", "last"], "batch_size": 2, "recompute": recompute}
    plan = planned(planned_workload(tmp_path), steps=20, directory=str(tmp_path), **how)
    turns = Turns(plan, plan.new_directory())
    turns.run(min)
    expected = reference.train(plan.spec)
    means, _ = turns.measured()
    assert [means[index]["loss"] for index in sorted(means)] == expected.losses
    assert [means[index]["runs"] for index in sorted(means)] == list(range(1, 21))
    assert all(torch.equal(turns.state()[name], tensor) for name, tensor in expected.state.items())
