"""Watched parameters: whoever reads one, by whatever way, somebody is told before."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import nn

from weft.workers.compute.watched import WatchedParameters, watch

READS: dict[str, Callable[[nn.Sequential], object]] = {
    "an attribute": lambda model: model[1].weight,
    "a name": lambda model: model.get_parameter("1.weight"),
    "a call": lambda model: model[1](torch.ones(2, 2)),
    "all of the model's": lambda model: sum(each.sum() for each in model.parameters()),
    "all with names": lambda model: dict(model.named_parameters()),
    "a state dict": lambda model: model.state_dict(),
    "a copy": copy.deepcopy,
    "a copy of the module": lambda model: copy.copy(model[1]._parameters),
    "another's parameters in its place": lambda model: torch.func.functional_call(
        model, {"0.weight": torch.ones(2, 2)}, torch.ones(2, 2)
    ),
    "a file": lambda model: torch.save(model, io.BytesIO()),
}


def watched() -> tuple[nn.Sequential, nn.Parameter, list[nn.Parameter]]:
    """A model, a weight of its second layer, and what is read of that layer."""
    model, read = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), list[nn.Parameter]()
    weight = model[1].get_parameter("weight")
    watch(model, {id(weight)}, read.append)
    return model, weight, read


@pytest.mark.parametrize("way", READS)
def test_whoever_reads_is_seen(way: str) -> None:
    model, weight, read = watched()
    READS[way](model)
    assert any(each is weight for each in read)


def test_other_modules_and_looks_without_values_are_not() -> None:
    model, _, read = watched()
    assert type(model[0]._parameters) is dict
    model[0](torch.ones(2, 2))
    model.train(mode=False)
    assert "weight" in model[1]._parameters
    assert len(model[1]._parameters) == 2
    assert not read


def test_a_watched_module_moves_changes_and_is_copied_as_any() -> None:
    model, weight, _ = watched()
    other = copy.deepcopy(model)
    assert type(other[1]._parameters) is dict
    assert other[1].weight is not weight
    assert torch.equal(other[1].weight, weight)
    model.double().float()
    assert isinstance(model[1]._parameters, WatchedParameters)
    model[1].weight = nn.Parameter(torch.zeros(2, 2))
    assert torch.equal(model(torch.ones(1, 2)), model[1].bias[None])
    model[1].bias = None
    assert list(dict(model[1].named_parameters())) == ["weight"]
