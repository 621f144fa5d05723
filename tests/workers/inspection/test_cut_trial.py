"""Cut trials: gradients cross from stage to stage as in a job."""

from __future__ import annotations

import runpy
from itertools import chain, combinations
from pathlib import Path

import pytest
import torch
from torch import nn

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
