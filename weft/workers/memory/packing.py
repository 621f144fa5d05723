"""Packing: a batch in a flat run of bytes, where another process of the job finds it.

    │ int64: bytes of head, of all │ head: skeleton; dtype, shape, strides, place of each tensor │ tensors, aligned │

What is read are views of those bytes. A head is mostly the one of the batch before, and is not read again then.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch

from weft.transport.memory.arena import aligned, dtype_name, typed
from weft.workload.data.tree import Skeleton, build, packed, unpacked

_LENGTHS = 16  # bytes
_Place = tuple[str, tuple[int, ...], tuple[int, ...], int]  # dtype, shape, strides, byte


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


class Unpacker:
    """Of one reader."""

    def __init__(self) -> None:
        self._head = b""
        self._skeleton: Skeleton | None = None
        self._places: list[_Place] = []

    def head_of(self, slot: torch.Tensor) -> bytes:
        """slot: in the host's memory."""
        length = int(slot[:8].view(torch.int64)[0])
        return slot[_LENGTHS : _LENGTHS + length].numpy().tobytes()

    def read(self, slot: torch.Tensor, head: bytes) -> Any:
        """The batch, of views of the slot. head: the slot's, which may be on a device."""
        if head != self._head or self._skeleton is None:
            skeleton, places = pickle.loads(head)
            first = _first_place(head)
            self._head, self._skeleton = head, unpacked(skeleton)
            self._places = [(dtype, shape, strides, first + offset) for dtype, shape, strides, offset in places]
        tensors = [typed(slot, start, shape, dtype, strides) for dtype, shape, strides, start in self._places]
        return build(self._skeleton, tensors)


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
