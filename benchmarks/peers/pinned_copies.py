"""Peer of benchmarks/gpu_transfers.py: plain copies between page-locked memory and the device, and nothing else.

Config: device, sizes (bytes of each copy, all in memory of their own), repeats. Prints {"up", "down", "both"} in bytes
per second as JSON: all sizes one after another in one stream, `repeats` times, and for "both" in two streams at once.
Without a GPU the memory is not page-locked and there are no streams: both directions take turns.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable

import torch


class Copies:
    """The buffers; `up` and `down` launch a copy of each."""

    def __init__(self, device: torch.device, sizes: list[int]) -> None:
        self._is_gpu = device.type == "cuda"
        self._host = [self._buffers(sizes, torch.device("cpu")) for _ in range(2)]
        self._own = [self._buffers(sizes, device) for _ in range(2)]
        self._streams = [torch.cuda.Stream() for _ in range(2)] if self._is_gpu else []  # type: ignore[no-untyped-call]
        self.num_bytes = sum(sizes)

    def _buffers(self, sizes: list[int], device: torch.device) -> list[torch.Tensor]:
        pins = self._is_gpu and device.type == "cpu"
        return [torch.zeros(size, dtype=torch.uint8, device=device, pin_memory=pins) for size in sizes]

    def up(self) -> None:
        with self._stream(0):
            for target, source in zip(self._own[0], self._host[0], strict=True):
                target.copy_(source, non_blocking=True)

    def down(self) -> None:
        with self._stream(1):
            for target, source in zip(self._host[1], self._own[1], strict=True):
                target.copy_(source, non_blocking=True)

    def both(self) -> None:
        self.up()
        self.down()

    def wait(self) -> None:
        if self._is_gpu:
            torch.cuda.synchronize()

    def _stream(self, number: int) -> contextlib.AbstractContextManager[object]:
        return torch.cuda.stream(self._streams[number]) if self._is_gpu else contextlib.nullcontext()


def rate(copies: Copies, launch: Callable[[], None], repeats: int, directions: int) -> float:
    launch()
    copies.wait()
    started = time.perf_counter()
    for _ in range(repeats):
        launch()
    copies.wait()
    return directions * repeats * copies.num_bytes / (time.perf_counter() - started)


def main() -> None:
    config = json.loads(sys.argv[1])
    copies = Copies(torch.device(config["device"]), config["sizes"])
    repeats = config["repeats"]
    print(
        json.dumps(
            {
                "up": rate(copies, copies.up, repeats, 1),
                "down": rate(copies, copies.down, repeats, 1),
                "both": rate(copies, copies.both, repeats, 2),
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    main()
