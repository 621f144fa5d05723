"""Speeds of memory, wake-ups and links, measured.

`python -m weft.transport.memory.speeds` prints a line of JSON for each part. In a process of its own, since `weft
doctor` imports no torch, and a driver may hang or crash whoever asks it. About a second of measuring, after torch has
been imported; each GPU takes some tenths more.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from weft.machine.cgroups import read_cgroup_limits
from weft.machine.facts import Machine, read_machine
from weft.transport.memory.board import futex_wait, futex_wake

TRIAD_SECONDS = 0.2  # of each of two; the best pass counts, as in STREAM
LEAST_ARRAY_BYTES, MOST_ARRAY_BYTES = 64 << 20, 512 << 20
CACHES_PER_ARRAY = 4  # STREAM's rule: each array four times the last cache
PART_OF_MEMORY = 8  # an array takes at most this part of the memory that is available: there are three
TOUCH_BYTES = 64 << 20
WAKE_ROUNDS = 200
FALL_ASLEEP_NS = 100_000  # the other process has long blocked when it is woken
WAKE_SECONDS = 5.0  # for all rounds: a process that has lost its partner ends
SLEEP_SECONDS = 0.05
COPY_BYTES, NUM_COPIES = 256 << 20, 8
_PING, _PONG = 0, 16  # int32 words a cache line apart


def main() -> None:
    machine = read_machine()
    _tell(
        {
            "wake_round_trip_seconds": wake_round_trip_seconds(machine.one_cpu_per_core),
            "first_touch_bytes_per_second": first_touch_bytes_per_second(),
            "one_core_bytes_per_second": triad_bytes_per_second(machine, 1),
            "all_cores_bytes_per_second": triad_bytes_per_second(machine, machine.num_cores),
            "num_cores": machine.num_cores,
        }
    )
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            _tell({"gpu": gpu_copy_speeds(index)})


def _tell(part: dict[str, Any]) -> None:
    print(json.dumps(part), flush=True)


def triad_bytes_per_second(machine: Machine, num_threads: int) -> float:
    """a = b + s c, over arrays that no cache holds: two are read and one is written (McCalpin's STREAM)."""
    torch.set_num_threads(num_threads)
    cache = machine.last_cache_bytes if num_threads > 1 else machine.last_cache_bytes // max(1, machine.num_sockets)
    allowed = min(machine.available_bytes, read_cgroup_limits().memory_bytes or machine.available_bytes)
    most = min(MOST_ARRAY_BYTES, allowed // PART_OF_MEMORY)
    num_bytes = min(most, max(LEAST_ARRAY_BYTES, CACHES_PER_ARRAY * cache))
    a, b, c = (torch.empty(max(1, num_bytes // 4)).fill_(1.0) for _ in range(3))  # touched by the threads that use it
    seconds: list[float] = []
    until = time.monotonic() + TRIAD_SECONDS
    while not seconds or time.monotonic() < until:
        start = time.perf_counter()
        torch.add(b, c, alpha=3.0, out=a)
        seconds.append(time.perf_counter() - start)
    return 3 * 4 * a.numel() / min(seconds)


def first_touch_bytes_per_second() -> float:
    """By one thread. Anonymous shared memory: like /dev/shm's, but a full /dev/shm does not kill us."""
    memory = mmap.mmap(-1, TOUCH_BYTES)
    torch.set_num_threads(1)
    start = time.perf_counter()
    torch.frombuffer(memory, dtype=torch.uint8).fill_(1)
    return TOUCH_BYTES / (time.perf_counter() - start)


def wake_round_trip_seconds(cpus: tuple[int, ...]) -> float | None:
    """Median of waking a process that sleeps on a futex on another core, and being woken by it. None on one core.

    Forks: call it before anything has started OpenMP's threads.
    """
    if len(cpus) < 2:
        return None
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    words = memoryview(memory).cast("i")
    address = ctypes.addressof(ctypes.c_int.from_buffer(memory))
    usable = os.sched_getaffinity(0)
    child = os.fork()
    if child == 0:
        try:
            os.sched_setaffinity(0, {cpus[1]})
            _answer(words, address)
        finally:
            os._exit(0)
    try:
        os.sched_setaffinity(0, {cpus[0]})
        return _ask(words, address)
    finally:
        os.sched_setaffinity(0, usable)
        os.waitpid(child, 0)


def _ask(words: memoryview[int], address: int) -> float | None:
    seconds = []
    until = time.monotonic() + WAKE_SECONDS
    for count in range(1, WAKE_ROUNDS + 1):
        awake = time.monotonic_ns() + FALL_ASLEEP_NS
        while time.monotonic_ns() < awake:
            pass
        start = time.perf_counter()
        words[_PING] = count
        futex_wake(address + 4 * _PING)
        if not _wait(words, address, _PONG, count, until):
            break
        seconds.append(time.perf_counter() - start)
    words[_PING] = WAKE_ROUNDS  # whatever has happened, the partner need not wait for more
    return statistics.median(seconds) if seconds else None


def _answer(words: memoryview[int], address: int) -> None:
    until = time.monotonic() + WAKE_SECONDS
    for count in range(1, WAKE_ROUNDS + 1):
        if not _wait(words, address, _PING, count, until):
            return
        words[_PONG] = count
        futex_wake(address + 4 * _PONG)


def _wait(words: memoryview[int], address: int, word: int, count: int, until: float) -> bool:
    """False if the time is up first."""
    while (seen := words[word]) < count:
        if time.monotonic() > until:
            return False
        futex_wait(address + 4 * word, seen, SLEEP_SECONDS)
    return True


def gpu_copy_speeds(index: int) -> dict[str, Any]:
    """Of copies between page-locked memory and the GPU: each direction alone, and the sum of both at once."""
    device = torch.device("cuda", index)
    with torch.cuda.device(device):
        sent, received = (torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2))
        arrived, leaving = (torch.empty(COPY_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
        up, down = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]  # torch has no types

        def h2d() -> None:
            with torch.cuda.stream(up):
                arrived.copy_(sent, non_blocking=True)

        def d2h() -> None:
            with torch.cuda.stream(down):
                received.copy_(leaving, non_blocking=True)

        def bytes_per_second(*copies: Callable[[], None]) -> float:
            for copy in copies:  # once without a clock: the link wakes up
                copy()
            torch.cuda.synchronize(device)
            start = time.perf_counter()
            for _ in range(NUM_COPIES):
                for copy in copies:
                    copy()
            torch.cuda.synchronize(device)
            return len(copies) * NUM_COPIES * COPY_BYTES / (time.perf_counter() - start)

        return {
            "index": index,
            "name": torch.cuda.get_device_name(device),
            "h2d_bytes_per_second": bytes_per_second(h2d),
            "d2h_bytes_per_second": bytes_per_second(d2h),
            "both_bytes_per_second": bytes_per_second(h2d, d2h),
        }


if __name__ == "__main__":
    main()
