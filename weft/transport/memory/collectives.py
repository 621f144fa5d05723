"""The reduction of SYNC: gradients of several replicas, summed where they lie, in shared memory.

    rank 0's bucket  │ g0 ········· │ g0 ·········· │        every rank maps every bucket
    rank 1's bucket  │ g1 ········· │ g1 ·········· │
                       ▼ owner 0      ▼ owner 1              each owner sums its own range of all of them,
                     │ g0 + g1      │ g0 + g1       │        in the order of the ranks, and updates it in place

Nothing is sent and nothing is gathered: each element is read once from each source and written once. The owner works
tile by tile, so that the sum of squares that clipping asks for is taken from a tile that is still in the cache.

    tile 0: out = s0 + s1 │ out · out     tile 1: out = s0 + s1 │ out · out     ...

float32 on one thread goes through NumPy, whose calls cost a third of torch's and whose dot product is twice as fast;
sums are the same bits either way. The rest is torch's, over as many threads as it has where the reduction is made.
When the sources may be read, and when the sum may, is the board's business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

# For each thread. Two sources' tiles stay in an L2 of 1 MiB, and the calls of a tile take a tenth of its time. Measured
# over 25 MiB on two cores: 64 KiB takes half as long again (calls), 2 MiB a third (the squares are read from the L3).
TILE_BYTES = 256 << 10

Step = Callable[[], Any]


class Reduction:
    """out = sources[0] + sources[1] + ..., element by element in this order, as often as it is run.

    out, sources: one-dimensional, contiguous, of one floating or complex dtype and length. out is one of the sources,
    in any place, or shares no memory with them. Sums are rounded to the dtype after each addition.

    Errors: ValueError for tensors that are not so.
    """

    def __init__(self, out: Tensor, sources: Sequence[Tensor]) -> None:
        _check(out, sources)
        out, *sources = map(as_real, (out, *sources))
        threads = torch.get_num_threads()
        quick = out.dtype is torch.float32 and threads == 1
        length = max(1, min(threads * TILE_BYTES // out.itemsize, len(out)))
        scratch = out.new_empty(length if len(sources) > 2 else 0)
        wide = torch.empty(length if out.itemsize < 4 else 0)
        self._tiles: list[tuple[list[Step], list[Step], Step]] = []
        for start in range(0, len(out), length):
            into, *parts = (each[start : start + length] for each in (out, *sources))
            sum_steps = _sum(into, parts, scratch[: len(into)], quick=quick)
            self._tiles.append((sum_steps, *_squares(into, wide[: len(into)], quick=quick)))

    def run(self, *, squares: bool) -> float:
        """Writes the sum to `out`; returns the sum of its squares, 0.0 without `squares`.

        Each tile's squares are summed in its dtype, or float32 where that is wider, and the tiles' in float64. It is
        inf or nan where an element is, and inf where the squares of finite ones are beyond the dtype.
        """
        total = 0.0
        with np.errstate(over="ignore", invalid="ignore"):  # the sum of squares says it
            for sum_steps, widen_steps, tile_squares in self._tiles:
                for step in sum_steps:
                    step()
                if squares:
                    for step in widen_steps:
                        step()
                    total += float(tile_squares())
        return total


def as_real(flat: Tensor) -> Tensor:
    """Complex numbers as twice as many real ones, which are added alike, and whose squares are the absolute ones."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


def _check(out: Tensor, sources: Sequence[Tensor]) -> None:
    if not sources:
        raise ValueError("a sum of no sources")
    if out.dim() != 1 or not out.is_contiguous() or not (out.is_floating_point() or out.is_complex()):
        raise ValueError(f"out is to be contiguous floats of one dimension, not {out.dtype} of shape {list(out.shape)}")
    num_bytes = out.numel() * out.itemsize
    for place, source in enumerate(sources):
        if (source.shape, source.dtype) != (out.shape, out.dtype) or not source.is_contiguous():
            raise ValueError(
                f"source {place} is {source.dtype} of shape {list(source.shape)}, out {out.dtype} of {list(out.shape)}"
            )
        if 0 < abs(source.data_ptr() - out.data_ptr()) < num_bytes:
            raise ValueError(f"source {place} overlaps out, and is not out itself")


def _sum(into: Tensor, parts: Sequence[Tensor], scratch: Tensor, *, quick: bool) -> list[Step]:
    """The steps that sum one tile. `into` is written by the last one alone: it may be any of the parts."""
    if len(parts) == 1:
        return [] if parts[0].data_ptr() == into.data_ptr() else [partial(into.copy_, parts[0])]
    partial_sums = [parts[0]] + [scratch] * (len(parts) - 2)
    targets = [scratch] * (len(parts) - 2) + [into]
    additions = zip(partial_sums, parts[1:], targets, strict=True)
    if quick:
        return [partial(np.add, so_far.numpy(), part.numpy(), target.numpy()) for so_far, part, target in additions]
    return [partial(torch.add, so_far, part, out=target) for so_far, part, target in additions]


def _squares(tile: Tensor, wide: Tensor, *, quick: bool) -> tuple[list[Step], Step]:
    """The steps to take first, and the one that returns the tile's sum of squares."""
    if quick:
        array = tile.numpy()
        return [], partial(array.dot, array)
    if tile.itemsize < 4:
        return [partial(wide.copy_, tile)], partial(torch.dot, wide, wide)
    return [], partial(torch.dot, tile, tile)
