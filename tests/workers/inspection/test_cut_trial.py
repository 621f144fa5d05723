"""Cut trials: gradients cross from stage to stage as in a job."""

from __future__ import annotations

import copy
import runpy
from collections import Counter, OrderedDict, deque
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from weft.workers.snapshots.stage_attributes import StageAttributes

_TRIALS = runpy.run_path(str(Path(__file__).with_name("cut_trials.py")))
whole_of, trial_of, differs = (_TRIALS[name] for name in ("whole_of", "trial_of", "differs"))


class Listener(nn.Module):
    """As Whisper's encoder begins: what the convolutions make is turned, so that blocks get it with other strides."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(8, 16, 3, padding=1), nn.Conv1d(16, 16, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16)) for _ in range(2))
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.gelu(self.conv2(nn.functional.gelu(self.conv1(x)))).permute(0, 2, 1)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean(1))


def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch).square().mean()
    return loss


@pytest.mark.parametrize("samples", [1, 3])
def test_a_gradient_has_its_own_strides_and_not_those_of_the_value_that_crossed(samples: int) -> None:
    """The trial took it from the leaf, which has it copied to the value's strides. The convolution's bias was then
    summed in another order than in the whole model, and sound cuts were refused."""
    torch.manual_seed(0)
    model, batch = Listener(), torch.randn(samples, 8, 40)
    recorded, whole = whole_of(model, step, batch)
    assert recorded.problems == {}
    units = range(1, len(recorded.units))
    for cuts in chain(combinations(units, 1), combinations(units, 2), [units]):
        assert differs(model, batch, trial_of(model, step, recorded, cuts), whole) is None


class Headed(nn.Module):
    """As MONAI's DynUNet under deep supervision: a block leaves its head in a list that the model has, too."""

    def __init__(self, holds: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block, self.head, self.out = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 2)
        heads = self.heads = [torch.rand(1)]
        self.block.heads = heads if holds == "a module" else None
        self.all = {"heads": (heads,)} if holds == "a dict" else None

        def leave(block: nn.Module, args: Any, made: torch.Tensor) -> None:
            place = block.heads or (self.all["heads"][0] if self.all else heads)
            place[0] = self.head(made)

        self.block.register_forward_hook(leave)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.block(x)) + self.heads[0]


@pytest.mark.parametrize("holds", ["a module", "a dict", "a hook"])
def test_a_list_that_several_hold_is_one_in_a_stage_and_as_it_was_behind_it(holds: str) -> None:
    """Each module had a copy of its own, and what one wrote the other did not find."""
    model, batch = Headed(holds), torch.randn(3, 4)
    first = model.heads[0]
    before = StageAttributes.of(model)
    recorded, whole = whole_of(model, step, batch)
    model.heads[0] = first
    trial = trial_of(model, step, recorded, [])
    for _ in range(2):
        assert differs(model, batch, trial, whole) is None
        assert model.heads == [first]
    assert trial.has_renewed()
    assert not trial.has_renewed()
    assert StageAttributes.of(model).is_as(before)


@pytest.mark.parametrize("container", [[0], {"a": 0}, {0}, deque([0], 1), OrderedDict(a=0), Counter("a"), {"a": [0]}])
def test_each_stage_has_contents_of_its_own_in_what_they_hold(container: Any) -> None:
    def contents() -> Any:
        return copy.deepcopy(container)

    def change() -> None:
        inner = container["a"] if isinstance(container, dict) and isinstance(container["a"], list) else container
        if isinstance(inner, dict):
            inner["b"] = 1
        else:
            (inner.add if isinstance(inner, set) else inner.append)(7)

    model = nn.Sequential(nn.Linear(1, 1))
    model[0].own = container
    built, was = StageAttributes.of(model), contents()
    first, second = built.copied(), built.copied()
    with first.installed():
        change()
        changed = contents()
    assert container == was != changed
    with second.installed():
        assert container == was
    assert second.is_as(built)
    assert not first.is_as(built)
    with first.installed():
        assert model[0].own is container
        assert container == changed
