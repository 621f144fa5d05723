from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from weft.workload.step import check_names, function_value, step_source, step_values, training_step, validation_step
from weft.workload.workload import Workload, WorkloadError


def a_loss() -> torch.Tensor:
    return nn.Parameter(torch.tensor(2.0)) * 3


def workload(**parts: Any) -> Workload:
    return Workload(nn.Linear(1, 1), [], optimizer=torch.optim.SGD, **parts)


def test_a_loss_alone_is_a_step_that_reports_nothing_else() -> None:
    loss = a_loss()
    values = step_values(loss, "Workload.step", learns=True)
    assert list(values) == ["loss"]
    assert values["loss"] is loss


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_what_stands_beside_the_loss_is_reported_without_its_gradient(kind: Any) -> None:
    returned = kind(accuracy=0.5, aux=a_loss(), count=torch.tensor([[3]]), loss=a_loss())
    values = step_values(returned, "Workload.step", learns=True)
    assert list(values) == ["loss", "accuracy", "aux", "count"]
    assert {name: float(value.detach()) for name, value in values.items()} == {
        "loss": 6.0,
        "accuracy": 0.5,
        "aux": 6.0,
        "count": 3.0,
    }
    assert [value.requires_grad for value in values.values()] == [True, False, False, False]


def test_what_is_only_measured_may_be_a_number() -> None:
    assert float(step_values(0.25, "Workload.validate", learns=False)["loss"]) == 0.25


def test_a_metric_may_be_a_number_and_a_loss_may_not() -> None:
    """`.item()` ends most metrics that people have. It was taken from where a forward is looked into, and refused,
    behind an epoch, where the units of an `nn.Sequential` are called."""
    for number in (0.25, np.float32(0.25), torch.tensor([0.25])):
        assert float(function_value(number, "accuracy")) == 0.25
    assert float(function_value(True, "accuracy")) == 1.0
    with pytest.raises(WorkloadError, match=r"Workload\.loss returned float; it must return a scalar tensor"):
        function_value(0.25, "loss")


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        (torch.zeros(4), r"a tensor of shape \(4,\); it must return a scalar, the mean over the samples given"),
        (None, "None; it must return a scalar"),
        (1j, "complex; it must return a scalar"),
        (torch.tensor(1j), r"a complex number; it must return a real one, such as its \.abs"),
    ],
)
def test_a_metric_that_is_no_scalar_is_told_by_its_name(returned: Any, text: str) -> None:
    with pytest.raises(WorkloadError, match=rf"Workload\.metrics\['top5'\] returned {text}"):
        function_value(returned, "top5")


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        (None, "returned None as the loss; it must return the loss, a scalar tensor, or a mapping with it as 'loss'"),
        ((a_loss(), a_loss()), "returned tuple as the loss; it must return the loss"),
        ({"logits": a_loss()}, "returned dict without 'loss'; it must return the loss, a scalar tensor, or a mapping"),
        (torch.zeros(4, 1), r"returned a tensor of shape \(4, 1\) as the loss; it must return the loss, a scalar"),
        (a_loss() * 1j, "returned a complex 'loss'; return a real one, such as its .abs"),
        (1.5, r"returned a loss without a gradient \(float\); return the tensor as the model's parameters have made"),
        (a_loss().detach(), r"returned a loss without a gradient \(Tensor\); return the tensor .* without .item"),
        (
            {"loss": a_loss(), "logits": torch.zeros(4, 9)},
            r"returned a tensor of shape \(4, 9\) as 'logits'; report scalars alone, means as the loss is, or return "
            r"the loss alone \(of what a model returns, output\['loss'\]\)",
        ),
        ({"loss": a_loss(), "hidden": None}, "returned None as 'hidden'; report scalars alone, means as the loss is"),
        ({"loss": a_loss(), 3: 1.0}, "returned a mapping with 3, which is no text; name what is reported"),
    ],
    ids=lambda value: None if isinstance(value, str) else type(value).__name__,
)
def test_a_step_that_returns_no_loss_is_told_what_it_returned(returned: Any, text: str) -> None:
    with pytest.raises(WorkloadError, match=f"Workload.step {text}"):
        step_values(returned, "Workload.step", learns=True)


def test_names_that_come_and_go_are_refused() -> None:
    check_names({"loss": 1.0, "aux": 2.0}, ["loss", "aux"], "Workload.step")
    with pytest.raises(WorkloadError, match="reported 'loss', and for a batch before 'loss', 'aux'; return the"):
        check_names({"loss": 1.0}, ["loss", "aux"], "Workload.step")


def test_a_loss_over_pairs_is_a_step_too_and_its_metrics_are_for_validation() -> None:
    given = workload(loss=nn.functional.mse_loss, metrics={"mean": lambda output, target: output.mean()})
    batch = torch.ones(4, 1), torch.zeros(4, 1)
    output = given.model(batch[0])
    trained, measured = (step(given.model, batch) for step in (training_step(given), validation_step(given)))
    assert trained == {"loss": output.square().mean()}
    assert measured == {"loss": output.square().mean(), "mean": output.mean()}
    assert step_source(given, learns=True) == "Workload.loss"


def test_validation_takes_the_step_unless_it_has_one_of_its_own() -> None:
    def step(model: nn.Module, batch: Any) -> Any: ...

    def validate(model: nn.Module, batch: Any) -> Any: ...

    alone, both = workload(step=step), workload(step=step, validate=validate)
    assert training_step(alone) is validation_step(alone) is training_step(both) is step
    assert validation_step(both) is validate
    assert [step_source(both, learns=learns) for learns in (True, False)] == ["Workload.step", "Workload.validate"]
    assert step_source(alone, learns=False) == "Workload.step"
