"""Devices: what a worker computes on, and the streams of its lanes.

    HostDevice   the cores of a CPU worker; a task is over when its call returns       weft.workers.devices.host
    StandIn      an accelerator that is none: streams, events and memory of its own,   weft.workers.devices.stand_in
                 on the CPU, so that everything but the kernels runs without a GPU
    CudaDevice   one GPU                                                               weft.workers.devices.cuda

A lane of an accelerator launches a task into its stream and goes on to the next; the task is over when the event that
was recorded behind it has happened. What a task computes is then not there yet when its call returns: whoever wants a
number of it on the host `tell`s where it is to go, and it comes there when the task is over.
"""

from __future__ import annotations

import contextlib
import threading
from abc import abstractmethod
from collections.abc import Callable
from typing import Protocol, TypeVar

from torch import Tensor, nn
from torch import device as TorchDevice
from torch import dtype as Dtype

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
        """Calls it, in whichever thread, so that what it computes comes behind all that was launched before. A forward
        in parts, which waits for more inside, in this one."""

    def wait_for(self, event: Event) -> None:
        """What is launched from now on comes after the event."""

    def record(self) -> Event:
        """A point behind all that was launched so far."""


class Memory(Protocol):
    """Where tensors lie, and how they come there."""

    torch: TorchDevice  # of its tensors

    def zeros(self, num_elements: int, dtype: Dtype) -> Tensor: ...

    def cache_bytes(self) -> int:
        """What of other memory takes the place of all that its caches hold."""

    def put(self, tensor: Tensor) -> Tensor:
        """A tensor of the host where the device can compute with it."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Between shared memory and the device's, of one shape, behind what the calling lane has launched; over when
        the lane's task is. What another process has put into shared memory is there when this is called."""

    def adopt(self, module: nn.Module) -> None:
        """A part of the model comes to the device, with all that its own `to` would take along."""

    def give_back(self, module: nn.Module) -> None:
        """What `adopt` has brought is the host's again, gradients too."""

    def pin(self, block: Tensor) -> None:
        """Of shared memory: so that copies between it and the device run beside computation. Where it cannot be
        page-locked, `notice` says so, and copies take longer."""


class Numbers(Protocol):
    """What modules draw, and what the host is told of what was computed."""

    drawing: threading.Lock  # stages of one process share generators: from a seed to the last number

    def seed(self, key: int) -> None:
        """The generators that a module may draw from, in about 2 microseconds. The caller holds `drawing`."""

    def tell(self, value: Tensor, use: Callable[[float], None]) -> None:
        """Calls `use` with a number that a task of this thread's lane computes, once it is there."""

    def after(self, act: Act) -> None:
        """Calls it when the task that this thread runs is over, in the order of such calls."""


class Streams(Protocol):
    """In whose order things are computed, and how long that takes."""

    def launching(self) -> None:
        """Of what this thread's task launches the first is next: until now it was the host that took its time."""

    def computing(self) -> contextlib.AbstractContextManager[object]:
        """A job is set up within: what it makes belongs to the stream of the compute lane, and is there at the end."""

    def timed(self, work: Callable[[], Result]) -> tuple[float, Result]:
        """(seconds, what it returns) of work alone on the device, to the end of all that it launches there."""


class Life(Protocol):
    """What a worker asks before its first job, and from job to job."""

    def link_bytes_per_second(self) -> float | None:
        """Of copies to the device and from it, the slower of the two; None where both memories are one."""

    def probe_seconds(self) -> float | None:
        """That a fixed piece of work takes: products of matrices and passes over memory. None on the host's cores."""

    def capacity_bytes(self) -> int | None:
        """Of the device's memory, what is free for jobs; None where that is the host's."""

    def reset_peak(self) -> None:
        """`peak_bytes` counts from here on."""

    def notice(self) -> str | None:
        """What the job's user should know of how the device serves it."""

    def peak_bytes(self) -> int | None:
        """The most that was allocated on the device; None where its memory is the host's."""

    def end_job(self) -> None:
        """Gives back what the job has taken."""

    def is_clean(self) -> bool:
        """Whether the next job finds it as this one did."""


class Device(Memory, Numbers, Streams, Life, Protocol):
    """What every worker has one of."""


class Accelerator(Device):
    """A device whose lanes have streams."""

    finishes_at_once: bool  # a task that was launched is over

    @abstractmethod
    def stream(self, lane: str) -> Stream: ...

    @abstractmethod
    def record_here(self) -> Event:
        """A point in the stream that the calling thread launches into, from inside a task."""

    @abstractmethod
    def take_acts(self) -> list[Act]:
        """What `tell` and `after` have left to do since the last call, of this thread."""

    @abstractmethod
    def take_launch_ns(self) -> int:
        """When `launching` was first called since the last time this was, by this thread; 0 where it was not."""

    @abstractmethod
    def lend(self, directory: Directory, name: str, num_bytes: int) -> Tensor:
        """A block of its memory that another worker's accelerator may borrow until the job ends."""

    @abstractmethod
    def borrow(self, directory: Directory, name: str) -> Tensor:
        """The block that another worker's accelerator has lent. Errors: KeyError where none has."""
