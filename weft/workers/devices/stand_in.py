"""The stand-in: an accelerator that is none, whose streams run on the cores of this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from weft.transport.memory.directory import Directory
from weft.workers.devices.device import Act, Event, HostDevice, Stream


class StandIn(HostDevice):
    """An accelerator whose streams run what is launched at once, on the cores of this process."""

    is_accelerator = True

    def __init__(self) -> None:
        super().__init__()
        self._acts = threading.local()

    def end_job(self) -> None:
        self._acts = threading.local()  # with those that a task which failed has left

    def lend(self, directory: Directory, name: str, num_bytes: int) -> torch.Tensor:
        block = directory.block(name, num_bytes)
        directory.publish(name, num_bytes)
        return block

    def borrow(self, directory: Directory, name: str) -> torch.Tensor:
        return directory.block(name, directory.published(name))

    def tell(self, value: torch.Tensor, use: Callable[[float], None]) -> None:
        kept = value.detach().clone()
        self.after(lambda: use(float(kept.item())))

    def after(self, act: Act) -> None:
        self._list().append(act)

    def take_acts(self) -> list[Act]:
        acts, self._acts.list = self._list(), []
        return acts

    def stream(self, lane: str) -> Stream:
        return _HostStream()

    def record_here(self) -> Event:
        return HostEvent()

    def _list(self) -> list[Act]:
        acts: list[Act] | None = getattr(self._acts, "list", None)
        if acts is None:
            acts = self._acts.list = []
        return acts


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
