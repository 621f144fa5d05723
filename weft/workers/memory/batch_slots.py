"""Batch slots: whole batches of any structure, packed, in the slots of a ring that every stage reads.

Where a batch stands in other memory than the planned, because it is longer, is the business of `growing.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from weft.plan.plan import Ring
from weft.transport.memory.blocks import Wanted
from weft.transport.memory.directory import Directory
from weft.workers.devices.device import Device
from weft.workers.memory.growing import Growing
from weft.workers.memory.packing import Packer, Unpacker, head_of, num_packed_bytes, pack_tensors, packed_into
from weft.workers.memory.slots import RingMemory
from weft.workload.code.own_classes import Modules
from weft.workload.data.tree import Skeleton


class BatchSlots:
    def __init__(
        self, directory: Directory, ring: Ring, microbatches: int, device: Device, *, position: int = 0
    ) -> None:
        """As RingMemory takes them."""
        self._memory = RingMemory(directory, ring, microbatches, device, position)
        self.growing = Growing(directory, ring, device)
        self._device = device
        self._slot_bytes = ring.slot_bytes
        self.by_number = ring.by_number
        self._packers = [Packer() for _ in range(ring.depth)]
        self._unpackers: dict[tuple[int, int], Unpacker] = {}  # by slot and by whose classes they read
        self._planned: dict[int, torch.Tensor] = {}  # slots where they were planned
        self._heads: dict[int, bytes] = {}  # of what a device has, by slot

    @staticmethod
    def wants(ring: Ring) -> Iterator[Wanted]:
        """As of RingMemory."""
        yield from RingMemory.wants(ring)
        yield from Growing.wants(ring)

    def write(self, iteration: int, microbatch: int, tensors: Sequence[torch.Tensor], skeleton: Skeleton) -> None:
        """Errors: SharedMemoryFull, for what does not fit."""
        number = self._memory.slot(iteration, microbatch)
        if not self._packers[number].pack(self._slot(number), tensors, skeleton):
            larger = self.growing.grow(number, 0, num_packed_bytes(tensors, skeleton))
            self._packers[number].pack(larger, tensors, skeleton)

    def fetch(self, source: BatchSlots, iteration: int, number: int, microbatch: int) -> None:
        """A batch that stands in the host's memory, to a device's."""
        came = packed_into(source._slot(source._memory.slot(iteration, number)))
        at = self._memory.slot(iteration, microbatch)
        slot = self._slot(at)
        if len(came) > len(slot):
            slot = self.growing.grow(at, 0, len(came))
        self._heads[at] = head_of(came)
        self._device.copy(slot[: len(came)], came)

    def take(self, iteration: int, microbatch: int, tensors: Sequence[torch.Tensor], skeleton: Skeleton) -> None:
        """A batch that is on the device already, to its slot there."""
        at = self._memory.slot(iteration, microbatch)
        slot, num_bytes = self._slot(at), num_packed_bytes(tensors, skeleton)
        if num_bytes > len(slot):
            slot = self.growing.grow(at, 0, num_bytes)
        self._heads[at] = pack_tensors(slot, tensors, skeleton)

    def read(self, iteration: int, microbatch: int, modules: Modules | None = None) -> Any:
        """modules: whose classes the batch is of."""
        number = self._memory.slot(iteration, microbatch)
        unpacker = self._unpackers.get((number, id(modules)))
        if unpacker is None:
            unpacker = self._unpackers[number, id(modules)] = Unpacker(modules)
        return unpacker.read(self._slot(number), self._heads.get(number))

    def _slot(self, number: int) -> torch.Tensor:
        """Its version counter is its own, so autograd does not confuse neighbours."""
        block = self.growing.block(number, 0)
        if block is not None:
            return block
        if number not in self._planned:
            start = number * self._slot_bytes
            self._planned[number] = self._memory.block()[start : start + self._slot_bytes].data
        return self._planned[number]
