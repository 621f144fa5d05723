from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from weft.reference.loop import ReferenceResult, train
from weft.spec.job_spec import JobSpec, SpecError, Strategy
from weft.workload.faults import NonFiniteLoss
from weft.workload.randomness import seed_unit
from weft.workload.workload import WorkloadError

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

def sentences(samples):
    """Inputs of 5 tokens and their targets; -100 where there is no loss. The targets of some samples are all -100."""
    inputs = torch.linspace(-1, 1, samples * 15, dtype=torch.float64).cos().view(samples, 5, 3)
    numbers = torch.arange(samples).view(-1, 1)
    return inputs, torch.where(torch.arange(5) < numbers % 4, (numbers + torch.arange(5)) % 2, -100)

def tokens_loss(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

def hits(output, target):
    return (output.argmax(dim=2) == target)[target != -100].double().mean()

def tokens(target):
    return (target != -100).sum()

def language(held_out=0, **changes):
    return dict(model=nn.Linear(3, 2).double(), train=sentences(10), loss=tokens_loss, weight=tokens,
                metrics={"hits": hits}, validation=sentences(held_out) if held_out else None, **changes)

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
        changes: str = "",
        *,
        more: str = "",
        on_step: Callable[[int, float], object] | None = None,
        threads: int = 1,
        **fields: Any,
    ) -> ReferenceResult:
        (tmp_path / "job.py").write_text(f"{SOURCE}{more}\ndef entry(**args):\n    return workload(**args{changes})\n")
        job = {"entry": "job.py:entry", "batch_size": 4, "seed": 3}
        job |= {name: fields.pop(name) for name in ("epochs", "steps", "batch_size", "seed", "mode") if name in fields}
        if not {"epochs", "steps"} & set(job):
            job["epochs"] = 2
        sections = {name: fields.pop(name) for name in ("stop", "checkpoint") if name in fields}
        strategy = {axis: fields.pop(axis) for axis in list(fields) if axis in Strategy.model_fields}
        spec = JobSpec(job={**job, "args": fields}, strategy=strategy, directory=str(tmp_path), **sections)
        return train(spec, threads=threads, on_step=on_step)

    return go


def test_it_stops_after_the_epoch_that_the_rule_says(run: Run) -> None:
    stop = {"metric": "loss", "patience": 2, "min_delta": 1e3}
    result = run(epochs=9, held_out=3, stop=stop)
    assert result.stopped is not None
    assert "loss has not improved by 1000 on" in result.stopped
    assert "of epoch 1 for 2 epochs" in result.stopped
    assert (len(result.losses), len(result.validations)) == (9, 3)
    assert_same_bits(result.state, run(epochs=3, held_out=3).state)


def test_a_metric_may_be_a_number(run: Run) -> None:
    as_number = ', metrics={"output": lambda output, target: output.mean().item()}'
    assert run(as_number, held_out=3).validations == run(held_out=3).validations


def test_it_keeps_the_model_behind_the_best_validation(run: Run) -> None:
    result = run(epochs=4, held_out=3, checkpoint={"keep_best": "loss", "best": "max"})
    losses = [each["loss"] for each in result.validations]
    epochs = losses.index(max(losses)) + 1
    assert result.best is not None
    assert_same_bits(result.best, run(epochs=epochs, held_out=3).state)


def test_a_rule_that_is_met_after_the_last_epoch_has_stopped_nothing(run: Run) -> None:
    result = run(epochs=3, held_out=3, stop={"metric": "loss", "patience": 2, "min_delta": 1e3})
    assert (result.stopped, len(result.losses)) == (None, 9)


def test_it_trains_no_longer_than_it_may(run: Run) -> None:
    result = run(epochs=9, held_out=3, stop={"max_time": "0.000001 s"})
    assert result.stopped == "0.000001 s of training are over"
    assert (len(result.losses), result.validations) == (1, [])


@pytest.mark.parametrize("held_out", [0, 3])
def test_the_users_function_is_asked_after_each_epoch(run: Run, held_out: int) -> None:
    changes = ', on_epoch=lambda values: "stop" if (values["epoch"], values["step"]) == (1, 6) else None'
    result = run(changes, epochs=5, held_out=held_out)
    assert (result.stopped, len(result.losses)) == ("Workload.on_epoch said so", 6)
    assert len(result.validations) == (2 if held_out else 0)


def test_a_rule_over_a_validation_that_there_is_not_is_refused(run: Run) -> None:
    with pytest.raises(SpecError, match=r"stop\.metric = 'loss': the job has no validation; give Workload\.validation"):
        run(stop={"metric": "loss"})


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


def test_a_model_that_rounds_by_itself_rounds_once_in_each_of_its_calls(run: Run) -> None:
    """Around it there was an autocast that was off, until the end of which a rounded copy of the weights was kept: the
    gradients of two calls were summed in bfloat16."""
    rounding = """
class Rounding(nn.Linear):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)

class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = Rounding(3, 3)
    def forward(self, x):
        return self.layer(self.layer(x.float())).sum(dim=1)

def rounded(output, target):
    return nn.functional.mse_loss(output, target[:, 0].float())
"""
    plain = "metrics={}, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)"
    result = run(f", model=Twice(), loss=rounded, {plain}", more=rounding, steps=1, batch_size=10)
    space: dict[str, Any] = {"torch": torch, "nn": nn}
    exec(rounding, space)
    _, inputs, targets, _ = by_hand(dropout=0.0)
    torch.manual_seed(3)
    model = space["Twice"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    order = torch.randperm(10, generator=torch.Generator().manual_seed(3))
    space["rounded"](model(inputs[order]), targets[order]).backward()
    optimizer.step()
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
        NonFiniteLoss,
        match=rf"loss is {value} at step 1 \(microbatch 1: samples? [\d, ]+ of Workload\.train\); lower the learning",
    ) as caught:
        run(changes.replace("where", str(order[6].item())), epochs=1, microbatches=2)
    assert (caught.value.step, caught.value.microbatch) == (1, 1)
    assert order[6].item() in caught.value.samples
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
        (
            ", validation=data(4), metrics={'m': lambda *_: 'x'}",
            r"Workload.metrics\['m'\] returned str; it must return",
        ),
        (", optimizer=lambda parameters: None", "Workload.optimizer returned None"),
    ],
)
def test_a_workload_that_cannot_be_trained_is_refused_by_field_with_a_remedy(run: Run, changes: str, text: str) -> None:
    with pytest.raises(WorkloadError, match=text):
        run(changes)


def test_more_microbatches_than_samples_in_a_batch_are_refused_with_both_numbers(run: Run) -> None:
    with pytest.raises(WorkloadError, match=r"strategy\.microbatches is 5, but job\.batch_size is 4"):
        run(microbatches=5)


def tokens_by_hand() -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.linspace(-1, 1, 150, dtype=torch.float64).cos().view(10, 5, 3)
    numbers = torch.arange(10).view(-1, 1)
    return inputs, torch.where(torch.arange(5) < numbers % 4, (numbers + torch.arange(5)) % 2, -100)


@pytest.mark.parametrize("strategy", [{}, {"microbatches": 4}, {"replicas": 2, "shares": [0.7, 0.3]}], ids=str)
def test_weighted_by_tokens_a_step_is_the_mean_over_all_tokens_of_the_batch(run: Run, strategy: dict[str, Any]) -> None:
    """Samples have 0 to 3 tokens with loss, so with four microbatches some have none and would give nan."""
    result = run(", **language(held_out=9)", epochs=1, batch_size=5, **strategy)
    torch.manual_seed(3)
    model = nn.Linear(3, 2).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    inputs, targets = tokens_by_hand()
    for step, batch in enumerate(torch.randperm(10, generator=torch.Generator().manual_seed(3)).split(5)):
        loss = nn.functional.cross_entropy(model(inputs[batch]).flatten(0, 1), targets[batch].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert result.losses[step] == pytest.approx(loss.item(), rel=1e-12)
    torch.testing.assert_close(result.state, dict(model.state_dict()), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("microbatches", [1, 3])
def test_weighted_by_tokens_a_validation_is_the_mean_over_all_tokens(run: Run, microbatches: int) -> None:
    result = run(", **language(held_out=10)", epochs=1, microbatches=microbatches)
    model = nn.Linear(3, 2).double()
    model.load_state_dict(result.state)
    inputs, targets = tokens_by_hand()
    output, counts = model(inputs), targets != -100
    expected = {
        "loss": nn.functional.cross_entropy(output[counts], targets[counts]).item(),
        "hits": (output.argmax(dim=2) == targets)[counts].double().mean().item(),
    }
    assert result.validations == [pytest.approx(expected, rel=1e-9)]


def test_a_batch_in_which_nothing_counts_has_loss_0_and_changes_nothing(run: Run) -> None:
    """Adam would still move what it has momentum for, were the gradient zeros: it gets none."""
    weight = "lambda target: 0 if len(target) == 2 else tokens(target)"
    changes = f", **{{**language(held_out=10), 'weight': {weight}, 'validation': sentences(1)}}"
    before, after = run(changes, steps=2), run(changes, steps=3)
    assert before.losses[:2] == after.losses[:2]
    assert after.losses[2] == 0.0
    assert_same_bits(after.state, before.state)
    assert after.validations == [{"loss": 0.0, "hits": 0.0}]


def test_what_weighs_the_number_of_samples_changes_no_bit(run: Run) -> None:
    plain, weighted = run(microbatches=3, held_out=7), run(", weight=len", microbatches=3, held_out=7)
    assert (weighted.losses, weighted.validations) == (plain.losses, plain.validations)
    assert_same_bits(weighted.state, plain.state)


def test_bf16_rounds_forward_and_loss_and_keeps_the_parameters_whole(run: Run) -> None:
    changes = """, **{"model": model(0.0).float(), "train": tuple(part.float() for part in data(10)),
        "validation": tuple(part.float() for part in data(6)),
        "metrics": {"rounded": lambda output, target: (output.dtype == torch.bfloat16) * torch.ones(())}}"""
    exact, rounded = run(changes), run(changes, precision="bf16")
    assert rounded.losses != exact.losses
    assert rounded.losses == pytest.approx(exact.losses, rel=0.05)
    assert [validation["rounded"] for validation in exact.validations] == [0, 0]
    assert [validation["rounded"] for validation in rounded.validations] == [1, 1]
    assert rounded.validations[0]["loss"] == pytest.approx(exact.validations[0]["loss"], rel=0.05)
    assert {tensor.dtype for tensor in rounded.state.values()} == {torch.float32}


def test_forward_alone_measures_each_batch_and_leaves_the_model_as_it_was(run: Run) -> None:
    """The batches and their order are those of training; neither dropout nor validation happens."""
    result = run(mode="forward", dropout=0.5, microbatches=3, held_out=5)
    model, inputs, targets, _ = by_hand(dropout=0.5)
    model.eval()
    expected = []
    for epoch in range(2):
        for batch in torch.randperm(10, generator=torch.Generator().manual_seed(3 + epoch)).split(4):
            output = model(inputs[batch])
            loss = nn.functional.mse_loss(output, targets[batch]).item()
            expected.append({"loss": pytest.approx(loss, rel=1e-12), "output": pytest.approx(output.mean().item())})
    assert result.measured == expected
    assert result.losses == [measured["loss"] for measured in result.measured]
    assert_same_bits(result.state, model.state_dict())
    assert (result.validations, result.learning_rates) == ([], [])


def test_forward_alone_needs_nothing_that_could_be_trained(run: Run) -> None:
    result = run(", model=nn.Tanh(), loss=lambda output, target: output.sum()", mode="forward", steps=4)
    assert len(result.losses) == 4
    assert result.state == {}


def test_training_measures_nothing_beyond_its_losses_and_validations(run: Run) -> None:
    result = run(held_out=5)
    assert (result.measured, result.grad_norms, result.skipped) == ([], [], [])
    assert result.learning_rates == [0.01] * 6
