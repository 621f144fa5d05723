"""Torch's own is put back, and what a package has put there stays."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module
from torch.optim import optimizer

from weft.workload.code import torchs_own


@pytest.fixture(autouse=True)
def noted() -> Iterator[None]:
    torchs_own.note()
    yield
    torchs_own.put_back()
    torchs_own._functions.clear()
    torchs_own._hooks.clear()


def own(*args: Any, **kwargs: Any) -> None:
    """What a job puts there."""


PLACES: dict[str, tuple[Any, str]] = {
    "a method": (nn.Linear, "forward"),
    "a method that is inherited": (nn.Dropout, "__init__"),
    "a function": (nn.functional, "relu"),
    "one that initialises": (nn.init, "kaiming_uniform_"),
    "one of tensors": (torch.Tensor, "backward"),
    "one of torch's": (torch, "load"),
    "one that is no Python": (torch, "matmul"),
    "an optimizer's": (torch.optim.Adam, "step"),
    "a scheduler's": (torch.optim.lr_scheduler.StepLR, "get_lr"),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("what", [own, functools.partial(own)], ids=["a function", "an object"])
def test_what_a_job_puts_in_a_place_of_torchs_is_gone(place: str, what: Callable[..., Any]) -> None:
    owner, name = PLACES[place]
    before = getattr(owner, name)
    setattr(owner, name, what)
    torchs_own.put_back()
    assert getattr(owner, name) is before


@pytest.mark.parametrize(
    "register",
    [
        module.register_module_forward_hook,
        module.register_module_forward_pre_hook,
        module.register_module_full_backward_hook,
        module.register_module_parameter_registration_hook,
        optimizer.register_optimizer_step_pre_hook,
        optimizer.register_optimizer_step_post_hook,
    ],
)
def test_hooks_for_all_are_gone(register: Callable[[Any], Any]) -> None:
    called: list[int] = []
    register(lambda *args: called.append(1))
    torchs_own.put_back()
    layer = nn.Linear(2, 2)
    layer(torch.zeros(1, 2)).sum().backward()
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    assert not called


def test_what_torch_itself_has_put_there_stays() -> None:
    torch.optim.Rprop([torch.zeros(1)], lr=0.1)  # the first one of a class marks its step
    step = torch.optim.Rprop.step
    torchs_own.put_back()
    assert torch.optim.Rprop.step is step
