"""Compiled: units whose forward torch.compile has made kernels of, which the reference and every stage run alike.

    load ──▶ each unit's `forward` is replaced ──▶ its first call with these shapes compiles, later ones run the kernels
                                                        │ ▲
                                                        ▼ │
                                            files, kept across jobs and shared by processes

A unit is compiled by itself, for one set of shapes at a time. So its kernels, and their bits, follow from the unit and
its arguments: neither from the cut nor from what has been compiled before. Hooks around a unit, losses and what a step
does between units run as they are.

A single layer of torch's own is one kernel already, and stays as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from weft.workload.compiling.compiler import Backend, cannot_compile, check_compiler, is_compilers, raise_limits
from weft.workload.cutting.leaves import replaced, tensors_in
from weft.workload.cutting.visible import CallKind, visible_modules
from weft.workload.units import is_cut_by_calls, units
from weft.workload.workload import Workload

MAX_GRAPHS: Final = 64  # of a unit, on the mean: shapes, in training and in validation; each takes seconds


@dataclass(frozen=True, slots=True)
class Call:
    """Of a compiled forward. Can be pickled where its arguments can."""

    training: bool
    learns: bool  # gradients are enabled
    given: tuple[tuple[Any, ...], dict[str, Any]]  # arguments, with meta tensors
    wanting: tuple[bool, ...]  # gradients, by tensor


def compile_units(workload: Workload) -> None:
    """From now on a call of such a unit compiles its forward, or runs what was compiled. Errors: CompileError."""
    found = compiled_modules(workload)
    if not found:
        return
    check_compiler()
    backend = Backend(MAX_GRAPHS * len(found))
    begins = None if is_cut_by_calls(workload) else units(workload.model)[0][1]
    for name, module in found:
        told = f"{name} ({type(module).__name__})"
        takes_over = begins is not None and module is not begins
        module.forward = CompiledForward(module.forward, module, told, backend, takes_over=takes_over)


def compiled_modules(workload: Workload) -> list[tuple[str, nn.Module]]:
    """(name, module) of each unit that there is something to compile of."""
    model = workload.model
    if is_cut_by_calls(workload):
        named = [(each.name, each.module) for each in visible_modules(model) if each.kind is CallKind.OPAQUE]
    else:
        named = [(prefix.rstrip("."), module) for prefix, module in units(model)]
    found = {module: name or "the model" for name, module in named if _gains(module)}
    return [(name, module) for module, name in found.items()]


def give_up_at(workload: Workload, moment: float) -> None:
    """From that moment of time.monotonic() on a call that would compile raises CompileError instead."""
    for _, module in compiled_modules(workload):
        if isinstance(forward := module.forward, CompiledForward):
            forward.backend.until = moment


def uncompiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    """For arguments without numbers."""
    return forward.eager if isinstance(forward, CompiledForward) else forward


class CompiledForward:
    """In the place of a module's forward. calls: each kind of call that there has been, once somebody wants to know."""

    def __init__(
        self, eager: Callable[..., Any], module: nn.Module, name: str, backend: Backend, *, takes_over: bool
    ) -> None:
        """takes_over: its argument may have come from another stage, which is the same to it as if it had not."""
        self.eager = eager
        self.calls: dict[Any, Call] | None = None
        self.backend = backend
        self._module, self._name, self._takes_over = module, name, takes_over
        plain = type(module).forward
        self._given = (module,) if getattr(eager, "__func__", None) is plain else ()  # else the user has bound it
        self._compiled: Callable[..., Any] = torch.compile(
            plain if self._given else eager, dynamic=False, backend=backend
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledForward:
        eager, module = copy.deepcopy(self.eager, memo), copy.deepcopy(self._module, memo)
        return CompiledForward(eager, module, self._name, self.backend, takes_over=self._takes_over)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise_limits()
        if self._takes_over and len(args) == 1 and isinstance(args[0], torch.Tensor):
            args = (_as_received(args[0]),)
        if self.calls is not None:
            self._note(args, kwargs)
        try:
            return self._compiled(*self._given, *args, **kwargs)
        except Exception as error:
            if not is_compilers(error):
                raise
            self.eager(*args, **kwargs)  # the user's own error, where it is that, says more
            raise cannot_compile(self._name, error) from error

    def _note(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert self.calls is not None
        tensors, learns = tensors_in((args, kwargs)), torch.is_grad_enabled()
        wanting = tuple(each.requires_grad for each in tensors)
        key = (self._module.training, learns, wanting, *((each.shape, each.dtype) for each in tensors))
        if key not in self.calls:
            meta = replaced((args, kwargs), lambda each: torch.empty_like(each, device="meta", requires_grad=False))
            self.calls[key] = Call(self._module.training, learns, meta, wanting)


def _as_received(x: torch.Tensor) -> torch.Tensor:
    """As a slot has it: without gaps, and wanting a gradient also where nothing before it is trained."""
    x = x.contiguous()
    if not torch.is_grad_enabled() or x.requires_grad or not (x.is_floating_point() or x.is_complex()):
        return x
    return x.detach().requires_grad_().clone()  # no leaf: the unit may write to it


def _gains(module: nn.Module) -> bool:
    is_layer = type(module).__module__.startswith("torch.nn.") and not any(True for _ in module.children())
    has_been = module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"
    return not (is_layer or has_been or isinstance(module, torch.jit.ScriptModule))
