"""The handover: what a daemon leaves to the one that its process becomes.

    WEFT_HANDOVER=fd ──▶ memory without a name: │ letter, a frame that any Weft reads │ estate and brood, pickled │

The process stays, and so do its children, its locks and the descriptors that the letter lists; its threads and its
memory go. What cannot be read costs what a restart costs: the children end, and jobs go on from what is on the disk.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import logging
import os
import pickle
import socket
import threading
from collections.abc import MutableMapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Final, Self

import psutil

from weft.scheduler.daemon.link import Brood
from weft.scheduler.daemon.replacing.estate import Estate
from weft.scheduler.runs.run import Changed
from weft.scheduler.runs.run_writer import RunWriter
from weft.spec.settings import Settings
from weft.transport.wire.frames import MAX_WORKER_FRAME_BYTES, FrameReader, Message, WireError, encode
from weft.transport.wire.runtime_directory import RuntimeDirectory
from weft.version import __version__

VARIABLE: Final = "WEFT_HANDOVER"
END_SECONDS: Final = 5.0  # for the fork server to end with its children
_WRITER: Final = "writer"  # of the run directories, which each daemon has of its own

_log = logging.getLogger("weft.handover")


@dataclass(frozen=True, slots=True, kw_only=True)
class Letter:
    version: str  # of the daemon that has written it
    successor: str  # the version of the Weft that it was written for
    settings: Message
    listener: int  # descriptor of the control socket
    lock: int  # of the runtime directory's
    owns_socket: bool
    http: list[int]
    links: list[int]
    server_pid: int
    caller: int  # descriptor of the connection on which the answer is awaited
    call: int  # the request's id
    sha256: str = ""  # of what follows

    def descriptors(self) -> list[int]:
        return [self.listener, self.lock, *self.http, *self.links, self.caller]


def write(letter: Letter, pickled: bytes) -> int:
    """Its descriptor. Errors: OSError."""
    told = asdict(letter) | {"sha256": hashlib.sha256(pickled).hexdigest()}
    descriptor = os.memfd_create("weft-handover")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(encode(told) + pickled)
    return descriptor


def packed(estate: Estate, brood: Brood, writer: RunWriter) -> bytes:
    """Both at once: what they share stays one thing. Errors: whatever cannot be pickled raises."""
    file = io.BytesIO()
    _Pickler(file, writer).dump((estate, brood))
    return file.getvalue()


def unpacked(data: bytes, writer: RunWriter) -> tuple[Estate, Brood]:
    estate, brood = _Unpickler(io.BytesIO(data), writer).load()
    return estate, brood


class Handover:
    """problem: why nothing can be made of it; empty where that is not so."""

    def __init__(self, letter: Letter | None, pickled: bytes, problem: str) -> None:
        self.problem = problem
        self.letter = letter
        self._pickled = pickled

    @classmethod
    def inherited(cls, environment: MutableMapping[str, str]) -> Self | None:
        """What this process was left, if it was; once. No program that it starts has any of it."""
        if (told := environment.pop(VARIABLE, None)) is None:
            return None
        try:
            with open(int(told), "rb") as file:
                file.seek(0)
                data = file.read()
            letter, pickled = _opened(data)
            for descriptor in letter.descriptors():
                os.set_inheritable(descriptor, False)
        except (OSError, ValueError, TypeError, WireError) as error:
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # whatever was left: sockets of children that end by it
            return cls(None, b"", f"the letter cannot be read ({error})")
        return cls(letter, pickled, _problem_of(letter, pickled))

    def settings(self) -> Settings | None:
        """Those of the daemon before, with which its workers run."""
        try:
            return None if self.letter is None else Settings.model_validate(self.letter.settings)
        except ValueError:  # of a Weft that knows others
            return None

    def runtime(self, settings: Settings) -> RuntimeDirectory | None:
        if self.letter is None:
            return None
        return RuntimeDirectory.inherit(
            settings.runtime_dir, self.letter.lock, self.letter.listener, owns_socket=self.letter.owns_socket
        )

    def open(self, writer: RunWriter) -> tuple[Estate, Brood] | None:
        """None where it cannot be read: then children must be ended."""
        if not self.problem:
            try:
                return unpacked(self._pickled, writer)
            except Exception as error:  # an estate of another shape may raise anything
                self.problem = f"it cannot be unpickled ({type(error).__name__}: {error})"
        _log.error("what the daemon before has left is of no use: %s; its jobs start from the disk", self.problem)
        return None

    def end_children(self) -> None:
        """Returns when the fork server and its children are gone. Blocks."""
        for descriptor in self.letter.links if self.letter is not None else ():
            os.close(descriptor)
        for server in psutil.Process().children():
            try:
                server.wait(END_SECONDS)
            except psutil.TimeoutExpired:
                server.kill()
                server.wait()

    def answer(self, answer: Message) -> None:
        """To whoever has asked for this daemon; nothing where nobody waits any more."""
        if self.letter is None:
            return
        with suppress(OSError), socket.socket(fileno=self.letter.caller) as connection:
            connection.setblocking(False)
            connection.send(encode({"id": self.letter.call, "ok": answer}))


def _opened(data: bytes) -> tuple[Letter, bytes]:
    """Errors: ValueError, TypeError or WireError for what is none."""
    end = 4 + int.from_bytes(data[:4], "big")
    messages, error = FrameReader(MAX_WORKER_FRAME_BYTES).take(data[:end])
    if error is not None:
        raise error
    if not messages:
        raise ValueError("it is cut off")
    return Letter(**messages[0]), data[end:]


def _problem_of(letter: Letter, pickled: bytes) -> str:
    if letter.successor != __version__:
        return f"Weft {letter.version} has left it to Weft {letter.successor}, and this is {__version__}"
    return "" if hashlib.sha256(pickled).hexdigest() == letter.sha256 else "it has changed on the way"


class _Pickler(pickle.Pickler):
    """What is no state is made anew: locks, which nobody holds, and what nobody waits for."""

    def __init__(self, file: io.BytesIO, writer: RunWriter) -> None:
        super().__init__(file, protocol=5)
        self._writer = writer

    def persistent_id(self, obj: Any) -> str | None:
        return _WRITER if obj is self._writer else None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, _LOCK):
            return _new_lock, ()
        return (type(obj), ()) if type(obj) in (asyncio.Lock, Changed) else NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, writer: RunWriter) -> None:
        super().__init__(file)
        self._writer = writer

    def persistent_load(self, pid: Any) -> RunWriter:
        if pid != _WRITER:
            raise pickle.UnpicklingError(f"{pid!r} is nothing that a daemon has of its own")
        return self._writer


def _new_lock() -> threading.Lock:
    return threading.Lock()


_LOCK = type(threading.Lock())
