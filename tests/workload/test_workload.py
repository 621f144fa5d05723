from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from weft.workload.workload import (
    EpochAnswer,
    Workload,
    WorkloadError,
    answer_of,
    make_scheduler,
    metric_of,
    span_of,
    weight_of,
)


def an_optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.5)


@pytest.mark.parametrize(
    "function",
    [
        lambda target: (target != -100).sum(),
        lambda target: (target != -100).sum().view(1, 1),
        lambda target: int((target != -100).sum()),
        lambda target: float((target != -100).sum()),
    ],
)
def test_a_weight_may_be_a_number_or_a_tensor_of_one(function: Callable[[torch.Tensor], Any]) -> None:
    weight = weight_of(torch.tensor([[1, -100], [2, 3]]), function)
    assert (type(weight), weight) == (float, 3.0)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "Workload.weight returned None; it must return a number, or a tensor of one"),
        ("3", "Workload.weight returned str; it must return a number"),
        (torch.ones(2), r"Workload.weight returned a tensor of shape \(2,\); it must return a number"),
        (-1, r"Workload.weight returned -1\.0; it must return a finite number of 0 or more"),
        (float("nan"), "Workload.weight returned nan; it must return a finite number"),
        (torch.tensor(float("inf")), "Workload.weight returned inf; it must return a finite number"),
    ],
    ids=str,
)
def test_a_weight_that_cannot_count_is_refused_with_a_remedy(value: Any, text: str) -> None:
    with pytest.raises(WorkloadError, match=text):
        weight_of(torch.zeros(2), lambda target: value)


def test_without_a_factory_there_is_no_scheduler() -> None:
    assert make_scheduler(None, an_optimizer()) is None


def test_the_scheduler_sets_the_first_rate_at_once() -> None:
    optimizer = an_optimizer()
    scheduler = make_scheduler(lambda optimizer: LambdaLR(optimizer, lambda step: 0.1 * (step + 1)), optimizer)
    assert isinstance(scheduler, LRScheduler)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)


def test_it_may_be_stepped_before_its_optimizer() -> None:
    """Behind a step that was skipped. torch warns of it, and a warning is an error here."""
    optimizer = an_optimizer()
    scheduler = make_scheduler(lambda optimizer: LambdaLR(optimizer, lambda step: 0.1 * (step + 1)), optimizer)
    assert scheduler is not None
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("factory", "text"),
    [
        (lambda optimizer: None, "Workload.scheduler returned None; it must return a torch.optim.lr_scheduler"),
        (
            lambda optimizer: "of timm",
            r"for example CosineAnnealingLR.*, or for rates of your own LambdaLR\(optimizer, ",
        ),
        (
            lambda optimizer: LambdaLR(an_optimizer(), lambda step: 1.0),
            "Workload.scheduler returned a scheduler of another optimizer than it was given; build it on its arg",
        ),
    ],
    ids=["none", "of another library", "another optimizer"],
)
def test_a_scheduler_that_cannot_be_stepped_is_refused_with_a_remedy(factory: Any, text: str) -> None:
    with pytest.raises(WorkloadError, match=text):
        make_scheduler(factory, an_optimizer())


def test_of_torchs_schedulers_one_takes_a_value_of_validations() -> None:
    model = nn.Linear(1, 1)
    data = torch.zeros(2, 1), torch.zeros(2, 1)
    workload = Workload(
        model=model,
        train=data,
        loss=nn.MSELoss(),
        optimizer=torch.optim.Adam,
        scheduler=ReduceLROnPlateau,
        scheduler_metric="accuracy",
    )
    assert metric_of(workload, make_scheduler(workload.scheduler, an_optimizer())) == "accuracy"
    assert metric_of(workload, make_scheduler(lambda given: LambdaLR(given, lambda step: 1.0), an_optimizer())) is None
    assert metric_of(workload, None) is None


@pytest.mark.parametrize(
    ("factory", "span"),
    [
        (lambda given: CosineAnnealingLR(given, T_max=10), 10),
        (lambda given: CosineAnnealingWarmRestarts(given, T_0=7), 7),
        (lambda given: StepLR(given, 30), 30),
        (lambda given: MultiStepLR(given, [60, 30]), 60),
        (lambda given: SequentialLR(given, [LinearLR(given), CosineAnnealingLR(given, 40)], [5]), 40),
        (lambda given: ChainedScheduler([StepLR(given, 3), MultiStepLR(given, [8])]), 8),
        (lambda given: LambdaLR(given, lambda step: 1.0), None),
        (lambda given: ExponentialLR(given, 0.9), None),
        (ReduceLROnPlateau, None),
    ],
)
def test_a_scheduler_is_written_for_so_many_calls_by_its_own_numbers(factory: Any, span: int | None) -> None:
    assert span_of(factory(an_optimizer())) == span


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ("stop", EpochAnswer(True, {"f1": None})),
        (None, EpochAnswer(False, {"f1": None})),
        ({"f1": 0.5}, EpochAnswer(False, {"f1": 0.5})),
        ({"f1": torch.tensor([0.25]), "stop": True}, EpochAnswer(True, {"f1": 0.25})),
        ({"f1": True, "stop": False}, EpochAnswer(False, {"f1": 1.0})),
    ],
)
def test_on_epoch_may_stop_training_and_tell_what_it_has_found(answer: Any, told: EpochAnswer) -> None:
    assert answer_of(lambda values: answer, ["f1"], {"epoch": 0}) == told


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ("halt", "'halt'; it must return 'stop', None to go on, or a mapping"),
        (True, "bool; it must return 'stop', None to"),
        (0, "int; it must return 'stop', None to"),
        ({}, r"no 'f1' of Workload\.epoch_metrics; let these be the names that it returns"),
        ({"f1": 0.5, "auc": 0.5}, r"'auc', not in Workload\.epoch_metrics; let"),
        ({"f1": 0.5, 3: 0.5}, r"3, not in Workload\.epoch_metrics; let"),
        ({"f1": "0.5"}, "'f1' as str; give a number, or a tensor of one"),
        ({"f1": torch.zeros(2)}, r"'f1' as a tensor of shape \(2,\); give a number, or"),
        ({"f1": 0.5, "stop": 1}, "'stop' as int; give True or False"),
    ],
)
def test_another_answer_of_on_epoch_is_refused_with_those_that_there_are(answer: Any, told: str) -> None:
    with pytest.raises(WorkloadError, match=rf"^Workload\.on_epoch returned {told}"):
        answer_of(lambda values: answer, ["f1"], {"epoch": 0})
