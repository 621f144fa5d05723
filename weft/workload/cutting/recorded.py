"""Recorded: what a run of the whole step has shown: units, the values that would cross, and what is in a cut's way."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weft.plan.plan import Border
from weft.workload.cutting.skipped import Key, Returned


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A tensor that crosses where a stage's end lies between its maker and one of its readers."""

    name: str
    maker: int  # unit
    readers: tuple[int, ...]  # units
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    units: tuple[str, ...]  # names of the modules with which they begin; the first begins with the step
    values: tuple[Value, ...]
    uses: tuple[frozenset[str], ...]  # of each unit, names of parameters and buffers
    given: tuple[tuple[tuple[int, str], ...], ...]  # of each unit, as in Border
    problems: dict[int, str]  # by unit, why no stage may begin with it
    repeated: tuple[str, ...]  # modules that are called several times, so that no unit begins with them
    returned: dict[Key, Returned]  # by each call of an opaque module
    result: Any  # of the step

    def border(self, unit: int) -> Border:
        """Where a stage begins with the unit."""
        return Border(self.units[unit:], self.given[unit])

    def merged(self, other: Recorded, source: str) -> Recorded:
        """With what validation's run passes on beside. source: the field that its step is from."""
        places, shared = _places(self.units, other.units)
        values = {value.name: value for value in self.values}
        for value in filter(None, (_moved(each, places) for each in other.values)):
            mine = values.get(value.name, value)
            shared -= set(range(min(mine.maker, value.maker) + 1, max(mine.maker, value.maker) + 1))
            readers = tuple(sorted({*mine.readers, *value.readers}))
            values[value.name] = dataclasses.replace(mine, readers=readers)
        uses, given = list(self.uses), list(self.given)
        for unit, (place, theirs) in enumerate(zip(places, other.uses, strict=True)):
            uses[place] |= theirs
            if other.units[unit] == self.units[place]:
                given[place] = tuple(dict.fromkeys((*given[place], *other.given[unit])))
        problems = {
            unit: f"validation ({source}) calls other modules, or in another order; cut where both training and "
            "validation begin with the same call"
            for unit in range(1, len(self.units))
            if unit not in shared
        }
        in_validation = {places[unit]: text for unit, text in other.problems.items() if places[unit] in shared}
        problems |= {unit: f"in validation, {text}" for unit, text in in_validation.items()}
        return dataclasses.replace(
            self,
            values=tuple(sorted(values.values(), key=lambda value: (value.maker, value.name))),
            uses=tuple(uses),
            given=tuple(given),
            problems={**problems, **self.problems},
            repeated=tuple(dict.fromkeys((*self.repeated, *other.repeated))),
            returned={**other.returned, **self.returned},
        )


def _places(ours: Sequence[str], theirs: Sequence[str]) -> tuple[list[int], set[int]]:
    """Of each of their units the one of ours in which it lies; and which of ours begin with what both begin with."""
    places = [0]
    for name in theirs[1:]:
        places.append(ours.index(name) if name in ours[1:] else places[-1])
    if places != sorted(places):
        return [0] * len(theirs), set()
    return places, set(places) - {0}


def _moved(value: Value, places: Sequence[int]) -> Value | None:
    """With our numbers of units; None where it crosses nothing of ours."""
    maker = places[value.maker]
    readers = tuple(sorted({places[reader] for reader in value.readers} - {maker}))
    return dataclasses.replace(value, maker=maker, readers=readers) if readers else None
