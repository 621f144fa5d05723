"""Cut trials: gradients cross from stage to stage as in a job."""

from __future__ import annotations

import contextlib
from itertools import chain, combinations

import pytest
import torch
from torch import nn

from weft.workers.devices.host import HostDevice
from weft.workers.inspection.cut_trial import CutTrial, attributes_of
from weft.workers.inspection.ran import TrialOutcome
from weft.workload.cutting.recording import StepRecording
from weft.workload.cutting.skipped import SkippedCalls


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


def seed(number: int) -> None: ...


@pytest.mark.parametrize("samples", [1, 3])
def test_a_gradient_has_its_own_strides_and_not_those_of_the_value_that_crossed(samples: int) -> None:
    """The trial took it from the leaf, which has it copied to the value's strides. The convolution's bias was then
    summed in another order than in the whole model, and sound cuts were refused."""
    torch.manual_seed(0)
    model, batch = Listener(), torch.randn(samples, 8, 40)
    recording = StepRecording(model)
    recorded = recording.run(step, batch, seed)
    with recording.installed_again(seed):
        recorded.result.backward()
    whole = TrialOutcome.of(model, {"loss": recorded.result}, learns=True)
    assert recorded.problems == {}
    units = range(1, len(recorded.units))
    for cuts in chain(combinations(units, 1), combinations(units, 2), [units]):
        trial = CutTrial(
            model,
            step,
            recorded,
            cuts,
            SkippedCalls(recorded.returned),
            HostDevice(),
            values_of=lambda loss: {"loss": loss},
            precision=contextlib.nullcontext,
            attributes=attributes_of(model),
            writing=set(),
        )
        model.zero_grad(set_to_none=True)
        assert whole.difference(TrialOutcome.of(model, trial.run(batch, seed), learns=True)) is None
