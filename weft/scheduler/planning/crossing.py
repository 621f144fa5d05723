"""Crossing: which values go from stage to stage where a model is cut, and the ways of their gradients. Pure.

A parameter that several stages use is nothing that crosses, since each has it; its gradient goes as a value's does.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from weft.plan.inspection import ParameterFacts, ValueFacts
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


@dataclass(frozen=True, slots=True)
class TiedParameter:
    """A trained parameter that several stages use."""

    number: int  # in the model
    facts: ParameterFacts
    stages: tuple[int, ...]  # ascending

    @property
    def hops(self) -> list[tuple[int, int]]:
        """The stages that its gradient goes between, as a value's."""
        return list(pairwise(reversed(self.stages)))


def tied_parameters(parameters: Iterable[ParameterFacts], cuts: Cuts) -> list[TiedParameter]:
    tied = []
    for number, facts in enumerate(parameters):
        stages = sorted({_stage_of(unit, cuts) for unit in facts.units})
        if facts.trained and len(stages) > 1:
            tied.append(TiedParameter(number, facts, tuple(stages)))
    return tied


Crosses = TypeVar("Crosses", CrossingValue, TiedParameter)


def by_hop(crossing: Iterable[Crosses]) -> dict[tuple[int, int], list[Crosses]]:
    """By the stages that their gradients go between, from one and to the other."""
    found: dict[tuple[int, int], list[Crosses]] = {}
    for each in crossing:
        for hop in each.hops:
            found.setdefault(hop, []).append(each)
    return dict(sorted(found.items()))


def _stage_of(unit: int, cuts: Cuts) -> int:
    return bisect_right(cuts, unit, key=lambda cut: cut[0]) - 1
