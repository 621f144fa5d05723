"""Substitutes, and what else a recording of a step refuses or notes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from weft.workload.cutting.recording import StepRecording
from weft.workload.cutting.substitutes import Substitutes
from weft.workload.workload import WorkloadError


def test_what_was_made_last_of_what_a_call_would_have_got_stands_for_what_it_returns() -> None:
    links = [("c:0", "b:0"), ("b:0", "a:0"), ("x:0", "y:0")]
    known = Substitutes(links, ["c:0", "d:0"])
    assert known.names == {"a:0", "b:0"}
    first, second = torch.zeros(1), torch.ones(1)
    known.see("a:0", first)
    assert known.of("c:0") is first
    known.see("b:0", second)
    assert known.of("c:0") is second
    assert known.of("d:0") is None
    known.begin()
    assert known.of("c:0") is None


def test_a_step_in_which_an_optimizer_steps_is_refused_with_the_line() -> None:
    """It trained on: of gradients that were not yet there nothing was updated, and zero_grad() took those that were."""
    model = nn.Linear(2, 1)
    own = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        own.zero_grad()
        own.step()
        loss: torch.Tensor = model(batch).mean()
        return loss

    with pytest.raises(
        WorkloadError, match=r"the step\(\) of SGD at .*test_substitutes.py:\d+; leave it out, as zero_gr"
    ):
        StepRecording(model).run(step, torch.zeros(3, 2), lambda number: None)
    own.step()
