"""Batch slots: a batch of any structure comes to every reader as it was, however long."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from weft.plan.plan import Ring, Role, SlotValue
from weft.transport.memory.directory import Directory
from weft.workers.devices.host import HostDevice
from weft.workers.devices.stand_in import StandIn
from weft.workers.memory.batch_slots import BatchSlots
from weft.workers.memory.packing import num_packed_bytes
from weft.workload.data.tree import flatten

ROOM = 1024
VALUE = SlotValue(name="batch", dtype="uint8", shapes={4: (ROOM,)}, offset=0, num_bytes=ROOM, stages=(0, 1))
RING = Ring(role=Role.BATCH, replica=0, stages=(0, 1), depth=2, slot_bytes=ROOM, values=(VALUE,))


def batch_of(length: int) -> dict[str, Any]:
    ids = torch.arange(2 * length).reshape(2, length)
    return {"ids": ids, "mask": ids % 2 == 0, "names": ["a" * length], "length": length}


def is_same(found: Any, batch: dict[str, Any]) -> bool:
    tensors = torch.equal(found["ids"], batch["ids"]) and torch.equal(found["mask"], batch["mask"])
    return tensors and (found["names"], found["length"]) == (batch["names"], batch["length"])


@pytest.mark.parametrize("lengths", [(0, 3, 1), (300,), (3, 300, 2, 299, 301, 5), (10, 20, 40, 80, 160, 320, 640)])
def test_batches_of_any_length_come_over(directory: Directory, lengths: tuple[int, ...]) -> None:
    writer, reader = (BatchSlots(directory, RING, 1, HostDevice()) for _ in range(2))
    for iteration, length in enumerate(lengths):
        batch = batch_of(length)
        writer.write(iteration, 0, *flatten(batch))
        assert is_same(reader.read(iteration, 0), batch)
    longest = num_packed_bytes(*flatten(batch_of(max(lengths))))
    assert (writer.growing.count > 0) == (longest > ROOM)


def test_each_tensor_comes_over_in_its_dtype_and_its_order_of_dimensions(directory: Directory) -> None:
    writer, reader = (BatchSlots(directory, RING, 1, HostDevice()) for _ in range(2))
    plain = torch.arange(6.0).reshape(2, 3)
    others = [plain.to(dtype) for dtype in (torch.bool, torch.bfloat16, torch.complex64)]
    batch = [plain.t(), plain.sum(), torch.zeros(0, 3), *others]
    writer.write(0, 0, *flatten(batch))
    found = reader.read(0, 0)
    assert [(each.dtype, each.stride()) for each in found] == [(each.dtype, each.stride()) for each in batch]
    assert all(map(torch.equal, found, batch))


def test_a_device_fetches_what_has_grown_and_grows_itself(directory: Directory) -> None:
    loader, shared = (BatchSlots(directory, RING, 2, HostDevice()) for _ in range(2))
    own = BatchSlots(directory, replace(RING, memory="device", stages=(1,)), 2, StandIn())
    for iteration, length in enumerate((3, 100, 2, 200, 99)):
        batches = [batch_of(length), batch_of(length + 1)]
        for microbatch, batch in enumerate(batches):
            loader.write(iteration, microbatch, *flatten(batch))
            own.fetch(shared, iteration, microbatch, microbatch)
        for microbatch, batch in enumerate(batches):
            assert is_same(own.read(iteration, microbatch), batch)
    assert own.growing.count == loader.growing.count == 4
    assert shared.growing.count == 0


def test_a_slot_has_the_batch_in_place(directory: Directory) -> None:
    """Nothing is copied for a reader on the host."""
    writer, reader = (BatchSlots(directory, RING, 1, HostDevice()) for _ in range(2))
    for length in (3, 300):
        writer.write(0, 0, *flatten(batch_of(length)))
        first, second = reader.read(0, 0), reader.read(0, 0)
        assert first["ids"].data_ptr() == second["ids"].data_ptr()
