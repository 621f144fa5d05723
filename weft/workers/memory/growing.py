"""Growing: more room for what does not fit the place that was planned for it in a slot.

    planned     │ u=0: value 0 │ value 1 │ u=1: …        as the first batches have it
    elsewhere   value 1 of slot 0: generation 1, 2, …    in memory of the ring's kind; the newest alone is kept
    notes       │ u=0, value 0: generation │ u=0, value 1: …        0, or negative: it stands where it was planned

Batches may be longer than those that were inspected. Who writes one makes a block for that place alone and notes it;
readers look at the note and open it. Nobody waits, and nothing is lost: a slot is written when all its readers are done
with what stood there, so by then nobody wants the block before. Other slots follow when they must, to the same size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from weft.machine.free_memory import SharedMemoryFull
from weft.plan.plan import Ring
from weft.quantities import size
from weft.transport.memory.arena import aligned
from weft.transport.memory.blocks import Wanted
from weft.transport.memory.directory import Directory
from weft.workers.devices.device import Accelerator, Device

SLACK = 1.5  # times what is needed: arbitrary; with less a length that creeps up grows often


class _Grown(NamedTuple):
    generation: int
    block: torch.Tensor  # uint8


class Growing:
    """Of the places of one ring, which go by slot and by the number of the value."""

    def __init__(self, directory: Directory, ring: Ring, device: Device) -> None:
        """As RingMemory takes them."""
        self._directory, self._ring, self._device = directory, ring, device
        shared = [directory.block(*wanted) for wanted in self.wants(ring)]
        notes = shared[0] if shared else torch.zeros(_num_note_bytes(ring), dtype=torch.uint8)
        self._generations = notes.view(torch.int64)
        self._notes = notes.numpy().data.cast("q")
        self._known: dict[tuple[int, int], _Grown] = {}
        self._sizes: dict[int, int] = {}  # to which places of a value grow, by its number
        self.count = 0  # of growths that this process has made
        self.rewind()  # others may have gone before

    @staticmethod
    def wants(ring: Ring) -> Iterator[Wanted]:
        """As of RingMemory. A device's own ring grows by one object, in one process."""
        if ring.memory != "device":
            yield Wanted(f"{ring.name}-grown", _num_note_bytes(ring))

    def rewind(self) -> None:
        """All stands where it was planned again: of a process that was killed nobody knows whether it has noted what it
        has made, so that generation is left out. While no lane of any worker runs."""
        for (slot, number), known in self._known.items():
            if self._ring.memory == "shared":
                self._directory.forget(self._name(slot, number, known.generation))
        used = self._generations.abs()
        self._generations.copy_(torch.where(used > 0, -used - 1, used))
        self._known.clear()
        self.count = 0

    def block(self, slot: int, number: int) -> torch.Tensor | None:
        """Where a value stands, if not where it was planned."""
        note = self._note(slot, number)
        generation = self._notes[note]
        if generation <= 0:
            return None
        known = self._known.get((slot, number))
        if known is None or known.generation != generation:
            found = self._found(self._name(slot, number, generation))
            known = self._known[slot, number] = _Grown(generation, found)
        return known.block

    def grow(self, slot: int, number: int, num_bytes: int) -> torch.Tensor:
        """The writer's: a larger block for a value of so many bytes. Errors: SharedMemoryFull."""
        note = self._note(slot, number)
        generation = self._notes[note]
        if generation > 0:
            self._directory.forget(self._name(slot, number, generation))
        generation = abs(generation)
        if num_bytes > self._sizes.get(number, 0):
            self._sizes[number] = aligned(int(SLACK * num_bytes))
        block = self._made(number, self._name(slot, number, generation + 1), num_bytes)
        self._known[slot, number] = _Grown(generation + 1, block)
        self._notes[note] = generation + 1
        self.count += 1
        return block

    def told(self) -> str:
        """Of a ring with growths, for people."""
        planned, now = self._ring.slot_bytes, self._ring.slot_bytes
        for number, num_bytes in self._sizes.items():
            now += num_bytes - self._ring.values[number].num_bytes
        return f"{self._ring.name} from {size(planned)} to {size(now)}"

    def _made(self, number: int, name: str, num_bytes: int) -> torch.Tensor:
        try:
            return self._make(name, self._sizes[number])
        except SharedMemoryFull:
            self._sizes[number] = aligned(num_bytes)  # without slack
        try:
            return self._make(name, self._sizes[number])
        except SharedMemoryFull as error:
            value = self._ring.values[number]
            raise SharedMemoryFull(
                f"a microbatch has {num_bytes} bytes of {value.name!r}, {value.num_bytes} were planned by the first "
                f"batches, and its slot cannot grow: {error}"
            ) from error

    def _make(self, name: str, num_bytes: int) -> torch.Tensor:
        match self._ring.memory:
            case "shared":
                return self._directory.block(name, num_bytes)
            case "device":
                return self._device.zeros(num_bytes, torch.uint8)
            case "peer":
                assert isinstance(self._device, Accelerator), "the host's memory needs nobody to lend it"
                return self._device.lend(self._directory, name, num_bytes)  # its writer is who lends

    def _found(self, name: str) -> torch.Tensor:
        if self._ring.memory == "shared":
            return self._directory.made(name)
        assert isinstance(self._device, Accelerator), "a device's own is known to who has made it"
        return self._device.borrow(self._directory, name)

    def _name(self, slot: int, number: int, generation: int) -> str:
        return f"{self._ring.name}-{slot}-{number}-{generation}"

    def _note(self, slot: int, number: int) -> int:
        return slot * len(self._ring.values) + number


def _num_note_bytes(ring: Ring) -> int:
    return 8 * ring.depth * len(ring.values)
