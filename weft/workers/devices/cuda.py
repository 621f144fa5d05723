"""CUDA: one GPU as a worker's device. Its lanes are streams that live as long as the worker.

Shared memory is page-locked while a job uses it, so that copies are asynchronous. Streams do not wait for the host nor
the host for the device in an iteration: between streams of this GPU there are events, and towards other processes a
thread of the lane sleeps on an event and then posts the task on the board.

Memory of one GPU that another one reads is torch's own CUDA IPC, used beneath its pickling. The reader opens the
handle on its own device, so it needs neither a context on the other GPU nor to see it: "cudaIpcOpenMemHandle can open
handles to devices that may not be visible in the process calling the API" (CUDA Runtime API), and its copies are in
the order of its own streams. A tensor of another device would be copied in a stream of that device. torch keeps what
was lent until a counter in shared memory says that who opened it has closed it (CudaIPCTypes.cpp).

    stamps   an event's time is its distance from a base event, by the GPU's clock, plus the base's time on
             CLOCK_MONOTONIC; distances are told in float32 and the clocks drift, so there is a new base each second
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any

import torch
from torch import nn

from weft.transport.memory.directory import Directory, SharedMemoryGone
from weft.workers.devices.device import Accelerator, Act, Event, Result, Stream
from weft.workers.devices.launcher import Launcher
from weft.workers.devices.tiles import TILE_BYTES, Tiles, UnlockedMemory

CALIBRATIONS = 8  # of the clock; the one that took the host least is the best
REBASE_MS = 1000.0  # to here a float32 tells less than 0.1 µs
NUM_NUMBERS = 1024  # places that tasks on their way may be telling numbers in; there are more where that is too few
LINK_BYTES = 64 << 20  # copied to measure the link: some milliseconds
LINK_RUNS = 3  # after one that warms up; the fastest counts, here and of the next
PROBE_BYTES, PROBE_PARTS = 64 << 20, 4  # of each of two matrices; some ten to hundred milliseconds in all
RETURN_SECONDS = 5.0  # for those who borrowed memory to let go at a job's end; within what a release may take
RETURN_INTERVAL = 0.005  # between looks at their counters, which wake nobody
_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every context, not only the first that asks
_NOTICE = (
    "shared memory could not be page-locked ({reason}): copies between it and the GPU go through page-locked tiles and "
    "wait for each other, so the job is slower; try ulimit -l unlimited, or LimitMEMLOCK=infinity in the unit"
)


class CudaDevice(Launcher, Accelerator):
    """The GPU that this process sees as number 0; the only one, which CUDA_VISIBLE_DEVICES has seen to."""

    finishes_at_once = False

    def __init__(self) -> None:
        super().__init__()
        self.torch = torch.device("cuda", 0)
        self.drawing = threading.Lock()
        torch.cuda.set_device(0)
        torch.cuda.init()  # type: ignore[no-untyped-call]
        self._generator = torch.cuda.default_generators[0]
        self._streams: dict[str, torch.cuda.Stream] = {}
        self._pinned: dict[int, torch.Tensor] = {}
        self._unlocked = UnlockedMemory(self._tiles_here)
        self._tiles: dict[int, Tiles] = {}  # by stream
        self._notice: str | None = None
        self._clock = _Clock()
        self._numbers = deque(torch.zeros(NUM_NUMBERS, dtype=torch.float64, pin_memory=True).unbind())  # free places
        self._baseline_bytes = torch.cuda.memory_allocated()
        self._is_broken = False
        self._has_lent = False

    # --- memory

    def zeros(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(num_elements, dtype=dtype, device=self.torch)

    def cache_bytes(self) -> int:
        return int(torch.cuda.get_device_properties(self.torch).L2_cache_size)

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        self.launching()
        if not self._unlocked.has(tensor):
            return tensor.to(self.torch, non_blocking=True)
        own = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.torch)
        self._unlocked.copy(own, tensor)
        return own

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.launching()
        self._unlocked.copy(target, source)

    def adopt(self, module: nn.Module) -> None:
        module.to(self.torch)

    def give_back(self, module: nn.Module) -> None:
        module.to("cpu")

    def pin(self, block: torch.Tensor) -> None:
        address = block.data_ptr()
        if block.numel() == 0 or address in self._pinned:
            return
        code = int(_runtime().cudaHostRegister(address, block.numel() * block.element_size(), _PORTABLE))
        if code:
            self._refuse(block, code)
        else:
            self._pinned[address] = block

    def _refuse(self, block: torch.Tensor, code: int) -> None:
        with contextlib.suppress(torch.AcceleratorError):
            torch.ones(1, device=self.torch)  # the refusal is this thread's last error, which the next launch raises
        self._unlocked.add(block)
        self._notice = self._notice or _NOTICE.format(reason=torch.cuda.CudaError(code))

    def notice(self) -> str | None:
        return self._notice

    def link_bytes_per_second(self) -> float | None:
        host = torch.zeros(LINK_BYTES, dtype=torch.uint8, pin_memory=True)
        own = torch.zeros(LINK_BYTES, dtype=torch.uint8, device=self.torch)
        slowest = max(_copy_seconds(own, host), _copy_seconds(host, own))
        del host, own
        torch.cuda.empty_cache()
        return LINK_BYTES / slowest

    def probe_seconds(self) -> float | None:
        seconds = min(self.timed(work)[0] for work in repeat(_probe_on(self.torch), 1 + LINK_RUNS))
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        return seconds

    def capacity_bytes(self) -> int | None:
        free, _ = torch.cuda.mem_get_info()
        return free

    def end_job(self) -> None:
        try:
            torch.cuda.synchronize()  # nothing of the job is on its way any more
            for address in self._pinned:
                torch.cuda.check_error(int(_runtime().cudaHostUnregister(address)))
            torch._C._cuda_clearCublasWorkspaces()  # allocated, one for each stream that has multiplied
            if self._has_lent:
                self._take_back()
            torch.cuda.empty_cache()
        except (torch.AcceleratorError, torch.cuda.CudaError):
            self._is_broken = True
        self._pinned.clear()
        self._unlocked.clear()
        self._notice = None
        self._has_lent = False
        self.forget_tasks()

    def is_clean(self) -> bool:
        """Whether a kernel still runs and nothing of a job's is left; after some errors a context is of no more use."""
        if self._is_broken:
            return False
        try:
            torch.ones(1, device=self.torch).add_(1).cpu()
        except (torch.AcceleratorError, torch.OutOfMemoryError):
            return False
        return torch.cuda.memory_allocated() <= self._baseline_bytes

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats()
        self._clock.calibrate()

    def peak_bytes(self) -> int | None:
        return torch.cuda.max_memory_allocated()

    def timed(self, work: Callable[[], Result]) -> tuple[float, Result]:
        """By events in the current stream: what the host takes before the first launch and after the last is none of
        it, since lanes launch ahead."""
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        begin.record()
        result = work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3, result

    # --- memory that two devices see

    def lend(self, directory: Directory, name: str, num_bytes: int) -> torch.Tensor:
        block = self.zeros(num_bytes, torch.uint8)
        self._has_lent = True
        directory.publish(name, block.untyped_storage()._share_cuda_())  # type: ignore[no-untyped-call]
        return block

    def borrow(self, directory: Directory, name: str) -> torch.Tensor:
        """Of the event in the handle nothing is made: a task reads after the board has said that it was written."""
        _, handle, num_bytes, offset, counters, counter, event, _ = directory.published(name)
        own = self.torch.index
        try:
            storage = torch.UntypedStorage._new_shared_cuda(
                own, handle, num_bytes, offset, counters, counter, event, False
            )
        except RuntimeError as error:
            raise SharedMemoryGone(f"{name} of another worker's GPU cannot be opened: {error}") from error
        return torch.empty(0, dtype=torch.uint8, device=self.torch).set_(storage)

    def _take_back(self) -> None:
        """Until all who borrowed have let go, which they do when they end the job. One that was killed never does, and
        then this device is not clean."""
        deadline = time.monotonic() + RETURN_SECONDS
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
        while torch.cuda.memory_allocated() > self._baseline_bytes and time.monotonic() < deadline:
            time.sleep(RETURN_INTERVAL)
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]

    # --- numbers

    def seed(self, key: int) -> None:
        torch.default_generator.manual_seed(key)
        self._generator.manual_seed(key)

    def tell(self, value: torch.Tensor, use: Callable[[float], None]) -> None:
        try:
            place = self._numbers.popleft()
        except IndexError:
            place = torch.zeros((), dtype=torch.float64, pin_memory=True)
        place.copy_(value.detach().reshape(()), non_blocking=True)

        def act() -> None:
            number = float(place)
            self._numbers.append(place)
            use(number)

        self.after(act)

    # --- streams

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        with torch.cuda.stream(self._stream("compute")):
            yield
        torch.cuda.synchronize()  # other lanes' streams and other workers use what was made, and wait for no event
        torch.cuda.empty_cache()  # of the parameters' first places, which other lanes' streams could not use

    def stream(self, lane: str) -> Stream:
        return _CudaStream(self._stream(lane), self._clock)

    def record_here(self) -> Event:
        return _CudaEvent(torch.cuda.current_stream(), self._clock)

    def _tiles_here(self) -> Tiles:
        stream = torch.cuda.current_stream().cuda_stream
        if stream not in self._tiles:
            pair = [torch.empty(TILE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
            self._tiles[stream] = Tiles(pair, _launch_copy, self.record_here)
        return self._tiles[stream]

    def _stream(self, lane: str) -> torch.cuda.Stream:
        if lane not in self._streams:
            self._streams[lane] = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        return self._streams[lane]


def _launch_copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)


def _probe_on(device: torch.device) -> Act:
    side = math.isqrt(PROBE_BYTES // 4)
    factor, passed = (torch.ones(side, side, device=device) for _ in range(2))

    def work() -> None:
        for _ in range(PROBE_PARTS):
            torch.mm(factor, factor)
            torch.add(passed, factor, out=passed)

    return work


def _copy_seconds(target: torch.Tensor, source: torch.Tensor) -> float:
    seconds = []
    for _ in range(1 + LINK_RUNS):
        torch.cuda.synchronize()
        started = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class _CudaStream:
    def __init__(self, stream: torch.cuda.Stream, clock: _Clock) -> None:
        self._stream = stream
        self._clock = clock

    def launch(self, work: Act) -> None:
        with torch.cuda.stream(self._stream):
            work()

    def wait_for(self, event: Event) -> None:
        assert isinstance(event, _CudaEvent)
        self._stream.wait_event(event.event)

    def record(self) -> Event:
        return _CudaEvent(self._stream, self._clock)


class _CudaEvent:
    """blocking: who waits sleeps, since the core is wanted by others."""

    def __init__(self, stream: torch.cuda.Stream, clock: _Clock) -> None:
        self.event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        self.event.record(stream)
        self._clock = clock

    def wait(self) -> None:
        self.event.synchronize()

    def at_ns(self) -> int:
        return self._clock.at_ns(self.event)


class _Clock:
    """The GPU's time on CLOCK_MONOTONIC. Its base events are in a stream of their own, where nothing is before them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.calibrate()

    def calibrate(self) -> None:
        with self._lock:
            self._calibrate()

    def _calibrate(self) -> None:
        best = None
        for _ in range(CALIBRATIONS):
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            before = time.monotonic_ns()
            event.record(self._stream)
            event.synchronize()
            after = time.monotonic_ns()
            if best is None or after - before < best[0]:
                best = (after - before, (before + after) // 2, event)
        assert best is not None
        _, self._base_ns, self._base = best

    def at_ns(self, event: torch.cuda.Event) -> int:
        with self._lock:
            distance: float = self._base.elapsed_time(event)
            at = min(self._base_ns + round(distance * 1e6), time.monotonic_ns())  # it has happened: the clocks drift
            if distance > REBASE_MS:
                self._calibrate()
            return at
