"""Slots: the fixed-shape tensors that microbatches travel in, as rings over one shared block each.

Microbatch m of iteration i is number u = i × M + m of the whole run and stands in slot u % depth of each ring. A view
is made when a slot first holds a microbatch of its size, and kept, so hardly anything is allocated per task.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from weft.shapes import shape_of
from weft.transport.arena import typed
from weft.transport.directory import Directory
from weft.workers.device import HostDevice


class SlotRing:
    """One ring. ring: its description in the plan (name, depth, dtype, slot_bytes, shapes by microbatch size)."""

    def __init__(
        self, directory: Directory, ring: Mapping[str, Any], microbatches: int, device: HostDevice | None = None
    ) -> None:
        """device: which has the slots of a ring that is not shared."""
        num_bytes = max(1, ring["depth"] * ring["slot_bytes"])
        shared = ring["shared"]
        own = device or HostDevice()
        self._block = directory.block(ring["name"], num_bytes) if shared else own.zeros(num_bytes, torch.uint8)
        self._depth: int = ring["depth"]
        self._microbatches = microbatches
        self.by_number: bool = ring.get("by_number", False)  # whether its readers go by a microbatch's number
        self._slot_bytes: int = ring["slot_bytes"]
        self._dtype: str = ring["dtype"]
        self._shapes = {size: tuple(shape) for size, shape in ring["shapes"]}
        self._views: list[dict[int, torch.Tensor]] = [{} for _ in range(self._depth)]

    def slot(self, iteration: int, microbatch: int, size: int) -> torch.Tensor:
        """The slot of a microbatch of `size` samples. Errors: KeyError for a size beyond those that were planned."""
        slot = (iteration * self._microbatches + microbatch) % self._depth
        views = self._views[slot]
        if size not in views:
            shape = shape_of(size, self._shapes)
            views[size] = typed(self._block, slot * self._slot_bytes, shape, self._dtype)
        return views[size]
