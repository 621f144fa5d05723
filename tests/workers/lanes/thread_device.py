"""An accelerator whose streams run on their own: each is a thread, and what it runs is late for whoever launched it."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

import torch

from weft.transport.memory.directory import Directory
from weft.workers.devices.device import Act, Event, Stream
from weft.workers.devices.stand_in import StandIn
from weft.workers.devices.tiles import Tiles, UnlockedMemory


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


class LateCopies:
    """Copies of a stream, each made at the last moment: when somebody waits for it, or asks for what comes after."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[torch.Tensor, torch.Tensor]] = deque()
        self._launched = self._made = 0

    def launch(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._waiting.append((target, source))
        self._launched += 1

    def record(self) -> Event:
        return LateEvent(self, self._launched)

    def make(self, until: int | None = None) -> None:
        """until: as many of all that were ever launched."""
        while self._waiting and (until is None or self._made < until):
            target, source = self._waiting.popleft()
            target.copy_(source)
            self._made += 1

    def tiles(self, num_bytes: int) -> Tiles:
        return Tiles([torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(2)], self.launch, self.record)


class LateEvent:
    def __init__(self, copies: LateCopies, until: int) -> None:
        self._copies = copies
        self._until = until

    def wait(self) -> None:
        self._copies.make(self._until)

    def at_ns(self) -> int:
        raise AssertionError("nobody asks")


class ThreadDevice(StandIn):
    """loans: what it and its peers have lent, by name; no shared memory. tile_bytes: of the tiles, where no memory can
    be page-locked; 0 where all can."""

    finishes_at_once = False

    def __init__(self, loans: dict[str, torch.Tensor], tile_bytes: int = 0) -> None:
        super().__init__()
        self._streams: list[ThreadStream] = []
        self._loans = loans
        self._tile_bytes = tile_bytes
        self._unlocked = UnlockedMemory(lambda: self._here()[1])
        self._lanes = threading.local()
        self.num_staged = 0

    def pin(self, block: torch.Tensor) -> None:
        if self._tile_bytes:
            self._unlocked.add(block)

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self._unlocked.has(tensor):
            return tensor
        own = torch.empty(tensor.shape, dtype=tensor.dtype)
        self.copy(own, tensor)
        return own

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.launching()
        self.num_staged += self._unlocked.has(source) or self._unlocked.has(target)
        self._unlocked.copy(target, source)
        self._here()[0].make()  # what the stream does next comes behind it

    def _here(self) -> tuple[LateCopies, Tiles]:
        """Of the calling stream."""
        if not hasattr(self._lanes, "own"):
            copies = LateCopies()
            self._lanes.own = (copies, copies.tiles(self._tile_bytes))
        own: tuple[LateCopies, Tiles] = self._lanes.own
        return own

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
def thread_device() -> Iterator[Callable[..., ThreadDevice]]:
    """Makes devices that reach one another, and ends their streams."""
    devices: list[ThreadDevice] = []
    loans: dict[str, torch.Tensor] = {}

    def make(tile_bytes: int = 0) -> ThreadDevice:
        devices.append(ThreadDevice(loans, tile_bytes))
        return devices[-1]

    yield make
    for device in devices:
        device.end()
