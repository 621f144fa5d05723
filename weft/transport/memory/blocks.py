"""Blocks: torch shared memory by job and name, as the directory's process holds it.

Whoever maps a block holds its memory, too. A directory that takes the place of one that died takes blocks from them, by
way of /proc, which lets processes of one user open each other's descriptors.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from multiprocessing import resource_sharer
from pathlib import Path

import torch

from weft.machine.free_memory import SharedMemoryFull

SHARED_MEMORY = Path("/dev/shm")
STOP_SECONDS = 5.0  # for the thread that hands descriptors over; it takes a moment

Calls = dict[str, int]


class Blocks:
    """The server's side: blocks by job and name, and a count of the calls that asked for them.

    The manager has a thread for each client, and the workers of a job ask for the same block at the same time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks: dict[str, dict[str, torch.Tensor]] = {}
        self._calls: Calls = {}

    def open(self, job: str, name: str, num_bytes: int, word: int) -> torch.Tensor:
        """The block, made on the first call with every int32 of it `word`. ValueError if its size is another."""
        with self._lock:
            self._calls[job] = self._calls.get(job, 0) + 1
            blocks = self._blocks.setdefault(job, {})
            if name not in blocks:
                blocks[name] = self._make(job, name, num_bytes, word)
            block = blocks[name]
        if block.numel() != num_bytes:
            raise ValueError(f"{job}/{name} has {block.numel()} bytes, not {num_bytes}")
        return block

    def find(self, job: str, name: str) -> torch.Tensor:
        """A block that somebody has made. KeyError if nobody has."""
        with self._lock:
            self._calls[job] = self._calls.get(job, 0) + 1
            return self._blocks.get(job, {})[name]

    def take(self, job: str, name: str, num_bytes: int, holder: int, descriptor: int) -> None:
        """The block that process `holder` has under the descriptor; every other who maps it tells the same, too.
        ValueError if another block has that name by now, OSError if the process is gone."""
        with self._lock:
            self._calls[job] = self._calls.get(job, 0) + 1
            blocks = self._blocks.setdefault(job, {})
            with _opened(f"/proc/{holder}/fd/{descriptor}") as own:
                if name not in blocks:
                    blocks[name] = _block_of(torch.UntypedStorage._new_shared_fd_cpu(own, num_bytes))  # type: ignore[attr-defined]
                elif not _is_of(blocks[name], own):
                    raise ValueError(f"{job}/{name} is another block here")

    def _make(self, job: str, name: str, num_bytes: int, word: int) -> torch.Tensor:
        try:
            return _shared_block(num_bytes, word)
        except RuntimeError as error:  # torch reserves the pages at once: later, nobody's store can fail
            _forget_names()
            held = sum(block.numel() for block in self._blocks[job].values())
            raise SharedMemoryFull(
                f"{num_bytes / 2**20:.1f} MiB more of shared memory for {job}/{name} cannot be had, beside the "
                f"{held / 2**20:.1f} MiB that the job has: {error}; /dev/shm has {_free_bytes() / 2**20:.0f} MiB free. "
                "Free some, use fewer microbatches or a smaller batch, or make /dev/shm larger"
            ) from None

    def forget(self, job: str, name: str) -> None:
        """One block, where there is one: its memory goes with the last who maps it."""
        with self._lock:
            self._blocks.get(job, {}).pop(name, None)

    def drop(self, job: str) -> int:
        """Forgets a job's blocks; returns their bytes."""
        with self._lock:
            self._calls.pop(job, None)
            blocks = self._blocks.pop(job, {})
            if not any(self._blocks.values()):
                # Nobody is about to fetch a descriptor: those that are left were for workers that were killed before
                # they did, and would keep their blocks' memory. The next one that is handed over starts it again.
                resource_sharer.stop(STOP_SECONDS)
        return sum(block.numel() for block in blocks.values())

    def num_bytes(self) -> dict[str, int]:
        with self._lock:
            return {job: sum(block.numel() for block in blocks.values()) for job, blocks in self._blocks.items()}

    def num_calls(self) -> Calls:
        with self._lock:
            return dict(self._calls)


def _shared_block(num_bytes: int, word: int) -> torch.Tensor:
    """Zeroed by the kernel, and so touched first by the lane that uses it; unless another word is asked for."""
    block = _block_of(torch.UntypedStorage._new_shared(num_bytes))  # type: ignore[no-untyped-call]
    if word:
        block.view(torch.int32).fill_(word)
    return block


def _block_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


@contextlib.contextmanager
def _opened(path: str) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def descriptor_of(storage: torch.UntypedStorage) -> int:
    """Of the memory that it maps; the storage's own."""
    descriptor, _ = storage._share_fd_cpu_()
    return int(descriptor)


def _is_of(block: torch.Tensor, descriptor: int) -> bool:
    return os.path.sameopenfile(descriptor_of(block.untyped_storage()), descriptor)


def _forget_names() -> None:
    """Of this process's shared memory: torch leaves one, with what it has reserved so far, where there is not enough.
    Whatever was made has none."""
    for path in SHARED_MEMORY.glob(f"torch_{os.getpid()}_*"):
        path.unlink(missing_ok=True)


def _free_bytes() -> int:
    status = os.statvfs(SHARED_MEMORY)
    return status.f_bavail * status.f_frsize
