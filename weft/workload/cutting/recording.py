"""A recording: one run of the whole step, looked at from outside: where it can be cut, and what would cross.

Every call of an opaque module begins a *region*: the call and what loosely follows it until the next. Modules that are
called once give the units, which begin where a stage may; a region of any other call belongs to the unit before it.
A tensor is *fed* where it depends on parameters, and not on the batch alone. What is fed in one region and read in a
later one crosses each cut between them:

    returned by a call that is seen    a value with a name: from its maker to every reader, over any number of stages
    loose                              only as an argument of the call with which the next stage begins
    a number asked of it               by no way: every later stage asks, too
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from weft.workload.cutting.calls import CallNumbers, Seed
from weft.workload.cutting.cut_step import Step, argument_name, named_tensors, output_name
from weft.workload.cutting.leaves import tensors_in
from weft.workload.cutting.operation import TWO_WAYS_OUT, asks_for_numbers, result_of, user_line
from weft.workload.cutting.placeholder import KNOWN
from weft.workload.cutting.skipped import Key, Returned, key_of, returned_of
from weft.workload.cutting.visible import CallKind, Forward, Visible, listening, visible_modules
from weft.workload.workload import WorkloadError


@dataclass(slots=True, eq=False)
class _Fed:
    """A tensor that is not of the batch alone."""

    tensor: torch.Tensor
    region: int  # in which it was made
    what: str
    name: str | None = None  # of what a call has returned
    readers: set[int] = field(default_factory=set)  # regions


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
    problems: dict[int, str]  # by unit, why no stage may begin with it
    repeated: tuple[str, ...]  # modules that are called several times, so that no unit begins with them
    returned: dict[Key, Returned]  # by each call of an opaque module
    result: Any  # of the step

    def merged(self, other: Recorded, source: str) -> Recorded:
        """With what validation's run passes on beside. source: the field that its step is from."""
        places, shared = _places(self.units, other.units)
        values = {value.name: value for value in self.values}
        for value in filter(None, (_moved(each, places) for each in other.values)):
            mine = values.get(value.name, value)
            shared -= set(range(min(mine.maker, value.maker) + 1, max(mine.maker, value.maker) + 1))
            readers = tuple(sorted({*mine.readers, *value.readers}))
            values[value.name] = dataclasses.replace(mine, readers=readers)
        uses = list(self.uses)
        for place, theirs in zip(places, other.uses, strict=True):
            uses[place] |= theirs
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


class StepRecording(TorchFunctionMode):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self._visible = visible_modules(model)
        tables = {
            id(each) for top in self._visible if top.kind is CallKind.TRANSPARENT for each in top.module.buffers()
        }
        self._names = {id(each): name for name, each in named_tensors(model) if id(each) not in tables}
        self._state = dict(named_tensors(model))
        self.numbers = CallNumbers()
        self._depth = 0  # within an opaque call
        self._calls: list[Visible] = []  # by region, from 1
        self._occurrences: dict[Visible, int] = {}
        self._fed: dict[int, _Fed] = {}  # by id of the tensor, as it is now
        self._all: list[_Fed] = []
        self._arguments: list[dict[int, _Fed]] = [{}]  # by region, and leaf
        self._uses: list[set[str]] = [set()]  # by region
        self._returned: dict[Key, Returned] = {}
        self._asked: dict[int, str] = {}  # by region: the first number that is asked for in it

    def run(self, step: Step, batch: Any, seed: Seed) -> Recorded:
        with listening(self._visible, self), self.numbers.running(seed), self:
            result = step(self._model, batch)
        return self._recorded(result)

    @contextlib.contextmanager
    def installed_again(self, seed: Seed) -> Iterator[None]:
        """The backward of such a run."""
        with listening(self._visible, self), self.numbers.running_again(seed):
            yield

    # --- while it runs

    def call(self, visible: Visible, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.numbers.is_running and visible.kind is CallKind.OPAQUE:
            return self.numbers.run(visible, forward, args, kwargs)
        if self._depth or not self.numbers.is_running:
            return forward(*args, **kwargs)
        occurrence = self._occurrences[visible] = self._occurrences.get(visible, -1) + 1
        if visible.kind is CallKind.OPAQUE:
            key = key_of(visible, occurrence, (args, kwargs))
            result = self._opaque(visible, forward, args, kwargs)
            self._returned[key] = returned_of(result, (args, kwargs))
            fed = tensors_in(result)
        else:
            result = forward(*args, **kwargs)
            fed = [tensor for tensor in tensors_in(result) if id(tensor) in self._fed]
        for leaf, tensor in enumerate(tensors_in(result)):
            if any(tensor is each for each in fed):
                self._name(tensor, output_name(visible.name, occurrence, leaf), str(visible))
        return result

    def _opaque(self, visible: Visible, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._calls.append(visible)
        self._arguments.append({})
        self._uses.append({self._names[id(each)] for _, each in named_tensors(visible.module)})
        for leaf, tensor in enumerate(tensors_in((args, kwargs))):
            if (fed := self._read(tensor)) is not None:
                self._arguments[-1][leaf] = fed
        self._depth += 1
        try:
            return self.numbers.run(visible, forward, args, kwargs)
        finally:
            self._depth -= 1

    @property
    def _region(self) -> int:
        return len(self._calls)

    def _read(self, tensor: torch.Tensor) -> _Fed | None:
        """Looks at a tensor's numbers in the present region."""
        fed = self._fed.get(id(tensor))
        if fed is None and id(tensor) in self._names:
            name = self._names[id(tensor)]
            self._uses[-1].add(name)
            return _Fed(self._state[name], self._region, name)  # each stage that reads it has it
        if fed is not None:
            fed.readers.add(self._region)
        return fed

    def _feed(self, tensor: torch.Tensor, what: str, name: str | None = None) -> None:
        self._fed[id(tensor)] = fed = _Fed(tensor, self._region, what, name)
        self._all.append(fed)  # keeps the tensor, so that no other gets its id

    def _name(self, tensor: torch.Tensor, name: str, maker: str) -> None:
        fed = self._fed.get(id(tensor))
        if fed is not None and fed.name is not None:
            return  # one that an inner call has returned, or an argument given back
        if fed is not None:
            fed.readers.add(self._region)
        self._feed(tensor, f"what {maker} returns", name)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._depth:
            return func(*args, **kwargs)
        if func is torch.Tensor.backward:
            raise WorkloadError(
                f"the step calls backward() at {user_line()}; leave it out, as what the optimizer does: Weft "
                "differentiates the loss that the step returns"
            )
        result = func(*args, **kwargs)
        made = tensors_in(result)
        if not made and _is_quiet(func):
            return result
        read = [fed for tensor in tensors_in((args, kwargs)) if (fed := self._read(tensor)) is not None]
        if read and not made and func.__name__ not in ("__setitem__", "__set__"):
            self._asked.setdefault(self._region, asks_for_numbers(func, read[0].what))
        if read:
            for tensor in made or tensors_in(args)[:1]:
                self._feed(tensor, result_of(func))
        return result

    # --- afterwards

    def _recorded(self, result: Any) -> Recorded:
        once = [region for region, visible in enumerate(self._calls, 1) if self._calls.count(visible) == 1]
        begins = [1, *(region for region in once if region > 1)] if self._calls else [1]
        unit_of = [max(0, sum(begin <= region for begin in begins) - 1) for region in range(len(self._calls) + 1)]
        names = tuple(self._calls[begin - 1].name if self._calls else "" for begin in begins)
        uses = tuple(
            frozenset(name for region, used in enumerate(self._uses) if unit_of[region] == unit for name in used)
            for unit in range(len(begins))
        )
        values = [*self._outputs(unit_of), *self._passed(begins)]
        return Recorded(
            units=names,
            values=tuple(sorted(values, key=lambda value: (value.maker, value.name))),
            uses=uses,
            problems=_odd(values) | self._problems(begins, unit_of),
            repeated=tuple(dict.fromkeys(each.name for each in self._calls if self._occurrences[each])),
            returned=self._returned,
            result=result,
        )

    def _outputs(self, unit_of: Sequence[int]) -> Iterator[Value]:
        for fed in self._all:
            maker = unit_of[fed.region]
            readers = tuple(sorted({unit_of[region] for region in fed.readers} - set(range(maker + 1))))
            if fed.name is not None and readers:
                yield Value(name=fed.name, maker=maker, readers=readers, tensor=fed.tensor)

    def _passed(self, begins: Sequence[int]) -> Iterator[Value]:
        """Loose arguments of the calls with which stages may begin."""
        for unit, begin in enumerate(begins[1:], 1):
            for leaf, fed in self._arguments[begin].items() if begin < len(self._arguments) else ():
                if fed.name is None and fed.region < begin:
                    name = argument_name(self._calls[begin - 1].name, leaf)
                    yield Value(name=name, maker=unit - 1, readers=(unit,), tensor=fed.tensor)

    def _problems(self, begins: Sequence[int], unit_of: Sequence[int]) -> dict[int, str]:
        problems = {}
        for unit, begin in enumerate(begins[1:], 1):
            asked = [text for region, text in self._asked.items() if region < begin]
            given = self._arguments[begin].values()
            lost = [
                fed for fed in self._all if fed.name is None and fed not in given and self._is_lost(fed, unit, unit_of)
            ]
            if asked:
                problems[unit] = (
                    f"{asked[0]}, and every stage runs that line, also those that do not have them; leave it out, or "
                    "make what is computed there an nn.Module of its own"
                )
            elif lost:
                problems[unit] = (
                    f"{lost[0].what} is made before it and used after it, and is neither an argument of "
                    f"{self._calls[begin - 1].name} nor what a module returns; {TWO_WAYS_OUT}"
                )
        return problems

    @staticmethod
    def _is_lost(fed: _Fed, cut: int, unit_of: Sequence[int]) -> bool:
        return unit_of[fed.region] < cut and any(unit_of[region] >= cut for region in fed.readers)


def _odd(values: Sequence[Value]) -> dict[int, str]:
    return {
        unit: f"{value.name.strip('>').rpartition(':')[0]} passes on or gets a sparse or nested tensor, and only plain "
        "ones cross; make it one (to_dense()), or cut elsewhere (strategy.split)"
        for value in values
        if value.tensor.layout is not torch.strided or value.tensor.is_nested
        for unit in range(value.maker + 1, value.readers[-1] + 1)
    }


def _is_quiet(func: Callable[..., Any]) -> bool:
    """Whether it tells what a placeholder can tell as well."""
    return func in KNOWN or func.__name__ in ("__repr__", "__format__")
