"""Unit state: parameters and buffers of a stage, and where in shared memory they are found."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import nn

from weft.transport.memory.arena import Arena
from weft.workers.compute.handover import check_fits
from weft.workers.compute.model_part import ModelPart, check_stays_none
from weft.workers.devices.device import Memory
from weft.workers.devices.host import HostDevice


class Homes:
    """Of parameters, in memory that others know them by. A forward, a step or an optimizer that assigns `.data` takes a
    parameter elsewhere; its values come home before anybody else looks."""

    def __init__(self, homes: Sequence[tuple[str, torch.Tensor, torch.Tensor]] = ()) -> None:
        """homes: (name, parameter, where it belongs)"""
        self._homes = [(name, parameter, home, home.data_ptr()) for name, parameter, home in homes]

    @torch.no_grad()
    def bring_back(self) -> None:
        """Raises WorkloadError where one has come to another shape or dtype."""
        for name, parameter, home, pointer in self._homes:
            if parameter.data_ptr() != pointer:
                check_fits(
                    parameter.data,
                    home,
                    what=f"the parameter {name!r} of Workload.model has become",
                    remedy="give it in __init__ the shape and dtype that it will have",
                )
                home.copy_(parameter.data)
                parameter.data = home


def move_state(state: Sequence[tuple[str, torch.Tensor]], arena: Arena) -> Homes:
    """Puts every tensor into the place of its name, so that the module works on the place from now on."""
    moved = [(name, tensor, arena[name]) for name, tensor in {id(each): (name, each) for name, each in state}.values()]
    for _, tensor, place in moved:
        place.copy_(tensor.data)
        tensor.data = place
    return Homes(moved)


def keep_state(part: ModelPart, names: Collection[str], arena: Arena, device: Memory) -> Callable[[], None]:
    """Leaves tensors of the stage's state where they are, and their values in the places of their names.

    What is returned does so again for what training changes beside what it updates: running statistics and their like,
    a teacher's mean. A module may have put other tensors in the place of its buffers since.
    """
    changing, kept = [], set(map(id, part.buffers().values()))
    first = dict(part.named_state())
    for name, tensor in first.items():
        if name in names:
            arena[name].copy_(tensor.data)
            changing += [name] if id(tensor) in kept else []

    def publish() -> None:
        now = dict(part.named_state())
        check_stays_none(sorted(now.keys() - first.keys()))
        for name in changing:
            copy_buffer(name, arena[name], now[name], device)

    return publish


def copy_buffer(name: str, place: torch.Tensor, value: torch.Tensor, device: Memory) -> None:
    """Between a module and shared memory. Raises WorkloadError where training has changed its shape or dtype."""
    check_fits(
        value,
        place,
        what=f"the buffer {name!r} of Workload.model has become",
        remedy="give it in __init__ the shape and dtype that it will have (or call the model there with a batch), or "
        "register it with persistent=False",
    )
    device.copy(place, value.data)


def restore_buffers(part: ModelPart, modules: Mapping[str, nn.Module], saved: Mapping[str, torch.Tensor]) -> None:
    """modules: the stage's own, by name. Raises WorkloadError where a buffer of the model's state has another shape or
    dtype. Another one may have come to any, and a slot that was built empty to a tensor; those of other stages, which
    the model may still have here, stay."""
    now, state = part.buffers(), dict(part.named_state())
    slots = {f"{name}.{key}".removeprefix("."): (m, key) for name, m in modules.items() for key in m._buffers}
    for name, value in saved.items():
        there = now.get(name)
        is_part = name not in slots and name.partition("[")[0] in slots  # of one that is sparse
        if there is not None and (name in state or is_part or _is_alike(there, value)):
            copy_buffer(name, there, value, HostDevice())
        elif name in slots:
            module, key = slots[name]
            there = module._buffers[key]
            holders = [(module, key)] if there is None else [at for at in slots.values() if _at(*at) is there]
            new = value.clone()
            for module, key in holders:
                module._buffers[key] = new


def _at(module: nn.Module, key: str) -> torch.Tensor | None:
    return module._buffers[key]


def _is_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype is other.dtype
