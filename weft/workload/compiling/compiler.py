"""Compiler: torch's own, as units are compiled with it: its settings, and the directory of what it leaves.

Kernels draw as uncompiled operations do, and are made for as many threads as the one that asks for them computes with.
Nothing of it runs in another process, so that none is left behind. To import it takes seconds, so only who compiles
does.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, cast

import torch

from weft.machine.bounded_directory import shrink
from weft.machine.run_file import make_directory
from weft.plan.error_places import add_place, places_of
from weft.workload.workload import WorkloadError

MAX_CACHE_BYTES: Final = 2 << 30  # arbitrary: some thousand graphs
CACHE_VARIABLE: Final = "TORCHINDUCTOR_CACHE_DIR"
REMEDY: Final = "use strategy.compile = false"
_LIMITS: Final = {"recompile_limit": 1 << 16, "accumulated_recompile_limit": 1 << 16}  # Backend's tells, these do not


class CompileError(WorkloadError):
    """What cannot be compiled, or a machine that cannot."""


@contextlib.contextmanager
def compiling(cache: Path | None) -> Iterator[None]:
    """What is compiled inside is kept in this directory; None: where torch keeps it. Settings are as before at the end,
    those of this thread and the environment's. Errors: RunFileError."""
    from torch._dynamo import config

    before = os.environ.get(CACHE_VARIABLE)
    try:
        if cache is not None:
            keep_in(cache)
        with config.patch(_LIMITS):
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
    from torch import _dynamo

    if _dynamo.config.recompile_limit == _LIMITS["recompile_limit"]:
        _dynamo.reset()


def raise_limits() -> None:
    """Of the thread that asks, where they are torch's: behind so many graphs it would go on without compiling."""
    from torch._dynamo import config

    if config.recompile_limit < _LIMITS["recompile_limit"]:
        for name, value in _LIMITS.items():
            setattr(config, name, value)


def is_compilers(error: BaseException) -> bool:
    """Whether it is the compiler that has raised it, and not what it compiles."""
    if "torch._dynamo.exc" not in sys.modules:
        return False
    from torch._dynamo.exc import TorchDynamoException

    return isinstance(error, TorchDynamoException)


def cannot_compile(what: str, error: BaseException) -> CompileError:
    """With the first line of what torch says, and its places."""
    cause = getattr(error, "inner_exception", error)
    told = next((line.strip() for line in str(cause).splitlines() if line.strip()), type(cause).__name__)
    made = CompileError(f"{what} cannot be compiled: {told.rstrip(':'):.300}; {REMEDY}")
    for place in places_of(error):
        add_place(made, place)
    return cause if isinstance(cause, CompileError) else made


def import_seconds() -> float:
    """What it takes to import it; hardly anything, where this process has done so before."""
    began = time.perf_counter()
    importlib.import_module("torch._inductor.compile_fx")
    return time.perf_counter() - began


def check_compiler() -> None:
    """Errors: CompileError, where there is none."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except (InvalidCxxCompiler, OSError):
        looked = os.environ.get("CXX", "g++")
        raise CompileError(
            f"strategy.compile = true needs a C++ compiler, and {looked!r:.80} is none that runs here; install g++, "
            f"name another in CXX where the daemon is started, or {REMEDY}"
        ) from None


class Backend:
    """As often as is sensible. num_graphs: that it has been asked for. until: a moment of time.monotonic() at which it
    begins no more."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.num_graphs = 0
        self.until = math.inf

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        from torch import hub
        from torch._inductor.compile_fx import compile_fx  # takes a second, and most jobs compile nothing

        vars(hub)["tqdm"].monitor_interval = 0  # or bars that the compiler makes, and does not show, start a thread
        self.num_graphs += 1
        if self.num_graphs > self._most:
            raise CompileError(
                f"strategy.compile = true compiles for each shape, and there have been {self._most}; pad batches to a "
                f"few lengths in Workload.collate, or {REMEDY}"
            )
        if time.monotonic() > self.until:
            raise CompileError("making kernels takes longer than they are worth")
        how = {"compile_threads": 1, "fallback_random": True, "cpp.threads": torch.get_num_threads()}
        return cast("Callable[..., Any]", compile_fx(graph, inputs, config_patches=how))
