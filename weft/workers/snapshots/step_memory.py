"""Step memory: what a step leaves behind for its next run, wherever that is: in attributes of the model's modules, in
modules beside the model, in variables around its functions, in a generator of its own.

A step that leaves nothing may be run again in its place. Of one that leaves something nobody knows how to put it back.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from weft.workers.snapshots.attributes import TORCHS, Attributes, own_of
from weft.workers.snapshots.remembered import GENERATORS, VALUES_AS_THEY_ARE, WITH_STORAGE
from weft.workload.code.beside_model import modules_beside
from weft.workload.code.epoch_reads import EpochReads
from weft.workload.code.fingerprint import fingerprint
from weft.workload.code.variables import VariableSearch
from weft.workload.cutting.placeholder import Placeholder
from weft.workload.workload import Workload

# What is kept if it changes; and what a step calls, most often: of that nobody knows which part is memory.
_APART = (*WITH_STORAGE, *GENERATORS, FunctionType, BuiltinFunctionType, MethodType, ModuleType, type)
_NUM_STEPS = 3  # of a scheduler, to see what they change; arbitrary


class StepMemory:
    def __init__(self, workload: Workload) -> None:
        self._modules = list(workload.model.modules())
        self._functions: dict[bool, list[Any]] = {  # by whether it learns
            True: [workload.step or workload.loss],
            False: [workload.validate or workload.step or list(workload.functions.values())],
        }
        self.has_buffers = any(
            buffer is not None for module in modules_beside(workload).values() for buffer in module._buffers.values()
        )  # beside the model: too much to look at, perhaps

    def look(self, *, learns: bool) -> str | None:
        """Another one after a run that has left something; None where nobody can tell. Of the model attributes alone:
        its parameters and buffers are known."""
        own = [
            {key: value for key, value in vars(module).items() if not (key in TORCHS or isinstance(value, Placeholder))}
            for module in self._modules
        ]
        return fingerprint(own, self._functions[learns], apart=self._modules)

    def close(self) -> None:
        """For good: lets go of the model, and of what functions have hold of."""
        self._modules, self._functions = [], {True: [], False: []}


class LostAttributes:
    """What snapshots do not have of what modules remember: what stands there, and what has changed inside of it."""

    def __init__(self, workload: Workload) -> None:
        """As its model was built."""
        model, search = workload.model, VariableSearch(workload)
        modules = dict(model.named_modules())
        self._attributes = Attributes({**modules, **search.variables})
        named = search.variables.items()
        own = {name: each for name, each in named if name.startswith("Workload.model.") and type(each) is dict}
        self._holders = {**modules, **own}  # of the model alone: functions may refer to data
        self._known = [*modules.values(), *model.parameters(), *model.buffers(), *search.objects]
        self._iterators = [(name, each, _place_of(each)) for name, each in search.iterators.items()]
        self._first = self._inside()
        self._of_epoch = EpochReads(workload)

    def of_epoch(self, units: Sequence[str], counted: Collection[str]) -> dict[str, list[str]]:
        """What has changed since that `on_epoch` reads, by name, and for each the unit that keeps it; and what it may
        set. units: names. counted: as of EpochReads."""
        changed, sets = self._of_epoch.changed(units, counted), self._of_epoch.sets
        of_steps = {"on_epoch": [name for name, _ in changed], "on_epoch_units": [unit for _, unit in changed]}
        return of_steps | {"on_epoch_sets": [] if sets is None else [sets]}

    def names(self) -> list[str]:
        """Of those that have changed since, or of iterators may have, with what they are."""
        kept, told = self._attributes.changed(), self._attributes.lost()
        known = {each.rpartition(" (")[0] for each in told} | {_name(m, key) for m in kept for key in kept[m]}
        for (module, key), (value, look) in self._inside().items():
            before, looked = self._first.get((module, key), (None, None))
            if before is value and looked != look and _name(module, key) not in known:
                told.append(f"{_name(module, key)} (a {type(value).__name__})")
        moved = [(name, each) for name, each, place in self._iterators if place is None or _place_of(each) != place]
        return told + [f"{name} (a {type(each).__name__})" for name, each in moved]

    def _inside(self) -> dict[tuple[str, str], tuple[Any, str | None]]:
        """Looks at what snapshots do not have if it changes, by the module's name and the attribute's."""
        looks: dict[int, str | None] = {}  # by id, since many modules may have one
        found = {}
        for name, holder in self._holders.items():
            for key, value in own_of(holder):
                if type(value) not in VALUES_AS_THEY_ARE and not isinstance(value, _APART):
                    if id(value) not in looks:
                        looks[id(value)] = fingerprint(value, apart=self._known)
                    found[name, key] = value, looks[id(value)]
        return found


class LostVariables:
    """What functions change from now on, of what neither an optimizer's state has nor a scheduler's."""

    def __init__(self, functions: Mapping[str, Any]) -> None:
        """By name; classes, too."""
        search = VariableSearch(functions)
        self._attributes = Attributes(search.variables)
        self._iterators = [(name, each, _place_of(each)) for name, each in search.iterators.items()]

    def names(self) -> list[str]:
        kept, lost = self._attributes.changed(), self._attributes.lost()
        changed = {_name(holder, key) for holder in kept for key in kept[holder]}
        moved = {name for name, each, place in self._iterators if place is None or _place_of(each) != place}
        return sorted({*changed, *(each.rpartition(" (")[0] for each in lost), *moved})

    @classmethod
    def of_optimizer(cls, optimizer: torch.optim.Optimizer) -> LostVariables:
        """Of its class, and of hooks on its step."""
        hooks = {
            f"Workload.optimizer.{name}.{number}": hook
            for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
            for number, hook in enumerate(getattr(optimizer, name, {}).values())
        }
        return cls({"Workload.optimizer": type(optimizer), **hooks})


def lost_of_scheduler(scheduler: LRScheduler | None) -> list[str]:
    """What its functions change where its state does not have it, by name. It is stepped for that."""
    if scheduler is None or isinstance(scheduler, ReduceLROnPlateau):
        return []
    lost = LostVariables(dict(_functions_of(scheduler, "Workload.scheduler")))
    with contextlib.suppress(Exception):  # which is raised again where it trains
        for _ in range(_NUM_STEPS):
            scheduler.step()
    return lost.names()


def _functions_of(scheduler: LRScheduler, name: str) -> Iterator[tuple[str, Any]]:
    """Of an object that is called in their place its own attributes are in the state, and its class's are not."""
    yield name, type(scheduler)
    for key, value in vars(scheduler).items():
        for number, each in enumerate(value if isinstance(value, (list, tuple)) else [value]):
            place = f"{name}.{key}.{number}"
            if isinstance(each, LRScheduler):
                yield from _functions_of(each, place)
            elif isinstance(each, (FunctionType, partial)) or (key != "optimizer" and isinstance(each, MethodType)):
                yield place, each
            elif callable(each) and not isinstance(each, torch.optim.Optimizer):
                yield place, type(each)


def _place_of(iterator: object) -> str | None:
    """Where it stands; None of one that does not say."""
    return repr(iterator) if type(iterator) is itertools.count else None


def _name(module: str, key: str) -> str:
    return f"{module}.{key}".removeprefix(".")
