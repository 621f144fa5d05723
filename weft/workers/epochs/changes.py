"""Changes: what a function of the user's that is asked after an epoch has left for the next one, in attributes of
modules and in variables that the step refers to.

    model.heat *= 0.5      LOSSES.clear()      WAYS["kl"] = 1.0      model.accuracy.reset()

Each process has these for itself, and the function runs in one of them: what it has changed all others are told. It is
written as in snapshots; of a dictionary by its keys, since under others each process may count for itself.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import nn

from weft.workers.snapshots.attributes import Attributes, Kept, check_kept, namespace_of, own_of
from weft.workers.snapshots.first_reads import FirstReads
from weft.workers.snapshots.plain import packed
from weft.workers.snapshots.remembered import (
    GENERATORS,
    WITH_STORAGE,
    CodeError,
    LargeError,
    NotPlainError,
    are_equal,
    written_alone,
)
from weft.workload.code.functions import functions_from, undecorated, words_in
from weft.workload.code.places import AllParts, Arguments, Variables, place_of
from weft.workload.code.places import Place as CodePlace
from weft.workload.code.variables import VariableSearch
from weft.workload.cutting.names import Attribute, slots_of
from weft.workload.cutting.placeholder import Placeholder
from weft.workload.workload import WorkloadError

MAX_BYTES = 1 << 24  # arbitrary: of one tensor, and of all that is told of one epoch; it passes through the daemon
MAX_COMPARED = 1 << 26  # arbitrary: of modules beside the model, bytes that are copied to be compared
MAX_DICTIONARIES = 1_000  # arbitrary: whose keys are told one by one; of others all that is in them

Holders = Mapping[str, nn.Module | Variables]
Place = tuple[str, str]  # a module's name, or that of variables, and the attribute's


@dataclass(slots=True)
class ToldChanges:
    """What was changed: as all others are told it, and by name."""

    told: Kept = field(default_factory=dict)
    beside: dict[Place, torch.Tensor] = field(default_factory=dict)  # the model, in modules
    before: list[tuple[str, str, Any]] = field(default_factory=list)  # what stood here, where others may have another
    options: list[tuple[int, str, Any]] = field(default_factory=list)  # of the optimizer's groups, by their numbers
    trained: dict[str, bool] = field(default_factory=dict)  # parameters' `requires_grad`, by their names
    state: dict[str, torch.Tensor] = field(default_factory=dict)  # buffers, and parameters that nobody trains
    unasked: list[Place] = field(default_factory=list)  # of what is told, that no step's code asks for by name
    refused: list[str] = field(default_factory=list)  # others would go on with another value
    untold: list[str] = field(default_factory=list)  # others may have no use for it; with what it is

    def packed(self) -> bytes:
        """Nothing where there is nothing to tell. Raises WorkloadError where it is too much."""
        if not any((self.told, self.beside, self.options, self.trained, self.state)):
            return b""
        data = packed(self._message())
        if len(data) > MAX_BYTES and self.unasked:
            for name, key in self.unasked:
                del self.told[name][key]
            data = packed(self._message())
        if len(data) > MAX_BYTES:
            told = [(_called(name, key), each) for name, own in self.told.items() for key, each in own.items()]
            told += self.state.items()
            raise WorkloadError(
                f"Workload.on_epoch has changed {len(data) / 2**20:.3g} MiB of what other processes have for "
                f"themselves, most of it in {max((len(packed(each)), name) for name, each in told)[1]:.80}, and they "
                f"are told {MAX_BYTES >> 20} MiB at most; change less there, or use one worker (strategy.stages = 1)"
            )
        return data

    def _message(self) -> dict[str, Any]:
        beside = {place: each.to("cpu", copy=True) for place, each in self.beside.items()}
        of_model = {"options": self.options, "trained": self.trained, "state": self.state}
        return {"told": self.told, "before": self.before, "beside": beside, **of_model}


class EpochChanges:
    """From where it was made: `watching` while the function runs, then `find`."""

    def __init__(
        self,
        model: nn.Module | None,
        own: Collection[Attributes],
        counted: Collection[str],
        *,
        has_one_replica: bool = True,
    ) -> None:
        """model: as this process has it, None where nobody has hold of it any more. own: of the stages that train it
        here. counted: attributes that other stages count, so what stands here is old. has_one_replica: so modules
        beside the model are of use to the stages before at most."""
        self._has_one_replica = has_one_replica
        self._modules = {} if model is None else dict(model.named_modules())
        self._holders: Holders = {**self._modules, **{name: one for each in own for name, one in each.holders.items()}}
        self._inside = _Dictionaries(self._holders)
        self._attributes = Attributes({**self._holders, **self._inside.by_name})
        self._beside = _Beside({name: each for name, each in self._holders.items() if name not in self._modules})
        here = {name for each in own for name in each.modules}
        self._elsewhere = {name: module for name, module in self._modules.items() if name not in here}
        self._before = {
            (name, key): written_alone(value)
            for name, holder in {**self._holders, **self._inside.by_name}.items()
            if self._inside.top(name) in self._elsewhere
            for key, value in own_of(holder)
        }
        watched = {Attribute(each, key) for each in self._elsewhere.values() for key, _ in own_of(each)}
        places = [(path, key) for path, _, key in (name.rpartition(".") for name in counted)]
        watched |= {Attribute(self._modules[path], key) for path, key in places if path in self._modules}
        self._watched = FirstReads(watched)

    def watching(self) -> AbstractContextManager[object]:
        return self._watched.watching()

    def find(
        self, found: ToldChanges, functions: Iterable[Any], places: Collection[CodePlace] = (), *, are_run: bool = True
    ) -> None:
        """functions: that stages run, which go by some of the variables. places: of those that updates go by. are_run:
        whether other processes run any of the model; where they update alone they have no use for the rest."""
        set_anew = self._set_anew()
        if are_run:
            self._find_beside(found)
        changes = self._attributes.all_changed(set_anew, MAX_BYTES)
        changed = [each for each in changes if not self._inside.has(self._holders, *each[:2])]
        if not changed:
            return
        steps = _Steps(functions, self._modules.get(""), places) if are_run else _Steps((), None, places)
        untold: dict[CodePlace, str] = {}
        for name, key, value in changed:
            top, first = self._inside.places.get(name, (name, key))
            outer, holder = self._holders[top], self._inside.by_name.get(name, self._holders[top])
            is_module = isinstance(outer, nn.Module)
            if not (are_run if is_module else steps.go_by(outer, first)):
                continue
            if type(namespace_of(outer).get(first)) in GENERATORS:  # each process draws from one of its own
                found.refused += [_called(name, key)] if is_module else []
            elif not isinstance(value, NotPlainError):
                found.told.setdefault(name, {})[key] = value
                if not (is_module or steps.ask_for(holder, key)):
                    found.unasked.append((name, key))
                if (name, key) in self._before and (name, key) not in set_anew:
                    found.before.append((name, key, self._before[name, key]))
            elif (str(value) or not is_module) and steps.ask_for(holder, key):
                is_code = isinstance(value, CodeError) and (top in self._modules or not self._has_one_replica)
                if is_code or isinstance(value, LargeError):
                    found.refused.append(_called(name, key))
                else:  # a variable that step and on_epoch have hold of has two names
                    place = (id(holder), key) if isinstance(holder, nn.Module) else place_of(holder, key)
                    untold.setdefault(place, _called(name, key))
        found.untold += untold.values()

    def _find_beside(self, found: ToldChanges) -> None:
        found.beside = self._beside.changed()
        if sum(each.nbytes for each in found.beside.values()) > MAX_BYTES:
            (name, key), _ = max(found.beside.items(), key=lambda item: item[1].nbytes)
            (found.untold if self._has_one_replica else found.refused).append(_called(name, key))
            found.beside = {}

    def _set_anew(self) -> set[Place]:
        """Whatever stands there elsewhere, and nobody has looked at what stood here: told even if that was the same."""
        names = {id(module): name for name, module in self._modules.items()}
        return {(names[id(each.module)], each.key) for each in self._watched.written - self._watched.read}


def take(message: Mapping[str, Any], own: Attributes) -> None:
    """What `ToldChanges` has packed, in another process. own: of a stage. Errors: WorkloadError."""
    told, inside = check_kept(message["told"]), _Dictionaries(own.holders)
    holders = {**own.holders, **inside.by_name}
    for name, key, before in message["before"]:
        now = dict(own_of(holders[name])).get(key) if inside.top(name) in own.modules else None
        if now is not None and before is not None and not are_equal(written_alone(now), before):
            raise WorkloadError(
                f"Workload.on_epoch has changed {_called(name, key):.80}, and so has the forward of another stage in "
                "its own process, which on_epoch knows nothing of; keep it in a buffer, or use strategy.stages = 1"
            )
    Attributes(holders).restore(told)
    _take_state(message["trained"], message["state"], own.holders)
    for (name, key), value in message["beside"].items():
        if isinstance(module := own.holders.get(name), nn.Module):
            _set_beside(module, key, value)
    own.note_restored(inside.places.get(name, (name, key)) for name, values in told.items() for key in values)


def _take_state(trained: Mapping[str, bool], state: Mapping[str, torch.Tensor], holders: Holders) -> None:
    """By the names of parameters and buffers. What stands in the place of another stage's is left as it is."""
    for name in {*trained, *state}:
        path, _, key = name.rpartition(".")
        module = holders.get(path)
        slots: dict[str, Any] = {**module._parameters, **module._buffers} if isinstance(module, nn.Module) else {}
        if (there := slots.get(key)) is None or isinstance(there, Placeholder):
            continue
        if name in trained:
            there.requires_grad_(trained[name])
        if name in state:
            there.detach().copy_(state[name])


class _Dictionaries:
    """Those with texts as keys, in attributes and variables and in one another."""

    def __init__(self, holders: Holders) -> None:
        self.by_name: dict[str, Variables] = {}
        self.places: dict[str, Place] = {}  # in the holders, of each, or of the outermost that it is in
        self._stood: dict[Place, str] = {}  # names, by where each stood
        left: list[tuple[str, Any, Place | None]] = [(name, holder, None) for name, holder in holders.items()]
        for name, holder, place in left:  # which grows
            for key, value in own_of(holder):
                own = f"{name}/{key}"
                is_one = type(value) is dict and all(type(each) is str for each in value)
                if is_one and own not in self.by_name and len(self.by_name) < MAX_DICTIONARIES:
                    self.by_name[own], self.places[own] = value, place or (name, key)
                    self._stood[name, key] = own
                    left.append((own, value, self.places[own]))

    def top(self, name: str) -> str:
        """The holder in which it is, or itself."""
        return self.places[name][0] if name in self.places else name

    def has(self, holders: Holders, name: str, key: str) -> bool:
        """Whether the one that stood in a place still does: its keys tell what has changed."""
        own = self._stood.get((name, key))
        holder = holders[name] if name in holders else self.by_name[name]
        return own is not None and dict(own_of(holder)).get(key) is self.by_name[own]


class _Beside:
    """Parameters and buffers of modules beside the model (a loss, a teacher), which each process has for itself."""

    def __init__(self, holders: Holders) -> None:
        modules = {name: each for name, each in holders.items() if isinstance(each, nn.Module)}
        self._slots = [(name, own) for name, each in modules.items() for own in slots_of(each)]
        sizes = itertools.accumulate(tensor.nbytes for _, tensor in self._now())
        self._before = {
            place: (tensor, _numbers(tensor, is_copied=size <= MAX_COMPARED))
            for (place, tensor), size in zip(self._now(), sizes, strict=True)
        }

    def changed(self) -> dict[Place, torch.Tensor]:
        found: dict[Place, torch.Tensor] = {}
        for place, tensor in self._now():
            there, numbers = self._before.get(place, (None, None))
            is_copied = isinstance(numbers, torch.Tensor)
            if there is not tensor or not are_equal(_numbers(tensor, is_copied=is_copied), numbers):
                found[place] = tensor.detach()
        return found

    def _now(self) -> Iterator[tuple[Place, torch.Tensor]]:
        for name, own in self._slots:
            yield from (((name, key), each) for key, each in own.items() if type(each) in WITH_STORAGE)


def _numbers(tensor: torch.Tensor, *, is_copied: bool) -> Any:
    """Who writes by `.data` leaves its version as it is; of many only that is looked at."""
    return tensor.detach().clone() if is_copied else tensor._version


def _set_beside(module: nn.Module, key: str, value: torch.Tensor) -> None:
    for own in slots_of(module):
        if (there := own.get(key)) is not None:
            if (there.shape, there.dtype) == (value.shape, value.dtype):
                there.detach().copy_(value)
            elif isinstance(there, nn.Parameter):
                own[key] = nn.Parameter(value.to(there.device), requires_grad=there.requires_grad)
            else:
                own[key] = value.to(there.device)
            return
    module._buffers[key] = value


def places_from(functions: Iterable[Any]) -> set[CodePlace]:
    """Of variables that they refer to."""
    search = VariableSearch({f"function {number}": each for number, each in enumerate(functions)})
    return {place_of(own, key) for own in search.variables.values() for key in own}


class _Steps:
    """What the steps of all processes go by."""

    def __init__(self, functions: Iterable[Any], model: nn.Module | None, places: Collection[CodePlace] = ()) -> None:
        self._roots = {f"function {number}": each for number, each in enumerate(functions)}
        self._model = model
        self._places = places_from([*self._roots.values(), model]).union(places)

    def go_by(self, variables: nn.Module | Variables, key: str) -> bool:
        return not isinstance(variables, nn.Module) and place_of(variables, key) in self._places

    def ask_for(self, variables: nn.Module | Variables, key: str) -> bool:
        """By name, or by none: a part of a container, an argument."""
        return isinstance(variables, (AllParts, Arguments)) or key in self._names

    @functools.cached_property
    def _names(self) -> set[str]:
        """In their code, of variables around it and of keys, too."""
        kinds = {kind for module in self._model.modules() for kind in type(module).__mro__} if self._model else set()
        methods = [undecorated(each) for kind in kinds - {nn.Module, object} for each in vars(kind).values()]
        functions = [*self._roots.values(), *(each for each in methods if isinstance(each, FunctionType))]
        codes = [own.__code__ for each in functions for own in functions_from(each)]
        return set[str]().union(*map(words_in, codes))


def _called(name: str, key: str) -> str:
    return f"{name}.{key}".removeprefix(".").replace("/", ".")
