"""Footprint: what a worker process is before a job, and the most that it had in one."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import operator
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import psutil
import torch

from weft.workers.process.process_settings import ProcessSettings
from weft.workload.entry import foreign_modules

GROWTH_BYTES = 1 << 30  # a worker this much above its size when new is replaced: its heap is a job's leftovers
GROWTH_DESCRIPTORS = 64  # as well: Weft's own, and those that packages keep, are a few
_PR_SET_THP_DISABLE, _PR_GET_THP_DISABLE = 41, 42


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a worker is before a job, to tell whether the job has left it as it was."""

    modules: Mapping[str, ModuleType]  # by their names
    num_bytes: int
    num_threads: int
    num_descriptors: int
    dtype: torch.dtype
    settings: ProcessSettings

    @classmethod
    def now(cls, inherited: Mapping[str, ModuleType]) -> Footprint:
        """inherited: the modules that the process was forked with. To gather those thousands anew writes to each, which
        copies the page that it shares with the parent: half of what a worker takes to begin."""
        return cls(
            inherited if len(inherited) == len(sys.modules) else dict(sys.modules),
            psutil.Process().memory_info().rss,
            threading.active_count(),
            psutil.Process().num_fds(),
            torch.get_default_dtype(),
            ProcessSettings.now(),
        )

    def is_clean(self) -> bool:
        """Once the job's modules are unloaded; puts back what it can of the settings. In the main thread, as `now`."""
        try:
            return self._is_as_it_was()
        except OSError:  # where the job has left no descriptor, nothing can be asked
            return False

    def _is_as_it_was(self) -> bool:
        process = psutil.Process()
        grown = process.memory_info().rss - self.num_bytes > GROWTH_BYTES
        open_files = process.num_fds() - self.num_descriptors > GROWTH_DESCRIPTORS
        threads = threading.active_count() > self.num_threads + 1  # the control thread has come since
        children = bool(process.children())  # forked, they have our descriptors
        modules = not all(map(operator.is_, map(sys.modules.get, self.modules), self.modules.values()))
        is_as_set = self.settings.restore() and torch.get_default_dtype() is self.dtype
        left = grown or open_files or threads or children or modules or bool(foreign_modules(self.modules))
        return is_as_set and not left


def trim() -> None:
    """Gives the system back what is free; workers keep it otherwise, for the next large tensor."""
    ctypes.CDLL(None).malloc_trim(0)


@contextlib.contextmanager
def small_pages() -> Iterator[None]:
    """Of a process that makes what it will not keep, which would leave its huge pages half empty (prctl(2),
    PR_SET_THP_DISABLE)."""
    libc, given = ctypes.CDLL(None), _small_pages_given()
    libc.prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_THP_DISABLE, given, 0, 0, 0)


@functools.cache
def _small_pages_given() -> int:
    """By whoever has started this process: 1 where it is to have no huge pages at all."""
    given: int = ctypes.CDLL(None).prctl(_PR_GET_THP_DISABLE, 0, 0, 0, 0)
    return given


def reset_peak() -> None:
    """Lets the kernel's high-water mark of this process begin anew (proc(5), clear_refs)."""
    with contextlib.suppress(OSError):  # a kernel that does not: the mark is then of the process's whole life
        Path("/proc/self/clear_refs").write_text("5")


def peak_resident_bytes() -> int | None:
    """The most that was resident since the mark was reset, in bytes, shared pages included; None where no one tells."""
    with contextlib.suppress(OSError):  # the job has left no descriptor
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return None
