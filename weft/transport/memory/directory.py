"""The directory: a Manager in a process of its own that owns every shared tensor and serves the dicts that find them.

Workers call it while they set a job up and afterwards only in the first task of a pair that hands GPU memory on
(`publish`), and where a slot grows; from any thread, since a proxy has a connection for each. Blocks are torch shared
memory with `file_descriptor` sharing: their names are gone from /dev/shm before anybody can crash, and the memory goes
when the last process that maps it does. A worker that is killed takes nothing with it, since the directory holds every
block too.
"""

from __future__ import annotations

import contextlib
import copy
import multiprocessing
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import resource_sharer
from multiprocessing.managers import BaseManager, DictProxy, RemoteError
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing  # registers how a shared tensor travels: as a file descriptor

from weft.machine.free_memory import SharedMemoryFull
from weft.transport.memory.arena import Arena, Layout

HANDOVER = "handover"  # the folder, beside the directory's socket, of the sockets on which descriptors are handed over
SHARED_MEMORY = Path("/dev/shm")
STOP_SECONDS = 5.0  # for the thread that hands descriptors over; it takes a moment
CONNECT_SECONDS = 30.0  # for a directory that is being started again

Calls = dict[str, int]


class SharedMemoryGone(Exception):
    """What another process should hold for this one is not there: the directory has died, or is a new one that knows
    nothing of the job's blocks; or a worker that lends its GPU's memory has died. The job can be run again."""


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
    storage = torch.UntypedStorage._new_shared(num_bytes)  # type: ignore[no-untyped-call]
    block = torch.empty(0, dtype=torch.uint8).set_(storage)
    if word:
        block.view(torch.int32).fill_(word)
    return block


def _forget_names() -> None:
    """Of this process's shared memory: torch leaves one, with what it has reserved so far, where there is not enough.
    Whatever was made has none."""
    for path in SHARED_MEMORY.glob(f"torch_{os.getpid()}_*"):
        path.unlink(missing_ok=True)


def _free_bytes() -> int:
    status = os.statvfs(SHARED_MEMORY)
    return status.f_bavail * status.f_frsize


class DirectoryManager(BaseManager):
    """Answers proxies. `layouts` maps "job/name" to a Layout, `handles` to what a block of a GPU is opened by."""

    def blocks(self) -> Any:  # replaced by register; written out for readers and type checkers
        raise AssertionError("unregistered")

    def layouts(self) -> Any:
        raise AssertionError("unregistered")

    def handles(self) -> Any:
        raise AssertionError("unregistered")


_BLOCKS_METHODS = ("open", "forget", "num_bytes", "num_calls")
DirectoryManager.register("blocks", exposed=_BLOCKS_METHODS)
DirectoryManager.register("layouts", proxytype=DictProxy)
DirectoryManager.register("handles", proxytype=DictProxy)


class DirectoryServer:
    """The directory's process: serves until the process is ended."""

    def __init__(self, address: Path, authkey: bytes) -> None:
        _use_authkey(address, authkey)
        self._blocks = Blocks()
        self._layouts: dict[str, Layout] = {}
        self._handles: dict[str, Any] = {}
        self._address = address
        self._authkey = authkey

    def serve(self, on_ready: Callable[[], None]) -> None:
        """Never returns; `on_ready` is called once clients can connect."""

        class Bound(DirectoryManager):
            """The same names, bound to this process's objects."""

        Bound.register("blocks", callable=lambda: self._blocks, exposed=_BLOCKS_METHODS)
        Bound.register("layouts", callable=lambda: self._layouts, proxytype=DictProxy)
        Bound.register("handles", callable=lambda: self._handles, proxytype=DictProxy)
        _clear(self._address)
        server = Bound(address=str(self._address), authkey=self._authkey).get_server()
        on_ready()
        server.serve_forever()

    def drop(self, job: str) -> int:
        """Forgets a job's blocks, layouts and handles; returns the blocks' bytes. From any thread."""
        for found in (self._layouts, self._handles):
            for key in [key for key in list(found) if key.startswith(f"{job}/")]:
                del found[key]
        return self._blocks.drop(job)

    def pass_calls(self) -> None:
        """Returns once no call holds the blocks. From any thread."""
        self._blocks.num_bytes()


class Directory:
    """A client of the directory, for one job. Each call is a round trip and a pickle: nothing for the steady state.

    Errors of every call: SharedMemoryGone, also where an owner has not made what its peer asks for; SharedMemoryFull.
    """

    def __init__(
        self, address: Path, authkey: bytes, job: str, opened: Callable[[torch.Tensor], None] = lambda block: None
    ) -> None:
        """opened: called with every block, mapped here."""
        self._job = job
        self._opened = opened
        with _asking(str(address)):
            _use_authkey(address, authkey)
            manager = _connect(address, authkey)
            self._blocks = manager.blocks()
            self._layouts = manager.layouts()
            self._handles = manager.handles()

    def of(self, job: str) -> Directory:
        """The same directory's client for another name that blocks go by."""
        other = copy.copy(self)
        other._job = job
        return other

    def create(self, name: str, layout: Layout) -> Arena:
        """The owner's call: makes the arena and publishes its layout."""
        block = self.block(name, layout.num_bytes)
        with _asking(name):
            self._layouts[f"{self._job}/{name}"] = layout
        return Arena(block, layout)

    def find(self, name: str) -> Arena:
        """A peer's call for an arena that its owner has created."""
        with _asking(name):
            layout = self._layouts[f"{self._job}/{name}"]
        return Arena(self.block(name, layout.num_bytes), layout)

    def block(self, name: str, num_bytes: int, word: int = 0) -> torch.Tensor:
        """A block whose size every user knows from the plan; the first to ask makes it, every int32 of it `word`."""
        with _asking(name):
            block: torch.Tensor = self._blocks.open(self._job, name, num_bytes, word)
        self._opened(block)
        return block

    def publish(self, name: str, handle: Any) -> None:
        """Tells peers what to open a block by that the directory does not own: plain data."""
        with _asking(name):
            self._handles[f"{self._job}/{name}"] = handle

    def published(self, name: str) -> Any:
        """A peer's call for what its owner has published."""
        with _asking(name):
            return self._handles[f"{self._job}/{name}"]

    def forget(self, name: str) -> None:
        """A block that nobody wants any more, with what was published of it."""
        with _asking(name):
            self._blocks.forget(self._job, name)
            self._handles.pop(f"{self._job}/{name}", None)

    def num_bytes(self) -> dict[str, int]:
        sizes: dict[str, int] = self._blocks.num_bytes()
        return sizes

    def num_calls(self) -> Calls:
        calls: Calls = self._blocks.num_calls()
        return calls


@contextlib.contextmanager
def _asking(name: str) -> Iterator[None]:
    """Around a call, of which the hand-over of a block's descriptor is a part: whatever breaks in it is no fault of the
    job's."""
    try:
        yield
    except (EOFError, OSError, KeyError, RemoteError, multiprocessing.AuthenticationError) as error:
        told = "".join(str(error).splitlines()[-1:])  # of an error at the other side, the last line of its traceback
        raise SharedMemoryGone(
            f"the directory process does not have {name} ({type(error).__name__}: {told})"
        ) from error
    except RuntimeError as error:  # torch, which could not map what it was given
        raise SharedMemoryFull(f"shared memory of {name} cannot be mapped: {error}") from error


def _connect(address: Path, authkey: bytes) -> DirectoryManager:
    manager = DirectoryManager(address=str(address), authkey=authkey)
    deadline = time.monotonic() + CONNECT_SECONDS
    while True:
        try:
            manager.connect()
            return manager
        except (FileNotFoundError, ConnectionRefusedError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)  # it is on its way up: the fork server was asked for it before it was asked for us


def _clear(address: Path) -> None:
    """Takes away the sockets of directories that were killed: there is never more than one."""
    address.unlink(missing_ok=True)
    shutil.rmtree(address.parent / HANDOVER, ignore_errors=True)
    (address.parent / HANDOVER).mkdir(mode=0o700, exist_ok=True)


def _use_authkey(address: Path, authkey: bytes) -> None:
    # The thread that hands descriptors over (multiprocessing.resource_sharer) listens in the process's temporary
    # directory under the process's key: both are put where the next directory cleans up and the daemon checks. Only the
    # directory ever hands any over: what workers send it is plain data.
    process = multiprocessing.current_process()
    process.authkey = authkey
    temporary = address.parent / HANDOVER
    temporary.mkdir(mode=0o700, exist_ok=True)
    process._config["tempdir"] = os.fspath(temporary)  # type: ignore[attr-defined]
