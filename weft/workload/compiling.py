"""Compiling: units whose forward torch.compile has made kernels of, which the reference and every stage run alike.

    load ──▶ each unit's `forward` is replaced ──▶ its first call with these shapes compiles, later ones run the kernels
                                                        │ ▲
                                                        ▼ │
                                            files, kept across jobs and shared by processes

A unit is compiled by itself, for one set of shapes at a time, and draws from torch's generator as it does uncompiled.
So its kernels, and their bits, follow from the unit and its arguments: neither from the cut nor from what has been
compiled before. Hooks around a unit, losses and what a step does between units run as they are.

A single layer of torch's own is one kernel already, and stays as it is.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch
import torch._dynamo.config
from torch import nn
from torch._dynamo.exc import TorchDynamoException

from weft.machine.bounded_directory import shrink
from weft.machine.run_file import make_directory
from weft.workload.cutting.visible import CallKind, visible_modules
from weft.workload.units import is_cut_by_calls, units
from weft.workload.workload import Workload, WorkloadError

MAX_GRAPHS: Final = 64  # of a unit, on the mean: shapes, times training or not; each takes seconds to compile
MAX_CACHE_BYTES: Final = 2 << 30  # arbitrary: some thousand graphs
CACHE_VARIABLE: Final = "TORCHINDUCTOR_CACHE_DIR"
_LIMITS: Final = {"recompile_limit": 1 << 16, "accumulated_recompile_limit": 1 << 16}  # ours tells, torch's is silent
_WITHOUT: Final = "leave strategy.compile out"


class CompileError(WorkloadError):
    """A unit, or this machine, that nothing can be compiled of, or with."""


@contextlib.contextmanager
def compiling(cache: Path | None) -> Iterator[None]:
    """What is compiled inside is kept in this directory; None: where torch keeps it. Settings are as before at the end,
    those of this thread and the environment's. Errors: RunFileError."""
    before = os.environ.get(CACHE_VARIABLE)
    try:
        if cache is not None:
            keep_in(cache)
        with torch._dynamo.config.patch(_LIMITS):
            yield
    finally:
        set_cache(before)


def keep_in(cache: Path) -> None:
    """From now on what is compiled is found there, and left there. Errors: RunFileError."""
    make_directory(cache)
    shrink(cache, MAX_CACHE_BYTES)
    set_cache(str(cache))


def set_cache(directory: str | None) -> None:
    if directory is None:
        os.environ.pop(CACHE_VARIABLE, None)
    else:
        os.environ[CACHE_VARIABLE] = directory


def forget() -> None:
    """What this process has compiled; the files stay."""
    if torch._dynamo.config.recompile_limit == _LIMITS["recompile_limit"]:
        torch._dynamo.reset()


def compile_units(workload: Workload) -> None:
    """From now on a call of such a unit compiles its forward, or runs what was compiled. Errors: CompileError."""
    found = compiled_modules(workload)
    if not found:
        return
    _check_compiler()
    backend = _Backend(MAX_GRAPHS * len(found))
    for name, module in found:
        module.forward = CompiledForward(module.forward, module, f"{name} ({type(module).__name__})", backend)


def compiled_modules(workload: Workload) -> list[tuple[str, nn.Module]]:
    """(name, module) of each unit that there is something to compile of."""
    model = workload.model
    if is_cut_by_calls(workload):
        named = [(each.name, each.module) for each in visible_modules(model) if each.kind is CallKind.OPAQUE]
    else:
        named = [(prefix.rstrip("."), module) for prefix, module in units(model)]
    return [(name or "the model", module) for module, name in {m: n for n, m in named if _gains(m)}.items()]


def uncompiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    """For arguments without numbers."""
    return forward.eager if isinstance(forward, CompiledForward) else forward


def told_of(error: TorchDynamoException) -> str:
    """The first line of what torch says."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300]


class CompiledForward:
    """In the place of a module's forward."""

    def __init__(self, eager: Callable[..., Any], module: nn.Module, name: str, backend: _Backend) -> None:
        self.eager = eager
        self._module, self._name, self._backend = module, name, backend
        plain = type(module).forward
        self._given = (module,) if getattr(eager, "__func__", None) is plain else ()  # else bound by the user
        self._compiled: Callable[..., Any] = torch.compile(
            plain if self._given else eager, dynamic=False, backend=backend
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledForward:
        eager, module = copy.deepcopy(self.eager, memo), copy.deepcopy(self._module, memo)
        return CompiledForward(eager, module, self._name, self._backend)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch._dynamo.config.recompile_limit < _LIMITS["recompile_limit"]:  # of each thread
            for name, value in _LIMITS.items():
                setattr(torch._dynamo.config, name, value)
        try:
            return self._compiled(*self._given, *args, **kwargs)
        except TorchDynamoException as error:
            self.eager(*args, **kwargs)  # the user's own error, where it is that, says more
            raise CompileError(f"{self._name} cannot be compiled: {told_of(error)}; {_WITHOUT}") from error


class _Backend:
    """torch's own, in one thread, and as often as is sensible."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._count = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        from torch._inductor.compile_fx import compile_fx  # takes a second, and most jobs compile nothing
        from torch.hub import tqdm

        tqdm.monitor_interval = 0  # or the progress bars that the compiler makes, and does not show, start a thread

        self._count += 1
        if self._count > self._most:
            raise CompileError(
                f"strategy.compile = true compiles for each shape, and there have been {self._most}; pad batches to a "
                f"few lengths in Workload.collate, or {_WITHOUT}"
            )
        how = {"compile_threads": 1, "fallback_random": True, "cpp.threads": torch.get_num_threads()}
        compiled: Callable[..., Any] = compile_fx(graph, inputs, config_patches=how)
        return compiled


def _gains(module: nn.Module) -> bool:
    is_layer = type(module).__module__.startswith("torch.nn.") and not any(True for _ in module.children())
    has_been = module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"
    return not (is_layer or has_been or isinstance(module, torch.jit.ScriptModule))


def _check_compiler() -> None:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except (InvalidCxxCompiler, OSError):
        looked = os.environ.get("CXX", "g++")
        raise CompileError(
            f"strategy.compile = true needs a C++ compiler, and {looked!r:.80} is none that runs here; install g++, "
            f"name another in CXX where the daemon is started, or {_WITHOUT}"
        ) from None
