"""Aliases: what a model keeps beside its parameters, as a buffer or an attribute, in the memory of one of them.

In the plain loop it follows the parameter. A job's parameters move to shared memory as training begins, and it would
stay behind with the values that they had then, and nobody would be told. What forward makes anew is none.

What has hold of a parameter itself sees it as it is; but it may read it without asking a module.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn

from weft.workload.workload import WorkloadError


@dataclass(frozen=True, slots=True)
class Alias:
    name: str
    module: nn.Module
    key: str  # of the module's attribute
    tensor: torch.Tensor
    parameter: str

    def stands(self) -> bool:
        value = self.module._buffers.get(self.key, vars(self.module).get(self.key))
        return any(each is self.tensor for each in _tensors(value))


def aliases_of(model: nn.Module) -> list[Alias]:
    """Of parameters that are trained, before the model has run."""
    named = [(name, each) for name, each in model.named_parameters() if each.requires_grad and has_memory(each)]
    homes: dict[int, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in named:
        homes.setdefault(parameter.untyped_storage().data_ptr(), []).append((name, parameter))
    known = {id(each) for each in model.parameters()}
    found = []
    for prefix, module, key, tensor in _kept(model):
        if id(tensor) in known or not has_memory(tensor):
            continue
        for name, parameter in homes.get(tensor.untyped_storage().data_ptr(), ()):
            if overlap(tensor, parameter):
                told = f"{prefix}.{key}" if prefix else key
                found.append(Alias(told, module, key, tensor, name))
    return found


def check_aliases(aliases: list[Alias]) -> None:
    """Once the model has run. Raises WorkloadError for one that is there still."""
    for alias in aliases:
        if alias.stands():
            raise WorkloadError(
                f"Workload.model: {alias.name!r:.80} is kept in the memory of the parameter {alias.parameter!r:.80}, "
                "and would not follow it where training moves it; read the parameter itself where it is needed, or "
                "keep a copy (.detach().clone()) if it is to stay as it is"
            )


def _kept(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
    for prefix, module in model.named_modules():
        own = {} if module._forward_pre_hooks else vars(module)  # torch.nn.utils.spectral_norm makes its weight anew
        for key, value in {**own, **module._buffers}.items():
            if key not in ("_buffers", "_parameters"):
                yield from ((prefix, module, key, tensor) for tensor in _tensors(value))


def _tensors(value: Any) -> list[torch.Tensor]:
    """It, or those in the list or dict that it is."""
    within = value.values() if type(value) is dict else value if type(value) in (list, tuple) else [value]
    return [each for each in within if isinstance(each, torch.Tensor)]


def dense_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Indices and entries of a sparse one (a graph's adjacency), which most of torch does not take; else it alone."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)


@dataclass(frozen=True, slots=True)
class SparseKind:
    """What a sparse tensor is beside its dense parts."""

    layout: torch.layout
    shape: torch.Size
    is_coalesced: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Self:
        return cls(tensor.layout, tensor.shape, tensor.layout is torch.sparse_coo and tensor.is_coalesced())

    def built(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """With the memory of these parts."""
        make: Any = torch.sparse_compressed_tensor
        how: dict[str, Any] = {"layout": self.layout}
        if self.layout is torch.sparse_coo:
            make, how = torch.sparse_coo_tensor, {"is_coalesced": self.is_coalesced}
        made: torch.Tensor = make(*parts, self.shape, **how, check_invariants=False)
        return made


def strides_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Those of a dense one in its place, of a sparse one."""
    return (tensor if tensor.layout is torch.strided else torch.empty(tensor.shape, device="meta")).stride()


def has_memory(tensor: torch.Tensor) -> bool:
    is_plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
    return is_plain and not tensor.is_meta and tensor.numel() > 0


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether they have memory in common, or may, since one has gaps in which the other lies."""
    (start, stop), (first, last) = _span(one), _span(other)
    return start < last and first < stop


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + elements * tensor.element_size()


def referred_elsewhere(model: nn.Module) -> str | None:
    """The name of a parameter that something else than a module of the model refers to, as it was built: a list of the
    user's, a closure, a loss that is not in the model. None where there is none.

    A recurrent layer's own list of its weights, which it reads when it is called, counts as the module.
    """
    found = _referred_elsewhere(model)
    if found is not None and gc.collect():  # perhaps by what nobody has any more
        found = _referred_elsewhere(model)
    return found


def _referred_elsewhere(model: nn.Module) -> str | None:
    names = {id(each): name for name, each in model.named_parameters() if each.requires_grad}
    parameters = [each for each in model.parameters() if each.requires_grad]
    own = {id(parameters)}
    for module in model.modules():
        if not isinstance(module._parameters, dict):  # a scripted module's
            return next(iter(names.values()), None)
        own.add(id(module._parameters))
        if isinstance(module, nn.RNNBase):
            own.add(id(module._flat_weights))
    others: list[Any] = [each for each in gc.get_referrers(*parameters) if id(each) not in own]
    return next((names[id(each)] for other in others for each in gc.get_referents(other) if id(each) in names), None)
