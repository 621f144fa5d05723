"""Rings of slots: which microbatch stands where, and that nothing is made anew for a task."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.plan.plan import Ring, Role, SlotValue
from weft.workers.devices.host import HostDevice
from weft.workers.memory.slots import SlotRing

VALUE = SlotValue(name="input", dtype="float32", shapes={2: (2, 4), 1: (1, 4)}, offset=0, num_bytes=64, stages=(0,))
RING = Ring(
    role=Role.INPUT,
    replica=0,
    stages=(0,),
    depth=3,
    slot_bytes=64,
    values=(VALUE,),
)


class Blocks:
    """Stands in for the directory: a block by its name, of the size first asked for."""

    def __init__(self) -> None:
        self.made: dict[str, torch.Tensor] = {}

    def block(self, name: str, num_bytes: int, fill: int = 0) -> torch.Tensor:
        return self.made.setdefault(name, torch.full((num_bytes,), fill, dtype=torch.uint8))


def ring_of(blocks: Blocks, microbatches: int = 2, **changes: Any) -> SlotRing:
    return SlotRing(blocks, replace(RING, **changes), microbatches, HostDevice())  # type: ignore[arg-type]  # all that it asks of one


def test_the_writer_and_the_reader_of_a_microbatch_meet_in_one_slot() -> None:
    blocks = Blocks()
    writer, reader = ring_of(blocks), ring_of(blocks)
    for iteration in range(4):
        for microbatch in range(2):
            writer.slot(iteration, microbatch, 2).fill_(10 * iteration + microbatch)
            assert reader.slot(iteration, microbatch, 2).tolist() == [[10 * iteration + microbatch] * 4] * 2


@given(first=st.integers(0, 30), second=st.integers(0, 30))
def test_microbatches_share_a_slot_only_at_a_distance_of_the_depth(first: int, second: int) -> None:
    ring = ring_of(Blocks())
    a, b = (ring.slot(*divmod(number, 2), 2).data_ptr() for number in (first, second))
    assert (a == b) == ((first - second) % 3 == 0)


def test_a_smaller_microbatch_stands_at_the_beginning_of_the_same_slot() -> None:
    ring = ring_of(Blocks())
    large, small = ring.slot(0, 1, 2), ring.slot(0, 1, 1)
    assert (large.shape, small.shape, small.dtype) == ((2, 4), (1, 4), torch.float32)
    small.fill_(7)
    assert large.tolist() == [[7.0] * 4, [0.0] * 4]


def test_slots_do_not_overlap() -> None:
    blocks = Blocks()
    ring = ring_of(blocks)
    ring.slot(0, 1, 2).fill_(1)
    assert not ring.slot(0, 0, 2).any()
    assert not ring.slot(1, 0, 2).any()
    assert blocks.made["input-0"].numel() == 3 * 64


def test_the_view_of_a_slot_is_made_once() -> None:
    ring = ring_of(Blocks())
    assert ring.slot(0, 0, 2) is ring.slot(3, 0, 2)


def test_a_microbatch_size_that_was_not_planned_is_an_error() -> None:
    with pytest.raises(KeyError):
        ring_of(Blocks()).slot(0, 0, 3)


def test_a_devices_own_ring_is_not_shared() -> None:
    blocks = Blocks()
    first, second = (ring_of(blocks, memory="device") for _ in range(2))
    first.slot(0, 0, 2).fill_(1)
    assert first.slot(0, 0, 2).tolist() == [[1.0] * 4] * 2
    assert not second.slot(0, 0, 2).any()
    assert blocks.made == {}


def test_the_host_reads_shared_memory_in_place() -> None:
    ring = ring_of(Blocks())
    assert ring.read(0, 0, 2) is ring.slot(0, 0, 2)


def test_a_ring_for_what_has_no_elements_has_a_block_all_the_same() -> None:
    blocks = Blocks()
    ring = ring_of(blocks, slot_bytes=0, values=(replace(VALUE, shapes={1: (1, 0)}),))
    assert ring.slot(0, 0, 1).shape == (1, 0)
    assert blocks.made["input-0"].numel() == 1
