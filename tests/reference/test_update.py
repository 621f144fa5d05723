"""The oracle's clipping, skipping and scheduling, against loops written out here."""

from __future__ import annotations

import math
import re
import statistics
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from weft.reference.loop import ReferenceResult, train
from weft.spec.field_errors import SpecError
from weft.spec.job_spec import JobSpec
from weft.workload.faults import NonFiniteLoss

SOURCE = """
import warnings
import torch, weft
from torch import nn

def data():
    inputs = torch.linspace(-1, 1, 60, dtype=torch.float64).sin().view(20, 3)
    return inputs, (3 * inputs ** 2).sum(dim=1, keepdim=True)

def without(samples):
    '''A loss that is nan where a batch holds one of these samples.'''
    bad = data()[1][samples]
    def loss(output, target):
        return nn.functional.mse_loss(output, target) * (float("nan") if torch.isin(target, bad).any() else 1.0)
    return loss

def warning(output, target):
    warnings.warn("theirs")
    return nn.functional.mse_loss(output, target)

def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)

def workload(**changes):
    parts = dict(model=nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double(), loss=nn.MSELoss(),
                 train=data(), optimizer=adam)
    return weft.Workload(**{**parts, **changes})
"""
WARM_UP = "scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 4)"

Run = Callable[..., ReferenceResult]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Trains the workload above, changed by Python source, by the axes given: ten steps of 4 samples,
    or as many epochs as are given."""

    def go(changes: str = "", *, epochs: int | None = None, **strategy: Any) -> ReferenceResult:
        (tmp_path / "job.py").write_text(f"{SOURCE}\ndef entry():\n    return workload({changes})\n")
        job = {"entry": "job.py:entry", "batch_size": 4, "seed": 3}
        job |= {"steps": 10} if epochs is None else {"epochs": epochs}
        return train(JobSpec.parse({"job": job, "strategy": strategy, "directory": str(tmp_path)}))

    return go


def batches() -> list[torch.Tensor]:
    """Indices of each of the ten steps; each sample is in one batch of the first five and in one of the last."""
    orders = [torch.randperm(20, generator=torch.Generator().manual_seed(3 + epoch)) for epoch in range(2)]
    return [batch for order in orders for batch in order.split(4)]


class ByHand:
    """The model, its data and its optimizer."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        self.inputs = torch.linspace(-1, 1, 60, dtype=torch.float64).sin().view(20, 3)
        self.targets = (3 * self.inputs**2).sum(dim=1, keepdim=True)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01, fused=True)

    def backward(self, batch: torch.Tensor) -> float:
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.model(self.inputs[batch]), self.targets[batch])
        loss.backward()
        return loss.item()

    def norm(self) -> float:
        return math.sqrt(sum(float((parameter.grad**2).sum()) for parameter in self.model.parameters()))


def assert_same_bits(state: dict[str, torch.Tensor], model: nn.Module) -> None:
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())


def test_a_gradient_is_clipped_in_the_steps_in_which_its_norm_is_too_great(run: Run) -> None:
    limit = statistics.median(run(clip_norm=1e9).grad_norms)
    result = run(clip_norm=limit)
    hand = ByHand()
    clipped = 0
    for step, batch in enumerate(batches()):
        assert result.losses[step] == pytest.approx(hand.backward(batch), rel=1e-9)
        norm = hand.norm()
        assert result.grad_norms[step] == pytest.approx(norm, rel=1e-9)
        if norm > limit:
            clipped += 1
            for parameter in hand.model.parameters():
                assert parameter.grad is not None
                parameter.grad *= limit / (norm + 1e-6)  # torch's guard against a norm of 0
        hand.optimizer.step()
    assert 0 < clipped < 10
    torch.testing.assert_close(result.state, dict(hand.model.state_dict()), rtol=1e-9, atol=1e-12)


def test_a_limit_that_no_gradient_reaches_changes_no_bit(run: Run) -> None:
    plain, limited = run(microbatches=2), run(clip_norm=1e9, microbatches=2)
    assert limited.losses == plain.losses
    assert all(torch.equal(limited.state[name], plain.state[name]) for name in plain.state)
    assert (len(limited.grad_norms), plain.grad_norms) == (10, [])


def test_the_norm_clipped_is_that_of_the_batch_whatever_its_microbatches_and_replicas(run: Run) -> None:
    whole, divided = run(clip_norm=0.5), run(clip_norm=0.5, replicas=2, shares=[0.75, 0.25], microbatches=2)
    assert divided.grad_norms == pytest.approx(whole.grad_norms, rel=1e-9)
    torch.testing.assert_close(divided.state, whole.state, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("clip", [{}, {"clip_norm": 1e9}], ids=["not clipped", "clipped"])
def test_a_step_whose_gradient_is_not_finite_is_skipped_and_the_rest_goes_on(run: Run, clip: dict[str, float]) -> None:
    bad = int(batches()[2][3])
    result = run(f"loss=without([{bad}]), {WARM_UP}", skip_nonfinite=True, **clip)
    skipped = [step for step, batch in enumerate(batches()) if bad in batch]
    assert result.skipped == skipped
    assert [step for step in range(10) if not math.isfinite(result.losses[step])] == skipped
    assert [step for step in range(10) if not math.isfinite(result.grad_norms[step])] == skipped
    hand = ByHand()
    for step, batch in enumerate(batches()):
        hand.optimizer.param_groups[0]["lr"] = 0.01 * (step + 1) / 4
        loss = hand.backward(batch)
        if step not in skipped:
            assert result.losses[step] == loss
            hand.optimizer.step()
    assert_same_bits(result.state, hand.model)


def test_without_skipping_a_loss_that_is_not_finite_stops_training_though_it_is_clipped(run: Run) -> None:
    with pytest.raises(NonFiniteLoss, match="at step 2"):
        run(f"loss=without([{int(batches()[2][3])}])", clip_norm=1.0)


def test_a_gradient_that_overflows_under_a_finite_loss_is_skipped(run: Run) -> None:
    """The root of an output that is exactly 0: its value is 0, its gradient infinite."""
    result = run("loss=lambda output, target: (output * 0).sqrt().mean()", skip_nonfinite=True)
    assert result.losses == [0.0] * 10
    assert result.skipped == list(range(10))
    assert_same_bits(result.state, ByHand().model)


def test_skipping_changes_no_bit_where_every_gradient_is_finite(run: Run) -> None:
    plain, watched = run(), run(skip_nonfinite=True)
    assert watched.losses == plain.losses
    assert (watched.skipped, len(watched.grad_norms)) == ([], 10)
    assert all(torch.equal(watched.state[name], plain.state[name]) for name in plain.state)


def test_the_scheduler_steps_after_every_step_and_each_rate_is_reported(run: Run) -> None:
    result = run(WARM_UP)
    hand = ByHand()
    for step, batch in enumerate(batches()):
        rate = 0.01 * ((step + 1) / 4)
        assert result.learning_rates[step] == rate
        hand.optimizer.param_groups[0]["lr"] = rate
        assert result.losses[step] == hand.backward(batch)
        hand.optimizer.step()
    assert_same_bits(result.state, hand.model)


PLATEAU = "scheduler=lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)"


def test_a_scheduler_that_takes_a_measured_value_steps_after_each_validation(run: Run) -> None:
    result = run(f"validation=data(), {PLATEAU}", epochs=10)
    hand = ByHand()
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(hand.optimizer, patience=0, threshold=0.5)
    rates = []
    for epoch in range(10):
        order = torch.randperm(20, generator=torch.Generator().manual_seed(3 + epoch))
        for batch in order.split(4):
            hand.backward(batch)
            rates.append(hand.optimizer.param_groups[0]["lr"])
            hand.optimizer.step()
        scheduler.step(result.validations[epoch]["loss"])
    assert result.learning_rates == rates
    assert len(set(rates)) > 2
    assert_same_bits(result.state, hand.model)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            "",
            "= 'loss': the job has no validation; give Workload.validation, or Workload.epoch_metrics with",
        ),
        (", validation=data(), scheduler_metric='f1'", "= 'f1': validations report loss; use one of these"),
    ],
    ids=["no validation", "no such value"],
)
def test_where_there_is_no_such_value_there_is_a_remedy(run: Run, changes: str, told: str) -> None:
    with pytest.raises(SpecError, match=re.escape(told)):
        run(f"{PLATEAU}{changes}")


def test_the_scheduler_steps_after_a_first_step_that_was_skipped(run: Run) -> None:
    """torch warns of it, and a warning is an error here."""
    result = run(f"loss=without([{int(batches()[0][0])}]), {WARM_UP}", skip_nonfinite=True)
    assert result.skipped[0] == 0
    assert result.learning_rates == [0.01 * ((step + 1) / 4) for step in range(10)]


def test_what_is_warned_of_at_each_step_is_told_once(run: Run) -> None:
    """As in the plain loop. Each step of a scheduler was made in a block of `warnings.catch_warnings`, at whose end all
    modules forget what they have warned of."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        run(f"loss=warning, {WARM_UP}")
    assert [str(each.message) for each in told] == ["theirs"]


def test_the_norm_is_of_what_the_optimizer_has(run: Run) -> None:
    """Gradients of what it has not were in it, and added up from step to step, since nobody cleared them; a job's norm
    never had them."""
    two = "optimizer=lambda given: torch.optim.SGD(list(given)[:2], lr=0.01)"
    model = "nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1).requires_grad_(False)).double()"
    assert run(two, clip_norm=100.0).grad_norms == run(f"model={model}, {two}", clip_norm=100.0).grad_norms
