"""Layer window: a device's places for the layers of a model that streams through it.

Layer s of W has place s % W, one for its parameters and one for its gradient; when a place may be written again, the
graph says (weft.scheduler.planning.graph.window). A layer's modules compute on its place from set-up on: their
parameters are views of it, whose numbers come and go.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from weft.plan.buckets import Bucket, Holder
from weft.transport.memory.arena import typed
from weft.workers.devices.device import Memory
from weft.workers.memory.bucket_memory import BucketMemory

Flat = Mapping[int, torch.Tensor]


class LayerWindow:
    """Of one replica, on the one device that has all its layers."""

    def __init__(self, memory: BucketMemory, replica: int, *, num_layers: int, num_places: int, device: Memory) -> None:
        self._memory = memory
        sizes = [0] * num_places
        for layer in range(num_layers):
            held = memory.held(Holder(replica, layer))
            sizes[layer % num_places] = max(sizes[layer % num_places], sum(bucket.num_bytes for bucket in held))
        self._values = [device.zeros(size, torch.uint8) for size in sizes]
        self._gradients = [device.zeros(size, torch.uint8) for size in sizes]

    def places(self, holder: Holder) -> tuple[Flat, Flat]:
        """A layer's parameters and its gradient, flat, by bucket."""
        held = self._memory.held(holder)
        place = holder[1] % len(self._values)
        return _laid_out(self._values[place], held), _laid_out(self._gradients[place], held)


def _laid_out(block: torch.Tensor, buckets: list[Bucket]) -> dict[int, torch.Tensor]:
    places, offset = {}, 0
    for bucket in buckets:
        places[bucket.index] = typed(block, offset, (bucket.num_elements,), bucket.dtype)
        offset += bucket.num_bytes
    return places
