"""Devices: what a worker computes on, and the streams of its lanes.

    HostDevice   the cores of a CPU worker; a task is over when its call returns       weft.workers.lanes.lane
    StandIn      an accelerator that is none: streams, events and memory of its own,   weft.workers.lanes.stream_lane
                 on the CPU, so that everything but the kernels runs without a GPU
    CudaDevice   one GPU                                                               weft.workers.devices.cuda

A lane of an accelerator launches a task into its stream and goes on to the next; the task is over when the event that
was recorded behind it has happened. What a task computes is then not there yet when its call returns: whoever wants a
number of it on the host `tell`s where it is to go, and it comes there when the task is over.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from torch import nn

from weft.transport.memory.directory import Directory

Act = Callable[[], None]
Result = TypeVar("Result")


class Event(Protocol):
    """A point in a stream."""

    def wait(self) -> None:
        """Until it has happened, sleeping."""

    def at_ns(self) -> int:
        """When it happened, on CLOCK_MONOTONIC. Of one that has."""


class Stream(Protocol):
    """One lane's order of execution on the device."""

    def launch(self, work: Act) -> None:
        """Calls it, in whichever thread, so that what it computes comes behind all that was launched before."""

    def wait_for(self, event: Event) -> None:
        """What is launched from now on comes after the event."""

    def record(self) -> Event:
        """A point behind all that was launched so far."""


class HostDevice:
    """The cores of this process. `torch` is the device of its tensors."""

    is_accelerator = False
    finishes_at_once = True  # a task that was launched is over

    def __init__(self, torch_device: torch.device | None = None) -> None:
        self.torch = torch_device or torch.device("cpu")
        self._launch = threading.local()
        self.drawing = threading.Lock()  # stages of one process share generators: from a seed to the last number

    # --- memory

    def zeros(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(num_elements, dtype=dtype, device=self.torch)

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the host where the device can compute with it."""
        return tensor

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Between shared memory and the device's, of one shape, behind what the calling lane has launched; over when
        the lane's task is. What another process has put into shared memory is there when this is called."""
        self.launching()
        target.copy_(source, non_blocking=True)

    def adopt(self, module: nn.Module) -> None:
        """A part of the model comes to the device, with all that its own `to` would take along."""

    def give_back(self, module: nn.Module) -> None:
        """What `adopt` has brought is the host's again, gradients too."""

    def pin(self, block: torch.Tensor) -> None:
        """Of shared memory: so that copies between it and the device run beside computation. Where it cannot be
        page-locked, `notice` says so, and copies take longer."""

    def notice(self) -> str | None:
        """What the job's user should know of how the device serves it."""
        return None

    def link_bytes_per_second(self) -> float | None:
        """Of copies to the device and from it, the slower of the two; None where both memories are one."""
        return None

    def capacity_bytes(self) -> int | None:
        """Of the device's memory, what is free for jobs; None where that is the host's."""
        return None

    def end_job(self) -> None:
        """Gives back what the job has taken."""

    def is_clean(self) -> bool:
        return True

    def reset_peak(self) -> None:
        """`peak_bytes` counts from here on."""

    def peak_bytes(self) -> int | None:
        """The most that was allocated on the device; None where its memory is the host's."""
        return None

    def timed(self, work: Callable[[], Result]) -> tuple[float, Result]:
        """(seconds, what it returns) of work alone on the device, to the end of all that it launches there."""
        started = time.perf_counter()
        result = work()
        return time.perf_counter() - started, result

    # --- memory that two devices see

    def lend(self, directory: Directory, name: str, num_bytes: int) -> torch.Tensor:
        """A block of the device's memory that another worker's device may borrow until the job ends."""
        raise AssertionError("the host's memory needs nobody to lend it")

    def borrow(self, directory: Directory, name: str) -> torch.Tensor:
        """The block that another worker's device has lent. Errors: KeyError where none has."""
        raise AssertionError("the host's memory needs nobody to lend it")

    # --- numbers

    def seed(self, key: int) -> None:
        """The generators that a module may draw from, in about 2 microseconds. The caller holds `drawing`."""
        torch.default_generator.manual_seed(key)

    def tell(self, value: torch.Tensor, use: Callable[[float], None]) -> None:
        """Calls `use` with a number that a task of this thread's lane computes, once it is there."""
        use(float(value.item()))

    def after(self, act: Act) -> None:
        """Calls it when the task that this thread runs is over, in the order of such calls."""
        act()

    def take_acts(self) -> list[Act]:
        """What `tell` and `after` have left to do since the last call, of this thread."""
        return []

    # --- streams

    def launching(self) -> None:
        """Of what this thread's task launches the first is next: until now it was the host that took its time."""
        if not getattr(self._launch, "at_ns", 0):
            self._launch.at_ns = time.monotonic_ns()

    def take_launch_ns(self) -> int:
        """When `launching` was first called since the last time this was; 0 where it was not."""
        at_ns, self._launch.at_ns = getattr(self._launch, "at_ns", 0), 0
        return at_ns

    def computing(self) -> contextlib.AbstractContextManager[object]:
        """A job is set up within: what it makes belongs to the stream of the compute lane, and is there at the end."""
        return contextlib.nullcontext()

    def stream(self, lane: str) -> Stream:
        raise AssertionError("lanes of the host have no streams")

    def record_here(self) -> Event:
        """A point in the stream that the calling thread launches into, from inside a task."""
        raise AssertionError("lanes of the host have no streams")
