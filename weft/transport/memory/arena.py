"""Arenas: shared-memory blocks cut into named tensors by a layout that is computed once.

┌───────────── one uint8 torch tensor in shared memory ─────────────┐
│ 0.weight (64, 256) float32 │pad│ 0.bias (256,) float32 │pad│ ...  │   every offset a multiple of 64 bytes
└────────────────────────────────────────────────────────────────────┘
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

ALIGNMENT = 64  # bytes: a cache line, and what MKL asks for


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of an arena. dtype is torch's name without the prefix, such as "float32"."""

    name: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Layout:
    entries: tuple[Entry, ...]
    num_bytes: int

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, torch.Tensor]]) -> Layout:
        """Places like the given tensors, one after another; a tensor that comes again under another name has one place.

        Strides are kept where the tensor is dense, since kernels may round differently for another order in memory.
        """
        entries: list[Entry] = []
        offset = 0
        places: dict[int, int] = {}
        for name, tensor in tensors:
            if id(tensor) not in places:
                places[id(tensor)] = offset
                offset += aligned(tensor.nbytes)
            strides = torch.empty_like(tensor, device="meta").stride()
            entries.append(
                Entry(name, places[id(tensor)], tuple(tensor.shape), tuple(strides), dtype_name(tensor.dtype))
            )
        return cls(tuple(entries), max(offset, ALIGNMENT))


class Arena:
    """A block and its layout. block: uint8, shape (layout.num_bytes,)."""

    def __init__(self, block: torch.Tensor, layout: Layout) -> None:
        if block.numel() < layout.num_bytes:
            raise ValueError(f"an arena of {block.numel()} bytes cannot hold a layout of {layout.num_bytes}")
        self.block = block
        self.layout = layout
        self._entries = {entry.name: entry for entry in layout.entries}

    def __getitem__(self, name: str) -> torch.Tensor:
        """The named tensor, in place; its version counter is its own, so autograd does not confuse neighbours."""
        entry = self._entries[name]
        return typed(self.block, entry.offset, entry.shape, entry.dtype, entry.strides)

    def items(self) -> Mapping[str, torch.Tensor]:
        return {name: self[name] for name in self._entries}


def aligned(num_bytes: int) -> int:
    """So many, or a few more: to where the next tensor may begin."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def typed(
    block: torch.Tensor, offset: int, shape: tuple[int, ...], dtype: str, strides: tuple[int, ...] | None = None
) -> torch.Tensor:
    """A tensor of the shape and dtype over the block's bytes from `offset` on; contiguous without strides."""
    kind = dtype_of(dtype)
    size = torch.Size(shape).numel() * kind.itemsize
    flat = block[offset : offset + size].view(kind)
    return (flat.view(shape) if strides is None else flat.as_strided(shape, strides)).data


def dtype_of(name: str) -> torch.dtype:
    """Raises ValueError for a name that is no torch dtype."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no torch dtype")
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
