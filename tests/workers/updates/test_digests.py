"""Digests of tensors: every bit counts, whatever the dtype, the length and the order in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from weft.plan.itinerary import Iteration
from weft.workers.compute.measured import Measured
from weft.workers.snapshots.held import VALUES, Extent, Held, Piece
from weft.workers.updates.digests import TILE_BYTES, Digests, digest
from weft.workers.updates.stage_update import StageUpdate
from weft.workload.faults import StateCorrupted, fault_of
from weft.workload.workload import Workload

TENSORS = {
    "whole words": torch.randn(64),
    "bytes beside words": torch.randn(33),
    "a part that begins inside a word": torch.randn(64)[1:40],
    "several tiles": torch.randn(3 * TILE_BYTES // 4 + 5),
    "bfloat16": torch.randn(37).to(torch.bfloat16),
    "complex": torch.randn(9, dtype=torch.complex64),
    "truths": torch.rand(21) > 0.5,
    "no dimension": torch.tensor(3.0),
    "another order in memory": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "no elements": torch.empty(0),
}


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Of its own memory, dense as it is."""
    return torch.as_strided(tensor, (tensor.numel(),), (1,), tensor.storage_offset()).view(torch.uint8)


@pytest.mark.parametrize("name", TENSORS)
def test_a_changed_bit_changes_it_and_one_that_is_changed_back_does_not(name: str) -> None:
    tensor = TENSORS[name].clone()
    if name.startswith("a part"):
        tensor = TENSORS[name]
    before, data = digest(tensor), as_bytes(tensor)
    for place in range(0, data.numel(), max(1, data.numel() // 50)):
        for bit in (0, 3, 7) if tensor.dtype is not torch.bool else (0,):
            data[place] ^= 1 << bit
            assert not torch.equal(digest(tensor), before), (place, bit)
            data[place] ^= 1 << bit
    assert torch.equal(digest(tensor), before)


def held_of(*pieces: Piece) -> Held:
    return Held(pieces=list(pieces))


def test_what_has_changed_is_named_by_its_parameters() -> None:
    flat = torch.zeros(3 * TILE_BYTES // 4)
    extents = [
        Extent("first", 0, 0, 10),
        Extent("second", 0, 10, flat.numel() - 10),
        Extent("third", 5, flat.numel() - 10, flat.numel()),
    ]
    whole = torch.zeros(4, 4)
    held = held_of(Piece(VALUES, extents, flat), Piece("exp_avg", [Extent("fourth", 0, 0, 0)], whole))
    digests = Digests()
    digests.check(0, held)  # nothing is known yet
    digests.note(0, held)
    digests.check(0, held)
    for place, named in ((0, "values of first, second"), (flat.numel() // 2, "values of second")):
        flat[place] = 1.0
        with pytest.raises(StateCorrupted, match=f"bits of the {named} have"):
            digests.check(0, held)
        flat[place] = 0.0
    whole[3, 3] = -0.0
    with pytest.raises(StateCorrupted, match="bits of the exp_avg of fourth have"):
        digests.check(0, held)
    digests.check(1, held)  # of another part nothing is known


def test_of_many_small_ones_in_a_tile_some_are_named() -> None:
    flat = torch.zeros(10)
    held = held_of(Piece(VALUES, [Extent(f"p{n}", 0, n, n + 1) for n in range(10)], flat))
    digests = Digests()
    digests.note(0, held)
    flat[4] = 1.0
    with pytest.raises(StateCorrupted, match="values of p0, p1, p2 or 7 more have"):
        digests.check(0, held)


@pytest.fixture
def stage() -> tuple[nn.Linear, StageUpdate]:
    model = nn.Linear(3, 2)
    workload: Any = Workload(
        model=nn.Sequential(model),
        loss=nn.functional.mse_loss,
        train=(torch.zeros(4, 3), torch.zeros(4, 2)),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.1),
    )
    names = {id(each): f"0.{name}" for name, each in model.named_parameters()}
    return model, StageUpdate(workload, list(model.parameters()), names, reports=False, digests=Digests())


def step(model: nn.Linear, update: StageUpdate, index: int) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    update.run(Iteration(index=index, training=True, epoch=0, step=index, start=0, size=4), Measured())


@pytest.mark.parametrize("what", ["values", "exp_avg_sq"])
def test_a_stage_that_updates_itself_finds_what_has_changed_and_does_not_step(
    stage: tuple[nn.Linear, StageUpdate], what: str
) -> None:
    model, update = stage
    for index in range(3):
        step(model, update, index)
        update.check()
    optimizer: Any = update._optimizer
    tensor = model.weight.data if what == "values" else optimizer.state[model.weight][what]
    as_bytes(tensor)[5] ^= 4
    before = model.bias.detach().clone()
    with pytest.raises(StateCorrupted) as caught:
        step(model, update, 3)
    assert torch.equal(model.bias, before)
    fault = fault_of(caught.value)
    assert (fault.reason, fault.exit_code) == ("corrupted", 70)
    assert f"bits of the {what} of 0.weight have changed since their last update" in fault.message
