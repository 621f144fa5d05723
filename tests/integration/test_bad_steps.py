"""Steps that cannot train, or cannot be cut: a sentence that says what stands where, and what to do."""

from __future__ import annotations

import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

_REAL = runpy.run_path(str(Path(__file__).with_name("real_daemon.py")))
RealDaemon, SECONDS = _REAL["RealDaemon"], _REAL["SECONDS"]

SEED, NUM_SAMPLES, BATCH = 3, 24, 8
ORDER = torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(SEED)).tolist()
ODD = ORDER[BATCH + 1]  # the sample that is unlike the others, in step 1, where nobody inspects any more
SOURCE = """
import os, types, torch, weft
from torch import nn
from torch.nn.functional import mse_loss

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.three, self.spare = nn.Linear(1, 4), nn.Linear(4, 4), nn.Linear(4, 1), nn.Linear(4, 4)
        {init}

    def forward(self, x, odd):
        {forward}

    {method}

def loss(output, batch):
    return mse_loss(output, batch["x"])

def step(model, batch):
    odd = bool(batch["odd"].any())
    {step}

def collate(items):
    batch = torch.utils.data.default_collate(items)
    {collate}
    return batch

def workload():
    torch.manual_seed(0)
    inputs = torch.linspace(0, 1, {count}).reshape(-1, 1)
    items = [{{"x": x, "odd": number == {odd}}} for number, x in enumerate(inputs)]
    {items}
    return weft.Workload(Model(), items, step=step, {more}
                         optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01))
"""
SOUND = {
    "init": "pass",
    "method": "pass",
    "forward": "return self.three(self.two(self.one(x)))",
    "step": "return loss(model(batch['x'], odd), batch)",
    "collate": "pass",
    "items": "pass",
    "more": "",
}
SAME_CALLS = "a step of several stages must call the same modules in the same order for every batch; "
TWO_WAYS_OUT = "cut elsewhere (strategy.split), or make what is computed there an nn.Module of its own"


def flow(usual: str, odd: str) -> dict[str, str]:
    return {"forward": f"return ({odd}) if odd else ({usual})"}


# what is wrong → (what takes the place of what is sound, strategy, parts of the sentence)
CASES: Mapping[str, tuple[dict[str, str], dict[str, Any], list[str]]] = {
    "no loss": (
        {"step": "model(batch['x'], odd)"},
        {},
        ["Workload.step returned None as the loss; it must return the loss, a scalar tensor, or a mapping with it"],
    ),
    "no loss by its name": (
        {"step": "return {'los': loss(model(batch['x'], odd), batch)}"},
        {},
        ["Workload.step returned dict without 'loss'"],
    ),
    "a loss of each sample": (
        {"step": "return model(batch['x'], odd)"},
        {},
        ["Workload.step returned a tensor of shape (4, 1) as the loss"],
    ),
    "a loss as a number": (
        {"step": "return loss(model(batch['x'], odd), batch).item()"},
        {},
        ["Workload.step returned a loss without a gradient (float); return the tensor as the model's parameters"],
    ),
    "a step that goes back by itself": (
        {"step": "value = loss(model(batch['x'], odd), batch); value.backward(); return value"},
        {},
        [
            "the step calls backward() at line.py:",
            "; leave it out, as what the optimizer does",
            "two that take turns, each with an optimizer of its own (a GAN), are no job",
        ],
    ),
    "a step that clips a gradient": (
        {"step": "nn.utils.clip_grad_norm_(model.parameters(), 1e-6); return loss(model(batch['x'], odd), batch)"},
        {},
        ["the step calls clip_grad_norm_ at line.py:", "leave it out, as backward(): strategy.clip_norm bounds the"],
    ),
    "an item of another structure": (
        {"items": f"del items[{ODD}]['odd']"},
        {},
        [f"sample {ODD} of Workload.train: the item has no ['odd'], and had it in sample ", "or give Workload.collate"],
    ),
    "a batch of another structure": (
        {"more": "collate=collate,", "collate": "batch |= {'more': 1} if batch['odd'].any() else {}"},
        {"microbatches": 2},
        ["the batch has ['more'], and had none before; every batch must have the same structure"],
    ),
    "a batch of another dtype": (
        {
            "more": "collate=collate,",
            "collate": "batch['x'] = batch['x'].double() if batch['odd'].any() else batch['x']",
        },
        {"microbatches": 2},
        ["the batch['x'] is a tensor of float64, and was a tensor of float32 before"],
    ),
    "a split that does not exist": (
        {},
        {"stages": 2, "split": ["tree"]},
        ["strategy.split: no unit is called 'tree'; did you mean 'three'?"],
    ),
    "a split that runs in another order": (
        {},
        {"stages": 3, "split": ["three", "two"]},
        ["strategy.split: 'two' runs before 'three'; give them in the order in which they run"],
    ),
    "a split at a module that is called again": (
        {"forward": "return self.three(self.two(self.two(self.one(x))))"},
        {"stages": 2, "split": ["two"]},
        ["strategy.split: 'two' is called several times in a step", "called once; give some of three"],
    ),
    "modules that are called again": (
        {"step": "return loss(model.two(model.two(batch['x'].expand(-1, 4))), batch)"},
        {"stages": 2},
        ["no stage begins with a module that the step calls several times (two): call it once"],
    ),
    "a number that is asked for": (
        {"step": "x = model.one(batch['x']); x = x / x.max().item(); return loss(model.three(model.two(x)), batch)"},
        {"stages": 2},
        [
            "change what stands in the way of more: before 'two': .item() at line.py:",
            " needs the numbers of the result of max, and every stage runs that line, also those that do not have them",
        ],
    ),
    "a choice by a number": (
        {"step": "x = model.one(batch['x']); x = x if x.sum() > 0 else -x; return model.three(model.two(x)).sum()"},
        {"stages": 2},
        ["if, or bool(), at line.py:", " needs the numbers of the result of gt, and every stage runs that line"],
    ),
    "rows that are chosen by numbers": (
        {"step": "x = model.one(batch['x']); return model.three(model.two(x[x[:, 0] > x[:, 1]])).square().sum()"},
        {"stages": 2, "split": ["three"]},
        [
            "an index at line.py:",
            " needs the numbers of the output of one (Linear), which another stage has; ",
            TWO_WAYS_OUT,
        ],
    ),
    "an object with a tensor in it": (
        {
            "init": "one = self.one.forward; self.one.forward = lambda x: types.SimpleNamespace(x=one(x)); "
            "two = self.two.forward; self.two.forward = lambda given: two(given.x)",
        },
        {"stages": 2, "split": ["two"]},
        [
            "cannot be cut before unit 'two': modules before it pass on an object that is no tensor, tuple",
            'it can be before ["three"]',
        ],
    ),
    "a sparse gradient that is clipped": (  # a job came to its first backward before it was told
        {
            "init": "self.spare = nn.Embedding(4, 4, sparse=True)",
            "forward": "return self.three(self.two(self.one(x)) + self.spare((x > 0).long()[:, 0]))",
        },
        {"clip_norm": 1.0},
        ["'spare.weight' gets a sparse gradient, and strategy.clip_norm looks at dense ones; ", "or leave clip_norm"],
    ),
    "a sparse tensor": (
        {
            "init": "one = self.one.forward; self.one.forward = lambda x: one(x).to_sparse(); "
            "two = self.two.forward; self.two.forward = lambda given: two(given.to_dense())",
        },
        {"stages": 2, "split": ["two"]},
        ["cannot be cut before unit 'two': one passes on or gets a sparse or nested tensor, and only plain"],
    ),
    "a gradient inside of the step": (
        {
            "step": "x = batch['x'].requires_grad_(); y = model(x, odd); "
            "return torch.autograd.grad(y.sum(), x, create_graph=True)[0].square().mean() + loss(y, batch)"
        },
        {"stages": 2},
        ["with a stage that begins there the step raises RuntimeError: ", "(torch.autograd.grad does), cut elsewhere"],
    ),
    "state outside of buffers": (
        {
            "init": "self.calls = [0]",
            "forward": "return self.three(self.two(self.scaled(self.one(x))))",
            "method": "def scaled(self, x):\n        self.calls[0] += 1\n        return x * self.calls[0]",
        },
        {"stages": 2},
        [
            "run again with the same batch, the whole step gives something else: the loss (",
            ") differs from that of its first run; keep in buffers of the model what lasts from call to call",
        ],
    ),
    "a parameter that is changed in each forward, which runs twice": (  # it was, and nobody was told
        {
            "init": "self.spare.requires_grad_(False)",
            "forward": "self.spare.weight.data.lerp_(self.two.weight.data, 0.1); "
            "return self.three(self.two(self.one(x)) + self.spare(self.one(x)))",
        },
        {"recompute": True},
        ["strategy.recompute = true runs each forward twice, and the step itself changes the parameter 'spare.weight'"],
    ),
    "a number that a module keeps by itself": (  # another process read the one that the model was built with
        {
            "init": "one, self.two.kept = self.one.forward, 1.0; "
            "self.one.forward = lambda x: setattr(self.two, 'kept', float(x.sum())) or one(x)",
            "step": "return loss(model(batch['x'], odd), batch) * model.two.kept",
        },
        {"stages": 2, "split": ["two"]},
        ["before 'two': cut there, the loss (", "let a module return what is read of it"],
    ),
    "what a module keeps by itself": (
        {
            "init": "one = self.one.forward; "
            "self.one.forward = lambda x: setattr(self.two, 'kept', float(x.sum())) or one(x)",
            "step": "return loss(model(batch['x'], odd), batch) * model.two.kept",
        },
        {"stages": 2, "split": ["two"]},
        ["the step raises AttributeError: 'Linear' object has no attribute 'kept'; what a module keeps by itself"],
    ),
    "a stage's first module is skipped": (
        flow("self.three(self.two(self.one(x)))", "self.one(x)[:, :1]"),
        {"stages": 2, "split": ["two"]},
        ["the step has ended without a call of two, with which a stage begins; ", SAME_CALLS],
    ),
    "a module that was not called before": (
        flow("self.three(self.two(self.one(x)))", "self.three(self.spare(self.two(self.one(x))))"),
        {"stages": 2, "split": ["two"]},
        [
            "spare (Linear) is called in the stage from two to the end of the step, and was not called there when",
            SAME_CALLS,
        ],
    ),
    "a line that draws, in some batches": (  # it was told that other modules had been called
        flow("self.three(self.two(self.one(x)))", "self.three(torch.dropout(self.two(self.one(x)), 0.5, True))"),
        {"stages": 2, "split": ["three"]},
        [
            "three, with which a stage begins, is called with the result of dropout at line.py:",
            " before training; the stage runs that line, and cannot here: the result of dropout at line.py:",
            " is drawn at random; make one nn.Module of the line and the `if` around it, which is called for every",
        ],
    ),
    "a gradient that nobody awaits": (  # it was dropped
        flow("self.three(self.two(self.one(x)).detach() + 0)", "self.three(self.two(self.one(x)) + 0)"),
        {"stages": 2, "split": ["three"]},
        ["passes on a tensor that parameters have a part in, and had none when the step was tried", "(stages = 1 cuts"],
    ),
    "modules in another order": (
        flow("self.three(self.two(self.spare(self.one(x))))", "self.three(self.spare(self.two(self.one(x))))"),
        {"stages": 2, "split": ["two"]},
        ["spare (Linear) is called in the stage from two to the end of the step", SAME_CALLS],
    ),
    "validation in another order": (
        {
            "forward": "return self.three(self.two(self.spare(self.one(x))))",
            "more": "validation=items, validate=lambda model, batch: "
            "loss(model.three(model.spare(model.two(model.one(batch['x'])))), batch),",
        },
        {"stages": 2},
        ["validation (Workload.validate) calls other modules, or in another order; cut where both"],
    ),
    "a model that is another one in each process": (
        {
            "init": "self.name = 'of_' + ''.join(chr(97 + int(each)) for each in str(os.getpid())); "
            "setattr(self, self.name, nn.Linear(4, 4))",
            "forward": "return self.three(getattr(self, self.name)(self.one(x)))",
        },
        {"stages": 2},
        ["Workload.model has no 'of_", "and had it when it was inspected; the function must build the same model"],
    ),
    "a model with names that a library counts up in each process": (
        {
            "init": "os.num_layers = getattr(os, 'num_layers', 0) + 1; "
            "self.name = f'layer_{os.num_layers}'; setattr(self, self.name, nn.Linear(4, 4))",
            "forward": "return self.three(getattr(self, self.name)(self.one(x)))",
        },
        {"stages": 2},
        ["Workload.model has 'layer_2.", "where it had 'layer_1.", "let the function begin that count anew"],
    ),
    "a buffer that gets its shape in the first forward": (  # an observer's: all was trained, and lost at the end
        {
            "init": "self.register_buffer('scale', torch.ones(1))",
            "forward": "self.scale.resize_(4).fill_(1.0); return self.three(self.two(self.one(x)) * self.scale)",
        },
        {},
        [
            "the buffer 'scale' of Workload.model has become (4,) float32, where (1,) float32 was planned",
            "(or call the model there with a batch)",
            "step 0 (iteration 0))",
        ],
    ),
}


def refused(daemon: RealDaemon, broken: Mapping[str, str], strategy: Mapping[str, Any]) -> str:
    source = SOURCE.format(**SOUND | broken, odd=ODD, count=NUM_SAMPLES)
    spec = daemon.spec(source, strategy={"microbatches": 2} | strategy, batch_size=BATCH, epochs=2, seed=SEED)
    done = daemon.weft("submit", "-f", "--json", daemon.spec_file(spec))
    result = daemon.client.wait(daemon.client.jobs()[0]["job"])
    assert (result["state"], result["exit_code"], done.returncode) == ("failed", 2, 2), result
    error: str = result["error"]
    assert error in done.stderr
    assert len(error.splitlines()) == 1
    assert str(spec.entry_file) not in error  # its name is enough
    return error


@pytest.mark.days(3)
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_step_that_cannot_be_run_or_cut_is_told_with_the_place_and_the_remedy(daemon: RealDaemon, name: str) -> None:
    broken, strategy, told = CASES[name]
    error = refused(daemon, broken, strategy)
    for part in told:
        assert part in error


@pytest.mark.slow
def test_a_module_that_a_batch_skips_within_one_stage_is_nobodys_business(daemon: RealDaemon) -> None:
    broken = flow("self.three(self.spare(self.two(self.one(x))))", "self.three(self.spare(self.one(x)))")
    source = SOURCE.format(**SOUND | broken, odd=ODD, count=NUM_SAMPLES)
    strategy = {"microbatches": 2, "stages": 2, "split": ["three"]}
    spec = daemon.spec(source, strategy=strategy, batch_size=BATCH, epochs=2, seed=SEED)
    assert daemon.run(spec)["state"] == "completed"
