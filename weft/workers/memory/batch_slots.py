"""Batch slots: whole batches of any structure, packed, in the slots of a ring that every stage reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from weft.workers.devices.device import Memory
from weft.workers.memory.packing import Unpacker, num_packed_bytes, pack
from weft.workers.memory.slots import SlotRing
from weft.workload.data.tree import Skeleton
from weft.workload.workload import WorkloadError


class BatchSlots:
    def __init__(self, ring: SlotRing, size: int) -> None:
        """size: of the microbatches that the slots are made for, the largest."""
        self._ring = ring
        self.by_number = ring.by_number
        self._size = size
        self._unpacker = Unpacker()
        self._heads: dict[int, bytes] = {}  # of what a device has, by the address of the slot

    def write(self, iteration: int, microbatch: int, tensors: Sequence[torch.Tensor], skeleton: Skeleton) -> None:
        slot = self._slot(iteration, microbatch)
        if not pack(slot, tensors, skeleton):
            raise WorkloadError(
                f"a batch of {num_packed_bytes(tensors, skeleton)} bytes does not fit its place, which has {len(slot)} "
                "by the first batches of the data; pad the samples of every batch to one length, in Workload.collate"
            )

    def fetch(self, source: BatchSlots, iteration: int, number: int, microbatch: int, device: Memory) -> None:
        """A batch that stands in the host's memory, to a device's."""
        came, slot = source._slot(iteration, number), self._slot(iteration, microbatch)
        self._heads[slot.data_ptr()] = self._unpacker.head_of(came)
        device.copy(slot, came)

    def read(self, iteration: int, microbatch: int) -> Any:
        slot = self._slot(iteration, microbatch)
        head = self._heads.get(slot.data_ptr())
        return self._unpacker.read(slot, self._unpacker.head_of(slot) if head is None else head)

    def _slot(self, iteration: int, microbatch: int) -> torch.Tensor:
        return self._ring.slot(iteration, microbatch, self._size)
