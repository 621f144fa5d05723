"""Held: what one worker's task has of what training has come to. Gathered for a SNAPSHOT, and read again from it.

piece       a tensor of elements: of one parameter in its shape, or flat, with the extents of those it is made of
buffer      of one replica, by its name in the model
fixed       of the first replica: parameters that nobody trains, and those without elements, by name
changes_fixed  whether a function of the user's may have changed them in between
names       of the first replica: what its stage has in the model's state dict
states      by parameter: what the optimizer keeps of it beside elements
options     by parameter: those of its group in the optimizer
scheduler   its state, which is the same for every optimizer of the job
kinds       the names of the optimizer's and the scheduler's classes, by "optimizer" and "scheduler"; "" of none
attributes  of one replica, what its modules remember elsewhere, as weft.workers.snapshots.attributes tells it
modes       of one replica, the modes that its modules are in, as weft.workers.snapshots.attributes tells them
restored    of the attributes, by module and name, those that are as they were restored
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from weft.workers.snapshots.attributes import Attributes, Kept, Modes

VALUES = ""  # the entry of a parameter's own elements; others have the optimizer's names


class Name(NamedTuple):
    """One of the model's state dict, and the tensor's first name, by which all else has it."""

    name: str
    first: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Extent(NamedTuple):
    """Elements `start` to `stop` of a flat piece: a parameter's from `offset` on, in its order in memory."""

    parameter: str
    offset: int
    start: int
    stop: int


class Piece(NamedTuple):
    entry: str
    extents: Sequence[Extent]  # one of no length, where the tensor has the parameter's shape
    tensor: Tensor


@dataclass(slots=True)
class Held:
    replica: int | None = None  # whose buffers and attributes they are
    pieces: list[Piece] = field(default_factory=list)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    fixed: dict[str, Tensor] = field(default_factory=dict)
    changes_fixed: bool = False
    names: Sequence[Name] = field(default_factory=list)
    states: dict[str, dict[str, Any]] = field(default_factory=dict)
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    scheduler: dict[str, Any] | None = None
    kinds: dict[str, str] = field(default_factory=dict)
    attributes: Kept = field(default_factory=dict)
    modes: Modes = field(default_factory=dict)
    restored: list[tuple[str, str]] = field(default_factory=list)

    def add_whole(self, parameter: str, entry: str, tensor: Tensor) -> None:
        """In the parameter's shape."""
        self.pieces.append(Piece(entry, (Extent(parameter, 0, 0, 0),), tensor))

    def add_attributes(self, attributes: Attributes) -> None:
        self.attributes, self.restored = attributes.changed(), attributes.as_restored()
        self.modes = attributes.modes()

    def tensors(self) -> list[Tensor]:
        return [*(piece.tensor for piece in self.pieces), *self.buffers.values(), *self.fixed.values()]

    def num_changing(self) -> int:
        """Of the tensors, those before the fixed ones, or all."""
        return len(self.pieces) + len(self.buffers) + (len(self.fixed) if self.changes_fixed else 0)

    def layout(self) -> dict[str, Any]:
        """What the tensors are, in numbers and text."""
        places = _places(self.options)
        return {
            "replica": self.replica,
            "pieces": [(piece.entry, [tuple(extent) for extent in piece.extents]) for piece in self.pieces],
            "buffers": list(self.buffers),
            "fixed": list(self.fixed),
            "names": [tuple(name) for name in self.names],
            "kinds": self.kinds,
            "options": {parameter: places[id(own)] for parameter, own in self.options.items()},
        }

    def plain(self) -> dict[str, Any]:
        """The rest: plain data. Options that are one object are there once, since they take the longest to read."""
        own = {id(each): each for each in self.options.values()}
        options = list(own.values())
        rest = {"states": self.states, "options": options, "scheduler": self.scheduler}
        return rest | {"attributes": self.attributes, "modes": self.modes, "restored": self.restored}

    @classmethod
    def of(cls, layout: dict[str, Any], plain: dict[str, Any], tensors: Sequence[Tensor]) -> Held:
        """As `layout`, `plain` and `tensors` told."""
        pieces = [
            Piece(entry, [Extent(*extent) for extent in extents], tensor)
            for (entry, extents), tensor in zip(layout["pieces"], tensors, strict=False)
        ]
        count = len(pieces) + len(layout["buffers"])
        return cls(
            replica=layout["replica"],
            pieces=pieces,
            buffers=dict(zip(layout["buffers"], tensors[len(pieces) : count], strict=True)),
            fixed=dict(zip(layout["fixed"], tensors[count:], strict=True)),
            names=[Name(name, first, tuple(shape), tuple(strides)) for name, first, shape, strides in layout["names"]],
            states=plain["states"],
            options={parameter: plain["options"][place] for parameter, place in layout["options"].items()},
            scheduler=plain["scheduler"],
            kinds=layout["kinds"],
            attributes=plain["attributes"],
            modes=plain["modes"],
            restored=[(module, name) for module, name in plain["restored"]],
        )


def _places(options: Mapping[str, Any]) -> dict[int, int]:
    """Of each object, by its id, among those that there are."""
    return {each: place for place, each in enumerate(dict.fromkeys(map(id, options.values())))}
