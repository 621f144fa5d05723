"""Digests: whether what an update has left is what the next one finds. Nobody writes there in between, so whatever
differs is memory that has changed of itself.

    UPDATE(i) ── note ──▶ forwards and backwards of i + 1 ──▶ check ── UPDATE(i + 1)
                   └────▶ SNAPSHOT(i) ──▶ check: no copy is of changed bits

A digest has a 64-bit sum, modulo 2⁶⁴, of each tile of 64 KiB: one changed bit always changes it, several do unless they
cancel out. It is read at the memory's speed, in the lane that updates, and found to differ before the next update uses
what has changed. It says nothing of what a processor computes wrong, nor of memory that no optimizer updates.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.workers.snapshots.held import VALUES, Held, Piece
from weft.workload.faults import StateCorrupted

TILE_BYTES = 1 << 16
WORD_BYTES = 8
NAMED = 3  # parameters that share a tile; of small ones there are many
_SMALLER = {1: torch.int8, 2: torch.int16, 4: torch.int32}  # of what does not come to whole words


class Digests:
    """Of one lane's updates. names: of the model's parameters."""

    def __init__(self, names: Sequence[str] = ()) -> None:
        self.names = names
        self._noted: dict[int, list[Tensor]] = {}

    def note(self, number: int, held: Held) -> None:
        """An update stands. number: which part of what the lane updates, such as a bucket."""
        self._noted[number] = [digest(piece.tensor) for piece in held.pieces]

    def forget(self) -> None:
        """What comes next was not left by an update."""
        self._noted.clear()

    def check(self, number: int, held: Held) -> None:
        """Nothing before the first update. Errors: StateCorrupted."""
        for piece, noted in zip(held.pieces, self._noted.get(number, ()), strict=False):
            found = digest(piece.tensor)
            if not torch.equal(found, noted):
                tile = int((found != noted).nonzero()[0]) if found.shape == noted.shape else 0
                raise StateCorrupted(_place(piece, tile))


def digest(tensor: Tensor) -> Tensor:
    """int64, a sum for each tile of the tensor's bytes in their order in memory, the last one of the rest."""
    data = tensor.detach()
    if not data.is_contiguous():
        data = data.contiguous()
    flat = data.view(-1)
    is_words = flat.nbytes % WORD_BYTES == 0 == flat.storage_offset() * flat.itemsize % WORD_BYTES
    words = flat.view(torch.int64 if is_words else _SMALLER[flat.itemsize])
    tile = TILE_BYTES // words.itemsize
    whole = words.numel() // tile * tile
    sums = words[:whole].view(-1, tile).sum(1, dtype=torch.int64)
    return torch.cat([sums, words[whole:].sum(dtype=torch.int64).view(1)])


def _place(piece: Piece, tile: int) -> str:
    """What of it stands in a tile, in words."""
    what = "values" if piece.entry == VALUES else piece.entry
    size = piece.tensor.element_size()
    first, last = tile * TILE_BYTES // size, min((tile + 1) * TILE_BYTES // size, piece.tensor.numel())
    extents = [each for each in piece.extents if each.stop == 0 or (each.start < last and first < each.stop)]
    names = list(dict.fromkeys(each.parameter for each in extents))
    more = f" or {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{what} of {', '.join(names[:NAMED])}{more}"
