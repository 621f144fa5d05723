"""The whole model, as training has left it: for a function of the user's that is asked between two iterations.

Each worker has some stages of it, or older values, or a device's. What all have come to lies in the host's shared
memory behind an epoch that is judged, where the model that is saved comes from: the function finds that in its model.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from weft.plan.plan import StagePlan
from weft.plan.worker_view import WorkerView
from weft.workers.epochs.changes import EpochChanges, ToldChanges, places_from
from weft.workers.epochs.options import OptionChanges
from weft.workers.epochs.read_elsewhere import ReadElsewhere, weak
from weft.workers.snapshots.attributes import Attributes, Modes
from weft.workers.snapshots.first_reads import asking
from weft.workers.snapshots.remembered import MAX_BYTES
from weft.workload.code.functions import found_from
from weft.workload.code.variables import hooks_of
from weft.workload.cutting.names import slots_of
from weft.workload.cutting.placeholder import Placeholder
from weft.workload.optimizer import made_optimizers
from weft.workload.units import is_cut_by_calls, units
from weft.workload.workload import Workload, WorkloadError

_PART: Final = (
    "weft: Workload.on_epoch asks for the state of an optimizer, which has in this process what is updated here, and "
    "not all of it; the job's own checkpoints have all, and `weft run --resume` goes on from them"
)
_UNTOLD: Final = (
    "weft: Workload.on_epoch has set {name} in the last stage's process, and steps in other processes refer to it, "
    "too, which have one of their own: they are told of numbers, text, tensors, enums, and lists and dicts of these"
)
_UNSAVED: Final = (
    "weft: Workload.on_epoch has set {name}, which no snapshot or checkpoint has, so it begins anew after a lost "
    "worker or a resume; have it set a number or text by which that is chosen"
)


class WholeModel:
    """Of one worker's workload. It keeps none of what the worker has no use for, so there is nothing to be shown where
    no function of the user's has the model."""

    def __init__(self, workload: Workload, view: WorkerView, own: Sequence[StagePlan], *, on_host: bool) -> None:
        """own: stages of the first replica that train this very model; another one may have one of its own here.
        on_host: the model is another device's, and is shown in host memory."""
        self._model, self._on_host = weakref.ref(workload.model), on_host
        others = [stage for stage in view.first_stages if stage not in own]
        self._own_state = {name for stage in own for name in stage.state}
        self._own = self._own_state - {name for each in others for name in each.state}
        self._trained_elsewhere: dict[str, bool] = {}  # of parameters that others have, their `requires_grad`
        self._counted_elsewhere = {name for each in others for name in each.counts}
        self._elsewhere: list[weakref.ref[nn.Module]] = []  # units that others train and evaluate
        for number, (prefix, unit) in enumerate(() if is_cut_by_calls(workload) else units(workload.model)):
            if any(stage.first <= number < stage.last for stage in own):
                self._own |= {prefix + name for name, _ in unit.named_buffers()}
            else:
                self._elsewhere.append(weakref.ref(unit))
        self._optimizers = [each for _, each in found_from(workload.on_epoch, "on_epoch", torch.optim.Optimizer)]
        self._is_alone = len(own) == sum(replica.num_stages for replica in view.replicas)
        self._has_one_replica = len(view.replicas) == 1
        self._read_elsewhere = ReadElsewhere(workload)
        of_steps = [workload.step, workload.loss, workload.validate, workload.weight, *workload.metrics.values()]
        self._functions = [*map(weak, of_steps)]
        hooks = (each for module in workload.model.modules() for each in hooks_of(module).values())
        updating = (workload.optimizer, workload.scheduler, *hooks)  # of what this process will not have any more
        self._updating = places_from(updating) if workload.on_epoch else set()
        named = list(dict(workload.model.named_parameters()).values())
        buckets = () if view.synchronisation is None else view.synchronisation.buckets
        updated = {id(named[place.parameter]) for bucket in buckets for place in bucket.places}
        every = workload.model.named_parameters(remove_duplicate=False)
        self._in_buckets = {name for name, parameter in every if id(parameter) in updated}  # replicas have one of each
        self._told = set[str]()
        self._updates = self._is_alone and view.synchronisation is None  # by the user's own optimizer
        self._has_windows = any(replica.working_window is not None for replica in view.replicas)
        self._is_shared = not any(replica.private or replica.device == "gpu" for replica in view.replicas)

    def go_on(self, modes: Modes | None) -> None:
        """modes: of the first replica's modules, as they were saved."""
        every = {} if modes is None else modes
        flags = {f"{name}.{key}".lstrip("."): flag for name, (_, own) in every.items() for key, flag in own.items()}
        self._trained_elsewhere = {name: flag for name, flag in flags.items() if name not in self._own_state}

    @contextmanager
    def shown(
        self, state: Mapping[str, torch.Tensor], own: Collection[Attributes], *, training: bool
    ) -> Iterator[ToldChanges]:
        """While no lane runs. state: what would be saved, by name. own: attributes of the stages that train it here.
        training: the mode that the epoch has left. What is found behind it all other processes are to be told. Raises
        WorkloadError for a change that would be lost, or that they would not have."""
        model, shown = self._model(), list[_Shown | _Own]()
        if model is not None:
            for unit in filter(None, (each() for each in self._elsewhere)):
                unit.train(training)
            whole = {name: _with_storage(each) for name, each in state.items()}
            shown = [*self._parameters(model, whole), *self._buffers(model, whole)]
        optimizers = [] if self._updates else [*self._optimizers, *made_optimizers()]  # it may have one in a list
        read, options = self._read_elsewhere.values(), OptionChanges(optimizers)
        changes, found = None if self._updates else self._changes(model, own), ToldChanges()
        lost = _lost(own)
        try:
            for each in shown:
                each.begin()
            _set_trained(model, self._trained_elsewhere)
            flags = self._flags(model)
            with ExitStack() as stack:
                stack.enter_context(asking())
                stack.enter_context(_own_gradients(model))
                stack.enter_context(self._asked_for_state(optimizers))
                if changes is not None:
                    stack.enter_context(changes.watching())
                yield found
            changed = [name for each in shown if each.has_changed() for name in each.tell(found)]
            found.trained |= {name: flag for name, flag in self._flags(model).items() if flags.get(name, flag) != flag}
            changed += self._read_elsewhere.changed(read)
            options.find(found)
            if changes is not None:
                run = (each() for each in self._functions)
                changes.find(found, run, self._updating, are_run=not self._is_alone)
        finally:
            for each in shown:
                each.end()
        _set_trained(model, found.trained)
        self._trained_elsewhere |= {name: flag for name, flag in found.trained.items() if name not in self._own_state}
        self._tell_once(_UNTOLD.format(name=name) for name in found.untold)
        self._tell_once(_UNSAVED.format(name=name) for key, name in _lost(own).items() if key not in lost)
        for name in [*changed, *found.refused]:
            raise WorkloadError(
                f"Workload.on_epoch has changed {name:.80}, of which other processes have parts or copies of their "
                "own; change it in the step, or in the model's train(), which each of them calls before each epoch, "
                "what a dataset goes by in its set_epoch(e), and learning rates by Workload.scheduler; a function or "
                "module is chosen by a number or text that on_epoch sets, which all are told of"
            )

    def _changes(self, model: nn.Module | None, own: Collection[Attributes]) -> EpochChanges:
        return EpochChanges(model, own, self._counted_elsewhere, has_one_replica=self._has_one_replica)

    @contextmanager
    def _asked_for_state(self, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
        """optimizers: which have here what this process updates, or nothing. Tells once of a script that saves that."""
        hooks = [each.register_state_dict_pre_hook(self._tell_part) for each in optimizers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _tell_part(self, optimizer: torch.optim.Optimizer) -> None:
        self._tell_once([_PART])

    def _tell_once(self, lines: Iterable[str]) -> None:
        """Among what the function prints."""
        for line in lines:
            if line not in self._told:
                print(line, file=sys.stderr)
            self._told.add(line)

    def _flags(self, model: nn.Module | None) -> dict[str, bool]:
        """What is trained, where nobody else would know of a change."""
        if model is None or not (self._on_host or not self._is_alone):
            return {}
        return {name: each.requires_grad for name, each in model.named_parameters()}

    def _parameters(self, model: nn.Module, state: Mapping[str, torch.Tensor]) -> Iterator[_Shown]:
        made: dict[int, nn.Parameter] = {}  # by the id of what they stand for, which may stand in several places
        for slots, key, name in _places(model, 0):
            is_one = self._has_one_replica or name in self._in_buckets
            may_change = self._is_shared and not self._on_host and is_one
            before, value = slots[key], state.get(name)
            is_told = not self._has_windows and (
                self._on_host or not (before.requires_grad or name in self._in_buckets)
            )
            if self._on_host or isinstance(before, Placeholder):
                if id(before) not in made:
                    data = before.detach().cpu() if value is None else value
                    made[id(before)] = nn.Parameter(data, requires_grad=before.requires_grad)
                yield _Shown(slots, key, name, before, made[id(before)], may_change, is_told)
            elif value is not None:
                yield _Shown(slots, key, name, before, value, may_change, is_told)

    def _buffers(self, model: nn.Module, state: Mapping[str, torch.Tensor]) -> Iterator[_Shown | _Own]:
        for slots, key, name in _places(model, 1):
            before, value = slots[key], state.get(name)
            if value is not None and (self._on_host or name not in self._own):
                yield _Shown(slots, key, name, before, value, may_change=False, is_told=True)
            elif self._on_host and not isinstance(before, Placeholder):
                yield _Shown(slots, key, name, before, before.cpu(), may_change=False, is_told=True)
            elif value is not None:
                yield _Own(slots, key, name, value, may_change=self._has_one_replica)


def _set_trained(model: nn.Module | None, flags: Mapping[str, bool]) -> None:
    """flags: `requires_grad` of parameters, by name. What stands in the place of another stage's has none to set."""
    for name, parameter in () if model is None or not flags else model.named_parameters(remove_duplicate=False):
        if name in flags and not isinstance(parameter, Placeholder):
            parameter.requires_grad_(flags[name])


@contextmanager
def _own_gradients(model: nn.Module | None) -> Iterator[None]:
    """What a backward inside leaves in `grad` is no part of the next step: a loop's `zero_grad()` drops it."""
    parameters = [] if model is None else list(model.parameters())
    before = [parameter.grad for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient


@dataclass(slots=True)
class _Shown:
    """What stands in one place of a module for a while: another tensor, or the same parameter with other data."""

    slots: dict[str, Any]
    key: str
    name: str
    before: torch.Tensor
    now: torch.Tensor
    may_change: bool  # in place, and all have it
    is_told: bool  # to the others
    data: torch.Tensor | None = None  # that a parameter had
    version: int = 0
    address: int = 0
    values: torch.Tensor | None = None  # of a small one that is told: who writes by `.data` leaves its version as it is

    def begin(self) -> None:
        if isinstance(self.before, nn.Parameter) and not isinstance(self.now, nn.Parameter):
            self.data, self.before.data, self.now = self.before.data, self.now, self.before
        self.slots[self.key] = self.now
        self.version, self.address = self.now._version, self.now.data_ptr()
        if self.is_told and not self.may_change and self.now.nbytes <= MAX_BYTES:
            self.values = self.now.detach().clone()

    def has_changed(self) -> bool:
        there = self.slots.get(self.key)
        if there is not self.now or there.data_ptr() != self.address:
            return True
        is_other = self.values is not None and not torch.equal(self.values, there.detach())
        return not self.may_change and (is_other or there._version != self.version)

    def tell(self, found: ToldChanges) -> list[str]:
        """Its name, where nobody can be told."""
        there = self.slots.get(self.key)
        if not self.is_told or not _tell(there, self.name, self.now, found):
            return [self.name]
        value = found.state[self.name]
        if there is not self.now:
            self.now.detach().copy_(value)
        if not isinstance(self.before, Placeholder) and self.before is not self.now:
            self.before.detach().copy_(value)
        return []

    def end(self) -> None:
        if self.data is not None:
            self.before.data = self.data
        self.slots[self.key] = self.before


@dataclass(slots=True)
class _Own:
    """A buffer that is this worker's own, and its place in what is saved."""

    slots: dict[str, Any]
    key: str
    name: str
    home: torch.Tensor
    may_change: bool
    before: tuple[int, int] = (0, 0)
    values: torch.Tensor | None = None  # as of _Shown

    def begin(self) -> None:
        self.before = self._now()
        there = self.slots.get(self.key)
        if there is not None and not self.may_change and there.nbytes <= MAX_BYTES:
            self.values = there.detach().clone()

    def has_changed(self) -> bool:
        there = self.slots.get(self.key)
        is_other = self.values is not None and there is not None and not torch.equal(self.values, there.detach())
        return not self.may_change and (is_other or self._now() != self.before)

    def tell(self, found: ToldChanges) -> list[str]:
        """As of _Shown."""
        return [] if _tell(self.slots.get(self.key), self.name, self.home, found) else [self.name]

    def end(self) -> None:
        there = self.slots.get(self.key)
        if there is not None and there.shape == self.home.shape:
            self.home.copy_(there.detach())

    def _now(self) -> tuple[int, int]:
        return id(there := self.slots.get(self.key)), 0 if there is None else there._version


def _tell(there: torch.Tensor | None, name: str, like: torch.Tensor, found: ToldChanges) -> bool:
    """Whether it can be: all others have one like it."""
    if there is None or (there.shape, there.dtype) != (like.shape, like.dtype):
        return False
    found.state[name] = there.detach().clone()
    return True


def _places(model: nn.Module, which: int) -> Iterator[tuple[dict[str, Any], str, str]]:
    """which: of `slots_of`. With the names that a state dict has."""
    for prefix, module in model.named_modules():
        slots = slots_of(module)[which]
        yield from ((slots, key, f"{prefix}.{key}".lstrip(".")) for key, each in slots.items() if each is not None)


def _lost(own: Iterable[Attributes]) -> dict[str, str]:
    """What snapshots do not have, by its last name: a variable has one for each function that refers to it."""
    return {name.rpartition(".")[2]: name for each in own for name in reversed(each.lost())}


def _with_storage(tensor: torch.Tensor) -> torch.Tensor:
    """In the same memory, and with a storage of its own: torch saves storages whole, and each for one dtype only."""
    if not tensor.numel():  # numpy gives it strides by which torch sees no other dtype
        return tensor.clone()
    flat = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)  # what is shared has no gaps
    return torch.from_numpy(flat.numpy()).view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
