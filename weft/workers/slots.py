"""Slots: the fixed-shape tensors that microbatches travel in, as rings over one shared block each.

Microbatch m of iteration i is number u = i × M + m of the whole run and stands in slot u % depth of each ring. Views
are made once for each (slot, microbatch size) and kept, so nothing is allocated per task.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from weft.transport.arena import typed
from weft.transport.directory import Directory


class SlotRing:
    """One ring. ring: its description in the plan (name, depth, dtype, slot_bytes, shapes by microbatch size)."""

    def __init__(self, directory: Directory, ring: Mapping[str, Any], microbatches: int) -> None:
        num_bytes = max(1, ring["depth"] * ring["slot_bytes"])
        shared = ring["shared"]
        self._block = directory.block(ring["name"], num_bytes) if shared else torch.zeros(num_bytes, dtype=torch.uint8)
        self._depth: int = ring["depth"]
        self._microbatches = microbatches
        self._views: list[dict[int, torch.Tensor]] = [
            {
                size: typed(self._block, slot * ring["slot_bytes"], tuple(shape), ring["dtype"])
                for size, shape in ring["shapes"]
            }
            for slot in range(self._depth)
        ]

    def slot(self, iteration: int, microbatch: int, size: int) -> torch.Tensor:
        """The slot of a microbatch of `size` samples."""
        return self._views[(iteration * self._microbatches + microbatch) % self._depth][size]
