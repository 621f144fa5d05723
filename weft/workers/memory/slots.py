"""Slots: the fixed-shape tensors that microbatches travel in, as rings over one block each.

Microbatch m of iteration i is number u = i × M + m of the whole run and stands in slot u % depth of each ring. A view
is made when a slot first holds a microbatch of its size, and kept, so hardly anything is allocated per task.

What crosses from one stage to the next keeps its strides: kernels sum in the order in which memory lies, so a result
would otherwise depend on where the model is cut. Beside the slots stands, for each of them, what strides it has:

    slots     │ u=0: elements, dense │ u=1 │         a dimension of stride 0 (of `expand`) is there once
    strides   │ 0 │ ...     │ 1 │ strides │         int64 in the host's memory; 0: contiguous, as planned
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from weft.plan.plan import Ring
from weft.plan.shapes import shape_of
from weft.transport.memory.arena import typed
from weft.transport.memory.directory import Directory
from weft.workers.devices.device import Accelerator, Device

MAX_GAPS = 16  # times its own size, for a tensor with gaps: arbitrary; a slice that is a smaller part has them closed


class SlotRing:
    """One ring of the plan."""

    def __init__(
        self,
        directory: Directory,
        ring: Ring,
        microbatches: int,
        device: Device,
        *,
        position: int = 0,
    ) -> None:
        """device: which has the slots of a ring that is not in shared memory. position: of its worker in the plan."""
        self._device = device
        self._is_borrowed = ring.memory == "peer" and ring.lender != position
        self._block = self._block_of(directory, ring)
        self._depth = ring.depth
        self._microbatches = microbatches
        self.by_number = ring.by_number  # whether its readers go by a microbatch's number
        self._slot_bytes = ring.slot_bytes
        (value,) = ring.values
        self._dtype = value.dtype
        self._shapes = value.shapes
        self._views: list[dict[int, torch.Tensor]] = [{} for _ in range(self._depth)]
        self._strides = SlotStrides(directory, ring) if ring.crosses else None

    def slot(self, iteration: int, microbatch: int, size: int) -> torch.Tensor:
        """The slot of a microbatch of `size` samples. Errors: KeyError for a size beyond those that were planned."""
        slot = self._number(iteration, microbatch)
        views = self._views[slot]
        if size not in views:
            shape = shape_of(size, self._shapes)
            views[size] = typed(self._block(), slot * self._slot_bytes, shape, self._dtype)
        return views[size]

    def write(self, iteration: int, microbatch: int, value: torch.Tensor, size: int) -> None:
        """Copies a stage's output, or the gradient of its input, into a slot of a ring that crosses."""
        assert self._strides is not None
        slot = self.slot(iteration, microbatch, size)
        strides = value.stride()
        is_planned = strides == slot.stride()
        self._strides.note(self._number(iteration, microbatch), None if is_planned else strides)
        if is_planned:
            self._device.copy(slot, value)
        else:
            self._device.copy(_laid_out(slot, strides), _once(value))

    def read(self, iteration: int, microbatch: int, size: int) -> torch.Tensor:
        """What stands in a slot, where the device can compute with it. In place where that is where it stands, and
        nothing lay between its elements."""
        slot = self.slot(iteration, microbatch, size)
        strides = None if self._strides is None else self._strides.noted(self._number(iteration, microbatch))
        if strides is None:
            return self._usable(slot)
        return _with_gaps(self._usable(_laid_out(slot, strides)), strides).expand(slot.shape)

    def _usable(self, slot: torch.Tensor) -> torch.Tensor:
        return slot.clone() if self._is_borrowed else self._device.put(slot)

    def _number(self, iteration: int, microbatch: int) -> int:
        return (iteration * self._microbatches + microbatch) % self._depth

    def _block_of(self, directory: Directory, ring: Ring) -> Callable[[], torch.Tensor]:
        """Made at once, but for what a device lends: that is made by the first task that writes it, and found by the
        first that reads it, which comes after. So nobody waits for it, and what a failed set-up leaves is not lent."""
        name, num_bytes = ring.name, max(1, ring.depth * ring.slot_bytes)
        if ring.memory == "peer":
            assert isinstance(self._device, Accelerator), "the host's memory needs nobody to lend it"
            if self._is_borrowed:
                return functools.cache(functools.partial(self._device.borrow, directory, name))
            return functools.cache(functools.partial(self._device.lend, directory, name, num_bytes))
        is_shared = ring.memory == "shared"
        block = directory.block(name, num_bytes) if is_shared else self._device.zeros(num_bytes, torch.uint8)
        return lambda: block


class SlotStrides:
    """The strides of what stands in each slot of a ring: a row of 1 + dimensions in the host's memory, where both ends
    see it. Those of a device's own ring are one object, in one process."""

    def __init__(self, directory: Directory, ring: Ring) -> None:
        shape = next(iter(ring.values[0].shapes.values()))
        self._row = 1 + len(shape)
        num_bytes = 8 * ring.depth * self._row
        is_own = ring.memory == "device"
        name = f"{ring.name}-strides"
        block = torch.zeros(num_bytes, dtype=torch.uint8) if is_own else directory.block(name, num_bytes)
        self._rows = block.numpy().data.cast("q")

    def note(self, slot: int, strides: tuple[int, ...] | None) -> None:
        """None: those of the slot."""
        start = slot * self._row
        self._rows[start] = strides is not None
        for place, stride in enumerate(strides or (), start + 1):
            self._rows[place] = stride

    def noted(self, slot: int) -> tuple[int, ...] | None:
        start = slot * self._row
        return tuple(self._rows[start + 1 : start + self._row]) if self._rows[start] else None


def _once(value: torch.Tensor) -> torch.Tensor:
    """Without the repeats of dimensions whose stride is 0."""
    return value[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in value.stride())]


def _laid_out(slot: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """A slot's memory for the elements of a tensor of its shape and these strides, each of them once."""
    shape, dense = _dense(tuple(slot.shape), strides)
    return slot.as_strided(shape, dense)


def _with_gaps(dense: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """The same with what lay between its elements, as in a slice or the real part of complex numbers."""
    gapped = tuple(own if stride == 0 else stride for own, stride in zip(dense.stride(), strides, strict=True))
    if gapped == dense.stride():
        return dense
    span = 1 + sum((extent - 1) * stride for extent, stride in zip(dense.shape, gapped, strict=True))
    if not dense.numel() <= span <= MAX_GAPS * dense.numel():
        return dense
    memory = torch.empty(span, dtype=dense.dtype, device=dense.device)
    return memory.as_strided(dense.shape, gapped).copy_(dense)


@functools.lru_cache(maxsize=1024)  # pairs of shape and strides: a few for each ring; as many as a deep model has
def _dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape without repeats, and the strides as they are or, where they leave gaps, in the same order without."""
    once = tuple(1 if stride == 0 else extent for extent, stride in zip(shape, strides, strict=True))
    like = (
        torch.empty(0, device="meta").as_strided(once, strides) if 0 not in once else torch.empty(once, device="meta")
    )
    return once, torch.empty_like(like).stride()
