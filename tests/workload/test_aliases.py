"""What a model keeps in the memory of a parameter, and what has hold of one beside its modules."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from weft.workload.aliases import aliases_of, check_aliases, referred_elsewhere
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


# --- what has hold of a parameter itself


class Keeping(nn.Module):
    """keep: what it has beside its modules, of its layer."""

    def __init__(self, keep: Callable[[nn.Linear], object]) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.kept = keep(self.layer)


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    return model


MODULES: dict[str, Callable[[], nn.Module]] = {
    "layers": lambda: nn.Sequential(nn.Linear(2, 2), nn.Conv1d(2, 2, 1), nn.BatchNorm1d(2)),
    "recurrent": lambda: nn.LSTM(2, 2, num_layers=2, bidirectional=True),
    "a transformer": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 4, batch_first=True), 2),
    "parametrized": lambda: parametrizations.weight_norm(nn.Linear(2, 2)),
    "a list of parameters": lambda: nn.ParameterList([torch.ones(2), torch.ones(2)]),
    "tied": tied,
    "a module that is not its own": lambda: Keeping(lambda layer: [layer]),
    "a frozen one": lambda: Keeping(lambda layer: [layer.weight.requires_grad_(requires_grad=False)]),
    "without parameters": nn.ReLU,
}
KEEPS: dict[str, Callable[[nn.Linear], object]] = {
    "a list": lambda layer: [layer.weight],
    "a table": lambda layer: {"weight": layer.weight},
    "a closure": lambda layer: (lambda weight: lambda: weight)(layer.weight),
    "an optimizer": lambda layer: torch.optim.SGD([layer.weight], lr=0.1),
    "another module": lambda layer: [nn.ParameterList([layer.weight])],
}


@pytest.mark.parametrize("name", MODULES)
def test_what_only_modules_have_is_referred_to_by_nobody_else(name: str) -> None:
    model = MODULES[name]()
    assert referred_elsewhere(model) is None


@pytest.mark.parametrize("name", KEEPS)
def test_what_something_else_has_is_told_by_its_name(name: str) -> None:
    model = Keeping(KEEPS[name])
    assert referred_elsewhere(model) == "layer.weight"


def test_what_nobody_has_any_more_does_not_count() -> None:
    model = nn.Linear(2, 2)
    gc.disable()
    try:
        cycle: list[object] = [model.weight]
        cycle.append(cycle)
        del cycle
        assert referred_elsewhere(model) is None
    finally:
        gc.enable()


def test_a_scripted_module_may_read_whatever_it_likes() -> None:
    with pytest.warns(DeprecationWarning, match="jit"):
        scripted = torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))
    assert referred_elsewhere(nn.Sequential(nn.Linear(2, 2), scripted)) is not None
