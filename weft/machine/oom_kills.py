"""The kernel's kills for lack of memory, told from all others: a killed process has one exit code, whoever killed it.

    counter of the group  3 ───────────── 3 ──── 4 ───────────────── 4
    what happens              kill by an    kill by the     kill by an
                              operator      kernel          operator
    claim                     no            yes             no

The kernel counts before it kills, so the count is there when the process has ended. A count that nobody's end explains,
such as that of a process that the job's code has started, is forgotten after a while: it says nothing of a later end.
"""

from __future__ import annotations

from collections.abc import Callable

from weft.machine.cgroups import CgroupLimits, read_oom_kills

KEPT_SECONDS = 30.0  # arbitrary: above the time in which the kernel takes a large process apart


class OomKills:
    """now: seconds on any clock that never goes back."""

    def __init__(self, read: Callable[[], int | None] = read_oom_kills) -> None:
        self._read = read
        self._counted = read() or 0
        self._unclaimed = 0
        self._seen_at = 0.0

    def look(self, now: float) -> None:
        """Now and then, so that what is old is known to be."""
        counted = self._read() or 0
        if counted > self._counted:
            self._unclaimed += counted - self._counted
            self._seen_at = now
        elif now - self._seen_at > KEPT_SECONDS:
            self._unclaimed = 0
        self._counted = counted

    def claim(self, now: float) -> bool:
        """Whether a process that has just been found killed was killed by the kernel; each of its kills is one's."""
        self.look(now)
        was_one = self._unclaimed > 0
        self._unclaimed -= was_one
        return was_one


def told_shortage(peak_bytes: int | None, limits: CgroupLimits, machine_bytes: int) -> str:
    """What is known of such a kill. peak_bytes: the most that the process had. machine_bytes: all that there is."""
    had = f"it had up to {peak_bytes / 2**20:.0f} MiB, and " if peak_bytes else ""
    if limits.memory_bytes is not None and limits.memory_bytes < machine_bytes:
        room = f"{limits.memory_from} may have {limits.memory_bytes / 2**20:.0f} MiB, all its processes together"
    else:
        room = f"the machine has {machine_bytes / 2**20:.0f} MiB"
    return f"was killed by the kernel for lack of memory: {had}{room}"
