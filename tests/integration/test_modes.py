"""A model is told to train, and to evaluate, where the plain loop tells it: each epoch, and each validation."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from weft.spec.job_spec import JobSpec

_SAME = runpy.run_path(str(Path(__file__).with_name("test_same_result.py")))
RealDaemon, same_as_the_plain_loop = _SAME["RealDaemon"], _SAME["same_as_the_plain_loop"]

# Norms that are kept as they were trained, as fine-tuning does it; one that somebody has left in eval(), which the loop
# undoes; a dropout that the model itself turns off after some steps, until the next epoch. A model that takes no mode,
# and evaluates in a way of its own; and an eval() of a part, which no loop calls.
MODEL = """
import torch, weft
from torch import nn
from torch.nn.functional import mse_loss

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x):
        if self.training:
            self.calls += 1
            if self.calls % 5 == 4:
                self.drop.eval()
        return self.drop(self.norm(self.linear(x)).relu())

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.norm, self.out = nn.ModuleList(Block() for _ in range(3)), nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.out(self.norm(x))

class Frozen(nn.Sequential):
    def train(self, mode=True):
        super().train(mode)
        self[1].eval()
        return self

class Calm(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.out = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.scale = 1.0

    def train(self):
        self.scale = 1.0
        return super().train(True)

    def eval(self):
        self.scale = 0.5
        return super().train(False)

    def forward(self, x):
        return self.out(self.norm(self.first(x)).relu()) * self.scale

class CalmPart(nn.Linear):
    def eval(self):
        raise NotImplementedError

def of(model, held_out, **how):
    data = torch.randn(24, 4), torch.randn(24, 4)
    return weft.Workload(model, data, validation=data if held_out else None,
                         optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), **how)

def any_model(held_out):
    model = Model()
    model.norm.eval()
    return of(model, held_out, step=lambda model, batch: mse_loss(model(batch[0]), batch[1]))

def sequential(held_out):
    model = nn.Sequential(nn.Linear(4, 4), Block(), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model[2].eval()
    model.append(CalmPart(4, 4))
    return of(model, held_out, loss=nn.MSELoss())

def calm(held_out):
    return of(Calm(), held_out, loss=nn.MSELoss())

def own_sequential(held_out):
    model = Frozen(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 4))
    return of(model, held_out, loss=nn.MSELoss())
"""


@pytest.mark.slow
@pytest.mark.pairs(
    4,
    model=("any_model", "sequential", "own_sequential", "calm"),
    held_out=(False, True),
    how=(
        {},
        {"microbatches": 2, "recompute": True},
        {"microbatches": 2, "stages": 2, "schedule": "gpipe"},
        {"microbatches": 2, "stages": 3},
    ),
)
def test_what_a_model_makes_of_train_and_eval_counts_from_the_first_step_on(
    daemon: RealDaemon, tmp_path: Path, model: str, held_out: bool, how: dict[str, Any]
) -> None:
    """A job told its model nothing before its first validation: norms that `train()` keeps in eval() trained in the
    first epoch, or for good where there is no validation, and one that was built in eval() stayed in it. An `eval()` of
    the model's own was never called."""
    (tmp_path / "modes.py").write_text(MODEL)
    job = {"entry": f"modes.py:{model}", "args": {"held_out": held_out}, "batch_size": 8, "epochs": 3, "seed": 7}
    assert same_as_the_plain_loop(daemon, JobSpec.parse({"job": job, "strategy": how, "directory": str(tmp_path)}))


WEIGHED = """
import torch, weft
from torch import nn
from torch.nn.functional import mse_loss

def step(model, batch):
    output = model(batch[0])
    return {"loss": mse_loss(output, batch[1]), "size": output.abs().mean()}

def workload(own_step, counting):
    data, held_out = (torch.randn(16, 4), torch.ones(16, 4)), (torch.randn(12, 4), torch.zeros(12, 4))
    held_out[1][:counting] = 1
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    if own_step:
        how = {"step": step, "weight": lambda batch: batch[1].sum()}
    else:
        how = {"loss": mse_loss, "metrics": {"size": lambda output, _: output.abs().mean()}, "weight": torch.sum}
    return weft.Workload(model, data, validation=held_out,
                         optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), **how)
"""


@pytest.mark.slow
@pytest.mark.pairs(own_step=(True, False), counting=(0, 2), stages=(1, 2))
def test_a_validation_in_which_nothing_counts_has_names_as_any_other(
    daemon: RealDaemon, tmp_path: Path, own_step: bool, counting: int, stages: int
) -> None:
    """With a step it had none, and `[stop]` said that the job had no validation."""
    (tmp_path / "weighed.py").write_text(WEIGHED)
    args = {"own_step": own_step, "counting": counting}
    job = {"entry": "weighed.py:workload", "args": args, "batch_size": 4, "epochs": 2, "seed": 7}
    spec = {"job": job, "strategy": {"microbatches": 2, "stages": stages}, "directory": str(tmp_path)}
    assert same_as_the_plain_loop(daemon, JobSpec.parse(spec | {"stop": {"metric": "size", "patience": 5}}))
