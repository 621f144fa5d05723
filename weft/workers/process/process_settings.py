"""Process settings: what a job's code may set for the whole process, beside torch's own, which outlives the job."""

from __future__ import annotations

import gc
import os
import resource
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from weft.workload.code.installed import is_installed
from weft.workload.code.torchs_own import has_other_kernels

_LIMITS = {name: getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}
_SIGNALS = ("SigBlk", "SigIgn", "SigCgt")  # of /proc/PID/status: of this thread, and of the process
_OF_GLIBC = 0b11 << 31  # of the masks there: glibc handles two signals itself, from some thread's start on
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSettings:
    """Of a worker before a job, seen from its main thread. What can be put back is: the environment, where modules are
    looked for, and which warnings are shown. Where anything else differs the worker has to be replaced."""

    environment: Mapping[str, str]
    path: tuple[str, ...]
    filters: tuple[Any, ...]  # of warnings
    others: Mapping[str, Any]

    @classmethod
    def now(cls) -> ProcessSettings:
        filters = tuple(warnings.filters)
        return cls(environment=dict(os.environ), path=tuple(sys.path), filters=filters, others=dict(_others()))

    def restore(self) -> bool:
        """Whether all is as it was."""
        for name in os.environ.keys() - self.environment.keys():
            del os.environ[name]
        os.environ |= self.environment
        sys.path[:] = [*self.path, *(each for each in sys.path if each not in self.path and _is_of_installed(each))]
        if tuple(warnings.filters) != self.filters:
            warnings.filters[:] = self.filters  # type: ignore[index]
            with warnings.catch_warnings():  # whose end has all modules forget what they have shown
                pass
        return dict(_others()) == self.others


def _is_of_installed(place: str) -> bool:
    """What an installed package has added for itself, and may import from later."""
    return os.path.isabs(place) and is_installed(Path(place))


def _others() -> Iterator[tuple[str, Any]]:
    for name, number in _LIMITS.items():
        yield name, resource.getrlimit(number)
    for line in Path("/proc/thread-self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in _SIGNALS:
            yield name, int(value, 16) & ~_OF_GLIBC
        elif name == "Umask":
            yield name, value
    yield "streams", [_stream(number) for number in range(3)]  # which programs that are started find
    yield "handlers", {number: signal.getsignal(number) for number in signal.valid_signals()}
    yield "timers", [signal.getitimer(which) != (0.0, 0.0) for which in _TIMERS]
    yield "niceness", os.getpriority(os.PRIO_PROCESS, 0)
    yield "cores", os.sched_getaffinity(0)
    yield "session", (os.getsid(0), os.getpgid(0) == os.getpid())  # each worker, and each spare, leads its own
    yield "hooks", (sys.excepthook, sys.unraisablehook, threading.excepthook, sys.gettrace(), sys.getprofile())
    yield "collector", (gc.isenabled(), gc.get_threshold())
    yield "limits", (sys.getrecursionlimit(), socket.getdefaulttimeout(), sys.getswitchinterval())
    yield "numpy", np.geterr()
    yield (
        "torch",
        (
            torch.get_default_device(),
            torch.is_grad_enabled(),
            torch.is_anomaly_enabled(),
            torch._C._get_mkldnn_enabled(),
            torch.is_autocast_cache_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.backends.mha.get_fastpath_enabled(),
            torch.__future__.get_swap_module_params_on_conversion(),
            torch.__future__.get_overwrite_module_params_on_conversion(),
            torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
            torch.backends.opt_einsum.enabled,
            torch.backends.opt_einsum.strategy,
            torch._C._len_torch_function_stack(),  # modes that were entered; a default device is one
            torch._C._len_torch_dispatch_stack(),
            torch._C._autograd._top_saved_tensors_default_hooks(True),
            has_other_kernels(),
            _validates_distributions(),
            _flushes_denormal(),
        ),
    )


def _stream(number: int) -> tuple[int, int] | None:
    """Which file it is; None where it is closed."""
    try:
        found = os.fstat(number)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _validates_distributions() -> bool:
    module = sys.modules.get("torch.distributions.distribution")
    return __debug__ if module is None else module.Distribution._validate_args


def _flushes_denormal() -> bool:
    smallest = torch.full((1,), sys.float_info.min, dtype=torch.float64, device="cpu")
    return not (smallest / 2).item()
