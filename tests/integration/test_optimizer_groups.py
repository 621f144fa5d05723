"""An optimizer whose groups follow from all parameters of the model is that of the plain loop, wherever that is cut."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from weft.spec.job_spec import JobSpec

_SAME = runpy.run_path(str(Path(__file__).with_name("test_same_result.py")))
RealDaemon, same_as_the_plain_loop = _SAME["RealDaemon"], _SAME["same_as_the_plain_loop"]

SOURCE = """
import torch, weft
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

def by_layer(model, given):
    return torch.optim.SGD([{"params": [each], "lr": 0.1 * 0.8 ** number} for number, each in enumerate(given)])

def by_halves(model, given):
    given = list(given)
    half = len(given) // 2
    return torch.optim.Adagrad([{"params": given[:half], "lr": 0.01}, {"params": given[half:]}], lr=0.1)

def first_alone(model, given):
    return torch.optim.AdamW(list(given)[:3], lr=0.1)

def of_the_model(model, given):
    return torch.optim.AdamW([{"params": model.blocks.parameters(), "lr": 1e-3}, {"params": model.out.parameters()}])

def by_name(model, given):
    names = {each: name for name, each in model.named_parameters()}
    return torch.optim.Adam([(names[each], each) for each in given], lr=1 / len(names))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.out = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), nn.Linear(4, 4)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.out(x)

def workload(kind):
    model = Model()
    return weft.Workload(model, (torch.randn(20, 4), torch.randn(20, 4)), loss=nn.MSELoss(),
                         optimizer=lambda given: globals()[kind](model, given),
                         scheduler=lambda optimizer: LambdaLR(optimizer, [
                             lambda step, number=number: 0.9 ** (step * number)
                             for number in range(len(optimizer.param_groups))]))
"""


@pytest.mark.slow
@pytest.mark.pairs(
    5,
    kind=("by_layer", "by_halves", "first_alone", "of_the_model", "by_name"),
    how=(
        {"stages": 2, "schedule": "gpipe"},
        {"stages": 3, "recompute": True},
        {"stages": 4, "schedule": "interleaved"},
        {"stages": 2, "clip_norm": 1e9},  # buckets, which have one optimizer of all
    ),
)
def test_it_is_that_of_the_plain_loop(daemon: RealDaemon, tmp_path: Path, kind: str, how: dict[str, Any]) -> None:
    """Each stage had asked for an optimizer of its own parameters, which are others, and counted from 0, in each."""
    (tmp_path / "groups.py").write_text(SOURCE)
    job = {"entry": "groups.py:workload", "args": {"kind": kind}, "batch_size": 8, "epochs": 2, "seed": 7}
    spec = JobSpec.parse({"job": job, "strategy": {"microbatches": 4, **how}, "directory": str(tmp_path)})
    assert same_as_the_plain_loop(daemon, spec)
