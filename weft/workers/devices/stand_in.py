"""The stand-in: an accelerator that is none, whose streams run on the cores of this process."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from weft.transport.memory.directory import Directory
from weft.workers.devices.device import Accelerator, Act, Event, Stream
from weft.workers.devices.host import HostDevice
from weft.workers.devices.launcher import Launcher


class StandIn(Launcher, HostDevice, Accelerator):
    """An accelerator whose streams run what is launched at once, on the cores of this process."""

    finishes_at_once = True

    def __init__(self) -> None:
        Launcher.__init__(self)
        HostDevice.__init__(self)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.launching()
        super().copy(target, source)

    def tell(self, value: torch.Tensor, use: Callable[[float], None]) -> None:
        kept = value.detach().clone()
        self.after(lambda: use(float(kept.item())))

    def stream(self, lane: str) -> Stream:
        return _HostStream()

    def record_here(self) -> Event:
        return HostEvent()

    def lend(self, directory: Directory, name: str, num_bytes: int) -> torch.Tensor:
        return directory.block(name, num_bytes)

    def borrow(self, directory: Directory, name: str) -> torch.Tensor:
        return directory.made(name)

    def end_job(self) -> None:
        self.forget_tasks()


class HostEvent:
    """Happened when it was recorded."""

    def __init__(self) -> None:
        self._at_ns = time.monotonic_ns()

    def wait(self) -> None:
        pass

    def at_ns(self) -> int:
        return self._at_ns


class _HostStream:
    def launch(self, work: Act) -> None:
        work()

    def wait_for(self, event: Event) -> None:
        event.wait()

    def record(self) -> Event:
        return HostEvent()
