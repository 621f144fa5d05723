"""Forward's buffers: what each microbatch's forward began with, for a forward that is run again.

A module may read a buffer in forward and change it there: the vectors of a spectral norm, a statistic that is also the
scale; or a number in an attribute, which counts. Under recompute a forward runs twice, and between the two other
microbatches have changed it again.

    forward(m)          what it changes is kept as it was before             Began
    forward(m) again    on copies of that, which stand in the buffers' place and go with what it makes of them

So the second forward computes what the first did, a change counts once, and a backward that needs a buffer finds the
one that its own forward had. Only what changes is kept for each microbatch.

Nobody says what changes, and batch norm's kernel leaves even autograd's count of changes alone. So one more copy of
every buffer is compared with it after a forward, until it is known to change. On a device a comparison makes the host
wait: behind the first few forwards autograd's count decides there, and a batch norm's buffers are taken to change.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from weft.workers.snapshots.stage_attributes import numbers_of
from weft.workload.aliases import dense_parts
from weft.workload.cutting.placeholder import Placeholder
from weft.workload.workload import WorkloadError

T = TypeVar("T")
Slot = tuple[nn.Module, str]
Changed = list[tuple[Slot, torch.Tensor | None]]
LOOKS = 8  # arbitrary: forwards on a device behind which buffers are compared


@dataclass(frozen=True, slots=True)
class Began:
    """What a forward changes, as it was before."""

    buffers: Changed = field(default_factory=list)
    numbers: list[tuple[dict[str, Any], dict[str, float]]] = field(default_factory=list)  # attributes of each module


@dataclass(slots=True)
class _Known:
    """A buffer before a forward."""

    buffer: torch.Tensor | None
    version: int  # autograd's count of changes
    value: torch.Tensor | None  # a copy
    changes: bool  # forward does change it, or has at some time


class SharedBuffers:
    """Buffers that other stages have, too, and no run had changed when the step was tried: copies would drift apart."""

    def __init__(self, model: nn.Module, names: Iterable[str]) -> None:
        """names: of the state that others have."""
        modules = dict(model.named_modules())
        places = [(name, *name.rpartition(".")) for name in sorted(names)]
        slots = [(name, modules[path]._buffers, key) for name, path, _, key in places if path in modules]
        self._slots = [each for each in slots if each[1].get(each[2]) is not None]

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """Around a run. Raises WorkloadError where it changes one."""
        before = self._now()
        yield
        pairs = zip(self._slots, before, self._now(), strict=True)
        if (changed := next((name for (name, _, _), was, now in pairs if was != now), None)) is not None:
            raise WorkloadError(
                f"the buffer {changed!r:.80}, which several stages have, is changed, and was not when the step was "
                "tried; change it from the first call of the step on, or use strategy.stages = 1"
            )

    def _now(self) -> list[tuple[int, int]]:
        found = [slots.get(key) for _, slots, key in self._slots]
        return [(id(there), _version(there)) for there in found]


_NO_HOOKS = "saved tensor hooks"  # torch.func's transforms take none, and say so with these words


class _ForgottenError(BaseException):
    """A forward asks for what it has not kept. No Exception: a handler of the user's is not to see it."""


def _forget(tensor: torch.Tensor) -> None:
    return None


def _remember(forgotten: None) -> torch.Tensor:
    raise _ForgottenError


class ForwardBuffers:
    """Of all modules within the given ones."""

    def __init__(self, modules: Iterable[nn.Module], *, can_compare: bool) -> None:
        """can_compare: they are where a comparison makes nobody wait."""
        self._modules = list({id(each): each for module in modules for each in module.modules()}.values())
        self._can_compare, self._looks = can_compare, LOOKS
        self._forgets = True
        self._known: dict[tuple[int, str], _Known] = {}
        self._attributes = [vars(each) for each in self._modules if not type(each).__module__.startswith("torch.")]
        self._numbers: list[dict[str, float]] = []  # of each

    def begin(self) -> None:
        """Before a forward."""
        slots = [slot for slot in self._slots() if self._has_to_be_copied(*slot)]
        copies = _copies(buffer for _, buffer in slots)
        for (module, name), buffer in slots:
            known = self._known.get((id(module), name))
            is_taken_to = not self._can_compare and isinstance(module, _NormBase)
            changes = is_taken_to if known is None else known.changes
            self._known[id(module), name] = _Known(buffer, _version(buffer), copies.get(id(buffer)), changes)
        self._numbers = [numbers_of(each) for each in self._attributes]

    def _has_to_be_copied(self, slot: Slot, buffer: torch.Tensor | None) -> bool:
        known = self._known.get((id(slot[0]), slot[1]))
        return known is None or known.changes or _is_another(known, buffer)

    def forgetting(self, forward: Callable[[], T]) -> T:
        """Of a forward that keeps nothing for a backward, and computes as one that does: some kernels (an LSTM's) give
        other bits where no gradient is asked for.

        One that differentiates by itself (torch.autograd.grad) is made once more, and keeps it for as long as it runs,
        as do all after it.
        """
        if self._forgets:
            try:
                with torch.autograd.graph.saved_tensors_hooks(_forget, _remember):
                    return forward()
            except _ForgottenError:
                pass
            except RuntimeError as error:
                if _NO_HOOKS not in str(error):
                    raise
            self._forgets = False
            self.put_back()
        return forward()

    @torch.no_grad()
    def put_back(self) -> None:
        """As they were before the forward."""
        for (module, name), buffer in self._slots():
            known = self._known.get((id(module), name))
            if known is not None and self._has_changed(known, buffer):
                module._buffers[name] = known.buffer
                if known.buffer is not None and known.value is not None:
                    known.buffer.copy_(known.value)
        for attributes, numbers in zip(self._attributes, self._numbers, strict=True):
            attributes.update(numbers)

    def end(self) -> Began:
        """After it: what it has changed, as it was."""
        changed: Changed = []
        for (module, name), buffer in self._slots():
            known = self._known.get((id(module), name))
            if known is None:  # made by this forward, which the second one will find made
                continue
            known.changes = known.changes or self._has_changed(known, buffer)
            if known.changes:
                changed.append(((module, name), known.value))
        self._looks = max(0, self._looks - 1)
        both = zip(self._attributes, self._numbers, strict=True)
        return Began(changed, [(now, numbers) for now, numbers in both if numbers_of(now) != numbers])

    @contextlib.contextmanager
    def as_they_were(self, began: Began) -> Iterator[None]:
        """A forward inside finds the buffers so, and what it changes is not seen outside."""
        now = [(module, name, module._buffers[name]) for (module, name), _ in began.buffers]
        numbers_now = [(attributes, numbers_of(attributes)) for attributes, _ in began.numbers]
        copies = _copies(value for _, value in began.buffers)
        for (module, name), value in began.buffers:
            module._buffers[name] = None if value is None else copies[id(value)]
        for attributes, numbers in began.numbers:
            attributes.update(numbers)
        try:
            yield
        finally:
            for module, name, buffer in now:
                module._buffers[name] = buffer
            for attributes, numbers in numbers_now:
                attributes.update(numbers)

    def _slots(self) -> Iterator[tuple[Slot, torch.Tensor | None]]:
        return (
            ((module, name), buffer)
            for module in self._modules
            for name, buffer in module._buffers.items()
            if not isinstance(buffer, Placeholder)  # another stage's
        )

    def _has_changed(self, known: _Known, buffer: torch.Tensor | None) -> bool:
        if _is_another(known, buffer):
            return True
        if buffer is None or known.value is None or not (self._can_compare or self._looks):
            return False
        return not all(map(torch.equal, dense_parts(buffer), dense_parts(known.value)))


def _copies(tensors: Iterable[torch.Tensor | None]) -> dict[int, torch.Tensor]:
    """By id. One tensor may stand in several modules; views of one memory are views of one copy of it."""
    each = {id(tensor): tensor for tensor in tensors if tensor is not None}
    sharing = Counter(map(_memory, each.values()))
    memories: dict[int, torch.UntypedStorage] = {}
    copies = {}
    for key, tensor in each.items():
        if (memory := _memory(tensor)) is None or sharing[memory] == 1:
            copies[key] = tensor.detach().clone()
        else:
            if memory not in memories:
                memories[memory] = tensor.untyped_storage().clone()  # type: ignore[no-untyped-call]
            like = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            copies[key] = like.set_(memories[memory], tensor.storage_offset(), tensor.shape, tensor.stride())
    return copies


def _memory(tensor: torch.Tensor) -> int | None:
    """Which it is in; None of a tensor that has none of its own to copy."""
    is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.numel() > 0
    return tensor.untyped_storage().data_ptr() if is_plain and not tensor.is_meta else None


def _version(buffer: torch.Tensor | None) -> int:
    return 0 if buffer is None else buffer._version


def _is_another(known: _Known, buffer: torch.Tensor | None) -> bool:
    return buffer is not known.buffer or _version(buffer) != known.version
