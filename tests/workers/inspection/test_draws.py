"""Draws: cuts of a step that leaves out blocks at random are right whatever it leaves out, or refused."""

from __future__ import annotations

import random
import runpy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from weft.spec.job_spec import JobSpec
from weft.workers.devices.host import HostDevice
from weft.workers.inspection.cut_proof import MAX_PROVEN, telling
from weft.workers.inspection.inspection import inspect
from weft.workload.workload import Workload

_TRIALS = runpy.run_path(str(Path(__file__).with_name("cut_trials.py")))
whole_of, trial_of, differs = (_TRIALS[name] for name in ("whole_of", "trial_of", "differs"))


class Block(nn.Module):
    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.own, self.other = nn.Linear(4, 4), nn.Linear(4, 4) if reads else None

    def forward(self, x: torch.Tensor, read: torch.Tensor | None = None) -> torch.Tensor:
        y = x + nn.functional.dropout(self.own(x).tanh(), 0.1, self.training)
        return y if self.other is None or read is None else y + self.other(read).mean(1, keepdim=True)


class Translator(nn.Module):
    """As BART is made: what the encoder's last block that is called returns goes to every block of the decoder, and the
    first module behind the encoder gets something else."""

    def __init__(self, draw: Callable[[], Any], behind: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.draw, self.behind = draw, behind
        self.words, self.encoder = nn.Embedding(9, 4), nn.ModuleList(Block(False) for _ in range(3))
        self.others, self.decoder = nn.Embedding(9, 4), nn.ModuleList(Block(True) for _ in range(3))
        self.head = nn.Linear(4, 9)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = nn.functional.dropout(self.words(source), 0.1, self.training)
        for block in self.encoder:
            if not (self.training and self.draw() < 0.4):
                x = block(x)
        x = self.behind(x)
        y = self.others(target)
        for block in self.decoder:
            if not (self.training and self.draw() < 0.4):
                y = block(y, read=x)
        return self.head(y)


def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(batch["source"], batch["target"])
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["target"].flatten())


def given(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def data(count: int) -> dict[str, torch.Tensor]:
    return {"source": torch.randint(9, (count, 5)), "target": torch.randint(9, (count, 4))}


@pytest.mark.parametrize("least", [7, 9])
def test_blocks_before_a_module_that_gets_something_else_may_be_left_out(least: int) -> None:
    """The proof took the cut with the blocks that one run had called. In another the first call behind the cut was that
    of the second embedding: its token numbers were sent in the place of what the encoder had made, and it failed."""
    torch.manual_seed(1)
    model, batch = Translator(partial(torch.rand, ()), given), data(3)
    runs = [whole_of(model, step, batch, microbatch) for microbatch in range(24)]
    recorded, _ = min(runs, key=lambda run: abs(len(run[0].called) - least))  # 9: all; 7: two are known by name alone
    assert recorded.varies
    cuts = [unit for unit in range(1, len(recorded.units)) if unit not in recorded.problems]
    called = set()
    for chosen in ([cuts[1]], [cuts[2], cuts[3]], cuts):
        trial = trial_of(model, step, recorded, chosen)
        for microbatch, (run, whole) in enumerate(runs):
            assert differs(model, batch, trial, whole, microbatch) is None
            called.add(run.called)
    assert len(called) > 8


@pytest.mark.parametrize("draw", [partial(torch.rand, ()), random.random])
def test_cuts_that_other_left_out_blocks_break_are_refused_with_what_to_do(draw: Callable[[], Any]) -> None:
    """What a line behind the encoder makes is known by the block before it, which is another one each time."""
    torch.manual_seed(1)
    workload = Workload(
        Translator(draw, lambda x: nn.functional.layer_norm(x, (4,))),
        data(8),
        step=step,
        optimizer=partial(torch.optim.SGD, lr=0.1),
    )
    spec = JobSpec.parse(
        {
            "job": {"entry": "a.py:b", "steps": 1, "batch_size": 4, "seed": 3},
            "strategy": {"stages": 2},
            "directory": "/",
        }
    )
    told = inspect(workload, spec, HostDevice())
    names = [unit["name"] for unit in told["units"]]
    problems = {names[unit]: text for unit, text in told["cut_problems"]}
    assert "leave it out inside of its own forward" in problems["others"]
    assert not {"decoder.1", "head"} & {name for name, text in problems.items() if "left out when" not in text}


def test_the_runs_that_a_cut_is_tried_with_leave_out_each_block_that_some_run_leaves_out() -> None:
    every, nothing = frozenset(range(6)), frozenset[str]()
    called = {1: every - {0, 1}, 2: every - {2}, 3: every, 4: every - {0}, 5: every - {1, 2}}
    assert telling({run: (calls, nothing) for run, calls in called.items()}) == [3, 1, 2, 4, 5]
    assert telling({1: (every, nothing), 2: (every, nothing)}) == [1]
    assert telling({1: (every - {0}, nothing), 2: (every - {1}, nothing)}) == [1, 2]
    assert len(telling({run: (every - {run}, nothing) for run in every})) == 1 + MAX_PROVEN


def test_what_is_left_out_together_is_left_out_alone_too() -> None:
    calls, lines = frozenset({1, 2, 3}), frozenset[str]()
    together = {1: calls, 2: calls, 3: calls - {1, 2}, 4: calls - {1, 2}, 5: calls - {1}, 6: calls - {2}}
    assert telling({run: (called, lines) for run, called in together.items()}) == [1, 3, 5, 6]


def test_and_each_line_that_some_run_leaves_out_but_they_begin_with_the_one_that_calls_most() -> None:
    calls, lines = frozenset({1, 2}), frozenset({"add", "mul"})
    assert telling({1: (calls, lines), 2: (calls, lines - {"add"}), 3: (calls, lines)}) == [1, 2]
    assert telling({1: (calls - {2}, lines), 2: (calls, frozenset())}) == [2, 1]
