"""Parcels: what crosses from stage to stage, as rings of slots with several tensors in each.

A tensor has a place in the slot, with room for the largest that was planned; what does not fit gets a larger one
(`growing.py`). Beside the slots a row in the host's memory says what stands there, so a reader has to know nothing of
it beforehand:

    slots   │ u=0: value 0 │ value 1 │ … │ u=1: …          a dimension of stride 0 (of `expand`) is there once
    rows    │ u=0: version │ value 0: dtype │ dimensions │ shape │ strides │ value 1: … │ u=1: …

A tensor that is not there (a gradient that nobody made) has the dtype 0. Strides are kept, since kernels sum in the
order in which memory lies: a result would otherwise depend on where the model is cut. A row is written where it
changes, and then the slot's version too, so from one iteration to the next each end looks at one number and has its
views.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from weft.plan.plan import Ring, SlotValue
from weft.transport.memory.arena import dtype_name, typed
from weft.transport.memory.blocks import Wanted
from weft.transport.memory.directory import Directory
from weft.workers.devices.device import Device
from weft.workers.memory.growing import Growing
from weft.workers.memory.slots import RingMemory
from weft.workload.workload import WorkloadError

MAX_DIMENSIONS = 64  # of a tensor: as many as an inspection may tell of
MAX_SHAPES = 64  # of one value in one slot, that views are kept of: arbitrary; of a model whose shapes keep changing
MAX_GAPS = 16  # times its own size, for a tensor with gaps: arbitrary; a slice that is a smaller part has them closed

_DTYPES = sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str)  # in every process
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES, start=1)}

_ROW = 2 + 2 * MAX_DIMENSIONS  # words that tell of one value

Like = tuple[torch.Size, tuple[int, ...], torch.dtype]  # shape, strides


class DoesNotFit(WorkloadError):
    """A tensor that no row can tell of. number: of the value, in the ring."""

    def __init__(self, value: SlotValue, number: int, dimensions: int) -> None:
        self.what = f"{dimensions} dimensions, of {MAX_DIMENSIONS} at most between two stages"
        super().__init__(
            f"the value {value.name!r} has {self.what}; reshape it, or leave this place out of strategy.split"
        )
        self.number = number


@dataclass(frozen=True, slots=True)
class _Place:
    """A tensor in a slot."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    memory: torch.Tensor  # its elements, each once
    is_whole: bool  # that is the tensor: contiguous


@dataclass(frozen=True, slots=True)
class _Kept:
    """What was laid out before of one value in one slot."""

    block: torch.Tensor | None  # where; None: where it was planned
    places: dict[Like, _Place] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Found:
    """What a reader has seen last of a slot."""

    version: int
    values: list[torch.Tensor | _Place | None]


class ParcelRing:
    """One ring of the plan, of what crosses. Its values go by their numbers."""

    def __init__(
        self, directory: Directory, ring: Ring, microbatches: int, device: Device, *, position: int = 0
    ) -> None:
        """As RingMemory takes them."""
        self._device = device
        self._memory = RingMemory(directory, ring, microbatches, device, position)
        self._rows = _Rows(directory, ring)
        self.growing = Growing(directory, ring, device)
        self._values = ring.values
        self._slot_bytes = ring.slot_bytes
        self._all = range(len(ring.values))
        self._written: list[list[_Place | None]] = [[None for _ in self._all] for _ in range(ring.depth)]
        self._found = [_Found(0, [None for _ in self._all]) for _ in range(ring.depth)]
        self._kept: dict[tuple[int, int], _Kept] = {}  # by slot and value

    @staticmethod
    def wants(ring: Ring) -> Iterator[Wanted]:
        """As of RingMemory."""
        for part in (RingMemory, _Rows, Growing):
            yield from part.wants(ring)

    def rewind(self) -> None:
        """Nothing stands in any slot. While no lane of any worker runs; `growing` is rewound, too."""
        self._rows.rewind()
        for written, found in zip(self._written, self._found, strict=True):
            written[:] = [None for _ in self._all]
            found.values[:] = [None for _ in self._all]
        self._found = [_Found(0, found.values) for found in self._found]

    def write(self, iteration: int, microbatch: int, tensors: Sequence[torch.Tensor | None]) -> None:
        """All values of a microbatch, without graphs. Errors: DoesNotFit."""
        for number, tensor in enumerate(tensors):
            self.put(iteration, microbatch, number, tensor)

    def put(self, iteration: int, microbatch: int, number: int, tensor: torch.Tensor | None) -> None:
        """One of them. Errors: DoesNotFit."""
        slot = self._memory.slot(iteration, microbatch)
        place = self._written[slot][number]
        if tensor is None:
            if place is not None:
                self._written[slot][number] = None
                self._rows.note(slot, number, None)
            return
        if not (
            place is not None
            and place.strides == tensor.stride()
            and place.shape == tensor.shape
            and place.dtype is tensor.dtype
        ):
            self._make_room(slot, number, tensor.shape.numel() * tensor.dtype.itemsize)
            place = self._written[slot][number] = self._place(slot, number, _like(tensor))
            self._rows.note(slot, number, place)
        self._device.copy(place.memory, tensor if place.is_whole else _once(tensor))

    def read(self, iteration: int, microbatch: int, numbers: Sequence[int] | None = None) -> list[torch.Tensor | None]:
        """Values of a microbatch where the device can compute with them; in place where that is where they stand, and
        nothing lay between their elements. numbers: of those that are wanted, if not all."""
        values = self._look(iteration, microbatch)
        wanted = values if numbers is None else [values[number] for number in numbers]
        return [self._taken(value) if isinstance(value, _Place) else value for value in wanted]

    def get(self, iteration: int, microbatch: int, number: int) -> torch.Tensor | None:
        """One of them."""
        value = self._look(iteration, microbatch)[number]
        return self._taken(value) if isinstance(value, _Place) else value

    def _look(self, iteration: int, microbatch: int) -> list[torch.Tensor | _Place | None]:
        """What stands in a slot: as it is, or from where it is to be taken."""
        slot = self._memory.slot(iteration, microbatch)
        found = self._found[slot]
        if (version := self._rows.version(slot)) != found.version:
            noted = enumerate(self._rows.noted(slot))
            places = [None if like is None else self._place(slot, number, like) for number, like in noted]
            values = [place.memory if place and place.is_whole and self._memory.is_own else place for place in places]
            found = self._found[slot] = _Found(version, values)
        return found.values

    def _taken(self, place: _Place) -> torch.Tensor:
        tensor = self._memory.usable(place.memory)
        return tensor if place.is_whole else _with_gaps(tensor, place.strides).expand(place.shape)

    def _make_room(self, slot: int, number: int, num_bytes: int) -> None:
        block = self.growing.block(slot, number)
        if num_bytes > (self._values[number].num_bytes if block is None else len(block)):
            self.growing.grow(slot, number, num_bytes)

    def _place(self, slot: int, number: int, like: Like) -> _Place:
        """Lanes of one device have a ring together: each slot's places change by whoever has the slot."""
        block = self.growing.block(slot, number)
        kept = self._kept.get((slot, number))
        if kept is None or kept.block is not block:  # a place that has grown keeps nothing of the one before
            kept = self._kept[slot, number] = _Kept(block)
        place = kept.places.get(like)
        if place is None:
            if len(kept.places) >= MAX_SHAPES:
                kept.places.clear()
            place = kept.places[like] = self._laid_out(block, slot, number, *like)
        return place

    def _laid_out(
        self,
        block: torch.Tensor | None,
        slot: int,
        number: int,
        shape: torch.Size,
        strides: tuple[int, ...],
        dtype: torch.dtype,
    ) -> _Place:
        if len(shape) > MAX_DIMENSIONS:
            raise DoesNotFit(self._values[number], number, len(shape))
        start, name = 0, dtype_name(dtype)
        if block is None:
            block, start = self._memory.block(), slot * self._slot_bytes + self._values[number].offset
        whole = typed(block, start, shape, name)
        if strides == whole.stride():
            return _Place(shape, strides, dtype, whole, is_whole=True)
        once, dense = _dense(shape, strides)
        return _Place(shape, strides, dtype, typed(block, start, once, name, dense), is_whole=False)


def _row_words(ring: Ring) -> int:
    """Of one slot: its version, and all its values."""
    return 1 + _ROW * len(ring.values)


class _Rows:
    """What stands in each slot of a ring, in the host's memory, where all ends see it. Of a device's own ring they are
    one object, in one process."""

    def __init__(self, directory: Directory, ring: Ring) -> None:
        self._row, self._slot = _ROW, _row_words(ring)
        self._num_values = len(ring.values)
        shared = [directory.block(*wanted) for wanted in self.wants(ring)]
        self._block = shared[0] if shared else torch.zeros(8 * ring.depth * self._slot, dtype=torch.uint8)
        self._words = self._block.numpy().data.cast("q")
        self.rewind()  # others may have gone before

    @staticmethod
    def wants(ring: Ring) -> Iterator[Wanted]:
        if ring.memory != "device":
            yield Wanted(f"{ring.name}-rows", 8 * ring.depth * _row_words(ring))

    def rewind(self) -> None:
        self._block.zero_()

    def version(self, slot: int) -> int:
        """Another one whenever a row of the slot has changed."""
        return self._words[slot * self._slot]

    def note(self, slot: int, number: int, place: _Place | None) -> None:
        start = slot * self._slot
        row = start + 1 + number * self._row
        if place is None:
            self._words[row] = 0
        else:
            told = array("q", (_CODES[place.dtype], len(place.shape), *place.shape, *place.strides))
            self._words[row : row + len(told)] = told
        self._words[start] += 1

    def noted(self, slot: int) -> list[Like | None]:
        return [self._noted(slot * self._slot + 1 + number * self._row) for number in range(self._num_values)]

    def _noted(self, row: int) -> Like | None:
        code, dimensions = self._words[row], self._words[row + 1]
        if not code:
            return None
        told = tuple(self._words[row + 2 : row + 2 + 2 * dimensions])
        return torch.Size(told[:dimensions]), told[dimensions:], _DTYPES[code - 1]


def _like(tensor: torch.Tensor) -> Like:
    return tensor.shape, tensor.stride(), tensor.dtype


def _once(value: torch.Tensor) -> torch.Tensor:
    """Without the repeats of dimensions whose stride is 0."""
    return value[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in value.stride())]


def _with_gaps(dense: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """The same with what lay between its elements, as in a slice or the real part of complex numbers."""
    gapped = tuple(own if stride == 0 else stride for own, stride in zip(dense.stride(), strides, strict=True))
    if gapped == dense.stride():
        return dense
    span = 1 + sum((extent - 1) * stride for extent, stride in zip(dense.shape, gapped, strict=True))
    if not dense.numel() <= span <= MAX_GAPS * dense.numel():
        return dense
    memory = torch.empty(span, dtype=dense.dtype, device=dense.device)
    return memory.as_strided(dense.shape, gapped).copy_(dense)


@functools.lru_cache(maxsize=1024)  # a few for each ring; as many as a deep model has
def _dense(shape: torch.Size, strides: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape without repeats, and the strides as they are or, where they leave gaps, in the same order without."""
    once = tuple(1 if stride == 0 else extent for extent, stride in zip(shape, strides, strict=True))
    like = (
        torch.empty(0, device="meta").as_strided(once, strides) if 0 not in once else torch.empty(once, device="meta")
    )
    return once, torch.empty_like(like).stride()
