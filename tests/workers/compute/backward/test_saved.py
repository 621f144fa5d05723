"""What a forward keeps for its backward: counted by hand, each block once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from weft.workers.compute.backward.saved import SavedBytes, refuses_to_be_noted

ROWS, WIDTH = 4, 8
ROW_BYTES = 4 * WIDTH  # of float32
ONE = ROWS * ROW_BYTES


def kept_by(forward: Callable[[torch.Tensor], torch.Tensor], *modules: nn.Module) -> int:
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    saved = SavedBytes([x, *(parameter for module in modules for parameter in module.parameters())])
    with saved.noting():
        y = forward(x)
    saved.note([y])
    y.sum().backward()
    assert x.grad is not None
    return saved.num_bytes


def test_what_comes_out_and_what_is_saved_count_once() -> None:
    first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    assert kept_by(first, first) == ONE, "the output; its input and the weight are there anyway"
    assert kept_by(lambda x: second(first(x)), first, second) == 2 * ONE
    assert kept_by(lambda x: torch.tanh(first(x)), first) == ONE, "tanh has its output, and needs not its input"
    assert kept_by(lambda x: torch.sin(first(x)), first) == 2 * ONE, "a sine needs its input"
    assert kept_by(lambda x: first(x).view(-1).exp().view(2, -1), first) == ONE, "views are of one block"
    assert kept_by(lambda x: x + 1.0) == ONE


def test_in_place_operations_have_no_block_of_their_own() -> None:
    layer = nn.Linear(WIDTH, WIDTH)
    assert kept_by(lambda x: torch.relu_(layer(x)), layer) == ONE


def test_what_is_made_again_is_not_kept() -> None:
    layer = nn.Linear(WIDTH, WIDTH)

    def chain(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(torch.sin(layer(x)))

    assert kept_by(chain, layer) == 3 * ONE
    again = kept_by(lambda x: torch.as_tensor(checkpoint(chain, x, use_reentrant=False)), layer)
    assert again == ONE


def test_gradients_are_as_without_a_look() -> None:
    """Also those of gradients: what is saved and unpacked has to stand in the graph as it did."""
    layer = nn.Linear(WIDTH, 1)
    found = []
    for looks in (False, True):
        torch.manual_seed(0)
        x = torch.randn(ROWS, WIDTH, requires_grad=True)
        saved = SavedBytes([x])
        if looks:
            with saved.noting():
                y = torch.autograd.grad(torch.tanh(layer(x)).sum(), x, create_graph=True)[0].pow(2).sum()
        else:
            y = torch.autograd.grad(torch.tanh(layer(x)).sum(), x, create_graph=True)[0].pow(2).sum()
        found.append(torch.autograd.grad(y, [x, layer.weight]))
    assert all(map(torch.equal, *found))


def test_transforms_that_refuse_a_look_are_told_from_other_errors() -> None:
    with pytest.raises(RuntimeError) as refused, SavedBytes([]).noting():
        torch.func.grad(lambda x: (x**2).sum())(torch.ones(2))
    assert refuses_to_be_noted(refused.value)
    assert not refuses_to_be_noted(RuntimeError("another"))
    assert not refuses_to_be_noted(None)


def test_tensors_without_memory_of_their_own_are_passed_over() -> None:
    saved = SavedBytes([torch.empty(3, device="meta")])
    saved.note([torch.empty(3, device="meta"), torch.eye(3).to_sparse(), torch.empty(0)])
    assert saved.num_bytes == 0
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with saved.noting():
        made = torch.func.vmap(lambda row: torch.sin(row) * row)(x)
    assert torch.equal(made, torch.sin(x) * x)
