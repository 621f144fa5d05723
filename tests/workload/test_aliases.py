"""What a model keeps in the memory of a parameter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from weft.workload.aliases import aliases_of, check_aliases
from weft.workload.workload import WorkloadError


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.kept: object = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def run(keep: Callable[[Model], None], during: Callable[[Model], None] = lambda model: None) -> None:
    model = Model()
    keep(model)
    aliases = aliases_of(model)
    model(torch.ones(1, 2))
    during(model)
    check_aliases(aliases)


def keep_data(model: Model) -> None:
    model.kept = model.linear.weight.detach().t()


@pytest.mark.parametrize(
    ("keep", "name"),
    [
        (lambda model: model.register_buffer("first", model.linear.weight.data), "first"),
        (lambda model: model.register_buffer("row", model.linear.weight.data[1]), "row"),
        (keep_data, "kept"),
        (lambda model: setattr(model, "kept", [model.linear.weight.data]), "kept"),
        (lambda model: setattr(model.linear, "kept", {"it": model.linear.weight.view(-1)}), "linear.kept"),
    ],
)
def test_it_is_told_by_its_name_with_the_remedy(keep: Callable[[Model], None], name: str) -> None:
    """It followed the parameter in the plain loop and stayed behind in a job, and nobody was told."""
    with pytest.raises(WorkloadError) as told:
        run(keep)
    assert f"{name!r} is kept in the memory of the parameter 'linear.weight', and would not follow" in str(told.value)
    assert ".detach().clone()" in str(told.value)


@pytest.mark.parametrize(
    "keep",
    [
        lambda model: setattr(model, "kept", [model.linear.weight]),  # the parameter itself
        lambda model: setattr(model, "kept", model.linear.weight.detach().clone()),
        lambda model: (model.linear.weight.requires_grad_(False), keep_data(model)),  # nobody moves it
        lambda model: torch.nn.utils.spectral_norm(model.linear),
        lambda model: setattr(model, "kept", nn.LSTM(2, 2)),
    ],
)
def test_a_parameter_itself_a_copy_and_what_a_hook_makes_anew_are_none(keep: Callable[[Model], None]) -> None:
    run(keep)


def test_what_forward_makes_anew_is_none() -> None:
    run(keep_data, keep_data)
