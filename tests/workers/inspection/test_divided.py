"""Whether a batch may be divided: by running it whole and in parts."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from weft.spec.candidates import candidates, or_auto
from weft.spec.job_spec import JobSpec
from weft.spec.workers_needed import Host
from weft.workers.devices.host import HostDevice
from weft.workers.inspection import inspection as inspections
from weft.workers.inspection.divided import why_undivided
from weft.workers.inspection.inspection import inspect_job, inspect_threaded
from weft.workload.workload import Workload

NUM_SAMPLES, BATCH = 23, 8  # the last batch is smaller
HOST = Host(workers=2)


def spec_of(**changes: Any) -> JobSpec:
    """Without a [strategy]."""
    job = {"entry": "job.py:workload", "batch_size": BATCH, "steps": 1_000_000, "seed": 3}
    return JobSpec.parse({"job": job | changes})


def workload_of(*units: nn.Module, **changes: Any) -> Workload:
    torch.manual_seed(1)
    data = torch.randn(NUM_SAMPLES, 6), torch.randn(NUM_SAMPLES, 1)
    fields: dict[str, Any] = {
        "model": nn.Sequential(nn.Linear(6, 5), nn.Tanh(), *units, nn.Linear(5, 1)),
        "loss": functional.mse_loss,
        "train": data,
        "validation": data,
        "optimizer": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    }
    return Workload(**fields | changes)


def stepping(step: Callable[[nn.Module, Any], Any], **changes: Any) -> Workload:
    return workload_of(loss=None, step=step, **changes)


def in_bfloat16() -> Workload:
    """A mean whose parts are rounded by themselves: 0.75 whole, and 0.7509765625 in two."""
    inputs, targets = torch.zeros(NUM_SAMPLES, 6), torch.tensor([1.0, 0.0, 0.0]).repeat(NUM_SAMPLES)
    data = inputs.bfloat16(), targets[:NUM_SAMPLES, None].bfloat16()
    made = workload_of(train=data, validation=data, loss=lambda output, target: (0 * output + target).mean())
    made.model.bfloat16()
    return made


def noisy(model: nn.Module, batch: Any) -> torch.Tensor:
    inputs, targets = batch
    return functional.mse_loss(model(inputs * (1 + 0.01 * random.random())), targets)


def masked_mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    counts = target > 0
    return ((output - target) ** 2)[counts].mean()


class Seen(nn.Module):
    """Replaces its buffer, which nobody sees at the tensor that it was."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.Buffer(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + 1
        return x


class Drawn(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(6), torch.zeros(1)


@pytest.mark.parametrize(
    "workload",
    [
        workload_of,
        lambda: workload_of(metrics={"error": functional.l1_loss}),
        lambda: stepping(lambda model, batch: {"loss": functional.mse_loss(model(batch[0]), batch[1]), "of": 1.0}),
        lambda: workload_of(loss=masked_mean, weight=lambda target: (target > 0).sum()),
        lambda: workload_of(nn.LayerNorm(5)),
    ],
)
def test_a_mean_over_what_is_weighed_may_be_divided(workload: Callable[[], Workload]) -> None:
    assert why_undivided(workload(), spec_of()) is None


@pytest.mark.parametrize(
    ("workload", "told"),
    [
        (lambda: workload_of(nn.Dropout(0.5)), "random numbers are drawn"),
        (lambda: stepping(noisy), "random numbers are drawn"),
        (lambda: workload_of(train=Drawn(), validation=None), "random numbers are drawn"),
        (lambda: workload_of(nn.BatchNorm1d(5)), "'2.running_mean' changes with each forward"),
        (lambda: workload_of(Seen()), "'2.seen' changes with each forward"),
        (lambda: workload_of(nn.BatchNorm1d(5, track_running_stats=False)), "a batch of training is another in parts"),
        (
            lambda: workload_of(loss=lambda output, target: functional.mse_loss(output, target, reduction="sum")),
            "the loss of a batch of training is another in parts",
        ),
        (lambda: workload_of(loss=masked_mean), "of a batch of training is another in parts"),
        (
            lambda: workload_of(metrics={"worst": lambda output, target: (output - target).max()}),
            "the worst of a batch of validation is another in parts",
        ),
        (
            lambda: stepping(lambda model, batch: model(batch[0][: BATCH - 2].view(BATCH - 2, 6)).mean()),
            "in parts they raise RuntimeError: shape '[6, 6]' is invalid",
        ),
        (
            lambda: workload_of(collate=torch.utils.data.default_collate),
            "collate may give parts of a batch other shapes than slots have",
        ),
        (lambda: workload_of(optimizer=torch.optim.Adafactor), "Adafactor may look at several parameters at once"),
    ],
)
def test_what_comes_to_something_else_in_parts_is_told(workload: Callable[[], Workload], told: str) -> None:
    assert told in str(why_undivided(workload(), spec_of()))


def test_a_job_that_only_runs_forward_is_not_divided() -> None:
    assert "reports what each microbatch comes to" in str(why_undivided(workload_of(), spec_of(mode="forward")))


def inspected(load: Callable[[], Workload], spec: JobSpec) -> Any:
    return inspect_job(load, or_auto(spec), HostDevice(), HOST)


def test_a_long_job_that_gives_no_strategy_is_looked_at_for_all_that_it_may_have() -> None:
    told = inspected(workload_of, spec_of())
    assert (told.get("unchosen"), told["undivided"], told["timed_size"]) == (None, None, BATCH)
    sizes = {size for size, _ in told["input"]["shapes"]}
    assert sizes >= {BATCH, BATCH // 2}, "of one worker's microbatches and of two replicas'"
    threaded = inspect_threaded(workload_of, or_auto(spec_of()), HOST, told)
    assert threaded is not None
    assert len(threaded["seconds"]) == len(told["units"])


def test_a_batch_that_stays_whole_is_looked_at_in_no_other_size() -> None:
    """A batch normalisation that got a microbatch of one sample would raise."""
    told = inspected(lambda: workload_of(nn.BatchNorm1d(5)), spec_of())
    assert "changes with each forward" in told["undivided"]
    assert {size for size, _ in told["input"]["shapes"]} == {BATCH, NUM_SAMPLES % BATCH}


def test_a_short_job_is_inspected_as_on_one_worker() -> None:
    calls: list[int] = []

    def load() -> Workload:
        calls.append(1)
        return workload_of()

    told = inspected(load, spec_of(steps=3))
    assert "s of training are too few to look for another" in told["unchosen"]
    assert "timed_size" not in told
    assert len(calls) == 1, "the job's function is not called a second time"


def test_where_the_look_at_others_raises_the_job_goes_on_without(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(inspections, "WORTH_SECONDS", 0.0)

    def load() -> Workload:
        calls.append(1)
        if len(calls) > 1:
            raise OSError("the file is open already")
        return workload_of()

    told = inspected(load, spec_of())
    assert told["unchosen"] == "a look at others raised OSError: the file is open already"
    assert inspect_threaded(load, or_auto(spec_of()), HOST, told) is None


def test_one_worker_alone_leaves_no_choice() -> None:
    told = inspect_job(workload_of, or_auto(spec_of()), HostDevice(), Host(workers=1))
    assert told["unchosen"] == "there is no other"


def told_of_parts(workload: Workload, **strategy: Any) -> tuple[float, ...]:
    spec = JobSpec.parse({"job": dict(spec_of().to_wire()["job"]), "strategy": strategy})
    in_two = [each for each in candidates(spec, HOST) if sum(each.strategy.division[1]) <= 2]  # a norm takes no one
    told = inspections.inspect(workload, spec, HostDevice(), in_two)
    return tuple(told["loss_in_parts"] or ())


def weighted_mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """As one with the weights of classes."""
    return ((output - target) ** 2 * target.exp()).sum() / target.exp().sum()


def compared(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Each sample with all others."""
    return functional.cross_entropy(output @ target.T, torch.arange(len(output)))


def mixing() -> dict[str, Any]:
    data = [(torch.randn(6), torch.randn(1)) for _ in range(3 * BATCH)]
    return {"collate": mixed, "train": data, "validation": None}


def mixed(some: list[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    """As timm's mixup does."""
    if len(some) % 2:
        raise AssertionError("Batch size should be even when using this")
    return [0.6 * each + 0.4 * each.flip(0) for each in map(torch.stack, zip(*some, strict=True))]


@pytest.mark.parametrize(
    "strategy", [{"microbatches": 2}, {"replicas": 2}, {"stages": 2, "microbatches": 2}, {"preset": "auto"}]
)
@pytest.mark.parametrize(
    "workload",
    [
        pytest.param(lambda: workload_of(loss=nn.MSELoss(reduction="sum")), id="a module"),
        pytest.param(lambda: workload_of(loss=lambda y, t: ((y - t) ** 2).sum()), id="a function"),
        pytest.param(lambda: workload_of(loss=weighted_mean), id="a mean over something else"),
        pytest.param(lambda: workload_of(loss=compared), id="a comparison"),
        pytest.param(lambda: stepping(lambda *given: drawing(*given).sum()), id="a sum that draws"),
        pytest.param(lambda: stepping(lambda *given: compared(drawing(*given), given[1][1])), id="drawn comparisons"),
        pytest.param(lambda: stepping(lambda model, batch: ((model(batch[0]) - batch[1]) ** 2).sum()), id="a step"),
        pytest.param(
            lambda: workload_of(nn.Dropout(), nn.BatchNorm1d(5), loss=nn.MSELoss(reduction="sum")), id="beside dropout"
        ),
        pytest.param(
            lambda: stepping(lambda model, batch: functional.mse_loss(model(batch[0]), batch[1]), **mixing()),
            id="a mixture of samples, which wants even numbers of them",
        ),
    ],
)
def test_a_loss_that_is_no_mean_is_told_where_a_step_has_several_microbatches(
    workload: Callable[[], Workload], strategy: dict[str, Any]
) -> None:
    whole, parts = told_of_parts(workload(), **strategy)
    assert abs(whole - parts) > 1e-3 * abs(whole)


def drawing(model: nn.Module, batch: Any) -> torch.Tensor:
    """As a step does that augments, or draws what it decodes."""
    output: torch.Tensor = model(batch[0] + 0.01 * torch.randn_like(batch[0]))
    return (output - batch[1]) ** 2


class Warming(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.calls


@pytest.mark.parametrize(
    ("workload", "strategy"),
    [
        pytest.param(lambda: workload_of(loss=nn.MSELoss(reduction="sum")), {}, id="one microbatch"),
        pytest.param(workload_of, {"microbatches": 2}, id="a mean"),
        pytest.param(lambda: workload_of(nn.Dropout(), nn.BatchNorm1d(5)), {"microbatches": 2}, id="beside dropout"),
        pytest.param(lambda: stepping(noisy), {"microbatches": 2}, id="a step that draws"),
        pytest.param(
            lambda: stepping(lambda *each: drawing(*each).mean()), {"microbatches": 2}, id="a mean that draws"
        ),
        pytest.param(lambda: workload_of(Warming()), {"microbatches": 2}, id="a count of calls"),
        pytest.param(in_bfloat16, {"microbatches": 2}, id="in bfloat16"),
        pytest.param(
            lambda: workload_of(loss=weighted_mean, weight=lambda target: target.exp().sum()),
            {"microbatches": 2},
            id="a mean over what is weighed",
        ),
    ],
)
def test_nothing_is_told_of_a_mean_or_where_batches_are_whole(
    workload: Callable[[], Workload], strategy: dict[str, Any]
) -> None:
    made = workload()
    assert told_of_parts(made, **strategy) == ()
    assert made.model.training
