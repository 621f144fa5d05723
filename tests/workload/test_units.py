"""What a model is cut between."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from weft.workload.units import check_modes, enter_mode, is_cut_by_calls, units
from weft.workload.workload import Workload, WorkloadError


class Named(nn.Sequential):
    """A class for its constructor alone, as libraries have them."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(1, 1), nn.Tanh())


class Evaluated(Named):
    """In an `eval()` of its own it is another one."""

    def eval(self) -> Evaluated:
        super().eval()
        self[1] = nn.Identity()
        return self


class Switched(nn.Linear):
    """Takes no mode, as a model of a script that never gives one."""

    def train(self) -> Switched:  # type: ignore[override]
        return super().train(True)

    def eval(self) -> Switched:
        return super().train(False)


class Trainer(nn.Linear):
    def train(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:  # type: ignore[override]
        raise NotImplementedError


class Asked(nn.Linear):
    def eval(self, inputs: torch.Tensor) -> None:  # type: ignore[override]
        raise NotImplementedError


class Frozen(Named):
    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self[0].eval()
        return self


def hooked(register: str, hook: Callable[..., None] = lambda *_: None) -> nn.Module:
    model = Named()
    getattr(model, register)(hook)
    return model


def with_buffer() -> nn.Module:
    model = Named()
    model.register_buffer("mean", torch.zeros(1))
    return model


def with_parameter() -> nn.Module:
    model = Named()
    model.scale = nn.Parameter(torch.ones(1))
    return model


def with_forward() -> nn.Module:
    model = Named()
    forward = model.forward
    model.forward = lambda x: forward(2 * x)  # type: ignore[method-assign]
    return model


def by_calls(model: nn.Module) -> bool:
    data = torch.zeros(2, 1), torch.zeros(2, 1)
    return is_cut_by_calls(Workload(model, data, loss=nn.MSELoss(), optimizer=torch.optim.AdamW))


def test_a_plain_sequential_is_cut_between_its_children_also_where_it_has_a_class_of_its_own() -> None:
    for model in (nn.Sequential(nn.Linear(1, 1), nn.Tanh()), Named()):
        assert [prefix for prefix, _ in units(model)] == ["0.", "1."]
        assert not by_calls(model)


@pytest.mark.parametrize(
    "make",
    [
        lambda: hooked("register_forward_hook"),
        lambda: hooked("register_forward_pre_hook"),
        lambda: hooked("register_full_backward_hook"),
        lambda: hooked("register_full_backward_pre_hook"),
        lambda: hooked("register_state_dict_post_hook"),
        lambda: hooked("register_state_dict_pre_hook"),
        with_buffer,
        with_parameter,
        with_forward,
        Frozen,
    ],
)
def test_one_that_is_more_than_its_children_is_cut_by_its_own_forward(make: Callable[[], nn.Module]) -> None:
    """A hook on the whole was never called, in a job and in its reference run alike, and nobody was told; a parameter
    beside the children ended the job with a KeyError of Weft's own."""
    assert by_calls(make())


def test_a_models_mode_is_entered_by_the_calls_of_a_loop() -> None:
    model = Evaluated()
    enter_mode(model, False)
    assert isinstance(model[1], nn.Identity)
    assert not model.training
    switched = Switched(1, 1)
    for training in (False, True):
        enter_mode(switched, training)
        assert switched.training == training
    for each in (model, switched, nn.Sequential(Asked(1, 1))):
        check_modes(each)


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (
            nn.Sequential(Trainer(1, 1)),
            "'0' has a train.inputs: .* of its own, and model.train.. is called in each epoch",
        ),
        (Trainer(1, 1), "'it' has a train.inputs: .*; give that method another name, such as fit"),
        (nn.ModuleList([Switched(1, 1)]), "'0' has a train.. -> 'Switched' of its own"),
        (Asked(1, 1), "'it' has a eval.inputs: .*; give that method another name, such as evaluate"),
    ],
    ids=["part", "whole", "without a mode", "eval"],
)
def test_a_method_of_another_meaning_is_told_by_its_name(model: nn.Module, text: str) -> None:
    with pytest.raises(WorkloadError, match=f"Workload.model: {text}"):
        check_modes(model)
