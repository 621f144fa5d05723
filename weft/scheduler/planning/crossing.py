"""Crossing: which values go from stage to stage where a model is cut, and the ways of their gradients. Pure.

A parameter that several stages use is nothing that crosses, since each has it; its gradient goes as a value's does.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TypeVar

from weft.plan.inspection import ParameterFacts, ValueFacts, slot_bytes
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


@dataclass(frozen=True, slots=True)
class Handovers:
    """What stages take to pass values on, and gradients back, by where the model is cut."""

    values: Sequence[ValueFacts]
    sends: float  # seconds for a byte, of who has made it
    takes: float  # the same of who needs it
    apart: Sequence[bool]  # for each stage, whether the next one has another memory
    learns: bool = True

    def between(self, bounds: Sequence[int]) -> Callable[[int, int, int], float]:
        """Seconds of a stage, by its number, between two of the bounds, for a microbatch of the largest size."""
        across: list[list[tuple[ValueFacts, int]]] = [[] for _ in bounds]  # made before a bound and read behind it
        for value in self.values:
            num_bytes = slot_bytes(value.shapes, value.itemsize)
            for number in range(bisect_right(bounds, value.maker), bisect_right(bounds, value.readers[-1])):
                across[number].append((value, num_bytes))

        @cache
        def handed(a: int, b: int) -> tuple[float, float]:
            """Seconds for what goes to stages behind, and for what comes from those before."""
            first, last = bounds[a], bounds[b]
            sent = [each for each in across[b] if each[0].maker >= first]
            came = [each for each in across[a] if _reads(each[0], first, last)]
            return self._seconds(sent, self.sends, self.takes), self._seconds(came, self.takes, self.sends)

        def seconds(stage: int, a: int, b: int) -> float:
            sending, taking = handed(a, b)
            return sending * self.apart[stage] + taking * self.apart[stage - 1]

        return seconds

    def _seconds(self, handed: Iterable[tuple[ValueFacts, int]], there: float, back: float) -> float:
        """there, back: of a byte, and of one of its gradient."""
        return sum(num_bytes * (there + back * (self.learns and value.differentiable)) for value, num_bytes in handed)


def _reads(value: ValueFacts, first: int, last: int) -> bool:
    """Whether any of these units does."""
    place = bisect_left(value.readers, first)
    return place < len(value.readers) and value.readers[place] < last


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
