"""What a step keeps for its next run, wherever that is, changes once in each run of the plain loop, and so in a job."""

from __future__ import annotations

import builtins
import collections
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import weft
from weft.reference import loop as reference
from weft.workers.snapshots.step_memory import LostAttributes, LostVariables, StepMemory, lost_of_scheduler
from weft.workload.workload import make_scheduler

_ATTEMPT = runpy.run_path(str(Path(__file__).parents[1] / "lanes" / "test_attempt.py"))
Turns, planned_workload = _ATTEMPT["Turns"], _ATTEMPT["planned_workload"]

SOURCE = """
import builtins

import torch
from torch import nn

import weft


class Calls(nn.Module):
    def __init__(self):
        super().__init__()
        self.num = 0

    def forward(self):
        self.num += 1
        return self.num


class Queue(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("num", torch.zeros(()))

    def forward(self):
        return self.num.add_(1).clone()


class Meter:
    def __init__(self):
        self.num = 0

    def add(self):
        self.num += 1
        return self.num


def workload():
    generator = torch.Generator().manual_seed(1)
    own, calls, queue, meter, steps = torch.Generator().manual_seed(2), Calls(), Queue(), Meter(), []

    def step(model, batch):
        {keep}
        x = batch["x"]
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        return loss / kept * ({factor})

    step.num = 0
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    model.register_parameter("num", nn.Parameter(torch.zeros(()), requires_grad=False))
    return weft.Workload(model=model, step=step, {more} train={{"x": torch.randn(24, 4, generator=generator)}},
                         optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05))
"""
MEMORIES = {
    "in an attribute of the model": "model.calls = kept = getattr(model, 'calls', 0) + 1",
    "in a parameter that nobody trains": "kept = model.num.data.add_(1).clone()",
    "in a module beside the model": "kept = calls()",
    "in a buffer beside the model": "kept = queue()",
    "in an object of a class of its own": "kept = meter.add()",
    "in a list around it": "steps.append(1); kept = len(steps)",
    "in the function itself": "step.num += 1; kept = step.num",
    "in a generator of its own": "kept = 1 + torch.rand((), generator=own)",
}
DRAWS_LATE = "1 + torch.rand(()) if batch['x'].sum() > 4 else 1"


@pytest.fixture
def turns_of(planned: Any, tmp_path: Path) -> Callable[..., tuple[Any, Any]]:
    def build(keep: str, factor: str, more: str = "") -> tuple[Any, Any]:
        (tmp_path / "job.py").write_text(SOURCE.format(keep=keep, factor=factor, more=more))
        plan = planned(planned_workload(tmp_path), steps=8, directory=str(tmp_path), batch_size=6)
        return Turns(plan, plan.new_directory()), plan.spec

    return build


def trains_as_the_plain_loop(turns: Any, spec: Any) -> None:
    expected = reference.train(spec)
    means, _ = turns.measured()
    assert [means[index]["loss"] for index in sorted(means)] == expected.losses
    assert all(torch.equal(turns.state()[name], tensor) for name, tensor in expected.state.items())


@pytest.mark.parametrize("where", MEMORIES)
def test_a_step_that_keeps_something_is_not_run_twice_where_it_draws_for_the_first_time(
    turns_of: Callable[..., tuple[Any, Any]], where: str
) -> None:
    """A step that had drawn nothing ran without seeds, and again with them once it had drawn; only buffers of the model
    were known to be changed twice by that."""
    turns, spec = turns_of(MEMORIES[where], DRAWS_LATE)
    turns.run(min)
    trains_as_the_plain_loop(turns, spec)


def test_nor_where_somebody_else_has_drawn_between_two_steps(
    turns_of: Callable[..., tuple[Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state at the last look stood for the one before a run. So what had been drawn since, or seeded as the job
    began, was taken for the run's own, and that was made again. What it keeps where nobody looks changed twice."""
    monkeypatch.setattr(builtins, "num_steps", 0, raising=False)
    turns, spec = turns_of("builtins.num_steps += 1; kept = builtins.num_steps", "1")

    def choose(ready: list[int]) -> int:
        torch.rand(1)
        return min(ready)

    builtins.num_steps = 0  # type: ignore[attr-defined]  # the inspection has counted, too
    turns.run(choose)
    assert builtins.num_steps == 8  # type: ignore[attr-defined]
    builtins.num_steps = 0  # type: ignore[attr-defined]
    trains_as_the_plain_loop(turns, spec)


def test_a_look_tells_what_validation_keeps_apart_from_what_training_keeps_and_a_plain_step_keeps_nothing() -> None:
    counts: list[float] = []

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = model(batch).mean()
        return loss

    def validate(model: nn.Module, batch: Any) -> torch.Tensor:
        loss = step(model, batch)
        counts.append(loss.item())
        return loss

    model = nn.Linear(2, 1)
    memory = StepMemory(weft.Workload(model=model, step=step, validate=validate, train=[1], optimizer=torch.optim.SGD))
    before = {learns: memory.look(learns=learns) for learns in (True, False)}
    step(model, torch.ones(3, 2)).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert {learns: memory.look(learns=learns) for learns in (True, False)} == before
    validate(model, torch.ones(3, 2))
    assert memory.look(learns=True) == before[True] is not None
    assert memory.look(learns=False) != before[False] is not None


class Meter:
    def __init__(self) -> None:
        self.total, self.of = 0.0, [bytearray(1)]


class Metered(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.meter, self.settings, self.both = Meter(), Meter(), [Meter(), 0]
        self.meter.weight = self.weight  # of the model, which training changes anyway
        self.table, self.watch = torch.zeros(1 << 19), collections.UserDict(n=0)


def test_what_changes_inside_of_an_object_that_no_snapshot_has_is_told() -> None:
    model = nn.Sequential(Metered(), nn.ReLU())
    attributes = LostAttributes(
        weft.Workload(model, (torch.zeros(1),), optimizer=torch.optim.SGD, step=lambda *_: None)
    )
    with torch.no_grad():
        model[0].weight.add_(1)
    model[0].meter.total += 1  # a number of an object of the user's
    model[0].both[0].total += 1
    assert attributes.names() == []
    model[0].meter.of[0][0] += 1
    assert attributes.names() == ["Workload.model.0.meter.of (a list)"]
    model[0].both[0].of[0][0] += 1
    model[0].settings = Meter()
    model[0].table += 1
    model[0].watch["n"] = 1
    assert sorted(attributes.names()) == [
        "0.settings (a Meter)",
        "0.table (of 2 MiB)",
        "0.watch (a UserDict)",
        "Workload.model.0.both.0.of (a list)",
        "Workload.model.0.meter.of (a list)",
    ]


turns = 0


def by_a_global(step: int) -> float:
    global turns
    turns += 1
    return 1 / turns


class OfACall:
    def __init__(self) -> None:
        self.turns = 0

    def __call__(self, step: int) -> float:
        self.turns += 1
        return 1 / self.turns

    def rate(self, step: int) -> float:
        return self(step)


def around(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    turns = 0

    def rate(step: int) -> float:
        nonlocal turns
        turns += 1
        return 1 / turns

    plain = lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    return lr_scheduler.SequentialLR(optimizer, [plain, lr_scheduler.LambdaLR(optimizer, rate)], milestones=[1])


def drawing(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    rates = iter(range(9))
    return lr_scheduler.LambdaLR(optimizer, lambda step: next(rates))


@pytest.mark.parametrize(
    ("scheduler", "lost"),
    [
        (lambda optimizer: lr_scheduler.LambdaLR(optimizer, by_a_global), ["lr_lambdas.0.globals.turns"]),
        (around, ["_schedulers.1.lr_lambdas.0.around.turns"]),
        (drawing, ["lr_lambdas.0.rates"]),
        (lambda optimizer: lr_scheduler.LambdaLR(optimizer, OfACall().rate), ["lr_lambdas.0.turns"]),
        (lambda optimizer: lr_scheduler.LambdaLR(optimizer, OfACall()), []),  # it is in the scheduler's state
        (lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1)), []),
        (lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=2), []),  # and then it raises
        (lr_scheduler.ReduceLROnPlateau, []),
    ],
)
def test_what_a_schedulers_functions_change_beside_its_state_is_told(
    scheduler: Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler], lost: list[str]
) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    found = lost_of_scheduler(make_scheduler(scheduler, optimizer))
    assert found == [f"Workload.scheduler.{name}" for name in lost]


class ByAGlobal(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        by_a_global(0)
        return super().step(closure)


class InItsGroup(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["turns"] = self.param_groups[0].get("turns", 0) + 1
        return super().step(closure)


def hooked(parameters: Any) -> torch.optim.Optimizer:
    optimizer, count = torch.optim.SGD(parameters), OfACall()
    optimizer.register_step_post_hook(lambda *_: setattr(count, "turns", count.turns + 1))
    return optimizer


@pytest.mark.parametrize(
    ("make", "lost"),
    [
        (ByAGlobal, ["Workload.optimizer.step.globals.turns"]),
        (hooked, ["Workload.optimizer._optimizer_step_post_hooks.0.count.turns"]),
        (InItsGroup, []),
        (torch.optim.AdamW, []),
    ],
)
def test_what_an_optimizers_step_changes_beside_its_state_is_told(make: Any, lost: list[str]) -> None:
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.ones(1)
    optimizer = make([parameter])
    variables = LostVariables.of_optimizer(optimizer)
    optimizer.step()
    assert variables.names() == lost
