"""Recorded: what a run of the whole step has shown: units, the values that would cross, and what is in a cut's way."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weft.plan.plan import Border
from weft.workload.cutting.names import argument_name, is_argument, is_beside, maker_of, output_name
from weft.workload.cutting.skipped import Key, Returned


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A tensor that crosses where a stage's end lies between its maker and one of its readers."""

    name: str
    maker: int  # unit
    readers: tuple[int, ...]  # units
    tensor: torch.Tensor

    @property
    def has_gradient(self) -> bool:
        return self.tensor.requires_grad


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    units: tuple[str, ...]  # names of the modules with which they begin; the first begins with the step
    values: tuple[Value, ...]
    uses: tuple[frozenset[str], ...]  # of each unit, names of parameters and buffers
    given: tuple[tuple[tuple[int, str], ...], ...]  # of each unit, as in Border
    ends: tuple[tuple[str, ...], ...]  # of each unit, as in Border
    late: tuple[str, ...]  # as in Border
    problems: dict[int, str]  # by unit, why no stage may begin with it
    repeated: tuple[str, ...]  # modules that are called several times, so that no unit begins with them
    returned: dict[Key, Returned]  # by each call of an opaque module
    redraws: dict[str, frozenset[str]]  # by call, the operations behind it that draw in every stage
    instead: tuple[tuple[str, str], ...]  # as in Border
    called: frozenset[tuple[int, int]]  # of each call of an opaque module its number, and which of its calls it is
    computed: frozenset[tuple[str, int]]  # of each operation between them what it is and where, and which time there
    varies: bool  # it asks for numbers that it has drawn: another run may call other modules
    made_once: frozenset[str]  # parameters and buffers that a step writes to: what is made of them has one maker
    result: Any  # of the step

    @property
    def lacks_gradients(self) -> bool:
        """Of some value that could have one."""
        return any(not each.has_gradient and each.tensor.is_floating_point() for each in self.values)

    def with_gradients(self, names: Collection[str]) -> Recorded:
        """names: of values that have one."""
        values = (_differentiable(each) if each.name in names else each for each in self.values)
        return dataclasses.replace(self, values=tuple(values)) if names else self

    def border(self, unit: int) -> Border:
        """Where a stage begins with the unit."""
        instead = self.instead if self.varies and not self.late else ()
        return Border(self.units[unit:], self.given[unit], self.ends[unit], self.late, instead)

    def with_left_out(self, modules: Sequence[tuple[str, frozenset[str]]]) -> Recorded:
        """modules: names, in the order of the model, and the parameters and buffers of each."""
        recorded = self
        for name, state in modules:
            recorded = recorded._with_unit(name, state)
        return recorded

    def _with_unit(self, name: str, state: frozenset[str]) -> Recorded:
        """Behind the item before it, where a stage may find itself begun or ended by its call; in one stage with it."""
        stack = {
            int(unit.rpartition(".")[2]): number for number, unit in enumerate(self.units) if is_beside(unit, name)
        }
        before = [number for item, number in stack.items() if item < int(name.rpartition(".")[2])]
        if not stack:
            return self._uncut(f"{name} was left out when the step was tried, and nothing shows where it is called")
        place = max(before) + 1 if before else max(1, min(stack.values()))
        return self._with_output(output_name(name, 0, 0), place, is_behind=bool(before))._inserted(name, place, state)

    def _uncut(self, why: str) -> Recorded:
        """One stage has all of it."""
        return dataclasses.replace(self, problems=dict.fromkeys(range(1, len(self.units)), why), varies=True)

    def _inserted(self, name: str, place: int, state: frozenset[str]) -> Recorded:
        """Where it is called it reads what others of its list do."""

        def moved(unit: int) -> int:
            return unit + (unit >= place)

        def readers(value: Value) -> tuple[int, ...]:
            found = {*map(moved, value.readers)}
            is_beside_one = any(is_beside(self.units[unit], name) for unit in value.readers)
            if is_beside_one and value.maker < place and not is_argument(value.name):
                found.add(place)
            return tuple(sorted(found))

        return dataclasses.replace(
            self,
            units=(*self.units[:place], name, *self.units[place:]),
            uses=(*self.uses[:place], state, *self.uses[place:]),
            given=(*self.given[:place], (), *self.given[place:]),
            ends=(*self.ends[:place], (), *self.ends[place:]),
            values=tuple(
                dataclasses.replace(value, maker=moved(value.maker), readers=readers(value)) for value in self.values
            ),
            problems={moved(unit): text for unit, text in self.problems.items()}
            | {place: "it was left out when the step was tried; cut at its neighbours"},
            varies=True,
        )

    def _with_output(self, name: str, place: int, *, is_behind: bool) -> Recorded:
        """With a value for what a left-out item returns where it is called: it is read where what it was given is, now
        that this stands for it. is_behind: an item before it. Only where items give to the next what they return: of
        a sum around each nobody knows how it would be called."""
        item = maker_of(name)
        links = dict(self.instead)
        if not any(is_beside(maker_of(each), item) and is_beside(maker_of(links[each]), item) for each in links):
            return self
        source = output_name(self.units[place - 1], 0, 0) if is_behind else dict(self.given[place]).get(0, "")
        stood = links.get(source, source) if is_argument(source) else source
        links = {
            each: name if other == stood and is_beside(maker_of(each), item) else other for each, other in links.items()
        } | {name: stood}
        found = [each for each in self.values if each.name == source and each.readers[-1] >= place]
        made = [
            dataclasses.replace(
                each, name=name, maker=place - 1, readers=tuple(unit for unit in each.readers if unit >= place)
            )
            for each in found
        ]
        given = tuple(
            (*each, *((leaf, name) for leaf, value in each if found and value == source and unit >= place))
            for unit, each in enumerate(self.given)
        )
        return dataclasses.replace(self, values=(*self.values, *made), given=given, instead=tuple(links.items()))

    def with_spares(self) -> Recorded:
        """With two values for each argument of a call with which a stage may begin: as who made it has named it, for
        runs in which another call comes first, and as its argument, for runs in which another has made it."""
        values = {value.name: value for value in self.values}
        given, links = list(self.given), dict(self.instead)
        for unit, module in enumerate(self.units[1:], 1):
            for leaf, name in self.given[unit]:
                argument = argument_name(module, leaf)
                made = links.get(argument, argument) if name == argument else name
                for spare in (made, argument):
                    if spare not in values:
                        values[spare] = Value(name=spare, maker=unit - 1, readers=(unit,), tensor=values[name].tensor)
                both = ((leaf, made), (leaf, argument))
                given[unit] = tuple(dict.fromkeys((*(each for each in given[unit] if each not in both), *both)))
        return dataclasses.replace(self, values=tuple(values.values()), given=tuple(given))

    def merged(self, other: Recorded, source: str) -> Recorded:
        """With what validation's run passes on beside. source: the field that its step is from."""
        places, shared = _places(self.units, other.units)
        if not set(other.late) <= set(self.late):
            shared = set()  # where a stage ends is known of training alone
        values = {value.name: value for value in self.values}
        for value in filter(None, (_moved(each, places) for each in other.values)):
            mine = values.get(value.name) or _differentiable(value)  # it ran without gradients
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
            "validation begin with the same call, or do it in Workload.on_epoch, which finds the whole model"
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
            repeated=tuple(
                dict.fromkeys((*self.repeated, *(name for name in other.repeated if name not in self.units)))
            ),
            returned={**other.returned, **self.returned},
            redraws={**other.redraws, **self.redraws},
            varies=self.varies or other.varies,
        )


def _places(ours: Sequence[str], theirs: Sequence[str]) -> tuple[list[int], set[int]]:
    """Of each of their units the one of ours in which it lies; and which of ours begin with what both begin with."""
    places = [0]
    for name in theirs[1:]:
        places.append(ours.index(name) if name in ours[1:] else places[-1])
    if places != sorted(places):
        return [0] * len(theirs), set()
    return places, set(places) - {0}


def _differentiable(value: Value) -> Value:
    tensor = value.tensor.detach()
    return dataclasses.replace(value, tensor=tensor.requires_grad_(tensor.is_floating_point() or tensor.is_complex()))


def _moved(value: Value, places: Sequence[int]) -> Value | None:
    """With our numbers of units; None where it crosses nothing of ours."""
    maker = places[value.maker]
    readers = tuple(sorted({places[reader] for reader in value.readers} - {maker}))
    return dataclasses.replace(value, maker=maker, readers=readers) if readers else None
