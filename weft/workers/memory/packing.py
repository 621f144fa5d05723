"""Packing: a batch in a flat run of bytes, where another process of the job finds it.

    │ int64: bytes of head, of all │ head: skeleton; dtype, shape, strides, place of each tensor │ tensors, aligned │

What is read are views of those bytes. A head is mostly that of the batch before in the slot, and then so are the views,
for whoever reads and for whoever writes.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch

from weft.transport.memory.arena import aligned, dtype_name, typed
from weft.workload.code.own_classes import Modules
from weft.workload.data.packed import packed, unpacked
from weft.workload.data.tree import Skeleton, build, kind_of_row

_LENGTHS = 16  # bytes


def num_packed_bytes(tensors: Sequence[torch.Tensor], skeleton: Skeleton) -> int:
    return _num_bytes(_head(tensors, skeleton), tensors)


class Packer:
    """Of one slot in the host's memory, for one of its writers."""

    def __init__(self) -> None:
        self._slot: torch.Tensor | None = None
        self._bytes = memoryview(b"")  # of the slot
        self._skeleton: Skeleton | None = None
        self._kinds: list[Any] = []  # of its tensors
        self._begin = b""  # lengths and head
        self._places: list[torch.Tensor] = []

    def pack(self, slot: torch.Tensor, tensors: Sequence[torch.Tensor], skeleton: Skeleton) -> bool:
        """slot: uint8, flat. False where it is too small, and then left as it is."""
        kinds = [(tensor.shape, tensor.dtype, tensor.stride()) for tensor in tensors]
        is_like = slot is self._slot and skeleton is self._skeleton and kinds == self._kinds
        if not is_like or self._bytes[: len(self._begin)] != self._begin:  # another process may have written to it
            head = _head(tensors, skeleton)
            num_bytes = _num_bytes(head, tensors)
            if num_bytes > len(slot):
                return False
            self._slot, self._skeleton, self._kinds = slot, skeleton, kinds
            self._bytes = slot.numpy().data
            self._begin = b"".join(number.to_bytes(8, "little") for number in (len(head), num_bytes)) + head
            self._bytes[: len(self._begin)] = self._begin
            self._places = _places(slot, tensors, head)
        for place, tensor in zip(self._places, tensors, strict=True):
            place.copy_(tensor)
        return True


def pack_tensors(into: torch.Tensor, tensors: Sequence[torch.Tensor], skeleton: Skeleton) -> bytes:
    """Without the head, which is returned: where `into` is on a device, as the tensors are."""
    head = _head(tensors, skeleton)
    for place, tensor in zip(_places(into, tensors, head), tensors, strict=True):
        place.copy_(tensor)
    return head


def _places(slot: torch.Tensor, tensors: Sequence[torch.Tensor], head: bytes) -> list[torch.Tensor]:
    places, offset = [], _first_place(head)
    for tensor in tensors:
        places.append(typed(slot, offset, tensor.shape, dtype_name(tensor.dtype), _strides(tensor)))
        offset += aligned(tensor.nbytes)
    return places


def packed_into(slot: torch.Tensor) -> torch.Tensor:
    """As much of a slot in the host's memory as its batch takes."""
    return slot[: int(slot[8:_LENGTHS].view(torch.int64)[0])]


def head_of(slot: torch.Tensor) -> bytes:
    """slot: in the host's memory."""
    length = int(slot[:8].view(torch.int64)[0])
    return slot[_LENGTHS : _LENGTHS + length].numpy().tobytes()


class Unpacker:
    """Of one slot, for one reader: while batches have the head of the one before, its views are kept."""

    def __init__(self, modules: Modules | None = None) -> None:
        """modules: whose classes the batches are of."""
        self._modules = modules
        self._slot: torch.Tensor | None = None
        self._bytes = memoryview(b"")  # of a slot in the host's memory
        self._head = b""
        self._skeleton: Skeleton | None = None
        self._tensors: list[torch.Tensor] = []
        self._kind: type | None = None  # of the batch, where it is a list or a tuple of these and nothing else

    def read(self, slot: torch.Tensor, head: bytes | None) -> Any:
        """The batch, of views of the slot. head: of a slot on a device, which has none there; of another, None."""
        is_same = slot is self._slot
        if not is_same and head is None:
            self._bytes = slot.numpy().data
        if head is None:
            end = _LENGTHS + int.from_bytes(self._bytes[:8], "little")
            if not is_same or self._bytes[_LENGTHS:end] != self._head:
                self._take(slot, bytes(self._bytes[_LENGTHS:end]))
        elif not is_same or head != self._head:
            self._take(slot, head)
        if self._kind is not None:
            return self._kind(self._tensors)
        assert self._skeleton is not None
        return build(self._skeleton, self._tensors)

    def _take(self, slot: torch.Tensor, head: bytes) -> None:
        skeleton, places = pickle.loads(head)
        first = _first_place(head)
        self._slot, self._head, self._skeleton = slot, head, unpacked(skeleton, self._modules)
        self._tensors = [typed(slot, first + offset, shape, dtype, strides) for dtype, shape, strides, offset in places]
        self._kind = kind_of_row(self._skeleton)


def _head(tensors: Sequence[torch.Tensor], skeleton: Skeleton) -> bytes:
    places, offset = [], 0
    for tensor in tensors:
        places.append((dtype_name(tensor.dtype), tuple(tensor.shape), _strides(tensor), offset))
        offset += aligned(tensor.nbytes)
    return pickle.dumps((packed(skeleton), places), pickle.HIGHEST_PROTOCOL)


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Its own order of dimensions, by which kernels round, without gaps."""
    return torch.empty_like(tensor, device="meta").stride()


def _num_bytes(head: bytes, tensors: Sequence[torch.Tensor]) -> int:
    return _first_place(head) + sum(aligned(tensor.nbytes) for tensor in tensors)


def _first_place(head: bytes) -> int:
    return aligned(_LENGTHS + len(head))
