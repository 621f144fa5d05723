"""Packing: a batch in a flat run of bytes, where another process of the job finds it.

    │ int64: bytes of head, of all │ head: skeleton; dtype, shape, strides, place of each tensor │ tensors, aligned │

What is read are views of those bytes. A head is mostly the one of the batch before, and is not read again then.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch

from weft.workload.data.tree import Skeleton, build, packed, unpacked

ALIGNMENT = 64
_LENGTHS = 16  # bytes
_Place = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]  # dtype, shape, strides, byte


def num_packed_bytes(tensors: Sequence[torch.Tensor], skeleton: Skeleton) -> int:
    head = _head(tensors, skeleton)
    return _first_place(len(head)) + sum(_aligned(_num_bytes(tensor)) for tensor in tensors)


def pack(into: torch.Tensor, tensors: Sequence[torch.Tensor], skeleton: Skeleton) -> bool:
    """into: uint8, flat. False where it is too small, and then left as it is."""
    head = _head(tensors, skeleton)
    place = _first_place(len(head))
    num_bytes = place + sum(_aligned(_num_bytes(tensor)) for tensor in tensors)
    if num_bytes > len(into):
        return False
    into[:_LENGTHS].view(torch.int64)[:] = torch.tensor([len(head), num_bytes])
    into[_LENGTHS : _LENGTHS + len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    for tensor in tensors:
        _view(into, (tensor.dtype, tuple(tensor.shape), _strides(tensor), place)).copy_(tensor)
        place += _aligned(_num_bytes(tensor))
    return True


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
            first = _first_place(len(head))
            self._head, self._skeleton = head, unpacked(skeleton)
            self._places = [(dtype, shape, strides, first + offset) for dtype, shape, strides, offset in places]
        return build(self._skeleton, [_view(slot, place) for place in self._places])


def _head(tensors: Sequence[torch.Tensor], skeleton: Skeleton) -> bytes:
    places, offset = [], 0
    for tensor in tensors:
        places.append((tensor.dtype, tuple(tensor.shape), _strides(tensor), offset))
        offset += _aligned(_num_bytes(tensor))
    return pickle.dumps((packed(skeleton), places), pickle.HIGHEST_PROTOCOL)


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Its own order of dimensions, by which kernels round, without gaps."""
    return torch.empty_like(tensor, device="meta").stride()


def _view(flat: torch.Tensor, place: _Place) -> torch.Tensor:
    dtype, shape, strides, start = place
    num_bytes = dtype.itemsize
    for extent in shape:
        num_bytes *= extent
    return flat[start : start + num_bytes].view(dtype).as_strided(shape, strides)


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _first_place(head: int) -> int:
    return _aligned(_LENGTHS + head)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
