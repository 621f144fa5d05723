"""The directory: a Manager in a process of its own that owns every shared tensor and serves the dicts that find them.

Workers call it while they set a job up and never afterwards, but for the first task of a pair that hands GPU memory on
(`publish`). Blocks are torch shared memory with `file_descriptor`
sharing: their names are gone from /dev/shm before anybody can crash, and the memory goes when the last process that
maps it does. A worker that is killed takes nothing with it, since the directory holds every block too.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from multiprocessing.managers import BaseManager, DictProxy
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing  # registers how a shared tensor travels: as a file descriptor

from weft.transport.arena import Arena, Layout

CONNECT_SECONDS = 30.0  # for a directory that is being started again

Calls = dict[str, int]


class Blocks:
    """The server's side: blocks by job and name, and a count of the calls that asked for them.

    The manager has a thread for each client, and the workers of a job ask for the same block at the same time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks: dict[str, dict[str, torch.Tensor]] = {}
        self._calls: Calls = {}

    def open(self, job: str, name: str, num_bytes: int, fill: int) -> torch.Tensor:
        """The block, made on the first call with every byte set to `fill`. ValueError if its size is another."""
        with self._lock:
            self._calls[job] = self._calls.get(job, 0) + 1
            blocks = self._blocks.setdefault(job, {})
            if name not in blocks:
                blocks[name] = _shared_block(num_bytes, fill)
            block = blocks[name]
        if block.numel() != num_bytes:
            raise ValueError(f"{job}/{name} has {block.numel()} bytes, not {num_bytes}")
        return block

    def drop(self, job: str) -> int:
        """Forgets a job's blocks; returns their bytes."""
        with self._lock:
            self._calls.pop(job, None)
            blocks = self._blocks.pop(job, {})
        return sum(block.numel() for block in blocks.values())

    def num_bytes(self) -> dict[str, int]:
        with self._lock:
            return {job: sum(block.numel() for block in blocks.values()) for job, blocks in self._blocks.items()}

    def num_calls(self) -> Calls:
        with self._lock:
            return dict(self._calls)


def _shared_block(num_bytes: int, fill: int) -> torch.Tensor:
    """Zeroed by the kernel, and so touched first by the lane that uses it; unless another fill is asked for."""
    storage = torch.UntypedStorage._new_shared(num_bytes)  # type: ignore[no-untyped-call]
    block = torch.empty(0, dtype=torch.uint8).set_(storage)
    return block.fill_(fill) if fill else block


class DirectoryManager(BaseManager):
    """Answers proxies. `layouts` maps "job/name" to a Layout, `handles` to what a block of a GPU is opened by."""

    def blocks(self) -> Any:  # replaced by register; written out for readers and type checkers
        raise AssertionError("unregistered")

    def layouts(self) -> Any:
        raise AssertionError("unregistered")

    def handles(self) -> Any:
        raise AssertionError("unregistered")


_BLOCKS_METHODS = ("open", "num_bytes", "num_calls")
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
        self._address.unlink(missing_ok=True)  # of a directory that was killed
        server = Bound(address=str(self._address), authkey=self._authkey).get_server()
        on_ready()
        server.serve_forever()

    def drop(self, job: str) -> int:
        """Forgets a job's blocks, layouts and handles; returns the blocks' bytes. From any thread."""
        for found in (self._layouts, self._handles):
            for key in [key for key in list(found) if key.startswith(f"{job}/")]:
                del found[key]
        return self._blocks.drop(job)


class Directory:
    """A client of the directory, for one job. Set-up only: each call is a round trip and a pickle."""

    def __init__(
        self, address: Path, authkey: bytes, job: str, opened: Callable[[torch.Tensor], None] = lambda block: None
    ) -> None:
        """opened: called with every block, mapped here."""
        _use_authkey(address, authkey)
        manager = _connect(address, authkey)
        self._job = job
        self._opened = opened
        self._blocks = manager.blocks()
        self._layouts = manager.layouts()
        self._handles = manager.handles()

    def create(self, name: str, layout: Layout) -> Arena:
        """The owner's call: makes the arena and publishes its layout."""
        block = self.block(name, layout.num_bytes)
        self._layouts[f"{self._job}/{name}"] = layout
        return Arena(block, layout)

    def find(self, name: str) -> Arena:
        """A peer's call for an arena that its owner has created; raises KeyError if it has not."""
        layout = self._layouts[f"{self._job}/{name}"]
        return Arena(self.block(name, layout.num_bytes), layout)

    def block(self, name: str, num_bytes: int, fill: int = 0) -> torch.Tensor:
        """A block whose size every user knows from the plan; the first to ask makes it."""
        block: torch.Tensor = self._blocks.open(self._job, name, num_bytes, fill)
        self._opened(block)
        return block

    def publish(self, name: str, handle: Any) -> None:
        """Tells peers what to open a block by that the directory does not own: plain data."""
        self._handles[f"{self._job}/{name}"] = handle

    def published(self, name: str) -> Any:
        """Raises KeyError where nobody has published it."""
        return self._handles[f"{self._job}/{name}"]

    def num_bytes(self) -> dict[str, int]:
        sizes: dict[str, int] = self._blocks.num_bytes()
        return sizes

    def num_calls(self) -> Calls:
        calls: Calls = self._blocks.num_calls()
        return calls


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


def _use_authkey(address: Path, authkey: bytes) -> None:
    # The thread that hands descriptors over (multiprocessing.resource_sharer) listens in the process's temporary
    # directory under the process's key: both are put where the daemon cleans up and checks.
    process = multiprocessing.current_process()
    process.authkey = authkey
    temporary = address.parent / "handover"
    temporary.mkdir(mode=0o700, exist_ok=True)
    process._config["tempdir"] = os.fspath(temporary)  # type: ignore[attr-defined]
