"""Control groups: how much memory and processor time the kernel gives the group that this process is in, and how many
of its processes it has killed for lack of memory.

Version 2 has limits in `memory.max` and `cpu.max`, version 1 in `memory.limit_in_bytes` and `cpu.cfs_quota_us`; both
may be mounted. A limit of any group above binds as well, so the least of all counts. Who was killed counts in its own
group, whoever's limit it was: in `memory.events`, or `memory.oom_control`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from weft.machine.mounts import Mount, read_mounts

Limit = TypeVar("Limit", int, float)
UNLIMITED_BYTES = 1 << 60  # version 1 writes the largest multiple of a page for no limit


@dataclass(frozen=True, slots=True, kw_only=True)
class CgroupLimits:
    """None: no limit."""

    memory_bytes: int | None = None
    memory_from: str | None = None  # the directory of the group that has it
    cpus: float | None = None  # processors' worth of time, such as 1.5
    cpus_from: str | None = None


def read_cgroup_limits(root: Path = Path("/")) -> CgroupLimits:
    num_bytes, memory_from = min(_of_groups(root, "memory", _memory_bytes), default=(None, None))
    count, cpus_from = min(_of_groups(root, "cpu", _cpus), default=(None, None))
    return CgroupLimits(memory_bytes=num_bytes, memory_from=memory_from, cpus=count, cpus_from=cpus_from)


def read_memory_limit(root: Path = Path("/")) -> int | None:
    """In bytes; None: there is none."""
    return min((num_bytes for num_bytes, _ in _of_groups(root, "memory", _memory_bytes)), default=None)


def _of_groups(root: Path, controller: str, read: Callable[[Path], Limit | None]) -> Iterator[tuple[Limit, str]]:
    """The limits that bind, each with its group's directory."""
    for mount, controllers, path in _hierarchies(root):
        for group in _groups(root, mount, path) if controller in controllers else ():
            if (limit := read(group)) is not None:
                yield limit, "/" + str(group.relative_to(root))


def read_oom_kills(root: Path = Path("/")) -> int | None:
    """Processes of our group that the kernel has killed for lack of memory; of the whole machine where the group does
    not count them, as the topmost one; None where nobody does."""
    for mount, controllers, path in _hierarchies(root):
        if "memory" in controllers:
            group = _groups(root, mount, path)[0]
            for name in ("memory.events", "memory.oom_control"):
                if (num_kills := _counter(group / name)) is not None:
                    return num_kills
    return _counter(root / "proc/vmstat")


def _counter(path: Path) -> int | None:
    """Of the line `oom_kill N`."""
    for line in _text(path).splitlines():
        name, _, number = line.partition(" ")
        if name == "oom_kill" and number.strip().isdigit():
            return int(number)
    return None


def _hierarchies(root: Path) -> Iterator[tuple[Mount, frozenset[str], str]]:
    """Each hierarchy that is mounted, the controllers to look for in it, and our group's path in it."""
    mounts = read_mounts(root)
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if number == "0":
            found = [mount for mount in mounts if mount.kind == "cgroup2"]
            controllers = frozenset({"memory", "cpu"})
        else:
            controllers = frozenset(names.split(","))
            found = [mount for mount in mounts if mount.kind == "cgroup" and controllers <= mount.options]
        if found:
            yield found[-1], controllers, path


def _groups(root: Path, mount: Mount, path: str) -> list[Path]:
    """Our group and those above it, as far as they are mounted; a container may see no more than its own."""
    top = root / mount.point.lstrip("/")
    inside = path.removeprefix(mount.root) if mount.root != "/" else path
    group = top / inside.lstrip("/")
    if ".." in group.parts or not group.is_dir():
        return [top]
    return [group, *(above for above in group.parents if above.is_relative_to(top))]


def _memory_bytes(group: Path) -> int | None:
    text = _text(group / "memory.max").strip() or _text(group / "memory.limit_in_bytes").strip()
    return int(text) if text.isdigit() and int(text) < UNLIMITED_BYTES else None


def _cpus(group: Path) -> float | None:
    quota, _, period = _text(group / "cpu.max").strip().partition(" ")
    if not quota:
        quota = _text(group / "cpu.cfs_quota_us").strip()
        period = _text(group / "cpu.cfs_period_us").strip()
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
