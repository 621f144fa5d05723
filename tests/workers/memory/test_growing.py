"""Growing: a place for more than was planned, made by who writes and found by who reads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from weft.machine.free_memory import SharedMemoryFull
from weft.plan.plan import Ring, Role, SlotValue
from weft.transport.memory.blocks import Blocks
from weft.transport.memory.directory import Directory
from weft.workers.devices.host import HostDevice
from weft.workers.devices.stand_in import StandIn
from weft.workers.memory.growing import SLACK, Growing

VALUE = SlotValue(name="layers.0:0", dtype="float32", shapes={1: (16,)}, offset=0, num_bytes=64, stages=(1,))
RING = Ring(role=Role.ACTIVATION, replica=0, writer=0, stages=(1,), depth=3, slot_bytes=64, values=(VALUE,))
NOTES = 8 * RING.depth


def test_nothing_has_grown_at_first(directory: Directory) -> None:
    growing = Growing(directory, RING, HostDevice())
    assert growing.block(0, 0) is None
    assert growing.count == 0


def test_a_block_has_slack_and_the_next_slots_are_of_its_size(directory: Directory) -> None:
    growing = Growing(directory, RING, HostDevice())
    assert len(growing.grow(0, 0, 1000)) == 1536 >= SLACK * 1000
    assert len(growing.grow(1, 0, 70)) == 1536
    assert len(growing.grow(2, 0, 1600)) == 2432
    assert growing.count == 3
    assert growing.told() == "activation-0-0 from 64 B to 2.4 KiB"


def test_the_block_before_is_given_back(directory: Directory) -> None:
    writer, reader = Growing(directory, RING, HostDevice()), Growing(directory, RING, HostDevice())
    for size in (100, 1000, 10_000):
        made = writer.grow(1, 0, size)
        found = reader.block(1, 0)
        assert found is not None
        assert found.data_ptr() == made.data_ptr()
        assert directory.num_bytes() == {"job": NOTES + len(made)}
    assert reader.block(0, 0) is None


def test_a_peer_lends_the_larger_block_too(directory: Directory) -> None:
    ring = replace(RING, memory="peer", lender=2)
    lender, borrower = Growing(directory, ring, StandIn()), Growing(directory, ring, StandIn())
    for size in (100, 1000):
        made = lender.grow(0, 0, size)
        found = borrower.block(0, 0)
        assert found is not None
        assert found.data_ptr() == made.data_ptr()


def test_what_is_in_a_devices_own_memory_grows_there(directory: Directory) -> None:
    growing = Growing(directory, replace(RING, memory="device"), StandIn())
    made = growing.grow(0, 0, 100)
    assert growing.block(0, 0) is made
    assert directory.num_bytes() == {}


def test_where_there_is_no_room_for_slack_there_is_none(directory: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    growing = Growing(directory, RING, HostDevice())
    _bound(monkeypatch, 1200)
    assert len(growing.grow(0, 0, 1000)) == 1024
    assert len(growing.grow(1, 0, 1000)) == 1024


def test_a_slot_that_cannot_grow_is_told_with_its_bytes_and_what_to_do(
    directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    growing = Growing(directory, RING, HostDevice())
    _bound(monkeypatch, 500)
    with pytest.raises(SharedMemoryFull) as refused:
        growing.grow(0, 0, 1000)
    assert str(refused.value) == (
        "a microbatch has 1000 bytes of 'layers.0:0', 64 were planned by the first batches, and its slot cannot grow: "
        "no room for 1024"
    )
    assert growing.block(0, 0) is None


def _bound(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    original = Blocks._make

    def make(self: Blocks, job: str, name: str, num_bytes: int, fill: int) -> torch.Tensor:
        if num_bytes > most:
            raise SharedMemoryFull(f"no room for {num_bytes}")
        return original(self, job, name, num_bytes, fill)

    monkeypatch.setattr(Blocks, "_make", make)
