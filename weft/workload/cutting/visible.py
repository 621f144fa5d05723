"""Visible modules: those whose calls a step is seen by, from a model's structure alone, so the same in every process.

    GPT2LMHeadModel                 walked: its forward is run by every stage
    ├── transformer                 walked, since it has repeated blocks
    │   ├── wte, wpe                opaque: a call is run by the stage that has it, and skipped by the others
    │   ├── drop                    transparent: nothing in its state; run like a loose operation
    │   ├── h                       a container that nobody calls
    │   │   └── 0, 1, 2, ...        opaque: items of repeated blocks
    │   └── ln_f                    opaque
    └── lm_head                     opaque

What lies inside an opaque or transparent module is nobody's business here.
"""

from __future__ import annotations

import contextlib
import enum
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
Forward = Callable[..., Any]
_REPLACED = ("forward", "_compiled_call_impl")  # attributes of modules that are heard


class CallKind(enum.Enum):
    WALKED = "walked"
    OPAQUE = "opaque"
    TRANSPARENT = "transparent"


@dataclass(frozen=True, slots=True, eq=False)
class Visible:
    number: int  # among the visible modules
    name: str  # as in `named_modules`
    module: nn.Module
    kind: CallKind

    @property
    def tells_shapes_alone(self) -> bool:
        """Its forward does nothing else of placeholders: it has no state and no parts, and is written by torch."""
        is_torchs = type(self.module).__module__.startswith("torch.nn.modules.")
        return self.kind is CallKind.TRANSPARENT and is_torchs and not self.module._modules

    def __str__(self) -> str:
        return f"{self.name or 'the model'} ({type(self.module).__name__})"


class Listener(Protocol):
    def call(self, visible: Visible, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """In the place of the forward of a visible module."""


def visible_modules(model: nn.Module) -> list[Visible]:
    """In the order of `named_modules`, each module once."""
    found: dict[nn.Module, tuple[str, CallKind]] = {}
    _visit(model, "", found, is_root=True, is_item=False)
    return [Visible(number, name, module, kind) for number, (module, (name, kind)) in enumerate(found.items())]


@contextlib.contextmanager
def listening(visible: list[Visible], listener: Listener) -> Iterator[None]:
    """The calls of these modules go to the listener, until the end. What was compiled runs as it was before."""
    before = [(each.module, {key: each.module.__dict__.get(key) for key in _REPLACED}) for each in visible]
    with contextlib.ExitStack() as leaving:
        for each in visible:
            forward = leaving.enter_context(_with_its_hooks(each.module, _forward_of(each.module)))
            own = {"forward": _heard(each, forward, listener), "_compiled_call_impl": None}
            each.module.__dict__.update(own)
        try:
            yield
        finally:
            for module, own in before:
                for key, value in own.items():
                    if value is None:
                        del module.__dict__[key]
                    else:
                        module.__dict__[key] = value


@contextlib.contextmanager
def _with_its_hooks(module: nn.Module, forward: Forward) -> Iterator[Forward]:
    """Torch's own hooks that make a weight of the module's parameters (spectral_norm, weight_norm and prune of
    `torch.nn.utils`) are a part of the call, so that a stage may begin with it. Others look at the step."""
    hooks = module._forward_pre_hooks
    own = {key: hook for key, hook in hooks.items() if type(hook).__module__.startswith("torch.nn.utils.")}
    if not own:
        yield forward
        return

    def made(*args: Any, **kwargs: Any) -> Any:
        for hook in own.values():
            hook(module, args)
        return forward(*args, **kwargs)

    order = list(hooks)
    for key in own:
        del hooks[key]
    try:
        yield made
    finally:
        now = own | {key: hooks.pop(key) for key in list(hooks)}
        hooks.update({key: now.pop(key) for key in order if key in now} | now)


def _forward_of(module: nn.Module) -> Forward:
    """Of one that torch.compile has made, whose tracing would go through the listener, the forward of what is in it."""
    original = module._modules.get("_orig_mod") if type(module).__name__ == "OptimizedModule" else None
    forward: Forward = module.forward if original is None else original
    return forward


def _heard(visible: Visible, forward: Forward, listener: Listener) -> Forward:
    def call(*args: Any, **kwargs: Any) -> Any:
        return listener.call(visible, forward, args, kwargs)

    return call


def _visit(
    module: nn.Module, name: str, found: dict[nn.Module, tuple[str, CallKind]], *, is_root: bool, is_item: bool
) -> None:
    if module in found:
        return
    if not _has_state(module):
        found[module] = (name, CallKind.TRANSPARENT)
        return
    if not _is_walked(module, is_root=is_root, is_item=is_item):
        found[module] = (name, CallKind.OPAQUE)
        return
    found[module] = (name, CallKind.WALKED)
    kinds = Counter(type(child) for child in module.children() if _has_state(child))
    has_items = isinstance(module, (nn.Sequential, nn.ModuleList)) and (is_item or _repeats(module))
    for key, child in module.named_children():
        is_twin = kinds[type(child)] > 1 and not isinstance(child, CONTAINERS)
        _visit(
            child,
            f"{name}.{key}" if name else key,
            found,
            is_root=False,
            is_item=has_items or (is_twin and not _has_blocks(child)),
        )


def _is_walked(module: nn.Module, *, is_root: bool, is_item: bool) -> bool:
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return True  # nobody calls it, but what is in it
    if is_item:
        return False
    if is_root or isinstance(module, CONTAINERS):
        return any(_has_state(child) for child in module.children())
    return any(isinstance(each, CONTAINERS) and _repeats(each) for each in module.modules())


def _repeats(container: nn.Module) -> bool:
    """Whether it has several items of one class, with state."""
    return max(Counter(type(item) for item in container.children() if _has_state(item)).values(), default=0) > 1


def _has_blocks(module: nn.Module) -> bool:
    """Whether it has repeated items that are made of modules themselves: a stack of blocks, and no block."""
    return any(
        isinstance(each, CONTAINERS)
        and _repeats(each)
        and any(_has_state(part) for item in each.children() for part in item.children())
        for each in module.modules()
    )


def _has_state(module: nn.Module) -> bool:
    """Parameters, or buffers that are saved: running statistics. A table of rotary angles is neither."""
    return any(True for _ in module.parameters()) or any(
        name.rpartition(".")[2] not in owner._non_persistent_buffers_set
        for owner in module.modules()
        for name, _ in owner.named_buffers(recurse=False)
    )
