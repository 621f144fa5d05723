"""Tiles: copies between a device and memory that could not be page-locked, through two page-locked tiles.

    up      host     source ─▶ tile 0 │ source ─▶ tile 1 │ source ─▶ tile 0 │ ...
            stream                    │ tile 0 ─▶ target │ tile 1 ─▶ target │ ...
    down    stream   source ─▶ tile 0 │ source ─▶ tile 1 │ source ─▶ tile 0 │ ...
            host                      │ tile 0 ─▶ target │ tile 1 ─▶ target │ ...

A copy up is launched when `copy` returns, as any other: it has read its source, which must be there. A copy down is
over then: its last part is the host's, of which no event of the stream would tell. So the launcher of a task that
copies down waits for the device, and the task ends when the stream is behind it, like every task.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from weft.workers.devices.device import Event

TILE_BYTES = 16 << 20  # arbitrary: a millisecond of a PCIe link, beside which an event's wait is little

Launch = Callable[[Tensor, Tensor], None]


class Tiles:
    """Those of one stream, kept from job to job. pair: 1-D, of bytes, page-locked. launch: (target, source) of a copy
    into the stream. record: a point in it."""

    def __init__(self, pair: Sequence[Tensor], launch: Launch, record: Callable[[], Event]) -> None:
        self._pair = pair
        self.launch = launch
        self._record = record
        self._events: list[Event | None] = [None, None]  # behind the last copy from a tile, or into it

    def up(self, target: Tensor, source: Tensor) -> None:
        """target: the device's. Both 1-D, contiguous, of one dtype and length."""
        for number, (place, part) in enumerate(self._parts(target, source)):
            tile = self._tile(number, part)
            self._wait(number)
            tile.copy_(part)
            self.launch(place, tile)
            self._events[number % 2] = self._record()

    def down(self, target: Tensor, source: Tensor) -> None:
        """source: the device's."""
        before: Tensor | None = None
        number = -1
        for number, (place, part) in enumerate(self._parts(target, source)):
            self.launch(self._tile(number, part), part)
            self._events[number % 2] = self._record()
            if before is not None:
                self._land(number - 1, before)
            before = place
        if before is not None:
            self._land(number, before)

    def _land(self, number: int, place: Tensor) -> None:
        self._wait(number)
        place.copy_(self._tile(number, place))

    def _wait(self, number: int) -> None:
        event = self._events[number % 2]
        if event is not None:
            event.wait()

    def _parts(self, target: Tensor, source: Tensor) -> Sequence[tuple[Tensor, Tensor]]:
        length = len(self._pair[0]) // source.itemsize
        return list(zip(torch.split(target, length), torch.split(source, length), strict=True)) if len(source) else []

    def _tile(self, number: int, like: Tensor) -> Tensor:
        return self._pair[number % 2][: like.numel() * like.itemsize].view(like.dtype)


class UnlockedMemory:
    """Blocks of shared memory that could not be page-locked. tiles: makes or finds those of the stream that the calling
    thread launches into."""

    def __init__(self, tiles: Callable[[], Tiles]) -> None:
        self._tiles = tiles
        self._addresses: set[int] = set()

    def add(self, block: Tensor) -> None:
        self._addresses.add(_address(block))

    def clear(self) -> None:
        self._addresses.clear()

    def has(self, tensor: Tensor) -> bool:
        """Whether it lies in one of the blocks."""
        return bool(self._addresses) and _address(tensor) in self._addresses

    def copy(self, target: Tensor, source: Tensor) -> None:
        """As target.copy_(source, non_blocking=True), of tensors of one shape."""
        if self.has(source):
            self._up(target, source)
        elif self.has(target):
            self._down(target, source)
        else:
            target.copy_(source, non_blocking=True)

    def _up(self, target: Tensor, source: Tensor) -> None:
        tiles = self._tiles()
        if target.is_contiguous() and target.dtype == source.dtype:
            tiles.up(target.view(-1), source.reshape(-1))
            return
        between = torch.empty(source.shape, dtype=source.dtype, device=target.device)
        tiles.up(between.view(-1), source.reshape(-1))
        tiles.launch(target, between)

    def _down(self, target: Tensor, source: Tensor) -> None:
        flat = source.detach().to(target.dtype).reshape(-1)
        if target.is_contiguous():
            self._tiles().down(target.view(-1), flat)
            return
        between = torch.empty(target.shape, dtype=target.dtype)
        self._tiles().down(between.view(-1), flat)
        target.copy_(between)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
