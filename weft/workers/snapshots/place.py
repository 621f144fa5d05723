"""Place: the shared memory of one task's snapshots. Places take turns, so one is whole while another is written.

    arena "snapshot-PLACE-TASK"    │ facts: length, plain data ░░░ │ tensor 0 │ tensor 1 │ ...      ░ room to grow

An arena is made beside the lane, once a snapshot is told that will go there: memory that nobody has had costs ten times
as much as the copy. It is made anew where what is copied has changed its shape. It belongs to the job and to no attempt
of it, and the directory has it, so it outlives every worker, and another attempt's copies go there again.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import msgpack
import torch
from torch import Tensor

from weft.machine.free_memory import SharedMemoryFull
from weft.transport.memory.arena import Arena, Layout
from weft.transport.memory.directory import Directory, SharedMemoryGone
from weft.workers.devices.device import Memory
from weft.workers.snapshots.beside import LEAST_BYTES, CopyBeside, Pairs
from weft.workers.snapshots.held import Held
from weft.workers.snapshots.plain import NAMES, packed, unpacked

_PAGE_BYTES = 1 << 12
_TOUCHED_BYTES = 1 << 26  # at a time: a job that ends waits for no more
_FACTS_STEP = 1 << 16  # so that another attempt's facts find the same room
_LENGTH_BYTES = 8
_FACTS = "facts"

_Kind = tuple[tuple[torch.Size, tuple[int, ...], torch.dtype], ...]


@dataclass(slots=True)
class _Room:
    kind: _Kind
    arena: Arena
    facts: Tensor  # uint8
    tensors: list[Tensor]
    is_written: bool = False  # what does not change is there, too


class SnapshotPlaces:
    """task: as `Plan.snapshot_tasks` names it. directory: of the job's snapshots."""

    def __init__(self, directory: Directory, task: str, device: Memory) -> None:
        self._directory = directory
        self._task = task
        self._device = device
        self._rooms: dict[int, _Room] = {}
        self._makers: dict[int, threading.Thread] = {}  # by place: who makes its room, or has
        self._closed = False

    def write(self, place: int, iteration: int, held: Held, *, beside: bool = False) -> CopyBeside | None:
        """Behind what the calling lane has launched; over when its task is. beside: what an update changes is copied
        while the lane goes on, which has to wait for what this gives before it changes any of that."""
        tensors = held.tensors()
        facts = _facts(held, iteration)
        room = self._room(place, tensors, len(facts))
        length = len(facts).to_bytes(_LENGTH_BYTES, "little")
        room.facts[: _LENGTH_BYTES + len(facts)] = torch.frombuffer(bytearray(length + facts), dtype=torch.uint8)
        count = held.num_changing() if room.is_written else len(tensors)
        pairs = [(target, source.detach()) for target, source in zip(room.tensors[:count], tensors, strict=False)]
        room.is_written = True
        copying = _begun(pairs[: len(held.pieces)]) if beside else None
        for target, source in pairs[len(held.pieces) :] if copying else pairs:
            self._device.copy(target, source)
        return copying

    def expects(self, place: int) -> bool:
        """Whether the place has room, or is to have it."""
        return place in self._makers or place in self._rooms

    def expect(self, place: int, held: Held) -> None:
        """Makes room beside the calling lane for what will look like this; where that fails, `write` tries again."""
        tensors, num_bytes = held.tensors(), len(_facts(held, 0))
        maker = threading.Thread(target=self._make_beside, args=(place, _kind_of(tensors), tensors, num_bytes))
        with contextlib.suppress(RuntimeError):  # of a system that has no thread more
            maker.start()
            self._makers[place] = maker

    def close(self) -> None:
        """No room is made any more."""
        self._closed = True
        for maker in self._makers.values():
            maker.join()

    def reopen(self) -> None:
        """After `close`, of another attempt."""
        self._makers.clear()
        self._closed = False

    def _room(self, place: int, tensors: Sequence[Tensor], num_bytes: int) -> _Room:
        if place in self._makers:
            self._makers[place].join()
        kind, room = _kind_of(tensors), self._rooms.get(place)
        if room is None or room.kind != kind or room.facts.numel() < _LENGTH_BYTES + num_bytes:
            room = self._rooms[place] = self._make(place, kind, tensors, num_bytes)
        return room

    def _make_beside(self, place: int, kind: _Kind, tensors: Sequence[Tensor], num_bytes: int) -> None:
        with contextlib.suppress(OSError):  # the parent has died, and so will this process
            os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))  # of this thread: the lane's core is the lane's
        with contextlib.suppress(SharedMemoryFull, SharedMemoryGone):
            room = self._make(place, kind, tensors, num_bytes)
            block = room.arena.block
            for begin in range(0, block.numel(), _TOUCHED_BYTES):
                if self._closed:
                    return
                block[begin : begin + _TOUCHED_BYTES : _PAGE_BYTES].zero_()  # mapped before the copy comes
            self._rooms[place] = room

    def _make(self, place: int, kind: _Kind, tensors: Sequence[Tensor], num_bytes: int) -> _Room:
        name = arena_name(place, self._task)
        facts_bytes = -(-(_LENGTH_BYTES + 2 * num_bytes) // _FACTS_STEP) * _FACTS_STEP
        facts = torch.empty(facts_bytes, dtype=torch.uint8, device="meta")
        layout = Layout.of([(_FACTS, facts), *((str(n), tensor) for n, tensor in enumerate(tensors))])
        arena = self._left(name, layout)
        if arena is None:
            self._directory.forget(name)
            arena = self._directory.create(name, layout)
        return _Room(kind, arena, arena[_FACTS], [arena[str(number)] for number in range(len(tensors))])

    def _left(self, name: str, layout: Layout) -> Arena | None:
        """By the attempt before."""
        with contextlib.suppress(SharedMemoryGone):  # most often because there is none
            arena = self._directory.find(name)
            return arena if arena.layout == layout else None
        return None


def _begun(pairs: Pairs) -> CopyBeside | None:
    """None where it is not worth a thread, or none is to be had."""
    if sum(source.nbytes for _, source in pairs) < LEAST_BYTES:
        return None
    with contextlib.suppress(RuntimeError):
        return CopyBeside(pairs)
    return None


def _kind_of(tensors: Sequence[Tensor]) -> _Kind:
    return tuple((each.shape, each.stride(), each.dtype) for each in tensors)


def read_place(directory: Directory, place: int, task: str, iteration: int) -> Held:
    """What one task has copied. Errors: SharedMemoryGone, also of what is not as it was written: without it the job can
    begin again."""
    name = arena_name(place, task)
    try:
        held, found = _read(directory.find(name))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise SharedMemoryGone(f"{name} cannot be read: {error}") from error
    if found != iteration:
        raise SharedMemoryGone(f"{name} is of iteration {found}, not {iteration}")
    return held


def _read(arena: Arena) -> tuple[Held, int]:
    data = arena[_FACTS]
    length = int.from_bytes(bytes(data[:_LENGTH_BYTES].tolist()), "little")
    facts = data[_LENGTH_BYTES : _LENGTH_BYTES + length].numpy().tobytes()
    iteration, layout, plain = msgpack.unpackb(facts, unicode_errors=NAMES)
    count = len(layout["pieces"]) + len(layout["buffers"]) + len(layout["fixed"])
    return Held.of(layout, unpacked(plain), [arena[str(number)] for number in range(count)]), iteration


def _facts(held: Held, iteration: int) -> bytes:
    facts: bytes = msgpack.packb([iteration, held.layout(), packed(held.plain())], unicode_errors=NAMES)
    return facts


def arena_name(place: int, task: str) -> str:
    return f"snapshot-{place}-{task}"
