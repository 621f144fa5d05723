"""An accelerator whose streams run on their own: each is a thread, and what it runs is late for whoever launched it."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator

import torch

from weft.transport.directory import Directory
from weft.workers.device import Act, Event, StandIn, Stream


class ThreadEvent:
    def __init__(self) -> None:
        self._happened = threading.Event()
        self._at_ns = 0

    def happen(self) -> None:
        self._at_ns = time.monotonic_ns()
        self._happened.set()

    def until_it_happens(self) -> None:
        self._happened.wait()

    def wait(self) -> None:
        self.until_it_happens()

    def at_ns(self) -> int:
        assert self._happened.is_set()
        return self._at_ns


class ThreadStream:
    """error: what the first thing that failed has raised; the stream runs nothing after it, as a GPU's would not."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Act | None] = queue.SimpleQueue()
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def launch(self, work: Act) -> None:
        self._work.put(work)

    def wait_for(self, event: Event) -> None:
        assert isinstance(event, ThreadEvent)
        self._work.put(event.until_it_happens)

    def record(self) -> Event:
        event = _Checked(self)
        self._work.put(event.happen)
        return event

    def end(self) -> None:
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            if self.error is None or getattr(work, "__name__", "") == "happen":
                try:
                    work()
                except BaseException as error:
                    self.error = error


class _Checked(ThreadEvent):
    """Who waits for it hears of what the stream has met before."""

    def __init__(self, stream: ThreadStream) -> None:
        super().__init__()
        self._stream = stream

    def wait(self) -> None:
        super().wait()
        if self._stream.error is not None:
            raise self._stream.error


class ThreadDevice(StandIn):
    """loans: what it and its peers have lent, by name; no shared memory."""

    finishes_at_once = False

    def __init__(self, loans: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self._streams: list[ThreadStream] = []
        self._loans = loans

    def lend(self, directory: Directory, name: str, num_bytes: int) -> torch.Tensor:
        assert name not in self._loans
        self._loans[name] = torch.zeros(num_bytes, dtype=torch.uint8)
        return self._loans[name]

    def borrow(self, directory: Directory, name: str) -> torch.Tensor:
        return self._loans[name]

    def stream(self, lane: str) -> Stream:
        self._streams.append(ThreadStream())
        return self._streams[-1]

    def record_here(self) -> Event:
        event = ThreadEvent()
        event.happen()
        return event

    def end(self) -> None:
        for stream in self._streams:
            stream.end()


@contextlib.contextmanager
def thread_device() -> Iterator[Callable[[], ThreadDevice]]:
    """Makes devices that reach one another, and ends their streams."""
    devices: list[ThreadDevice] = []
    loans: dict[str, torch.Tensor] = {}

    def make() -> ThreadDevice:
        devices.append(ThreadDevice(loans))
        return devices[-1]

    yield make
    for device in devices:
        device.end()
