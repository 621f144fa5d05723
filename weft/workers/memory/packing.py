"""Packing: a batch in a flat run of bytes, where another process of the job finds it.

    │ int64: bytes of head, of all │ head: skeleton; dtype, shape, strides, place of each tensor │ tensors, aligned │

What is read are views of those bytes. A head is mostly that of the batch before in the slot, and then so are the views.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch

from weft.transport.memory.arena import aligned, dtype_name, typed
from weft.workload.data.tree import Skeleton, build, packed, unpacked

_LENGTHS = 16  # bytes


def num_packed_bytes(tensors: Sequence[torch.Tensor], skeleton: Skeleton) -> int:
    return _num_bytes(_head(tensors, skeleton), tensors)


def pack(into: torch.Tensor, tensors: Sequence[torch.Tensor], skeleton: Skeleton) -> bool:
    """into: uint8, flat. False where it is too small, and then left as it is."""
    head = _head(tensors, skeleton)
    num_bytes = _num_bytes(head, tensors)
    if num_bytes > len(into):
        return False
    into[:_LENGTHS].view(torch.int64)[:] = torch.tensor([len(head), num_bytes])
    into[_LENGTHS : _LENGTHS + len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    _copy(into, tensors, head)
    return True


def pack_tensors(into: torch.Tensor, tensors: Sequence[torch.Tensor], skeleton: Skeleton) -> bytes:
    """Without the head, which is returned: where `into` is on a device, as the tensors are."""
    head = _head(tensors, skeleton)
    _copy(into, tensors, head)
    return head


def _copy(into: torch.Tensor, tensors: Sequence[torch.Tensor], head: bytes) -> None:
    place = _first_place(head)
    for tensor in tensors:
        typed(into, place, tensor.shape, dtype_name(tensor.dtype), _strides(tensor)).copy_(tensor)
        place += aligned(tensor.nbytes)


def packed_into(slot: torch.Tensor) -> torch.Tensor:
    """As much of a slot in the host's memory as its batch takes."""
    return slot[: int(slot[8:_LENGTHS].view(torch.int64)[0])]


def head_of(slot: torch.Tensor) -> bytes:
    """slot: in the host's memory."""
    length = int(slot[:8].view(torch.int64)[0])
    return slot[_LENGTHS : _LENGTHS + length].numpy().tobytes()


class Unpacker:
    """Of one slot, for one reader: while batches have the head of the one before, its views are kept."""

    def __init__(self) -> None:
        self._slot: torch.Tensor | None = None
        self._bytes = memoryview(b"")  # of a slot in the host's memory
        self._head = b""
        self._skeleton: Skeleton | None = None
        self._tensors: list[torch.Tensor] = []

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
        assert self._skeleton is not None
        return build(self._skeleton, self._tensors)

    def _take(self, slot: torch.Tensor, head: bytes) -> None:
        skeleton, places = pickle.loads(head)
        first = _first_place(head)
        self._slot, self._head, self._skeleton = slot, head, unpacked(skeleton)
        self._tensors = [typed(slot, first + offset, shape, dtype, strides) for dtype, shape, strides, offset in places]


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
