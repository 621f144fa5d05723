"""Free memory: what there is of it for a job that is about to be planned."""

from __future__ import annotations

import os
from dataclasses import dataclass

import psutil

from weft.machine.cgroups import read_memory_limit


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeMemory:
    """In bytes."""

    shared: int  # in /dev/shm, where arenas are
    host: int  # of any kind: the machine's or, where that is less, all that the daemon's control group may have


def free_memory() -> FreeMemory:
    status = os.statvfs("/dev/shm")
    available, limit = psutil.virtual_memory().available, read_memory_limit()
    return FreeMemory(
        shared=status.f_bavail * status.f_frsize, host=available if limit is None else min(available, limit)
    )


class SharedMemoryFull(Exception):
    """A block cannot be made or mapped. The text has the sums and the remedy."""
