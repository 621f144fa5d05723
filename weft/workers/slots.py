"""Slots: the fixed-shape tensors that microbatches travel in, as rings over one block each.

Microbatch m of iteration i is number u = i × M + m of the whole run and stands in slot u % depth of each ring. A view
is made when a slot first holds a microbatch of its size, and kept, so hardly anything is allocated per task.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from weft.shapes import shape_of, strides_of
from weft.transport.arena import typed
from weft.transport.directory import Directory
from weft.workers.device import HostDevice


class SlotRing:
    """One ring. ring: as the plan has it (name, depth, memory, dtype, slot_bytes, shapes by microbatch size, order)."""

    def __init__(
        self,
        directory: Directory,
        ring: Mapping[str, Any],
        microbatches: int,
        device: HostDevice | None = None,
        *,
        position: int = 0,
    ) -> None:
        """device: which has the slots of a ring that is not in shared memory. position: of its worker in the plan."""
        self._device = device or HostDevice()
        self._is_borrowed = ring["memory"] == "peer" and ring["lender"] != position
        self._block = self._block_of(directory, ring)
        self._depth: int = ring["depth"]
        self._microbatches = microbatches
        self.by_number: bool = ring.get("by_number", False)  # whether its readers go by a microbatch's number
        self._slot_bytes: int = ring["slot_bytes"]
        self._dtype: str = ring["dtype"]
        self._shapes = {size: tuple(shape) for size, shape in ring["shapes"]}
        self._order: Sequence[int] = ring.get("order", ())
        self._views: list[dict[int, torch.Tensor]] = [{} for _ in range(self._depth)]

    def slot(self, iteration: int, microbatch: int, size: int) -> torch.Tensor:
        """The slot of a microbatch of `size` samples. Errors: KeyError for a size beyond those that were planned."""
        slot = (iteration * self._microbatches + microbatch) % self._depth
        views = self._views[slot]
        if size not in views:
            shape = shape_of(size, self._shapes)
            strides = strides_of(shape, self._order) if self._order else None
            views[size] = typed(self._block(), slot * self._slot_bytes, shape, self._dtype, strides)
        return views[size]

    def read(self, iteration: int, microbatch: int, size: int) -> torch.Tensor:
        """What stands in a slot, where the device can compute with it. In place where that is where it stands."""
        slot = self.slot(iteration, microbatch, size)
        return slot.clone() if self._is_borrowed else self._device.put(slot)

    def _block_of(self, directory: Directory, ring: Mapping[str, Any]) -> Callable[[], torch.Tensor]:
        """Made at once, but for what a device lends: that is made by the first task that writes it, and found by the
        first that reads it, which comes after. So nobody waits for it, and what a failed set-up leaves is not lent."""
        name, num_bytes = ring["name"], max(1, ring["depth"] * ring["slot_bytes"])
        if self._is_borrowed:
            return functools.cache(functools.partial(self._device.borrow, directory, name))
        if ring["memory"] == "peer":
            return functools.cache(functools.partial(self._device.lend, directory, name, num_bytes))
        is_shared = ring["memory"] == "shared"
        block = directory.block(name, num_bytes) if is_shared else self._device.zeros(num_bytes, torch.uint8)
        return lambda: block
