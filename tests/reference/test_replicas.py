"""The oracle with several replicas, against loops written out here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from weft.reference.loop import ReferenceResult, train
from weft.reference.replicas import Replicas, updates_seen
from weft.spec.job_spec import JobSpec
from weft.workload.workload import WorkloadError

SOURCE = """
import torch, weft
from torch import nn

class Counting(nn.Module):
    '''Multiplies by how often it has run in training; it changes its buffer in place, or binds it anew.'''
    def __init__(self, in_place):
        super().__init__()
        self.in_place = in_place
        self.register_buffer("runs", torch.tensor(0.0, dtype=torch.float64))
    def forward(self, inputs):
        if self.training and self.in_place:
            self.runs += 1
        elif self.training:
            self.runs = self.runs + 1
        return inputs * self.runs

def data(samples):
    inputs = torch.linspace(-1, 1, samples * 3, dtype=torch.float64).sin().view(samples, 3)
    return inputs, inputs.sum(dim=1, keepdim=True)

def told(output, target):
    print(len(output), end=" ")
    return nn.functional.mse_loss(output, target)

MODELS = {
    "dropout": lambda: nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 1)),
    "plain": lambda: nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)),
    "linear": lambda: nn.Linear(3, 1),
    "normalised": lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)),
    "counting, in place": lambda: nn.Sequential(nn.Linear(3, 1), Counting(True)),
    "counting, bound anew": lambda: nn.Sequential(nn.Linear(3, 1), Counting(False)),
}

def workload(model="plain", samples=21, held_out=0, lr=0.1, momentum=0.0, tells=False):
    return weft.Workload(model=MODELS[model]().double(), loss=told if tells else nn.MSELoss(), train=data(samples),
                         validation=data(held_out) if held_out else None,
                         optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr, momentum=momentum))
"""

TWO = {"replicas": 2}
Run = Callable[..., ReferenceResult]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Trains the workload above by the strategy given, with fields of the job and arguments of the entry."""
    (tmp_path / "job.py").write_text(SOURCE)

    def go(
        strategy: dict[str, Any], shares: Callable[[int], Sequence[float]] | None = None, **fields: Any
    ) -> ReferenceResult:
        job: dict[str, Any] = {"entry": "job.py:workload", "batch_size": 10, "seed": 3}
        job |= {name: fields.pop(name) for name in ("epochs", "steps", "batch_size") if name in fields}
        if not {"epochs", "steps"} & set(job):
            job["epochs"] = 3
        spec = JobSpec.parse({"job": {**job, "args": fields}, "strategy": strategy, "directory": str(tmp_path)})
        return train(spec, shares=shares)

    return go


def replicas_of(*microbatches: int, **axes: Any) -> dict[str, Any]:
    return {"replicas": [{"device": "cpu", "microbatches": count} for count in microbatches], **axes}


def samples(count: int = 21) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.linspace(-1, 1, count * 3, dtype=torch.float64).sin().view(count, 3)
    return inputs, inputs.sum(dim=1, keepdim=True)


def linear() -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(3, 1).double()


def order(epoch: int) -> torch.Tensor:
    return torch.randperm(21, generator=torch.Generator().manual_seed(3 + epoch))


def batches(steps: int) -> list[torch.Tensor]:
    """Indices of each step's batch: of 10, 10 and 1 samples in every epoch."""
    return [batch for epoch in range(steps) for batch in order(epoch).split(10)][:steps]


def gradients(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(nn.functional.mse_loss(model(inputs), targets), list(model.parameters())))


def assert_near(result: ReferenceResult, expected: ReferenceResult) -> None:
    assert result.losses == pytest.approx(expected.losses, rel=1e-12, abs=1e-15)
    for mine, other in zip(result.validations, expected.validations, strict=True):
        assert mine == pytest.approx(other, rel=1e-12, abs=1e-15)
    torch.testing.assert_close(result.state, expected.state, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    "strategy",
    [
        TWO,
        {"replicas": 3, "microbatches": 2, "shares": [0.5, 0.3, 0.2]},
        replicas_of(3, 1, shares=[0.7, 0.3]),
        replicas_of(1, 4, shares=[9.0, 1.0]),  # more microbatches than samples in the second share
        {"replicas": 2, "shares": [0.0, 1.0]},
    ],
    ids=str,
)
def test_a_batch_divided_over_replicas_trains_as_the_whole_batch_does(run: Run, strategy: dict[str, Any]) -> None:
    """Batches of 10, 10 and 1 samples: of the last one some replicas get nothing."""
    arguments = {"held_out": 13, "momentum": 0.9}
    assert_near(run(strategy, **arguments), run({}, **arguments))


def test_random_numbers_belong_to_the_microbatch_whichever_replica_computes_it(run: Run) -> None:
    alone = run({"microbatches": 3}, model="dropout", batch_size=6, samples=12)
    divided = run(replicas_of(2, 1, shares=[2.0, 1.0]), model="dropout", batch_size=6, samples=12)
    assert divided.losses == alone.losses
    assert all(torch.equal(divided.state[name], alone.state[name]) for name in alone.state)


def test_shares_can_change_with_the_step_and_validation_keeps_those_of_the_strategy(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    by_step = {0: [1.0, 1.0], 1: [0.8, 0.2], 2: [0.0, 1.0]}
    run({**TWO, "shares": [0.7, 0.3]}, by_step.__getitem__, steps=3, held_out=20, samples=30, tells=True)
    assert capsys.readouterr().out.split() == ["5", "5", "8", "2", "10", "7", "3", "7", "3"]


def test_more_microbatches_over_all_replicas_than_samples_are_refused(run: Run) -> None:
    with pytest.raises(WorkloadError, match=r"sum of all replicas' microbatches is 11, but job\.batch_size is 10"):
        run(replicas_of(6, 5))


@pytest.mark.parametrize(
    ("staleness", "warmup", "expected"),
    [
        (0, 0, [0, 1, 2, 3, 4, 5]),
        (1, 0, [0, 0, 1, 2, 3, 4]),
        (2, 0, [0, 0, 0, 1, 2, 3]),
        (2, 1, [0, 1, 1, 1, 2, 3]),
        (2, 3, [0, 1, 2, 3, 3, 3]),
        (1, 9, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_the_updates_seen_lag_by_the_staleness_and_never_go_back(
    staleness: int, warmup: int, expected: list[int]
) -> None:
    assert [updates_seen(step, staleness, warmup) for step in range(6)] == expected


def test_staleness_of_one_is_the_loop_with_delayed_gradients(run: Run) -> None:
    result = run({"staleness": 1}, model="linear", steps=7)
    model, old = linear(), linear()
    inputs, targets = samples()
    for step, batch in enumerate(batches(7)):
        loss = nn.functional.mse_loss(old(inputs[batch]), targets[batch])
        assert result.losses[step] == pytest.approx(loss.item(), rel=1e-12)
        update = gradients(old, inputs[batch], targets[batch])
        old.load_state_dict(model.state_dict())  # as they are after update step - 1: what the next step sees
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), update, strict=True):
                parameter -= 0.1 * gradient
    torch.testing.assert_close(result.state, dict(model.state_dict()), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("warmup", [0, 2])
def test_each_replica_has_its_own_staleness_and_one_update_is_made_of_them_all(run: Run, warmup: int) -> None:
    strategy = replicas_of(1, 2, staleness=[0, 2], shares=[0.6, 0.4], staleness_warmup=warmup)
    result = run(strategy, model="linear", steps=8)
    inputs, targets = samples()
    versions = [linear()]
    for step, batch in enumerate(batches(8)):
        newest, late = versions[step], versions[updates_seen(step, 2, warmup)]
        cut = round(0.6 * len(batch))  # of the batch of one sample, too: it goes to the first
        next_model = linear()
        next_model.load_state_dict(newest.state_dict())
        for model, part in ((newest, batch[:cut]), (late, batch[cut:])):
            if len(part):
                for parameter, gradient in zip(
                    next_model.parameters(), gradients(model, inputs[part], targets[part]), strict=True
                ):
                    parameter.data -= 0.1 * len(part) / len(batch) * gradient
        versions.append(next_model)
    torch.testing.assert_close(result.state, dict(versions[-1].state_dict()), rtol=1e-12, atol=1e-14)


def test_a_warm_up_as_long_as_the_job_leaves_no_staleness(run: Run) -> None:
    fresh, warm = run({}), run({"staleness": 3, "staleness_warmup": 9})
    assert warm.losses == fresh.losses
    assert all(torch.equal(warm.state[name], fresh.state[name]) for name in fresh.state)
    assert run({"staleness": 3, "staleness_warmup": 4}).losses[:6] != fresh.losses[:6]


def test_validation_uses_the_newest_parameters(run: Run) -> None:
    result = run({"staleness": 2}, model="linear", epochs=1, held_out=21)
    inputs, targets = samples()
    model = linear()
    model.load_state_dict(result.state)
    assert result.validations == [{"loss": pytest.approx(nn.functional.mse_loss(model(inputs), targets).item())}]


def test_running_statistics_come_from_the_first_replica_alone(run: Run) -> None:
    result = run(replicas_of(2, 2), model="normalised", lr=0.0, steps=2)
    inputs, _ = samples()
    norm = nn.BatchNorm1d(3).double()
    for batch in batches(2):
        norm(inputs[batch[:3]])  # the first share has 5 of the 10 samples, in microbatches of 3 and 2
        norm(inputs[batch[3:5]])
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        torch.testing.assert_close(result.state[f"0.{name}"], norm.state_dict()[name], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("model_name", ["counting, in place", "counting, bound anew"])
def test_other_replicas_start_from_the_buffers_of_the_step_and_their_changes_are_dropped(
    run: Run, model_name: str
) -> None:
    """The output is multiplied by the number of runs that the buffer has counted."""
    result = run(replicas_of(2, 2), model=model_name, lr=0.0, steps=2, samples=20)
    model = linear()
    inputs, targets = samples(20)
    shuffled = torch.randperm(20, generator=torch.Generator().manual_seed(3)).split(10)
    for step, factors in enumerate([(1, 2, 1, 1), (3, 4, 3, 3)]):
        parts = [part for share in shuffled[step].split(5) for part in share.tensor_split(2)]
        losses = [
            nn.functional.mse_loss(model(inputs[part]) * factor, targets[part]).item() * len(part) / 10
            for part, factor in zip(parts, factors, strict=True)
        ]
        assert result.losses[step] == pytest.approx(sum(losses), rel=1e-12)
    assert result.state["1.runs"] == 4


def test_the_model_is_its_own_again_after_a_replica_has_run_even_into_an_error() -> None:
    model = nn.BatchNorm1d(2)
    replicas = Replicas(model, [0, 1], warmup=0)
    replicas.begin_step()
    with torch.no_grad():
        model.weight += 1
    replicas.begin_step()

    def run_as_the_second() -> None:
        with replicas.model_as_seen_by(1, step=1):
            assert model.weight.tolist() == [1, 1]
            model(torch.randn(4, 2))
            assert model.num_batches_tracked == 1
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_as_the_second()
    assert model.weight.tolist() == [2, 2]
    assert model.num_batches_tracked == 0
    assert [id(parameter) for parameter in model.parameters()] == [id(model.weight), id(model.bias)]
