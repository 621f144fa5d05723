"""Regions: what a recording has seen of a step, and what follows from it for stages.

Every call of an opaque module begins a *region*: the call and what loosely follows it until the next. A *unit* is what
a stage may begin with: a module that is called once, in the order of the calls.

    regions     ┊ a ┊ b ┊ c ┊ a again ┊ b again ┊ d ┊
    units       ┊ 0 ┊ 1 ┊ 2 ┊ 0       ┊ 1       ┊ 3 ┊

A later call of a module belongs to the module's unit where the step goes through several modules again (a network for
two inputs) and the call needs nothing that a later unit has made. Otherwise it belongs to the unit before it, and the
module is in both.

A tensor is *fed* where it depends on parameters, and not on the batch alone. What is fed in one unit and needed in a
later one crosses each cut between them, by the name of the call that returns it or, if it is a loose result, by that of
its operation. A loose result of parameters alone is made where it is needed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from weft.workload.cutting.names import argument_name, call_name, maker_of
from weft.workload.cutting.recorded import Value
from weft.workload.cutting.visible import Visible


@dataclass(slots=True, eq=False)
class Read:
    """An operation that needs numbers, or a call."""

    region: int | None  # None: what the step returns
    sources: list[Fed]
    made: list[Fed]  # of an operation
    is_call: bool = False
    asks: str = ""  # what for, where it tells numbers to Python
    writes: str = ""  # the parameter or buffer that it writes to


@dataclass(slots=True, eq=False)
class Fed:
    """A tensor that is not of the batch alone."""

    tensor: torch.Tensor
    region: int  # in which it was made
    name: str  # by which it would cross; of a parameter or buffer, its own
    what: str  # for people
    is_state: bool = False  # a parameter or buffer
    is_loose: bool = False
    is_of_state: bool = False  # made of parameters and of the batch, by nothing else
    given: Fed | None = None  # the same tensor, as another call had returned it before
    sources: Sequence[Fed] = ()  # of a loose result; of one that a module without state returns, it


class Regions:
    """calls: by region, from 1. fed: those that were made. arguments: by region, of its call, by leaf. states: of each
    call, the parameters and buffers of its module. reads: in their order."""

    def __init__(
        self,
        calls: Sequence[Visible],
        fed: Sequence[Fed],
        arguments: Sequence[dict[int, Fed]],
        states: Sequence[frozenset[str]],
        reads: Sequence[Read],
    ) -> None:
        self._calls, self._fed, self._arguments, self._states, self._reads = calls, fed, arguments, states, reads
        self._counts = Counter(calls)
        self._late = _called_in_passes(calls)  # modules whose other calls belong to their own unit
        self._until: list[int] = []  # by unit, the last region of it and of those before
        self._unit: dict[Fed, int] = {}  # that has it
        self._place()
        self._settled: dict[Fed, int] = {}  # what is made of written state in one unit alone, and that unit
        self.made_once = frozenset(name for name in {read.writes for read in reads} - {""} if not self._settle(name))
        self._needed: dict[Fed, set[int]] = {}  # units
        for read in reversed(reads):  # what it has made is read by later ones alone
            units = self._made_in(read)
            for source in read.sources:
                _add(self._needed, source, units)

    @property
    def units(self) -> tuple[str, ...]:
        return tuple(self._calls[begin - 1].name if self._calls else "" for begin in self._begins)

    @property
    def repeated(self) -> tuple[str, ...]:
        """Modules that are called several times and begin no unit."""
        return tuple(
            dict.fromkeys(each.name for each in self._calls if self._counts[each] > 1 and each not in self._late)
        )

    @property
    def ends(self) -> tuple[tuple[str, ...], ...]:
        """Of each unit, as in Border."""
        names = self._call_names()
        found = []
        for unit in range(len(self._begins)):
            last = max((region for region, other in enumerate(self._unit_of) if other < unit), default=0)
            found.append(tuple(names[last + 1 :]) if last > self._begins[unit] else ())
        return tuple(found)

    @property
    def late(self) -> tuple[str, ...]:
        return tuple(
            name
            for name, call in zip(self._call_names()[1:], self._calls, strict=True)
            if call in self._late and name != call.name
        )

    def _call_names(self) -> list[str]:
        """By region."""
        seen: Counter[Visible] = Counter()
        names = [""]
        for call in self._calls:
            names.append(call_name(call.name, seen[call]))
            seen[call] += 1
        return names

    @cached_property
    def given(self) -> tuple[tuple[tuple[int, str], ...], ...]:
        return tuple(tuple((leaf, name) for leaf, name, _ in self._passed(begin)) for begin in self._begins)

    @cached_property
    def values(self) -> tuple[Value, ...]:
        found = [*self._jumping(), *self._arguments_of_begins()]
        return tuple(sorted(found, key=lambda value: (value.maker, value.name)))

    @cached_property
    def uses(self) -> tuple[frozenset[str], ...]:
        """Of each unit, names of parameters and buffers."""
        found: list[set[str]] = [set() for _ in self._begins]
        for unit, names in zip(self._unit_of[1:], self._states, strict=True):
            found[unit] |= names
        for fed, units in self._needed.items():
            for unit in units if fed.is_state else ():
                found[unit].add(fed.name)
        return tuple(map(frozenset, found))

    @cached_property
    def problems(self) -> dict[int, str]:
        """By unit, why no stage may begin with it."""
        found = {}
        for unit in range(1, len(self._begins)):
            asked = next((read.asks for read in self._reads if read.asks and self._is_beside(read, unit)), None)
            if asked is not None:
                found[unit] = (
                    f"{asked}, and every stage runs that line, also those that do not have them; leave it out, or "
                    "make what is computed there an nn.Module of its own"
                )
        return _odd(self.values) | found

    # --- what is needed where

    def _place(self) -> None:
        """Regions to units. A module that needs in a later call what a later unit has made cannot be in one alone."""
        while True:
            begins = {call: region for region, call in reversed(list(enumerate(self._calls, 1)))}
            own = [begin for call, begin in begins.items() if self._counts[call] == 1 or call in self._late]
            self._begins = sorted({1, *own})  # of each unit, its region
            number = {begin: unit for unit, begin in enumerate(self._begins)}
            self._unit_of, self._unit = [0], {}
            self._until = [
                max(
                    region
                    for region, call in enumerate(self._calls, 1)
                    if number.get(begins[call], unit + 1) <= unit and (region in number or call in self._late)
                )
                for unit in range(len(self._begins) if self._calls else 0)
            ]
            made = iter(self._fed)
            ahead = next(made, None)
            for region, call in enumerate(self._calls, 1):
                while ahead is not None and ahead.region < region:
                    self._unit[ahead] = self._unit_with(ahead.region, ahead.sources)
                    ahead = next(made, None)
                needed = max((self._unit.get(fed, 0) for fed in self._arguments[region].values()), default=0)
                if call not in self._late:
                    unit = max(number.get(region, 0), self._unit_of[-1], needed)
                elif (unit := number[begins[call]]) < needed:
                    self._late.discard(call)
                    break
                self._unit_of.append(unit)
            else:
                while ahead is not None:
                    self._unit[ahead] = self._unit_with(ahead.region, ahead.sources)
                    ahead = next(made, None)
                return

    def _unit_with(self, region: int, sources: Sequence[Fed]) -> int:
        """Where an operation is made: in the first unit that may have all of it and whose stage runs so far."""
        if not sources:  # what a call returns
            return self._unit_of[region]
        unit = max(self._unit.get(each, 0) for each in sources)
        return min(max(unit, self._unit_of[region]), max(unit, bisect_left(self._until, region)))

    def _settle(self, name: str) -> bool:
        """Of a buffer that no call has (a count of steps), all that is made of it and of other state, and every write
        to it, belong to the one unit that needs something of it, the last if none does and nothing else goes into it:
        each stage comes by the lines that stand before its end. Else a result is made once, where it stands: behind a
        write it is another one."""
        group: dict[Fed, None] = {}
        users: set[int] = set()
        first_that_may, takes_more = 0, False
        for read in self._reads:
            own = [fed for fed in read.sources if fed in group or (fed.is_state and fed.name == name)]
            group |= dict.fromkeys(fed for fed in own if fed.is_state)
            others = [fed for fed in read.sources if fed not in group]
            is_of_state = own and read.made and not read.writes and all(fed.is_of_state for fed in others)
            if read.writes == name or is_of_state:
                group |= dict.fromkeys(read.made)
                if read.writes:
                    takes_more |= bool(others)
                    first_that_may = max(first_that_may, self._unit_with(read.region or 0, others))
            elif own:
                users |= self._reader(read)
        if not users and not takes_more:
            users.add(len(self._begins) - 1)
        if len(users) == 1 and max(users) >= first_that_may and all(name not in names for names in self._states):
            self._settled |= dict.fromkeys((fed for fed in group if not fed.is_state), max(users))
            self._unit |= self._settled
            return True
        for fed in group:
            fed.is_of_state = False
        return False

    def _reader(self, read: Read) -> set[int]:
        """The unit of what is not made of state alone."""
        if read.region is None:
            return {len(self._begins) - 1}
        return {self._unit_of[read.region] if read.is_call else self._unit_with(read.region, read.sources)}

    def _made_in(self, read: Read) -> set[int]:
        """Units: where a result of state alone is needed in one of them it is made there."""
        if read.made and read.made[0] in self._settled:
            return {self._settled[read.made[0]]}
        if read.made and all(map(self._is_made_again, read.made)):
            return set().union(*(self._needed.get(each, ()) for each in read.made))
        return self._reader(read)

    def _is_beside(self, read: Read, unit: int) -> bool:
        """Whether a stage that has not the numbers of it runs it, where stages meet at the unit."""
        if read.region is None:
            return False
        last = max(region for region, other in enumerate(self._unit_of) if other < unit)
        return self._unit_with(read.region, read.sources) < unit or read.region < last

    def _is_made_again(self, fed: Fed) -> bool:
        if fed in self._settled:
            return True
        return fed.is_of_state and not fed.is_state and len(self._needed.get(fed, ())) <= 1

    # --- values

    def _passed(self, begin: int) -> Iterator[tuple[int, str, Fed]]:
        """What the call of a region is given of earlier ones: (leaf, name, tensor)."""
        for leaf, fed in self._arguments[begin].items() if begin < len(self._arguments) else ():
            if fed.region < begin and not fed.is_state and not self._is_made_again(fed):
                yield leaf, argument_name(self._calls[begin - 1].name, leaf) if fed.is_loose else fed.name, fed

    def _jumping(self) -> Iterator[Value]:
        for fed in self._fed:
            maker = self._unit[fed]
            readers = tuple(sorted(self._needed.get(fed, set()) - set(range(maker + 1))))
            if readers and (not fed.is_loose or self._jumps(fed, maker, readers[-1])):
                yield Value(name=fed.name, maker=maker, readers=readers, tensor=fed.tensor)

    def _jumps(self, loose: Fed, maker: int, last: int) -> bool:
        """Over a cut, and not as an argument of the call behind it."""
        if self._is_made_again(loose):
            return False
        return any(
            all(fed is not loose for fed in self._arguments[self._begins[unit]].values())
            for unit in range(maker + 1, last + 1)
        )

    def _arguments_of_begins(self) -> Iterator[Value]:
        for unit, begin in enumerate(self._begins[1:], 1):
            for _, name, fed in self._passed(begin):
                if fed.is_loose:
                    yield Value(name=name, maker=unit - 1, readers=(unit,), tensor=fed.tensor)


def _called_in_passes(calls: Sequence[Visible]) -> set[Visible]:
    """Modules that are called several times, together with others of the kind."""
    seen: set[Visible] = set()
    again = []
    for call in calls:
        again.append(call in seen)
        seen.add(call)
    found = {call for call, is_again in zip(calls, again, strict=True) if is_again}
    for number, call in enumerate(calls):
        beside = [other for other in (number - 1, number + 1) if 0 <= other < len(calls)]
        if again[number] and not any(again[other] and calls[other] is not call for other in beside):
            found.discard(call)
    return found


def _add(needed: dict[Fed, set[int]], fed: Fed | None, units: set[int]) -> None:
    while fed is not None:
        needed.setdefault(fed, set()).update(units)
        fed = fed.given


def _odd(values: Sequence[Value]) -> dict[int, str]:
    return {
        unit: f"{maker_of(value.name)} passes on or gets a sparse or nested tensor, and only plain ones cross; make it "
        "one (to_dense()), or cut elsewhere (strategy.split)"
        for value in values
        if value.tensor.layout is not torch.strided or value.tensor.is_nested
        for unit in range(value.maker + 1, value.readers[-1] + 1)
    }
