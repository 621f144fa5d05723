"""What a model is cut between."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from weft.workload.units import is_cut_by_calls, units
from weft.workload.workload import Workload


class Named(nn.Sequential):
    """A class for its constructor alone, as libraries have them."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(1, 1), nn.Tanh())


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
