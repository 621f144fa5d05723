"""Held: what one worker's task has of what training has come to. Gathered for a SNAPSHOT, and read again from it.

piece       a tensor of elements: of one parameter in its shape, or flat, with the extents of those it is made of
buffer      of one replica, by its name in the model
fixed       of the first replica: parameters that nobody trains, by name
names       of the first replica: what its stage has in the model's state dict
states      by parameter: what the optimizer keeps of it beside elements
options     by parameter: those of its group in the optimizer
scheduler   its state, which is the same for every optimizer of the job
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

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
    replica: int | None = None  # whose buffers they are
    pieces: list[Piece] = field(default_factory=list)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    fixed: dict[str, Tensor] = field(default_factory=dict)
    names: Sequence[Name] = field(default_factory=list)
    states: dict[str, dict[str, Any]] = field(default_factory=dict)
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    scheduler: dict[str, Any] | None = None

    def add_whole(self, parameter: str, entry: str, tensor: Tensor) -> None:
        """In the parameter's shape."""
        self.pieces.append(Piece(entry, (Extent(parameter, 0, 0, 0),), tensor))

    def tensors(self) -> list[Tensor]:
        return [*(piece.tensor for piece in self.pieces), *self.buffers.values(), *self.fixed.values()]

    def num_changing(self) -> int:
        """Of the tensors, those before the fixed ones."""
        return len(self.pieces) + len(self.buffers)

    def facts(self) -> dict[str, Any]:
        """All but the tensors: plain data."""
        return {
            "replica": self.replica,
            "pieces": [(piece.entry, [tuple(extent) for extent in piece.extents]) for piece in self.pieces],
            "buffers": list(self.buffers),
            "fixed": list(self.fixed),
            "names": [tuple(name) for name in self.names],
            "states": self.states,
            "options": self.options,
            "scheduler": self.scheduler,
        }

    @classmethod
    def of(cls, facts: dict[str, Any], tensors: Sequence[Tensor]) -> Held:
        """As `facts` and `tensors` told."""
        pieces = [
            Piece(entry, [Extent(*extent) for extent in extents], tensor)
            for (entry, extents), tensor in zip(facts["pieces"], tensors, strict=False)
        ]
        count = len(pieces) + len(facts["buffers"])
        return cls(
            replica=facts["replica"],
            pieces=pieces,
            buffers=dict(zip(facts["buffers"], tensors[len(pieces) : count], strict=True)),
            fixed=dict(zip(facts["fixed"], tensors[count:], strict=True)),
            names=[Name(*name) for name in facts["names"]],
            states=facts["states"],
            options=facts["options"],
            scheduler=facts["scheduler"],
        )
