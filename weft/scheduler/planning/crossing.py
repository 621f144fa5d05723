"""Crossing: which values go from stage to stage where a model is cut, and the ways of their gradients. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from weft.plan.inspection import ValueFacts
from weft.plan.placement import Cuts


@dataclass(frozen=True, slots=True)
class CrossingValue:
    """A value that stages behind its maker's read."""

    facts: ValueFacts
    writer: int  # the stage of its maker
    readers: tuple[int, ...]  # stages, ascending, all above the writer

    @property
    def hops(self) -> list[tuple[int, int]]:
        """The stages that its gradient goes between: from its last reader to the next lower one, and so on down to the
        writer. Each adds its own part, so it is summed in the order in which autograd sums it in the whole model."""
        return list(pairwise([*reversed(self.readers), self.writer])) if self.facts.differentiable else []


def crossing_values(values: Iterable[ValueFacts], cuts: Cuts) -> list[CrossingValue]:
    crossing = []
    for facts in values:
        writer = _stage_of(facts.maker, cuts)
        readers = sorted({_stage_of(reader, cuts) for reader in facts.readers} - {writer})
        if readers:
            crossing.append(CrossingValue(facts, writer, tuple(readers)))
    return crossing


def gradients_into(stage: int, crossing: Sequence[CrossingValue]) -> dict[int, list[CrossingValue]]:
    """The values whose gradients come to a stage, by the stage that they come from."""
    found: dict[int, list[CrossingValue]] = {}
    for value in crossing:
        for source, target in value.hops:
            if target == stage:
                found.setdefault(source, []).append(value)
    return dict(sorted(found.items()))


def _stage_of(unit: int, cuts: Cuts) -> int:
    return bisect_right([first for first, _ in cuts], unit) - 1
