"""What a stage shows of itself in every snapshot."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from weft.workers.compute.model_part import UnitPart
from weft.workers.lanes.shown import Shown
from weft.workload.units import Unit
from weft.workload.workload import WorkloadError


def test_a_parameter_that_nobody_trains_may_change_only_where_it_is_known_to() -> None:
    """A teacher that follows from the hundredth step on was not seen to change, and a snapshot had its first values."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False))
    names = {id(each): name for name, each in model.named_parameters()}
    part = UnitPart([Unit(0, "0.", model[0]), Unit(1, "1.", model[1])], ["1.weight"])
    shown = Shown(part, names, [id(each) for each in model[0].parameters()])
    assert list(part.buffers()) == ["1.weight"]
    assert list(shown.fixed) == ["1.bias"]
    assert [name.first for name in shown.names] == list(names.values())
    with torch.no_grad():
        model[0].weight.zero_()
        model[1].weight.zero_()
        shown.check()
        model[1].bias.zero_()
    with pytest.raises(
        WorkloadError, match=r"changed the parameter '1\.bias', .* did not when it was tried .* buffers"
    ):
        shown.check()
    shown.begin()
    shown.check()


def test_one_without_elements_may_be_trained_by_whatever_counts_its_changes() -> None:
    model = nn.Linear(2, 2)
    model.prompt = nn.Parameter(torch.empty(0, 2))
    names = {id(each): name for name, each in model.named_parameters()}
    shown = Shown(UnitPart([Unit(0, "", model)]), names, names)
    assert list(shown.fixed) == ["prompt"]
    with torch.no_grad():
        model.prompt.mul_(2)
    shown.check()
