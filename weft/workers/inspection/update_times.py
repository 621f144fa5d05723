"""Update times: what a step of the user's optimizer takes, on the host and on a device, found out on a sample.

A step takes as long as its bytes do, so a part of a large model tells enough, and the state of the whole of it, which
may be twice the model, is never made. The sample is of whole parameters with the gradients that the units' runs have
left, so it suits any optimizer: all parameters as far as SAMPLE_BYTES go, in the order of the model, and beyond it the
smallest one of each sort that the optimizer may tell apart, so that state facts are found of every one.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from weft.plan.error_places import step_place, within
from weft.workers.devices.device import Device
from weft.workers.devices.host import HostDevice
from weft.workers.inspection.state_facts import optimizer_memory, sort_of
from weft.workers.inspection.times import TIMED_RUNS, OtherMemory, repeated
from weft.workers.snapshots.plain import why_not_plain
from weft.workers.snapshots.step_memory import LostVariables, lost_of_scheduler
from weft.workers.updates.optimizer_state import options
from weft.workload.optimizer import hook_of, make_optimizer, without_closure
from weft.workload.randomness import generator_states
from weft.workload.workload import Workload

JOINT_BYTES = 4 << 20  # of parameters on which it is seen whether they are updated apart; more for two of each sort
JOINT_STEPS = 6  # what some make of all gradients (Prodigy its rate) shows in later steps alone
JOINT_SHARE = 1e-3  # of what the steps change; rounding is less
SAMPLE_BYTES = 256 << 20  # of parameters: far beyond any cache, and tens of milliseconds a step

Sort = tuple[object, ...]


class GradientSample:
    """Keeps the gradients of some parameters and drops the others as they come. optimizer: None where nobody learns."""

    def __init__(self, optimizer: torch.optim.Optimizer | None) -> None:
        self._sorts: dict[int, Sort] = {} if optimizer is None else _sorts(optimizer)
        self._within: dict[int, nn.Parameter] = {}
        self._within_bytes = 0
        self._seen: set[Sort] = set()  # sorts of those within
        self._beyond: dict[Sort, nn.Parameter] = {}  # of other sorts
        self._bytes: dict[int, int] = {}  # of every parameter that has had a gradient, by its id
        self.sparse: set[int] = set()  # ids of parameters whose gradients are

    def take(self, module: nn.Module) -> None:
        """A unit whose parameters have the gradients of its runs."""
        for parameter in module.parameters():
            if parameter.grad is not None and id(parameter) not in self._within:
                self._take(parameter)

    def _take(self, parameter: nn.Parameter) -> None:
        if parameter.grad is not None and parameter.grad.is_sparse:
            self.sparse.add(id(parameter))
        sort = self._sorts.get(id(parameter))
        dropped: nn.Parameter | None = parameter
        if sort is not None:
            size = self._bytes[id(parameter)] = parameter.numel() * parameter.element_size()
            if self._within_bytes + size <= SAMPLE_BYTES:
                self._within[id(parameter)] = parameter
                self._within_bytes += size
                self._seen.add(sort)
                dropped = self._beyond.pop(sort, None)
            elif sort not in self._seen:
                dropped = self._larger(sort, parameter)
        if dropped is not None:
            dropped.grad = None

    def _larger(self, sort: Sort, parameter: nn.Parameter) -> nn.Parameter | None:
        """Keeps the smaller one of the sort; the other one, if there is one."""
        kept = self._beyond.setdefault(sort, parameter)
        if kept is parameter:
            return None
        if self._bytes[id(parameter)] >= self._bytes[id(kept)]:
            return parameter
        self._beyond[sort] = parameter
        return kept

    def parameters(self) -> list[nn.Parameter]:
        return [*self._within.values(), *self._beyond.values()]

    def few(self) -> list[nn.Parameter]:
        """Those with the smallest gradients: two of each sort, and more as far as JOINT_BYTES go."""
        found, seen, num_bytes = list[nn.Parameter](), Counter[Sort](), 0
        for parameter in sorted(self.parameters(), key=lambda each: self._bytes[id(each)]):
            sort, size = self._sorts[id(parameter)], self._bytes[id(parameter)]
            if seen[sort] < 2 or num_bytes + size <= JOINT_BYTES:
                found.append(parameter)
                num_bytes += size
                seen[sort] += 1
        return found

    def whole_per_part(self) -> float:
        """Bytes of all parameters that have had a gradient ÷ those of the sample."""
        part = sum(self._bytes[id(parameter)] for parameter in self.parameters())
        return sum(self._bytes.values()) / part if part else 1.0


def _sorts(optimizer: torch.optim.Optimizer) -> dict[int, Sort]:
    """By the id of each of its parameters."""
    return {
        id(parameter): (number, *sort_of(optimizer, parameter))
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }


@dataclass(frozen=True, slots=True)
class UpdateTimes:
    seconds: float  # of one step on the whole model
    optimizer: torch.optim.Optimizer  # has stepped, on the sample
    moves: bool  # whatever a step changes beside the parameters stands in `optimizer.state`
    hides: bool  # it changes what stands neither there nor among the options of its groups
    lost: Sequence[str]  # names of variables that its functions change
    draws: bool  # from torch's generators, Python's or numpy's
    is_joint: bool  # what it makes of some parameters depends on which others it updates

    @property
    def stepped(self) -> torch.optim.Optimizer | None:
        """None where its state cannot move."""
        return self.optimizer if self.moves else None


def update_times(
    workload: Workload,
    optimizer: torch.optim.Optimizer | None,
    sample: GradientSample,
    device: Device,
    *,
    host: bool,
    own: bool,
) -> tuple[UpdateTimes | None, UpdateTimes | None]:
    """On the host and on the device, of each that may update. optimizer: of parameters that are on the host; None where
    nobody learns."""
    if optimizer is None:
        return None, None
    on_host = _measured(workload, optimizer, sample, HostDevice()) if host else None
    return on_host, _on_device(workload, sample, device) if own else None


def _on_device(workload: Workload, sample: GradientSample, device: Device) -> UpdateTimes:
    """With an optimizer that is made while the sample's parameters are on the device."""
    held = [(parameter, parameter.data, parameter.grad) for parameter in sample.parameters()]
    try:
        for parameter, values, gradient in held:
            parameter.grad = None  # it cannot be on another device than its parameter
            parameter.data = device.put(values)
            parameter.grad = None if gradient is None else device.put(gradient)
        optimizer = make_optimizer(workload.optimizer, workload.model.parameters())
        assert optimizer is not None
        if optimizer.state:  # of Adagrad's constructor, which knows nothing of a kernel that is chosen after it
            optimizer.load_state_dict(optimizer.state_dict())
        return _measured(workload, optimizer, sample, device)
    finally:
        for parameter, values, _ in held:
            parameter.grad = None
            parameter.data = values


def _measured(
    workload: Workload, optimizer: torch.optim.Optimizer, sample: GradientSample, device: Device
) -> UpdateTimes:
    """Where the device has what the sample has."""
    is_joint = _is_joint(workload, optimizer, sample, device)
    scale = sample.whole_per_part()
    generators = generator_states()
    lost = LostVariables.of_optimizer(optimizer)
    with without_closure(optimizer), within(f"{step_place(optimizer)}, tried before training"):
        optimizer.step()  # makes the optimizer's state
    draws = generator_states() != generators
    before = optimizer_memory(optimizer)
    other = OtherMemory(device)

    def once() -> float:
        other.fill_caches()
        return device.timed(optimizer.step)[0]

    seconds = min(repeated(once, TIMED_RUNS))
    after = optimizer_memory(optimizer)
    return UpdateTimes(
        seconds * scale,
        optimizer,
        moves=after == before,
        hides=after[-1] != before[-1],
        draws=draws,
        lost=lost.names(),
        is_joint=is_joint,
    )


def _is_joint(workload: Workload, optimizer: torch.optim.Optimizer, sample: GradientSample, device: Device) -> bool:
    """Whether what a step makes of some parameters depends on which others it updates, beyond rounding: as where it
    goes by a norm or a mean over all of them (LAMB with a bound, Prodigy). torch's own update them apart.

    Of an optimizer that draws, that has hooks, or that raises with these gradients, nothing is said.
    """
    parameters = [parameter for parameter in sample.few() if parameter.numel()]
    if type(optimizer).__module__.startswith("torch.optim.") or hook_of(optimizer) or len(parameters) < 2:
        return False
    own = parameters[::2]
    generators = generator_states()
    with contextlib.suppress(Exception):  # the step is tried once more, where what it raises is told
        together, apart = (_after_steps(workload, optimizer, device, each, own) for each in (parameters, own))
        return generators == generator_states() and any(map(_differs, own, together, apart))
    return False


def _after_steps(
    workload: Workload,
    used: torch.optim.Optimizer,
    device: Device,
    updated: Sequence[nn.Parameter],
    told: Sequence[nn.Parameter],
) -> list[torch.Tensor]:
    """What some parameters have come to when a new optimizer has updated a number of them; all are as before then.
    Nothing, where the user's function gives one that is used already."""
    held = [(parameter, parameter.data, parameter.grad) for parameter in workload.model.parameters()]
    chosen = set(map(id, updated))
    try:
        for parameter, values, _ in held:
            parameter.grad = None
            if id(parameter) in chosen:
                parameter.data = device.put(values.clone())
        optimizer = make_optimizer(workload.optimizer, workload.model.parameters())
        if optimizer is None or optimizer is used:
            return []
        for step in range(JOINT_STEPS):
            for place, (parameter, _, gradient) in enumerate(held):
                if id(parameter) in chosen and gradient is not None:
                    parameter.grad = gradient * math.cos(place * step)  # another share of the whole in each step
            optimizer.step()
        return [parameter.data for parameter in told]
    finally:
        for parameter, values, gradient in held:
            if id(parameter) in chosen:
                parameter.data = values
            parameter.grad = gradient


def _differs(before: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> bool:
    moved = (one - before).abs().max()
    return bool((one - other).abs().max() > JOINT_SHARE * moved)


def update_facts(update: UpdateTimes | None) -> dict[str, Any]:
    """What of an inspection is told by a step; None: nobody updates."""
    return {
        "update_seconds": 0.0 if update is None else update.seconds,
        "optimizer_draws": update is not None and update.draws,
        "joint_optimizer": update is not None and update.is_joint,
    }


def unsaved(optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None, update: UpdateTimes | None) -> str | None:
    """What could not be put back into another process, as a reason; None where all can. optimizer: of all parameters;
    update: of one that has stepped."""
    stepped = optimizer if update is None else update.optimizer
    if update is not None and update.hides:
        return f"{type(stepped).__name__} keeps more than its state and its groups' options"
    own = {id(parameter) for group in stepped.param_groups for parameter in group["params"]}
    if any(id(key) not in own or not isinstance(of_one, dict) for key, of_one in stepped.state.items()):
        return f"{type(stepped).__name__} keeps state that is of no parameter"
    state = [
        {name: value for name, value in of_one.items() if not isinstance(value, torch.Tensor)}
        for of_one in stepped.state.values()
    ]
    if why := why_not_plain(lambda: {"state": state, "options": [options(group) for group in stepped.param_groups]}):
        return f"the state of {type(stepped).__name__} cannot be put back ({why})"
    if scheduler is not None and (why := why_not_plain(scheduler.state_dict)):
        return f"the state of {type(scheduler).__name__} cannot be put back ({why})"
    return None


def lost_beside(scheduler: LRScheduler | None, update: UpdateTimes | None, samplers: list[str]) -> dict[str, list[str]]:
    """What no snapshot has. samplers: that give another order when they are asked again. The scheduler moves on."""
    optimizer = [] if update is None else list(update.lost)
    return {"scheduler": lost_of_scheduler(scheduler), "optimizer": optimizer, "sampler": samplers}
