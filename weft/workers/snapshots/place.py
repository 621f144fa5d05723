"""Place: the shared memory of one task's snapshots. Places take turns, so one is whole while another is written.

    arena "snapshot-PLACE-TASK"    │ facts: length, plain data ░░░ │ tensor 0 │ tensor 1 │ ...      ░ room to grow

An arena is made by the first snapshot that goes there, and anew where what is copied has changed its shape. It belongs
to the job and to no attempt of it, and the directory has it, so it outlives every worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.transport.memory.arena import Arena, Layout
from weft.transport.memory.directory import Directory, SharedMemoryGone
from weft.workers.devices.device import Memory
from weft.workers.snapshots.held import Held
from weft.workers.snapshots.plain import decoded, encoded

_LENGTH_BYTES = 8
_FACTS = "facts"

_Kind = tuple[tuple[torch.Size, tuple[int, ...], torch.dtype], ...]


@dataclass(slots=True)
class _Made:
    kind: _Kind
    facts: Tensor  # uint8
    tensors: list[Tensor]


class SnapshotPlaces:
    """task: as `Plan.snapshot_tasks` names it. directory: of the job's snapshots."""

    def __init__(self, directory: Directory, task: str, device: Memory) -> None:
        self._directory = directory
        self._task = task
        self._device = device
        self._made: dict[int, _Made] = {}

    def write(self, place: int, iteration: int, held: Held) -> None:
        """Behind what the calling lane has launched; over when its task is."""
        tensors = held.tensors()
        facts = encoded({"iteration": iteration, **held.facts()})
        made, is_new = self._room(place, tensors, len(facts))
        length = len(facts).to_bytes(_LENGTH_BYTES, "little")
        made.facts[: _LENGTH_BYTES + len(facts)] = torch.frombuffer(bytearray(length + facts), dtype=torch.uint8)
        count = len(tensors) if is_new else held.num_changing()
        for target, source in zip(made.tensors[:count], tensors, strict=False):
            self._device.copy(target, source.detach())

    def _room(self, place: int, tensors: Sequence[Tensor], num_bytes: int) -> tuple[_Made, bool]:
        """And whether nothing has been written there."""
        kind = tuple((each.shape, each.stride(), each.dtype) for each in tensors)
        made = self._made.get(place)
        if made is not None and made.kind == kind and made.facts.numel() >= _LENGTH_BYTES + num_bytes:
            return made, False
        made = self._made[place] = self._make(place, kind, tensors, num_bytes)
        return made, True

    def _make(self, place: int, kind: _Kind, tensors: Sequence[Tensor], num_bytes: int) -> _Made:
        name = arena_name(place, self._task)
        room = torch.empty(_LENGTH_BYTES + 2 * num_bytes, dtype=torch.uint8, device="meta")
        layout = Layout.of([(_FACTS, room), *((str(n), tensor) for n, tensor in enumerate(tensors))])
        self._directory.forget(name)
        arena = self._directory.create(name, layout)
        return _Made(kind, arena[_FACTS], [arena[str(number)] for number in range(len(tensors))])


def read_place(directory: Directory, place: int, task: str, iteration: int) -> Held:
    """What one task has copied. Errors: SharedMemoryGone, also of what is not as it was written: without it the job can
    begin again."""
    name = arena_name(place, task)
    try:
        held, found = _read(directory.find(name))
    except (ValueError, KeyError, TypeError) as error:
        raise SharedMemoryGone(f"{name} cannot be read: {error}") from error
    if found != iteration:
        raise SharedMemoryGone(f"{name} is of iteration {found}, not {iteration}")
    return held


def _read(arena: Arena) -> tuple[Held, int]:
    data = arena[_FACTS]
    length = int.from_bytes(bytes(data[:_LENGTH_BYTES].tolist()), "little")
    facts: dict[str, Any] = decoded(data[_LENGTH_BYTES : _LENGTH_BYTES + length].numpy().tobytes())
    count = len(facts["pieces"]) + len(facts["buffers"]) + len(facts["fixed"])
    return Held.of(facts, [arena[str(number)] for number in range(count)]), facts["iteration"]


def arena_name(place: int, task: str) -> str:
    return f"snapshot-{place}-{task}"
