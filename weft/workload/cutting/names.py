"""Names of values, as every process that runs a step gives them, and of what a model's modules hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from weft.workload.cutting.tape import Renewed

Place = tuple[dict[str, Any], str, torch.Tensor, str]  # where a tensor stands: in what, by which key; it; its name


class Attribute(NamedTuple):
    """Of a module, which may have a hash of its own that changes with what it keeps, and equality that is no answer, as
    a metric of torchmetrics has both."""

    module: nn.Module
    key: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Attribute) and self.module is other.module and self.key == other.key

    def __hash__(self) -> int:
        return hash((id(self.module), self.key))


def call_name(module: str, occurrence: int) -> str:
    """occurrence: of the module in the step, from 0."""
    return f"{module}@{occurrence}" if occurrence else module


def output_name(module: str, occurrence: int, leaf: int) -> str:
    """Of a tensor that a module's call has returned."""
    return f"{call_name(module, occurrence)}:{leaf}"


def is_argument(value: str) -> bool:
    return value.startswith(">")


def maker_of(value: str) -> str:
    """The module that returns it, or is called with it."""
    return value.strip(">~").rpartition(":")[0].partition(" ")[0]


def argument_name(module: str, leaf: int) -> str:
    """Of a tensor that a stage which begins at this module is called with."""
    return f">{module}:{leaf}"


def is_beside(unit: str, name: str) -> bool:
    """In one list."""
    (stack, _, number), (own, _, _) = unit.rpartition("."), name.rpartition(".")
    return stack == own and number.isdigit()


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Each parameter and buffer once, by its first name."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def names_by_place(model: nn.Module) -> dict[Attribute, str]:
    """The first name of each tensor, by every place in a module where it stands."""
    names = {id(tensor): name for name, tensor in named_tensors(model)}
    return {
        Attribute(module, key): names[id(tensor)]
        for module in model.modules()
        for slots in slots_of(module)
        for key, tensor in slots.items()
        if tensor is not None
    }


def slots_in(module: nn.Module) -> Iterator[Attribute]:
    """Places of parameters and buffers, in other modules inside of it too."""
    return (Attribute(part, key) for part in module.modules() for slots in slots_of(part) for key in slots)


def places_of(names: Mapping[Attribute, str]) -> list[Place]:
    """names: of some that `names_by_place` tells."""
    return [
        (slots, key, tensor, name)
        for (module, key), name in names.items()
        for slots in slots_of(module)
        if (tensor := slots.get(key)) is not None
    ]


def memory_of(tensor: torch.Tensor) -> int:
    """The same of all that is written to through one of them; 0 of what has none: of what torch.func makes while one of
    its transforms runs, too."""
    has_one = tensor.layout is torch.strided and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return int(tensor.untyped_storage()._cdata) if has_one else 0


class KeptMemory:
    """Of what a model keeps: to tell what is written to it from what a step has made."""

    def __init__(self) -> None:
        self._seen: frozenset[int] = frozenset()  # once, since it takes long

    def has(self, tensor: torch.Tensor, kept: Sequence[torch.Tensor]) -> bool:
        """Whether it is one of those that are kept, or is written to where one of these is, as its `.data` is."""
        if any(tensor is each for each in kept):
            return True
        real = [each for each in kept if not isinstance(each, Renewed)]
        if not self._seen:
            self._seen = frozenset(map(memory_of, real))
        memory = memory_of(tensor)
        if memory == 0 or memory not in self._seen:
            return False
        return any(memory == memory_of(each) for each in real)  # they may have other memory by now


def slots_of(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Where a module holds its own parameters and buffers, by key."""
    return module._parameters, module._buffers
