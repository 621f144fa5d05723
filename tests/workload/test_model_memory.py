"""A model as every part of a job finds it, and what would mean something else once its parameters are moved."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from weft.workload.model_memory import check_plain, check_values, settle
from weft.workload.workload import WorkloadError


def holding(**parameters: torch.Tensor) -> nn.Module:
    model = nn.Module()
    for name, tensor in parameters.items():
        model.register_parameter(name, nn.Parameter(tensor))
    return model


def test_a_parameter_with_gaps_gets_a_dense_place_and_every_other_one_stays_where_it_is() -> None:
    """A stage's was dense and so took the fused kernel, and the plain loop's was not and did not."""
    table = torch.arange(24.0).view(4, 6)
    model = holding(sliced=table[:, :3], turned=torch.ones(3, 4).t(), plain=torch.ones(5), none=torch.ones(0, 3))
    places = {name: each.data_ptr() for name, each in model.named_parameters() if name != "sliced"}
    settle(model)
    assert model.sliced.stride() == (3, 1)
    assert torch.equal(model.sliced, table[:, :3])
    assert model.turned.stride() == (1, 4), "a dense one keeps its order: kernels round by it"
    assert all(model.get_parameter(name).data_ptr() == place for name, place in places.items())


def test_parameters_that_share_memory_and_are_two_are_refused_and_one_that_stands_twice_is_not() -> None:
    """In the plain loop both moved together; in shared memory each had a place of its own."""
    shared = torch.ones(4)
    with pytest.raises(WorkloadError, match=r"'a' and 'b' share memory and are two .*\(a\.weight = b\.weight"):
        settle(holding(a=shared, b=shared))
    with pytest.raises(WorkloadError, match="share memory"):
        settle(holding(a=shared, b=shared[2:]))
    frozen = holding(a=shared, b=shared).requires_grad_(False)
    settle(frozen)
    halves = torch.ones(8)
    model = holding(a=halves[:4], b=halves[4:], c=torch.ones(0), d=torch.ones(0))
    model.twice = model.a
    settle(model)


def test_what_the_saved_model_cannot_hold_is_refused_by_its_name() -> None:
    settle(holding(weight=torch.ones(2, dtype=torch.complex64)))
    with pytest.raises(
        WorkloadError, match=r"'weight' is complex128, which model.safetensors cannot hold; .*complex64"
    ):
        settle(holding(weight=torch.ones(2, dtype=torch.complex128)))
    graph = nn.Module()
    graph.register_buffer("adjacency", torch.eye(3).to_sparse())
    with pytest.raises(WorkloadError, match=r"'adjacency' is no dense tensor but sparse_coo, .*persistent=False"):
        settle(graph)
    graph.register_buffer("adjacency", torch.eye(3).to_sparse(), persistent=False)
    settle(graph)


@pytest.mark.parametrize(
    ("check", "model", "text"),
    [
        (check_values, nn.LazyLinear(3), "'weight' has no shape yet; call the model once with a batch like yours"),
        (check_values, nn.Linear(2, 3, device="meta"), "'weight' is on torch's meta device, and has no values; build"),
        (check_plain, nn.Sequential(torch.jit.ScriptModule()), "'0' is of torch.jit; give the nn.Module that it was"),
    ],
    ids=["lazy", "meta", "script"],
)
def test_what_cannot_be_trained_as_it_is_built_is_refused_with_what_to_do(
    check: Callable[[nn.Module], None], model: nn.Module, text: str
) -> None:
    with pytest.raises(WorkloadError, match=f"Workload.model: {text}"):
        check(model)


def test_a_name_that_no_file_and_no_message_takes_is_refused() -> None:
    model = nn.Module()
    model.add_module("a\udc00", nn.Tanh())
    with pytest.raises(WorkloadError, match=r"Workload.model: the name 'a.udc00' is no text; give one in UTF-8"):
        settle(model)
