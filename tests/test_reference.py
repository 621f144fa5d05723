from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from weft.reference import ReferenceResult, train
from weft.spec import JobSpec
from weft.workers.errors import NonFiniteLoss
from weft.workers.randomness import seed_unit
from weft.workload import WorkloadError

SOURCE = '''
import torch, weft
from torch import nn

class Pairs(torch.utils.data.Dataset):
    """Not a TensorDataset: its items are collated one by one."""
    def __init__(self, inputs, targets):
        self.inputs, self.targets = inputs, targets
    def __len__(self):
        return len(self.inputs)
    def __getitem__(self, index):
        return self.inputs[index], self.targets[index]

class Whole(nn.Module):
    """A model that cannot be cut."""
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1).double()
    def forward(self, inputs):
        return self.layer(inputs)

def data(samples):
    inputs = torch.linspace(-1, 1, samples * 3, dtype=torch.float64).sin().view(samples, 3)
    return inputs, inputs.sum(dim=1, keepdim=True)

def model(dropout):
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1)).double()

def workload(samples=10, held_out=0, dropout=0.0, collated=False, **changes):
    train = data(samples)
    parts = dict(model=model(dropout), loss=nn.MSELoss(), train=Pairs(*train) if collated else train,
                 validation=data(held_out) if held_out else None,
                 optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01),
                 metrics={"output": lambda output, target: output.mean()})
    return weft.Workload(**{**parts, **changes})
'''

Run = Callable[..., ReferenceResult]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Trains the workload above, changed by Python source, with fields of the spec and arguments of the entry."""

    def go(
        changes: str = "", *, on_step: Callable[[int, float], object] | None = None, threads: int = 1, **fields: Any
    ) -> ReferenceResult:
        (tmp_path / "job.py").write_text(f"{SOURCE}\ndef entry(**args):\n    return workload(**args{changes})\n")
        job = {"entry": "job.py:entry", "batch_size": 4, "seed": 3}
        job |= {name: fields.pop(name) for name in ("epochs", "steps", "batch_size", "seed") if name in fields}
        if not {"epochs", "steps"} & set(job):
            job["epochs"] = 2
        strategy = {"microbatches": fields.pop("microbatches", 1)}
        spec = JobSpec(job={**job, "args": fields}, strategy=strategy, directory=str(tmp_path))
        return train(spec, threads=threads, on_step=on_step)

    return go


def by_hand(dropout: float) -> tuple[nn.Sequential, torch.Tensor, torch.Tensor, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1)).double()
    inputs = torch.linspace(-1, 1, 30, dtype=torch.float64).sin().view(10, 3)
    return model, inputs, inputs.sum(dim=1, keepdim=True), torch.optim.Adam(model.parameters(), lr=0.01, fused=True)


def assert_same_bits(state: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(state) == list(expected)
    assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_one_microbatch_is_the_loop_that_anyone_would_write_bit_for_bit(run: Run) -> None:
    result = run(epochs=3)
    model, inputs, targets, optimizer = by_hand(dropout=0.0)
    losses = []
    for epoch in range(3):
        order = torch.randperm(10, generator=torch.Generator().manual_seed(3 + epoch))
        for indices in (order[:4], order[4:8], order[8:]):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs[indices]), targets[indices])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert result.losses == losses
    assert_same_bits(result.state, model.state_dict())


def test_dropout_does_not_depend_on_the_order_in_which_microbatches_run(run: Run) -> None:
    result = run(epochs=1, dropout=0.5, microbatches=3)
    model, inputs, targets, optimizer = by_hand(dropout=0.5)
    order = torch.randperm(10, generator=torch.Generator().manual_seed(3))
    for step, indices in enumerate((order[:4], order[4:8], order[8:])):
        batch_loss = 0.0
        for microbatch in (2, 1, 0):
            part = indices.tensor_split(3)[microbatch]
            output = inputs[part]
            for unit, module in enumerate(model):
                seed_unit(3, step, microbatch, unit)
                output = module(output)
            if len(part):
                loss = nn.functional.mse_loss(output, targets[part]) * (len(part) / len(indices))
                loss.backward()
                batch_loss += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        assert result.losses[step] == pytest.approx(batch_loss, rel=1e-12)
    torch.testing.assert_close(result.state, dict(model.state_dict()), rtol=1e-9, atol=1e-12)


def test_dropout_differs_between_steps_and_between_microbatches(run: Run) -> None:
    changes = """, **{
        "train": (torch.ones(8, 3).double(), torch.zeros(8, 1).double()),
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        "loss": lambda output, target: seen.append(output.sum().item()) or nn.functional.mse_loss(output, target)}"""
    seen: list[float] = []
    sys.modules["weft_test_seen"] = type(sys)("weft_test_seen")
    sys.modules["weft_test_seen"].seen = seen  # type: ignore[attr-defined]  # a way out of the entry's own module
    try:
        run(changes.replace("seen.", "__import__('weft_test_seen').seen."), epochs=1, dropout=0.5, microbatches=4)
    finally:
        del sys.modules["weft_test_seen"]
    assert len(seen) == 8
    assert len(set(seen)) > 6  # the same inputs and parameters throughout: only the masks differ


@pytest.mark.parametrize("microbatches", [2, 3, 4])
def test_microbatches_of_unequal_size_add_up_to_the_batch(run: Run, microbatches: int) -> None:
    """Batches of 4, 4 and 2 samples: in three parts they are uneven, and of the last some are empty."""
    whole, parts = run(), run(microbatches=microbatches)
    assert parts.losses == pytest.approx(whole.losses, rel=1e-12)
    torch.testing.assert_close(parts.state, whole.state, rtol=1e-9, atol=1e-12)


def test_a_dataset_of_items_trains_as_the_same_tensors_do(run: Run) -> None:
    tensors, items = run(microbatches=2), run(microbatches=2, collated=True)
    assert items.losses == tensors.losses
    assert_same_bits(items.state, tensors.state)


def test_steps_run_through_as_many_epochs_as_they_need_and_stop_within_one(run: Run) -> None:
    epochs, steps = run(epochs=3, held_out=5), run(steps=7, held_out=5)
    assert len(epochs.losses) == 9
    assert steps.losses == epochs.losses[:7]
    assert steps.validations[:2] == epochs.validations[:2]
    assert len(steps.validations) == 3  # the unfinished epoch is validated, too
    assert steps.validations[2] != epochs.validations[2]


def test_steps_that_end_with_an_epoch_are_validated_once(run: Run) -> None:
    assert len(run(steps=6, held_out=5).validations) == 2


def test_validation_is_the_mean_over_all_samples_whatever_the_cuts(run: Run) -> None:
    result = run(epochs=1, held_out=7, dropout=0.5, microbatches=3)
    model, _, _, _ = by_hand(dropout=0.5)
    model.load_state_dict(result.state)
    inputs = torch.linspace(-1, 1, 21, dtype=torch.float64).sin().view(7, 3)
    with torch.no_grad():
        output = model.eval()(inputs)
    expected = {
        "loss": nn.functional.mse_loss(output, inputs.sum(dim=1, keepdim=True)).item(),
        "output": output.mean().item(),
    }
    assert result.validations == [pytest.approx(expected, rel=1e-9)]


def test_validation_does_not_disturb_training(run: Run) -> None:
    with_it, without = run(dropout=0.5, held_out=7, microbatches=2), run(dropout=0.5, microbatches=2)
    assert with_it.losses == without.losses
    assert_same_bits(with_it.state, without.state)
    assert without.validations == []


def test_two_runs_have_the_same_bits_and_another_seed_has_not(run: Run) -> None:
    first = run(dropout=0.5, microbatches=2, held_out=5)
    torch.rand(100)
    second, other = run(dropout=0.5, microbatches=2, held_out=5), run(dropout=0.5, microbatches=2, seed=4)
    assert (first.losses, first.validations) == (second.losses, second.validations)
    assert_same_bits(first.state, second.state)
    assert other.losses != first.losses


def test_each_step_is_told_as_it_ends(run: Run) -> None:
    told: list[tuple[int, float]] = []
    result = run(on_step=lambda step, loss: told.append((step, loss)))
    assert told == list(enumerate(result.losses))


def test_a_model_that_is_no_sequential_is_one_unit(run: Run) -> None:
    result = run(", model=Whole()")
    assert sorted(result.state) == ["layer.bias", "layer.weight"]
    assert result.losses[-1] < result.losses[0]


def test_threads_and_modules_are_as_they_were_before(run: Run, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    run(threads=before + 1, on_step=lambda step, loss: torch.get_num_threads() == before + 1 or pytest.fail("threads"))
    assert torch.get_num_threads() == before
    assert not [name for name, module in sys.modules.items() if str(tmp_path) in str(getattr(module, "__file__", ""))]


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_loss_that_is_not_finite_stops_training_and_says_where(run: Run, value: str) -> None:
    changes = f"""
    , loss=lambda output, target: nn.functional.mse_loss(output, target) * (
        float("{value}") if (target == data(10)[1][where]).any() else 1)""".strip()
    order = torch.randperm(10, generator=torch.Generator().manual_seed(3))
    with pytest.raises(
        NonFiniteLoss, match=rf"loss is {value} at step 1 \(microbatch 1\); lower the learning"
    ) as caught:
        run(changes.replace("where", str(order[6].item())), epochs=1, microbatches=2)
    assert (caught.value.step, caught.value.microbatch) == (1, 1)
    assert not math.isfinite(caught.value.value)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (", train=data(0)", "Workload.train has no samples; give a dataset of at least one"),
        (", validation=data(0)", "Workload.validation has no samples"),
        (", train=[(1.0, 2.0, 3.0)]", "Workload.train: its items are not .input, target. pairs"),
        (", train=7", "Workload.train is int; give a map-style dataset"),
        (", model=nn.Tanh()", "Workload.model has no parameter that requires a gradient"),
        (", model=model(0.0).requires_grad_(False)", "Workload.model has no parameter that requires a gradient"),
        (
            ", loss=nn.MSELoss(reduction='none')",
            r"Workload.loss returned a tensor of shape \(4, 1\); it must return a sc",
        ),
        (", loss=lambda output, target: 1.0", "Workload.loss returned float; it must return a scalar tensor"),
        (", validation=data(4), metrics={'m': lambda *_: 'x'}", "Workload.metrics 'm' returned str; it must return"),
        (", optimizer=lambda parameters: None", "Workload.optimizer returned NoneType"),
    ],
)
def test_a_workload_that_cannot_be_trained_is_refused_by_field_with_a_remedy(run: Run, changes: str, text: str) -> None:
    with pytest.raises(WorkloadError, match=text):
        run(changes)


def test_more_microbatches_than_samples_in_a_batch_are_refused_with_both_numbers(run: Run) -> None:
    with pytest.raises(WorkloadError, match=r"strategy\.microbatches is 5, but job\.batch_size is 4"):
        run(microbatches=5)
