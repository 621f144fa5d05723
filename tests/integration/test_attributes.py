"""What modules remember in attributes is a part of training, as buffers are: it goes on after a loss and a resume."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from weft.reference.loop import train

_RECOVERY = runpy.run_path(str(Path(__file__).with_name("test_recovery.py")))
held_behind_a_snapshot, check_is_undisturbed, kill_worker, PASS_GATE = (
    _RECOVERY[name] for name in ("held_behind_a_snapshot", "check_is_undisturbed", "kill_worker", "PASS_GATE")
)

# A count, a window, a tensor, a generator of its own, and one that tells its state by torch's own way.
REMEMBERING = """
import collections
import torch

class Remembering(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.calls, self.recent, self.scale = 0, collections.deque(maxlen=3), torch.ones(1)
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x):
        if self.training:
            self.calls += 1
            self.recent.append(float(x.detach().mean()))
            self.scale.mul_(0.999)
            x = x + 0.01 * torch.rand(1, generator=self.generator)
        return x * self.scale.clone() + 0.01 * sum(self.recent) + 0.1 / (self.calls + 1)

class Telling(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.told = torch.nn.Linear(8, 8), [0.0]

    def forward(self, x):
        if self.training:
            self.told[0] += 0.01
        return self.linear(x) * (1 + self.told[0])

    def get_extra_state(self):
        return {"told": self.told}

    def set_extra_state(self, state):
        self.told = state["told"]
"""
MODEL = (
    "torch.nn.Sequential(torch.nn.Linear(8, 8), Remembering(), Telling(), torch.nn.Tanh(), Remembering(), Telling())"
)
WORKLOAD = """
import weft

class Whole(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Remembering()
        self.layers = {MODEL}

    def forward(self, x):
        return self.inner(self.layers(x))

def workload(own_forward=False):
    data = torch.randn(16, 8), torch.randn(16, 8)
    optimizer = lambda parameters: torch.optim.Adam(parameters, lr=0.05)
    model = Whole() if own_forward else {MODEL}
    return weft.Workload(model, data, loss=torch.nn.functional.mse_loss, validation=data, optimizer=optimizer)
""".replace("{MODEL}", MODEL)


@pytest.mark.slow(seconds=2)
@pytest.mark.pairs(own_forward=(True, False), stages=(1, 2), then=(1, 2))
def test_a_resumed_job_goes_on_with_them(daemon: Any, own_forward: bool, stages: int, then: int) -> None:
    if own_forward:
        stages = then = 1  # between stages they would have to be buffers

    def spec(stages: int, steps: int, **fields: Any) -> Any:
        strategy = {"stages": stages, "microbatches": 2}
        args = {"own_forward": own_forward}
        return daemon.spec(REMEMBERING + WORKLOAD, strategy=strategy, batch_size=8, steps=steps, args=args, **fields)

    half = spec(stages, 6)
    first = daemon.run(type(half).parse(half.to_wire() | {"checkpoint": {"every": "2 steps"}}))
    assert first["state"] == "completed", first["error"]
    on = daemon.run(spec(then, 9, resume_from=first["run_dir"]))
    assert on["state"] == "completed", on["error"]
    for result, steps in ((first, 6), (on, 9)):
        plain, ours = train(spec(1, steps)).state, load_file(Path(result["model"]))
        assert plain.keys() == ours.keys()
        assert [name for name in plain if not torch.equal(plain[name], ours[name])] == []


# The first stages count in the model's own lines and the second one in a module, and the last one goes by both.
COUNTING = """
{PASS_GATE}
import torch, weft

class Counting(torch.nn.Linear):
    def __init__(self):
        super().__init__(8, 8)
        self.warmth = 0.0

    def forward(self, x):
        if self.training:
            self.warmth += 0.01
        return super().forward(x) * self.warmth

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.calls = torch.nn.ModuleList([torch.nn.Linear(8, 8), Counting(), torch.nn.Linear(8, 8)]), 0

    def forward(self, x):
        if self.training:
            self.calls += 1
        for layer in self.layers:
            x = layer(x).tanh()
        return x / (1 + self.calls / 10)

def workload(gates=("", ""), calls_at=(0, 0)):
    def step(model, batch):
        for gate, at in zip(gates, calls_at):
            if model.calls == at:
                pass_gate(gate, f"of call {at}")
        return torch.nn.functional.mse_loss(model(batch[0]), batch[1])

    data = torch.randn(48, 8), torch.randn(48, 8)
    optimizer = lambda parameters: torch.optim.Adam(parameters, lr=0.05)
    return weft.Workload(Model(), data, step=step, validation=data, optimizer=optimizer)
""".replace("{PASS_GATE}", PASS_GATE)


@pytest.mark.parametrize("recompute", [False, True])
def test_numbers_that_stages_count_alike_go_on_in_other_stages(daemon: Any, recompute: bool) -> None:
    def spec(stages: int, steps: int, **fields: Any) -> Any:
        strategy = {"stages": stages, "microbatches": 2, "recompute": recompute}
        return daemon.spec(COUNTING, strategy=strategy, batch_size=8, steps=steps, **fields)

    half = spec(3, 8)
    first = daemon.run(type(half).parse(half.to_wire() | {"checkpoint": {"every": "2 steps"}}))
    on = daemon.run(spec(2, 15, resume_from=first["run_dir"]))
    for result, steps in ((first, 8), (on, 15)):
        assert result["state"] == "completed", result["error"]
        plain, ours = train(spec(1, steps)).state, load_file(Path(result["model"]))
        assert [name for name in plain if not torch.equal(plain[name], ours[name])] == []


# A module without parameters in a block of the first stage, which skipped it tries elsewhere, and one whose weight is
# another's, too: each has counted in its own stage alone.
COUNTING_INSIDE = """
import torch, weft

class Late(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * (1 + max(0, self.calls - 5) / 9)

class Block(Late):
    def __init__(self):
        super().__init__()
        self.late, self.layer = Late(), torch.nn.Linear(4, 4)

    def forward(self, x):
        return super().forward(self.layer(self.late(x)))

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([Block(), torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), Block()])
        self.layers[3].layer.weight = self.layers[0].layer.weight

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x

def workload():
    data = torch.randn(48, 4), torch.randn(48, 4)
    step = lambda model, batch: torch.nn.functional.mse_loss(model(batch[0]), batch[1])
    return weft.Workload(Model(), data, step=step, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
"""


# The last stage alone runs the lines that count, behind the last layer and behind the loss, and the first one alone a
# layer that does: the others have those numbers as they were when the job began, or went on.
COUNTING_APART = """
import torch, weft

class Begins(torch.nn.Linear):
    def forward(self, x):
        return self.begin(super().forward(x))

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([Begins(4, 4), *(torch.nn.Linear(4, 4) for _ in range(3))])
        self.layers[0].begin = self.begin
        self.begun = self.seen = self.steps = self.turns = 0

    def begin(self, x):
        self.begun += self.training
        return x * (1 + 1 / (1 + self.begun))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        self.seen += self.training * len(x)
        return x * (1 + 1 / (1 + self.seen))

def workload(peeks_at=None, asks=False, begins_anew=False):
    def step(model, batch):
        model.turns += 1
        y = model(batch[0])
        loss = (1 + 1 / (1 + model.steps)) * torch.nn.functional.mse_loss(y, batch[1])
        model.steps += model.training
        if begins_anew and model.turns == 9:
            model.turns = 0
        return loss * (1 + 1 / model.turns)

    def peek(module, *_):
        module.peeked += 1
        if module.peeked == peeks_at:
            model.steps

    model = Model()
    if peeks_at is not None:
        model.layers[0].peeked = 0
        model.layers[0].register_forward_hook(peek)
    data = torch.randn(48, 4), torch.randn(48, 4)
    optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    on_epoch = (lambda values: print(model.begun, model.steps)) if asks else None
    return weft.Workload(model, data, step=step, validation=data, optimizer=optimizer, on_epoch=on_epoch)
"""


@pytest.mark.slow(seconds=2)
@pytest.mark.parametrize("recompute", [False, True])
def test_numbers_that_one_stage_counts_go_on_in_other_stages(daemon: Any, recompute: bool) -> None:
    strategy = {"microbatches": 2, "recompute": recompute}
    before: dict[str, Any] = {}
    for stages, steps in ((3, 4), (2, 8), (3, 12), (1, 14)):
        spec = daemon.spec(COUNTING_APART, strategy=strategy | {"stages": stages}, batch_size=8, steps=steps, **before)
        result = daemon.run(type(spec).parse(spec.to_wire() | {"checkpoint": {"every": "2 steps"}}))
        assert result["state"] == "completed", result["error"]
        plain = train(daemon.spec(COUNTING_APART, strategy=strategy, batch_size=8, steps=steps)).state
        ours = load_file(Path(result["model"]))
        assert [name for name in plain if not torch.equal(plain[name], ours[name])] == []
        before = {"resume_from": result["run_dir"]}


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (
            {"peeks_at": 40},
            "the attribute 'steps' is used in the process of a stage that does not change it, as another",
        ),
        ({"asks": True}, r"the attribute '\w+' is used in the process of a stage that does not change it, as another"),
        ({"begins_anew": True}, "the attribute 'turns' is changed where stages have left the step that change it, too"),
    ],
    ids=["read", "read in on_epoch", "changed"],
)
def test_who_comes_to_use_what_stages_elsewhere_count_is_told(daemon: Any, args: Any, why: str) -> None:
    """Behind the runs that it was tried in."""
    spec = daemon.spec(COUNTING_APART, strategy={"stages": 2}, batch_size=8, epochs=9, args=args)
    result = daemon.run(spec)
    assert result["state"] == "failed"
    assert re.search(why, result["error"])


@pytest.mark.slow(seconds=2)
def test_what_a_stage_has_tried_of_others_modules_is_none_of_their_numbers(daemon: Any) -> None:
    before: dict[str, Any] = {}
    for stages, steps in ((3, 4), (2, 8), (3, 12)):
        spec = daemon.spec(
            COUNTING_INSIDE, strategy={"stages": stages, "microbatches": 2}, batch_size=8, steps=steps, **before
        )
        result = daemon.run(type(spec).parse(spec.to_wire() | {"checkpoint": {"every": "2 steps"}}))
        assert result["state"] == "completed", result["error"]
        plain = train(daemon.spec(COUNTING_INSIDE, strategy={"microbatches": 2}, batch_size=8, steps=steps)).state
        ours = load_file(Path(result["model"]))
        assert [name for name in plain if not torch.equal(plain[name], ours[name])] == []
        before = {"resume_from": result["run_dir"]}


@pytest.mark.slow(seconds=7)
@pytest.mark.pairs(schedule=("gpipe", "1f1b"))  # one a day
def test_so_they_do_behind_a_loss(daemon: Any, schedule: str) -> None:
    strategy = {"stages": 3, "microbatches": 2, "schedule": schedule}
    with held_behind_a_snapshot(daemon, strategy, source=COUNTING, batch_size=8) as (job, spec, gate):
        kill_worker(daemon, job, "cpu")
        daemon.until_logged(job, "goes on after step")
        gate.open()
        check_is_undisturbed(daemon, job, spec)
        result = daemon.client.show(job)
        plain, ours = train(spec).state, load_file(Path(result["run_dir"], "model.safetensors"))
        assert [name for name in plain if not torch.equal(plain[name], ours[name])] == []


@pytest.mark.days(2)
@pytest.mark.slow(seconds=4)
@pytest.mark.pairs(3, strategy=("one stage", "pipeline", "replicas"), victim=("cpu", "loader"))
def test_who_was_not_killed_puts_them_back_too(daemon: Any, strategy: str, victim: str) -> None:
    layers = (
        "torch.nn.Dropout(0.1),\n        torch.nn.Linear(width, width), torch.nn.Tanh(), torch.nn.Linear(width, 1))"
    )
    assert layers in _RECOVERY["SOURCE"]
    source = REMEMBERING + _RECOVERY["SOURCE"].replace(
        layers,
        "torch.nn.Dropout(0.1), Remembering(), Telling(), torch.nn.Tanh(), Remembering(), torch.nn.Linear(8, 1))",
    )
    with held_behind_a_snapshot(daemon, _RECOVERY["STRATEGIES"][strategy], source=source) as (job, spec, gate):
        kill_worker(daemon, job, victim)
        daemon.until_logged(job, "goes on after step")
        gate.open()
        check_is_undisturbed(daemon, job, spec)


def test_what_no_snapshot_can_have_is_told_by_name(daemon: Any) -> None:
    source = REMEMBERING.replace("self.calls += 1", "self.calls += 1; self.seen = object()") + WORKLOAD
    result = daemon.run(daemon.spec(source, steps=2, batch_size=8))
    log = daemon.log_of(result["job"])
    assert "state: a step changes 1.seen (a object), 4.seen (a object), which no snapshot or checkpoint has" in log


@pytest.mark.slow(seconds=2)
def test_what_a_forward_keeps_of_values_that_others_have_is_no_memory(daemon: Any) -> None:
    """Behind a run of a stage a module may hold what stands for another one's values."""
    source = """
import torch, weft

class Keeping(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        self.kept = []
        for layer in self.layers:
            x = layer(x)
            self.last = x
            self.kept.append((x, x.shape))
        return x

def workload():
    data = torch.randn(16, 4), torch.randn(16, 4)
    return weft.Workload(Keeping(), data, loss=torch.nn.functional.mse_loss, validation=data,
                         optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
"""
    spec = daemon.spec(source, strategy={"stages": 2, "microbatches": 2}, batch_size=8, steps=6)
    result = daemon.run(type(spec).parse(spec.to_wire() | {"checkpoint": {"every": "2 steps"}}))
    assert result["state"] == "completed", daemon.log_of(result["job"])
    assert "state: " not in daemon.log_of(result["job"])
    plain, ours = train(spec).state, load_file(Path(result["model"]))
    assert [name for name in plain if not torch.equal(plain[name], ours[name])] == []
