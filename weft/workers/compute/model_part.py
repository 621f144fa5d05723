"""Model part: what a stage has of the user's model, however it is cut."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import nn

from weft.plan.plan import StagePlan
from weft.plan.worker_view import WorkerView
from weft.workers.devices.device import Memory
from weft.workload.aliases import dense_parts
from weft.workload.code.beside_model import modules_beside
from weft.workload.code.own_classes import Modules, modules_of
from weft.workload.code.places import Variables
from weft.workload.code.variables import variables_of
from weft.workload.cutting.names import named_tensors
from weft.workload.cutting.placeholder import Placeholder
from weft.workload.cutting.skipped import SkippedCalls, unpickled
from weft.workload.units import Unit, is_cut_by_calls, named_state, units
from weft.workload.workload import Workload, WorkloadError


class ModelPart(Protocol):
    def named_state(self) -> list[tuple[str, torch.Tensor]]:
        """As they are now; by their names in the whole model's state dict."""

    def buffers(self) -> dict[str, torch.Tensor]:
        """As they are now, those too that no state dict has; by their names in the whole model. Parameters that nobody
        trains and the step itself changes are among them, and what modules beside the model have."""

    def parameters(self) -> list[nn.Parameter]:
        """Each once, in the order of the model."""

    def modules(self) -> dict[str, nn.Module]:
        """Whose attributes are the stage's, by their names in the whole model, and those beside it; before anything of
        it has moved."""

    def adopt(self, device: Memory) -> None:
        """Brings it to the device."""


@dataclass(frozen=True, slots=True)
class OwnPart:
    """What a stage has, of the worker's workload, or of one that was made for it alone."""

    workload: Workload
    part: ModelPart
    parameters: list[nn.Parameter]  # of the whole model, in its order
    skipped: SkippedCalls | None  # of a model that is cut by its own forward
    modules: Modules  # with the classes that the workload's functions know
    variables: Mapping[str, Variables]  # of the workload, which its first stage here has


def own_parts(
    view: WorkerView, workload: Workload, again: Callable[[], Workload], device: torch.device
) -> list[OwnPart]:
    """Of each stage of a worker. again: makes another workload, with nothing in it that the first one has.

    Stages of one worker that share a parameter have one each, as in workers of their own: both gradients are whole
    then, and are added as the graph has it. A model that is cut by its own forward can be one stage's alone. A copy
    would not do: a step, or a hook of the model, may refer to that very model. Errors: WorkloadError.
    """
    found: list[OwnPart] = []
    taken: set[int] = set()
    for plan in view.stages:
        others = _with_others(plan, view.first_stages)
        own, part = workload, part_of(workload, plan, others)
        held = {id(parameter) for parameter in part.parameters()}
        if held & taken or (found and isinstance(part, CallPart)):
            own = again()
            check_built(own.model, view.first_stages)
            part = part_of(own, plan, others)
        taken |= held
        modules = modules_of(own.model)
        skipped = unpickled(view.skipped_calls, device, modules) if isinstance(part, CallPart) else None
        variables = {} if any(each.workload is own for each in found) else variables_of(own)
        found.append(OwnPart(own, part, list(own.model.parameters()), skipped, modules, variables))
    return found


@dataclass(frozen=True, slots=True)
class WithOthers:
    """What a stage has to do with others, by name: attributes that others alone change, those that stages before it
    change, too, and state that is others', too."""

    counted_elsewhere: Collection[str] = ()
    counted_before: Collection[str] = ()
    shared: Collection[str] = ()


ALONE: Final = WithOthers()


def _with_others(plan: StagePlan, stages: Sequence[StagePlan]) -> WithOthers:
    others = [stage for stage in stages if stage.last <= plan.first or plan.last <= stage.first]
    return WithOthers(
        counted_elsewhere={name for stage in stages for name in stage.counts}.difference(plan.counts),
        counted_before={name for stage in stages if stage.last <= plan.first for name in stage.counts},
        shared={name for stage in others for name in stage.state}.intersection(plan.state),
    )


def part_of(workload: Workload, stage: StagePlan, others: WithOthers = ALONE) -> ModelPart:
    """What stands beside the model is the last stage's, where the loss is."""
    if is_cut_by_calls(workload):
        beside = {} if stage.ends is not None else modules_beside(workload)
        return CallPart(workload.model, stage.state, stage.changing, beside, others)
    made = [Unit(number, *unit) for number, unit in enumerate(units(workload.model))]
    beside = {} if stage.last < len(made) else modules_beside(workload)
    return UnitPart(made[stage.first : stage.last], stage.changing, beside)


def check_built(model: nn.Module, stages: Sequence[StagePlan]) -> None:
    """stages: of one replica. Errors: WorkloadError, where the model is another than was inspected."""
    known = {name for name, _ in named_tensors(model)}
    unknown = [name for stage in stages for name in stage.state if name not in known]
    is_saved = _empty_buffers(model) if unknown else {}
    check_stays_none(name for name in unknown if is_saved.get(name))
    missing = next((name for name in unknown if name not in is_saved), None)
    if missing is not None:
        new = known.difference(*(stage.state for stage in stages))
        counted = next((name for name in sorted(new) if _without_numbers(name) == _without_numbers(missing)), None)
        raise WorkloadError(
            f"Workload.model has no {missing!r:.80}, and had it when it was inspected; the function must build the "
            "same model in every process (torch's generator is seeded before it is called, and no other)"
            if counted is None
            else f"Workload.model has {counted!r:.80} where it had {missing!r:.80} when it was inspected: what numbers "
            "its names goes on from the model that the process made before; let the function begin that count anew "
            "(in Keras: keras.utils.clear_session())"
        )


def _without_numbers(name: str) -> str:
    return re.sub(r"_?\d+", "", name)


def check_stays_none(names: Iterable[str]) -> None:
    """names: of buffers of a state dict that were None and are no longer. Errors: WorkloadError for any."""
    for name in names:
        raise WorkloadError(
            f"the buffer {name!r:.80} of Workload.model, which was built as None, becomes a tensor in a step; give it "
            "in __init__ the shape and dtype that it will have, or register it with persistent=False"
        )


def _empty_buffers(model: nn.Module) -> dict[str, bool]:
    """By name: whether a state dict would have it."""
    return {
        f"{place}.{key}".removeprefix("."): key not in module._non_persistent_buffers_set
        for place, module in model.named_modules()
        for key, buffer in module._buffers.items()
        if buffer is None
    }


def whole_state(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return named_state([Unit(0, "", model)])


class UnitPart(ModelPart):
    """Units of an `nn.Sequential`."""

    def __init__(
        self, own: Sequence[Unit], changing: Collection[str] = (), beside: Mapping[str, nn.Module] | None = None
    ) -> None:
        """changing: names of parameters that count as buffers. beside: modules beside the model."""
        self.units = tuple(own)
        self._beside = beside or {}
        named = ((unit.prefix + name, each) for unit in self.units for name, each in unit.module.named_parameters())
        self._changing = {name: each for name, each in named if name in changing}

    def named_state(self) -> list[tuple[str, torch.Tensor]]:
        return named_state(self.units)

    def buffers(self) -> dict[str, torch.Tensor]:
        found = ((unit.prefix + name, each) for unit in self.units for name, each in unit.module.named_buffers())
        return {**_in_dense_parts(found), **self._changing, **_buffers_of(self._beside)}

    def parameters(self) -> list[nn.Parameter]:
        return list({id(p): p for unit in self.units for p in unit.module.parameters()}.values())

    def modules(self) -> dict[str, nn.Module]:
        named = ((unit.prefix, name, each) for unit in self.units for name, each in unit.module.named_modules())
        return {f"{prefix}{name}".removesuffix("."): each for prefix, name, each in named} | dict(self._beside)

    def adopt(self, device: Memory) -> None:
        for unit in self.units:
            device.adopt(unit.module)


class CallPart(ModelPart):
    """Parameters and buffers that are used by some calls of a model, in the whole of it: what is not the stage's own is
    there until the stage is installed."""

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str],
        changing: Collection[str] = (),
        beside: Mapping[str, nn.Module] | None = None,
        others: WithOthers = ALONE,
    ) -> None:
        """names: the first of each tensor. changing: of parameters that count as buffers. beside: modules beside the
        model."""
        self.model, self.others = model, others
        self._beside = beside or {}
        self.names = tuple(names)
        known = dict(named_tensors(model))
        own = {id(known[name]) for name in names if name in known}
        self._state_names = [name for name, tensor in whole_state(model) if id(tensor) in own]
        self._parameters = [each for each in model.parameters() if id(each) in own]
        self._changing = {name: each for name, each in model.named_parameters() if name in changing and id(each) in own}

    def named_state(self) -> list[tuple[str, torch.Tensor]]:
        now = dict(whole_state(self.model))
        return [(name, now[name]) for name in self._state_names if name in now]

    def buffers(self) -> dict[str, torch.Tensor]:
        found = ((name, each) for name, each in self.model.named_buffers() if not isinstance(each, Placeholder))
        return _in_dense_parts(found) | self._changing | _buffers_of(self._beside)

    def parameters(self) -> list[nn.Parameter]:
        return self._parameters

    def modules(self) -> dict[str, nn.Module]:
        return modules_with(self.model, self.names) | dict(self._beside)

    def adopt(self, device: Memory) -> None:
        holder = nn.Module()
        for number, parameter in enumerate(self._parameters):
            holder.register_parameter(str(number), parameter)
        device.adopt(holder)
        for module in self.model.modules():
            for key, buffer in module._buffers.items():
                if buffer is not None and not isinstance(buffer, Placeholder):
                    module._buffers[key] = device.put(buffer)


def modules_with(model: nn.Module, names: Iterable[str]) -> dict[str, nn.Module]:
    """Those that have some of the named parameters and buffers, and those without any that lie in one of these. A
    weight that several modules have makes a module the stage's only where it has no other: who computes with it has
    what else is in that module, too."""
    known = dict(named_tensors(model))
    own = {id(known[name]) for name in names if name in known}
    state = {m: {id(each) for _, each in named_tensors(m)} for m in model.modules()}
    slots = Counter(id(each) for m in state for part in (m._parameters, m._buffers) for each in part.values())
    found = {m for m, ids in state.items() if ({each for each in ids if slots[each] == 1} or ids) & own}
    places = dict(model.named_modules(remove_duplicate=False))
    for place, module in places.items():
        around = [places[place.rsplit(".", up)[0]] for up in range(1, place.count(".") + 1)]
        inside = next((m for m in around if state[m]), model)
        if not state[module] and (inside in found or not state[inside]):
            found.add(module)
    return {name: m for name, m in model.named_modules() if m in found}


def _buffers_of(beside: Mapping[str, nn.Module]) -> dict[str, torch.Tensor]:
    named = ((f"{name}.{key}", each) for name, module in beside.items() for key, each in module._buffers.items())
    return _in_dense_parts((name, each) for name, each in named if each is not None)


def _in_dense_parts(buffers: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """By name. What is sparse is there by its indices and entries, which have its memory."""
    return {
        f"{name}[{number}]" if part is not buffer else name: part
        for name, buffer in buffers
        for number, part in enumerate(dense_parts(buffer))
    }


def functions_with_state(workload: Workload) -> list[nn.Module]:
    functions = workload.functions.values() if workload.step is None else ()
    return [function for function in functions if isinstance(function, nn.Module)]
