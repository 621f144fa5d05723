"""Blocks: torch shared memory by job and name, as the directory's process holds it.

Whoever maps a block holds its memory, too, and tells by which descriptor. Others open that by way of /proc, which lets
processes of one user open each other's: workers those of the directory, and a directory that takes the place of one
that died those of the workers.
"""

from __future__ import annotations

import contextlib
import os
import resource
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from weft.machine.free_memory import SharedMemoryFull
from weft.transport.memory.arena import Layout

SHARED_MEMORY = Path("/dev/shm")

Calls = dict[str, int]


class Wanted(NamedTuple):
    """A block whose size every user knows from the plan; the first to ask makes it, every int32 of it `word`."""

    name: str
    num_bytes: int
    word: int = 0


@dataclass(frozen=True, slots=True)
class BlockDescriptor:
    """A block, as another process finds it."""

    num_bytes: int
    holder: int  # pid
    descriptor: int  # the holder's
    inode: int  # of the memory: a number of a descriptor may be another one's by the time that it is opened

    @classmethod
    def of(cls, block: torch.Tensor) -> BlockDescriptor:
        """block: of this process."""
        descriptor = descriptor_of(block.untyped_storage())
        return cls(block.numel(), os.getpid(), descriptor, os.fstat(descriptor).st_ino)

    def mapped(self) -> torch.Tensor:
        """The same memory, here. OSError if the holder has it no more, RuntimeError if it cannot be mapped."""
        with _opened(self.holder, self.descriptor) as own:
            if os.fstat(own).st_ino != self.inode:
                raise FileNotFoundError(f"descriptor {self.descriptor} of process {self.holder} is another one by now")
            return _mapped(own, self.num_bytes)


class Blocks:
    """The server's side: blocks by job and name, and a count of the calls that asked for them.

    The manager has a thread for each client, and the workers of a job ask for the same block at the same time.
    """

    def __init__(self, layouts: dict[str, Layout] | None = None) -> None:
        """layouts: of arenas, by "job/name"; the directory's."""
        self._lock = threading.Lock()
        self._layouts = {} if layouts is None else layouts
        self._blocks: dict[str, dict[str, torch.Tensor]] = {}
        self._calls: Calls = {}

    def open(self, job: str, *wanted: Wanted) -> list[BlockDescriptor]:
        """Blocks, made on the first call. ValueError if the size of one is another."""
        held = []
        with self._lock:
            self._calls[job] = self._calls.get(job, 0) + 1
            blocks = self._blocks.setdefault(job, {})
            for name, num_bytes, word in wanted:
                if name not in blocks:
                    blocks[name] = self._make(job, name, num_bytes, word)
                held.append(BlockDescriptor.of(blocks[name]))
        for each, found in zip(wanted, held, strict=True):
            if found.num_bytes != each.num_bytes:
                raise ValueError(f"{job}/{each.name} has {found.num_bytes} bytes, not {each.num_bytes}")
        return held

    def create(self, job: str, name: str, layout: Layout) -> BlockDescriptor:
        """An arena's block, with its layout: each of its own would be a round trip. Errors: as of `open`."""
        (held,) = self.open(job, Wanted(name, layout.num_bytes))
        self._layouts[f"{job}/{name}"] = layout
        return held

    def find(self, job: str, name: str) -> BlockDescriptor:
        """A block that somebody has made. KeyError if nobody has."""
        with self._lock:
            self._calls[job] = self._calls.get(job, 0) + 1
            return BlockDescriptor.of(self._blocks.get(job, {})[name])

    def take(self, job: str, name: str, held: BlockDescriptor) -> None:
        """The block that a worker has; every other who maps it tells the same, too. ValueError if another block has
        that name by now, OSError if the worker is gone."""
        with self._lock:
            self._calls[job] = self._calls.get(job, 0) + 1
            blocks = self._blocks.setdefault(job, {})
            if name not in blocks:
                blocks[name] = held.mapped()
            elif BlockDescriptor.of(blocks[name]).inode != held.inode:
                raise ValueError(f"{job}/{name} is another block here")

    def _make(self, job: str, name: str, num_bytes: int, word: int) -> torch.Tensor:
        try:
            return _shared_block(num_bytes, word)
        except RuntimeError as error:  # torch reserves the pages at once: later, nobody's store can fail
            _forget_names()
            held = sum(block.numel() for block in self._blocks[job].values())
            raise SharedMemoryFull(
                f"{num_bytes / 2**20:.1f} MiB more of shared memory for {job}/{name} cannot be had, beside the "
                f"{held / 2**20:.1f} MiB that the job has: {error}; {_what_to_do(num_bytes)}"
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
            num_bytes = sum(block.numel() for block in blocks.values())
            blocks.clear()  # a call that has failed is remembered by its connection, with all that it had in hand
        return num_bytes

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


def _mapped(descriptor: int, num_bytes: int) -> torch.Tensor:
    """With a descriptor of its own."""
    return _block_of(torch.UntypedStorage._new_shared_fd_cpu(descriptor, num_bytes))  # type: ignore[attr-defined]


@contextlib.contextmanager
def _opened(holder: int, descriptor: int) -> Iterator[int]:
    own = os.open(f"/proc/{holder}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        yield own
    finally:
        os.close(own)


def descriptor_of(storage: torch.UntypedStorage) -> int:
    """Of the memory that it maps; the storage's own."""
    descriptor, _ = storage._share_fd_cpu_()
    return int(descriptor)


def _forget_names() -> None:
    """Of this process's shared memory: torch leaves one, with what it has reserved so far, where there is not enough.
    Whatever was made has none."""
    for path in SHARED_MEMORY.glob(f"torch_{os.getpid()}_*"):
        path.unlink(missing_ok=True)


def _what_to_do(num_bytes: int) -> str:
    """For a block that cannot be made."""
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if most != resource.RLIM_INFINITY and num_bytes > most:  # a block is a file, and /dev/shm may have room for it
        return (
            f"a process may write no file above {most / 2**20:.1f} MiB here (RLIMIT_FSIZE). Start the daemon after "
            "`ulimit -f unlimited`, or with LimitFSIZE=infinity in its unit; or use a smaller batch"
        )
    status = os.statvfs(SHARED_MEMORY)
    free = status.f_bavail * status.f_frsize / 2**20
    remedy = "Free some, use fewer microbatches or a smaller batch, or make /dev/shm larger"
    return f"/dev/shm has {free:.0f} MiB free. {remedy}"
