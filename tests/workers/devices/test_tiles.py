"""Copies through two tiles, beside a stream that makes each of its copies as late as it may."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from weft.workers.devices.tiles import Tiles, UnlockedMemory

LateCopies = runpy.run_path(str(Path(__file__).parents[1] / "lanes" / "thread_device.py"))["LateCopies"]
TILE_BYTES = 64
SIZES = [0, 1, 7, 8, 9, 16, 17, 41]  # elements of float64: none, less than a tile, tiles and what is left over


class Stand:
    """A block of shared memory that could not be page-locked, and a device's own memory beside it."""

    def __init__(self) -> None:
        self.copies: Any = LateCopies()
        tiles = self.copies.tiles(TILE_BYTES)
        self.memory = UnlockedMemory(lambda: tiles)
        self.block = torch.zeros(1 << 12, dtype=torch.uint8)
        self.memory.add(self.block)

    def shared(self, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        count = torch.Size(shape).numel()
        return self.block[: count * dtype.itemsize].view(dtype).view(shape)


@pytest.mark.parametrize("size", SIZES)
def test_what_goes_up_has_been_read_and_is_there_when_the_stream_gets_to_it(size: int) -> None:
    stand = Stand()
    numbers = torch.randn(size, dtype=torch.float64)
    shared, own = stand.shared(size), torch.full((size,), torch.nan, dtype=torch.float64)
    shared.copy_(numbers)
    stand.memory.copy(own, shared)
    shared.fill_(torch.nan)  # the next one writes
    stand.copies.make()
    assert torch.equal(own, numbers)


@pytest.mark.parametrize("size", SIZES)
def test_what_goes_down_is_there_when_the_copy_returns(size: int) -> None:
    stand = Stand()
    numbers = torch.randn(size, dtype=torch.float64)
    shared = stand.shared(size).fill_(torch.nan)
    stand.memory.copy(shared, numbers.clone())
    assert torch.equal(shared, numbers)


def test_a_tile_is_written_again_only_when_the_stream_is_through_with_it() -> None:
    """From one copy to the next, in either direction."""
    stand = Stand()
    given = [torch.randn(size, dtype=torch.float64) for size in (9, 3, 20, 5, 1)]
    own = [torch.empty_like(each) for each in given]
    for place, numbers in zip(own, given, strict=True):
        stand.shared(len(numbers)).copy_(numbers)
        stand.memory.copy(place, stand.shared(len(numbers)))
    back = stand.shared(20)
    stand.memory.copy(back, own[2])
    assert torch.equal(back, given[2]), "behind what went up before"
    stand.copies.make()
    assert all(torch.equal(place, numbers) for place, numbers in zip(own, given, strict=True))


@pytest.mark.parametrize("goes_up", [True, False])
def test_a_copy_that_does_not_wait_for_its_tiles_brings_something_else(
    goes_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tiles, "_wait", lambda tiles, number: None)
    stand = Stand()
    numbers, own, shared = torch.randn(41, dtype=torch.float64), torch.zeros(41, dtype=torch.float64), stand.shared(41)
    (shared if goes_up else own).copy_(numbers)
    stand.memory.copy(own, shared) if goes_up else stand.memory.copy(shared, own)
    stand.copies.make()
    assert not torch.equal(own if goes_up else shared, numbers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool], ids=str)
def test_any_shape_stride_and_dtype_comes_over(dtype: torch.dtype) -> None:
    stand = Stand()
    numbers = torch.randint(0, 2, (5, 4, 3), generator=torch.Generator().manual_seed(0)).to(dtype)
    for order in ((0, 1, 2), (2, 0, 1)):
        shape = [numbers.shape[place] for place in order]
        shared = stand.shared(*shape, dtype=dtype).permute([order.index(place) for place in range(3)])
        shared.copy_(numbers)
        own = torch.zeros_like(numbers)
        stand.memory.copy(own, shared)
        stand.copies.make()
        assert torch.equal(own, numbers)
        shared.zero_()
        stand.memory.copy(shared, own)
        assert torch.equal(shared, numbers)
    one, number = stand.shared(dtype=dtype), numbers.flatten()[numbers.flatten().nonzero()[0, 0]]
    stand.memory.copy(one, number)
    assert one == number


def test_a_dtype_of_the_devices_own_is_the_slots_on_the_way() -> None:
    stand = Stand()
    shared, own = stand.shared(9, dtype=torch.bfloat16), torch.randn(9)
    stand.memory.copy(shared, own)
    assert torch.equal(shared, own.bfloat16())
    wide = torch.zeros(9)
    stand.memory.copy(wide, shared)
    stand.copies.make()
    assert torch.equal(wide, own.bfloat16().float())


def test_memory_that_is_page_locked_is_copied_as_ever() -> None:
    stand = Stand()
    numbers, own = torch.randn(41), torch.zeros(41)
    stand.memory.copy(own, numbers)
    assert torch.equal(own, numbers)
    stand.memory.clear()
    shared = stand.shared(41, dtype=torch.float32)
    stand.memory.copy(shared, numbers)
    assert torch.equal(shared, numbers)
