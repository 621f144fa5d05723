"""The directory: a Manager in a process of its own that owns every shared tensor and serves the dicts that find them.

Workers call it while they set a job up and afterwards only in the first task of a pair that hands GPU memory on
(`publish`), and where a slot grows; from any thread, since a proxy has a connection for each. Blocks are torch shared
memory by descriptor: their names are gone from /dev/shm before anybody can crash, and the memory goes when the last
process that maps it does. A worker that is killed takes nothing with it, since the directory holds every block too; nor
does the directory, since whoever maps a block hands it on to the one that takes its place (`hand_on`).

    directory.sock ──▶ directory-PID.sock     each has an address of its own: clients of the one before, which let go of
                                              things by the server's own numbers, cannot mean this one
"""

from __future__ import annotations

import contextlib
import copy
import errno
import multiprocessing.util
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from multiprocessing import managers
from multiprocessing.connection import Listener
from multiprocessing.managers import BaseManager, DictProxy, RemoteError, Token
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from weft.machine.free_memory import SharedMemoryFull
from weft.transport.memory.arena import Arena, Layout
from weft.transport.memory.blocks import BlockDescriptor, Blocks, Calls, Wanted

BACKLOG = 128  # connections not yet accepted
CONNECT_SECONDS = 30.0  # for a directory that is being started again


class SharedMemoryGone(Exception):
    """What another process should hold for this one is not there: the directory has died, or is a new one that knows
    nothing of the job's blocks; or a worker that lends its GPU's memory has died. The job can be run again."""

    @property
    def is_own_descriptor(self) -> bool:
        """Whether this process's own connection is gone: what runs here has closed it, and would do so again."""
        cause = self.__cause__
        return isinstance(cause, OSError) and cause.errno in (errno.EBADF, errno.ENOTSOCK)


# What the manager has, by the idents that clients know without asking: `layouts` maps "job/name" to a Layout, `handles`
# to what a block of a GPU is opened by. To have it make a proxy takes three connections, each with both sides' keys.
_BLOCKS, _LAYOUTS, _HANDLES = "blocks", "layouts", "handles"
_BLOCKS_METHODS = ("open", "create", "find", "take", "forget", "num_bytes", "num_calls")
_BlocksProxy: Any = managers.MakeProxyType("_BlocksProxy", _BLOCKS_METHODS)  # type: ignore[attr-defined]


class DirectoryServer:
    """The directory's process: serves until the process is ended."""

    def __init__(self, address: Path, authkey: bytes) -> None:
        self._layouts: dict[str, Layout] = {}
        self._blocks = Blocks(self._layouts)
        self._handles: dict[str, Any] = {}
        self._address = address
        self._authkey = authkey
        self._server: Any = None
        self._listeners: list[Any] = []  # kept: one that goes unlinks what stands at its path

    def serve(self, on_ready: Callable[[], None]) -> None:
        """Never returns; `on_ready` is called once clients can connect."""
        _clear(self._address)
        server = BaseManager(address=str(self._own_address()), authkey=self._authkey).get_server()
        held = {_BLOCKS: self._blocks, _LAYOUTS: self._layouts, _HANDLES: self._handles}
        for ident, referent in held.items():
            exposed = _BLOCKS_METHODS if ident == _BLOCKS else DictProxy._exposed_  # type: ignore[attr-defined]
            server.id_to_obj[ident] = (referent, set(exposed), {})
            server.id_to_refcount[ident] = 1  # type: ignore[attr-defined]
        self._address.symlink_to(self._own_address())
        self._server = server
        on_ready()
        server.serve_forever()

    def listen_again(self) -> None:
        """Where its sockets have been removed: connections that are there go on, and new ones find it again. From any
        thread. Errors: OSError."""
        if self._server is None or self._address.exists():
            return
        _clear(self._address)
        self._listeners.append(self._server.listener)
        self._server.listener = Listener(str(self._own_address()), backlog=BACKLOG)
        self._address.symlink_to(self._own_address())
        threading.Thread(target=self._server.accepter, name="accepter", daemon=True).start()

    def _own_address(self) -> Path:
        return self._address.with_stem(f"{self._address.stem}-{os.getpid()}")

    def drop(self, job: str) -> int:
        """Forgets a job's blocks, layouts and handles; returns the blocks' bytes. From any thread."""
        for found in (self._layouts, self._handles):
            for key in [key for key in list(found) if key.startswith(f"{job}/")]:
                del found[key]
        return self._blocks.drop(job)

    def pass_calls(self) -> None:
        """Returns once no call holds the blocks. From any thread."""
        self._blocks.num_bytes()


@dataclass(slots=True)
class _Known:
    """What this process knows of a name, to tell it to a directory that does not."""

    inode: int = 0
    storage: StorageWeakRef | None = None  # of the block, for as long as anybody here maps it
    layout: Layout | None = None
    handle: Any = None

    def block(self) -> torch.Tensor | None:
        storage = None if self.storage is None else torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        return None if storage is None else torch.empty(0, dtype=torch.uint8).set_(storage)


class Server:
    """The directory that lives, as every client that is made of the first one reaches it."""

    def __init__(self, address: Path, authkey: bytes) -> None:
        self._address, self._authkey = address, authkey
        self._known: dict[tuple[str, str], _Known] = {}  # by job and name
        self.connect()

    def connect(self) -> None:
        """Waits for one that is being started."""
        with _asking(str(self._address)):
            self.blocks = _connect(self._address, self._authkey)
            self.layouts, self.handles = (self._dict(ident) for ident in (_LAYOUTS, _HANDLES))

    def anew(self) -> Server:
        """By the same connections, where the directory is still there; it knows nothing of what this one has met."""
        other = copy.copy(self)
        other._known = {}
        if not self._is_there():
            other.connect()
        return other

    def _is_there(self) -> bool:
        """By this thread's connection, which its end would have closed; where there is none, by a call."""
        connection = getattr(self.blocks._tls, "connection", None)
        try:
            if connection is not None:
                return not connection.poll(0)  # nobody waits for an answer
            self.blocks.num_calls()
        except (EOFError, OSError, RemoteError):
            return False
        return True

    def _dict(self, ident: str) -> Any:
        """Which lives as long as the blocks' proxy, by the same connections."""
        address = self.blocks._token.address
        return DictProxy(Token("dict", address, ident), "pickle", authkey=self._authkey, incref=False)

    def known(self, job: str, name: str) -> _Known:
        return self._known.setdefault((job, name), _Known())

    def forget(self, job: str, name: str) -> None:
        self._known.pop((job, name), None)

    def hand_on(self) -> None:
        """Errors: SharedMemoryGone. Of names that another block has by now it tells the first, once all others are
        handed on."""
        self.connect()
        taken: ValueError | None = None
        for (job, name), known in list(self._known.items()):
            try:
                with _asking(name):
                    self._hand_on(job, name, known)
            except ValueError as error:
                taken = taken or error
        if taken is not None:
            raise SharedMemoryGone(str(taken)) from taken

    def _hand_on(self, job: str, name: str, known: _Known) -> None:
        if known.storage is not None:
            if (block := known.block()) is None:  # nobody here wants it any more
                return
            self.blocks.take(job, name, BlockDescriptor.of(block))
        if known.layout is not None:
            self.layouts[f"{job}/{name}"] = known.layout
        if known.handle is not None:
            self.handles[f"{job}/{name}"] = known.handle


class Directory:
    """A client of the directory, for one job. Each call is a round trip and a pickle: nothing for the steady state.

    Errors of every call: SharedMemoryGone, also where an owner has not made what its peer asks for; SharedMemoryFull.
    """

    def __init__(
        self,
        address: Path,
        authkey: bytes,
        job: str,
        opened: Callable[[torch.Tensor], None] = lambda block: None,
        *,
        after: Directory | None = None,
    ) -> None:
        """opened: called with every block, mapped here. after: an earlier job's client in this process, whose
        connections are taken over, since to connect takes longer than to ask."""
        self._job = job
        self._opened = opened
        self._asked: dict[Wanted, BlockDescriptor] = {}  # for, and not mapped yet
        self._server: Server = Server(address, authkey) if after is None else after._server.anew()

    def of(self, job: str) -> Directory:
        """The same directory's client for another name that blocks go by."""
        other = copy.copy(self)
        other._job, other._asked = job, {}
        return other

    def create(self, name: str, layout: Layout) -> Arena:
        """The owner's call: makes the arena and publishes its layout."""
        with _asking(name):
            held = self._server.blocks.create(self._job, name, layout)
        self._server.known(self._job, name).layout = layout
        return Arena(self._mapped(name, held), layout)

    def find(self, name: str) -> Arena:
        """A peer's call for an arena that its owner has created."""
        with _asking(name):
            layout = self._server.layouts[f"{self._job}/{name}"]
        self._server.known(self._job, name).layout = layout
        return Arena(self.made(name), layout)

    def block(self, name: str, num_bytes: int, word: int = 0) -> torch.Tensor:
        """As Wanted says."""
        wanted = Wanted(name, num_bytes, word)
        if (held := self._asked.pop(wanted, None)) is None:
            with _asking(name):
                (held,) = self._server.blocks.open(self._job, wanted)
        return self._mapped(name, held)

    def ask_for(self, wanted: Collection[Wanted]) -> None:
        """Blocks that will be mapped by and by, in one call for all: each of its own would be a round trip."""
        with _asking(", ".join(each.name for each in wanted)):
            held = self._server.blocks.open(self._job, *wanted)
        self._asked.update(zip(wanted, held, strict=True))

    def made(self, name: str) -> torch.Tensor:
        """A peer's call for a block that its owner has made."""
        with _asking(name):
            held = self._server.blocks.find(self._job, name)
        return self._mapped(name, held)

    def publish(self, name: str, handle: Any) -> None:
        """Tells peers what to open a block by that the directory does not own: plain data."""
        with _asking(name):
            self._server.handles[f"{self._job}/{name}"] = handle
        self._server.known(self._job, name).handle = handle

    def published(self, name: str) -> Any:
        """A peer's call for what its owner has published."""
        with _asking(name):
            return self._server.handles[f"{self._job}/{name}"]

    def forget(self, name: str) -> None:
        """A block that nobody wants any more, with what was published of it."""
        self._server.forget(self._job, name)
        for each in [each for each in list(self._asked) if each.name == name]:
            self._asked.pop(each, None)
        with _asking(name):
            self._server.blocks.forget(self._job, name)
            self._server.handles.pop(f"{self._job}/{name}", None)

    def hand_on(self) -> None:
        """Where the directory has died: tells the one that takes its place all that is mapped here and was published
        from here, by whatever client was made of this one. What it has already stays as it is."""
        self._server.hand_on()

    def after_fork(self) -> None:
        """In the child, which has connections of its own from then on; the calling thread's at once, where the
        directory is there."""
        multiprocessing.util._run_after_forkers()  # type: ignore[attr-defined]  # as multiprocessing's own children do
        with contextlib.suppress(EOFError, OSError, RemoteError):
            self._server.blocks.num_calls()

    def num_bytes(self) -> dict[str, int]:
        sizes: dict[str, int] = self._server.blocks.num_bytes()
        return sizes

    def num_calls(self) -> Calls:
        calls: Calls = self._server.blocks.num_calls()
        return calls

    def _mapped(self, name: str, held: BlockDescriptor) -> torch.Tensor:
        """Once, for as long as anybody here maps it."""
        known = self._server.known(self._job, name)
        block = known.block() if known.inode == held.inode else None
        if block is None:
            with _asking(name):
                block = held.mapped()
            known.inode, known.storage = held.inode, StorageWeakRef(block.untyped_storage())  # type: ignore[no-untyped-call]
            self._opened(block)
        return block


@contextlib.contextmanager
def _asking(name: str) -> Iterator[None]:
    """Around a call, and the mapping of a block that it tells of: whatever breaks in it is no fault of the job's."""
    try:
        yield
    except (EOFError, OSError, KeyError, RemoteError, multiprocessing.AuthenticationError) as error:
        told = "".join(str(error).splitlines()[-1:])  # of an error at the other side, the last line of its traceback
        raise SharedMemoryGone(
            f"the directory process does not have {name} ({type(error).__name__}: {told})"
        ) from error
    except RuntimeError as error:  # torch, which could not map what it was given
        raise SharedMemoryFull(f"shared memory of {name} cannot be mapped: {error}") from error


def _connect(address: Path, authkey: bytes) -> Any:
    """The blocks' proxy, of which the directory is told: with it a thread's connection ends."""
    deadline = time.monotonic() + CONNECT_SECONDS
    while True:
        try:
            token = Token("blocks", str(address.resolve(strict=True)), _BLOCKS)
            return _BlocksProxy(token, "pickle", authkey=authkey)
        except (FileNotFoundError, ConnectionRefusedError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)  # it is on its way up: the fork server was asked for it before it was asked for us


def _clear(address: Path) -> None:
    """Takes away the sockets of directories that were killed: there is never more than one that lives."""
    for each in (address, *address.parent.glob(f"{address.stem}-*{address.suffix}")):
        each.unlink(missing_ok=True)
