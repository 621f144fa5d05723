"""Slots: the tensors of fixed shape that a batch's microbatches stand in, as rings over one block each.

Microbatch m of iteration i is number u = i × M + m of the whole run and stands in slot u % depth of each ring. A view
is made when a slot first holds a microbatch of its size, and kept, so hardly anything is allocated per task. What
crosses from stage to stage has slots of another kind: `weft.workers.memory.parcels`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch

from weft.plan.plan import Ring
from weft.plan.shapes import shape_of
from weft.transport.memory.arena import typed
from weft.transport.memory.blocks import Wanted
from weft.transport.memory.directory import Directory
from weft.workers.devices.device import Accelerator, Device


class RingMemory:
    """Where the slots of a ring are, and which of them a microbatch has."""

    def __init__(self, directory: Directory, ring: Ring, microbatches: int, device: Device, position: int) -> None:
        """device: which has the slots of a ring that is not in shared memory. position: of its worker in the plan."""
        self._device = device
        self._is_borrowed = ring.memory == "peer" and ring.lender != position
        self.block = self._block_of(directory, ring)
        # Whether the device computes with what stands there as it stands there.
        self.is_own = not self._is_borrowed and (ring.memory != "shared" or not isinstance(device, Accelerator))
        self._depth = ring.depth
        self._microbatches = microbatches

    @staticmethod
    def wants(ring: Ring) -> Iterator[Wanted]:
        """Of the directory, as soon as it is made."""
        if ring.memory == "shared":
            yield Wanted(ring.name, max(1, ring.depth * ring.slot_bytes))

    def slot(self, iteration: int, microbatch: int) -> int:
        return (iteration * self._microbatches + microbatch) % self._depth

    def usable(self, tensor: torch.Tensor) -> torch.Tensor:
        """What stands in a slot, where the device can compute with it; in place where that is where it stands."""
        return tensor.clone() if self._is_borrowed else self._device.put(tensor)

    def _block_of(self, directory: Directory, ring: Ring) -> Callable[[], torch.Tensor]:
        """Made at once, but for what a device lends: that is made by the first task that writes it, and found by the
        first that reads it, which comes after. So nobody waits for it, and what a failed set-up leaves is not lent."""
        name, num_bytes = ring.name, max(1, ring.depth * ring.slot_bytes)
        if ring.memory == "peer":
            assert isinstance(self._device, Accelerator), "the host's memory needs nobody to lend it"
            if self._is_borrowed:
                return functools.cache(functools.partial(self._device.borrow, directory, name))
            return functools.cache(functools.partial(self._device.lend, directory, name, num_bytes))
        blocks = [directory.block(*wanted) for wanted in self.wants(ring)]
        block = blocks[0] if blocks else self._device.zeros(num_bytes, torch.uint8)
        return lambda: block


class SlotRing:
    """One ring of the plan, of data: one tensor in each slot."""

    wants = staticmethod(RingMemory.wants)

    def __init__(
        self, directory: Directory, ring: Ring, microbatches: int, device: Device, *, position: int = 0
    ) -> None:
        """As RingMemory takes them."""
        self._memory = RingMemory(directory, ring, microbatches, device, position)
        (value,) = ring.values
        self._dtype = value.dtype
        self._shapes = value.shapes
        self._slot_bytes = ring.slot_bytes
        self._views: list[dict[int, torch.Tensor]] = [{} for _ in range(ring.depth)]
        self.by_number = ring.by_number  # whether its readers go by a microbatch's number

    def slot(self, iteration: int, microbatch: int, size: int) -> torch.Tensor:
        """The slot of a microbatch of `size` samples. Errors: KeyError for a size beyond those that were planned."""
        slot = self._memory.slot(iteration, microbatch)
        views = self._views[slot]
        if size not in views:
            shape = shape_of(size, self._shapes)
            views[size] = typed(self._memory.block(), slot * self._slot_bytes, shape, self._dtype)
        return views[size]

    def read(self, iteration: int, microbatch: int, size: int) -> torch.Tensor:
        """What stands in a slot, where the device can compute with it."""
        return self._memory.usable(self.slot(iteration, microbatch, size))
