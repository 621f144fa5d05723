"""What the machine is and what it lets this process do, as /proc and /sys say. Readers take the root to read under.

Whatever a kernel does not tell is 0, None or empty, never an error: `weft doctor` has to work where things are amiss.
"""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from weft.machine.mounts import read_mounts

NVIDIA, DISPLAY_CLASS = "0x10de", "0x03"  # PCI vendor; the first byte of a display controller's class


@dataclass(frozen=True, slots=True, kw_only=True)
class NumaNode:
    index: int
    cpus: tuple[int, ...]  # those that this process may use
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    cpu_model: str
    num_sockets: int  # of the processors that this process may use, as are
    num_cores: int
    cpus: tuple[int, ...]
    one_cpu_per_core: tuple[int, ...]  # the first of each
    core_speeds: Mapping[int, float]  # by CPU, as a part of the fastest one's; empty where all are alike
    num_online: int  # processors, usable or not
    last_cache_bytes: int  # of the last level, over the usable cores
    nodes: tuple[NumaNode, ...]
    total_bytes: int
    available_bytes: int
    num_nvidia_cards: int  # on the PCI bus, usable or not


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedMemory:
    """/dev/shm."""

    kind: str | None  # of its file system; None where nothing is mounted there
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The soft limits of this process, None for none."""

    memlock_bytes: int | None
    nofile: int | None
    nproc: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPolicy:
    huge_pages: str | None  # always, madvise or never; None where the kernel has none
    shared_huge_pages: str | None  # of shared memory
    num_reserved_huge_pages: int
    huge_page_bytes: int
    overcommit: int  # vm.overcommit_memory; 2: the kernel promises no more than it has
    uncommitted_bytes: int


def read_machine(root: Path = Path("/"), usable: Iterable[int] | None = None) -> Machine:
    """usable: CPU numbers; by default those of the affinity mask."""
    cpus = tuple(sorted(os.sched_getaffinity(0) if usable is None else usable))
    devices = root / "sys/devices/system"
    cores: dict[str, int] = {}
    sockets = set()
    for cpu in cpus:
        topology = devices / f"cpu/cpu{cpu}/topology"
        cores.setdefault(_text(topology / "thread_siblings_list") or f"cpu {cpu}", cpu)
        sockets.add(_text(topology / "physical_package_id"))
    memory = _meminfo(root)
    return Machine(
        cpu_model=_cpu_model(root),
        num_sockets=len(sockets),
        num_cores=len(cores),
        cpus=cpus,
        one_cpu_per_core=tuple(cores.values()),
        core_speeds=core_speeds(cpus, root),
        num_online=len(cpu_list(_text(devices / "cpu/online"))) or len(cpus),
        last_cache_bytes=_last_cache_bytes(devices, cpus),
        nodes=_nodes(devices, cpus),
        total_bytes=memory.get("MemTotal", 0),
        available_bytes=memory.get("MemAvailable", 0),
        num_nvidia_cards=_num_nvidia_cards(root),
    )


def read_shared_memory(path: Path = Path("/dev/shm"), root: Path = Path("/")) -> SharedMemory:
    kinds = [mount.kind for mount in read_mounts(root) if mount.point == str(path)]
    try:
        status = os.statvfs(path)
    except OSError:
        return SharedMemory(kind=None, total_bytes=0, free_bytes=0)
    return SharedMemory(
        kind=kinds[-1] if kinds else None,
        total_bytes=status.f_blocks * status.f_frsize,
        free_bytes=status.f_bavail * status.f_frsize,
    )


def read_limits() -> Limits:
    def soft(which: int) -> int | None:
        limit = resource.getrlimit(which)[0]
        return None if limit == resource.RLIM_INFINITY else limit

    return Limits(
        memlock_bytes=soft(resource.RLIMIT_MEMLOCK),
        nofile=soft(resource.RLIMIT_NOFILE),
        nproc=soft(resource.RLIMIT_NPROC),
    )


def read_memory_policy(root: Path = Path("/")) -> MemoryPolicy:
    memory = _meminfo(root)
    overcommit = _text(root / "proc/sys/vm/overcommit_memory")
    huge_pages = root / "sys/kernel/mm/transparent_hugepage"
    return MemoryPolicy(
        huge_pages=_chosen(huge_pages / "enabled"),
        shared_huge_pages=_chosen(huge_pages / "shmem_enabled"),
        num_reserved_huge_pages=memory.get("HugePages_Total", 0),
        huge_page_bytes=memory.get("Hugepagesize", 0),
        overcommit=int(overcommit) if overcommit.isdigit() else 0,
        uncommitted_bytes=max(0, memory.get("CommitLimit", 0) - memory.get("Committed_AS", 0)),
    )


def cpu_list(text: str) -> tuple[int, ...]:
    """The numbers of a kernel's list, such as 0-3,8."""
    numbers: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return tuple(numbers)


def core_speeds(cpus: Iterable[int], root: Path = Path("/")) -> dict[int, float]:
    """By CPU, as a part of the fastest one's, of cores of several kinds in one machine, such as Intel's for performance
    and for efficiency; empty where all are alike. By the capacity by which the kernel tells them apart, or else by
    their highest frequency, which says less than there is."""
    cpus = list(cpus)
    for name in ("cpu_capacity", "cpufreq/cpuinfo_max_freq"):
        told = [_text(root / f"sys/devices/system/cpu/cpu{cpu}" / name) for cpu in cpus]
        if all(text.isdigit() and int(text) for text in told) and len(set(told)) > 1:
            most = max(map(int, told))
            return {cpu: int(text) / most for cpu, text in zip(cpus, told, strict=True)}
    return {}


def _nodes(devices: Path, usable: tuple[int, ...]) -> tuple[NumaNode, ...]:
    nodes = []
    for path in (devices / "node").glob("node[0-9]*"):
        index = int(path.name.removeprefix("node"))
        cpus = tuple(cpu for cpu in cpu_list(_text(path / "cpulist")) if cpu in usable)
        total = re.search(r"MemTotal:\s+(\d+) kB", _text(path / "meminfo"))
        nodes.append(NumaNode(index=index, cpus=cpus, total_bytes=1024 * int(total[1]) if total else 0))
    return tuple(sorted(nodes, key=lambda node: node.index))


def _last_cache_bytes(devices: Path, cpus: tuple[int, ...]) -> int:
    """The sum over the caches of the highest level that the CPUs share among them."""
    caches: dict[int, dict[str, int]] = {}
    for cpu in cpus:
        for path in (devices / f"cpu/cpu{cpu}/cache").glob("index[0-9]*"):
            level, size = _text(path / "level"), re.fullmatch(r"(\d+)K", _text(path / "size"))
            if level.isdigit() and size:
                shared_by = _text(path / "shared_cpu_list") or str(cpu)
                caches.setdefault(int(level), {})[shared_by] = 1024 * int(size[1])
    return sum(caches[max(caches)].values()) if caches else 0


def _num_nvidia_cards(root: Path) -> int:
    cards = (root / "sys/bus/pci/devices").glob("*")
    return sum(_text(card / "vendor") == NVIDIA and _text(card / "class").startswith(DISPLAY_CLASS) for card in cards)


def _cpu_model(root: Path) -> str:
    named = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", _text(root / "proc/cpuinfo"), flags=re.MULTILINE)
    return named[1].strip() if named else "unknown"


def _meminfo(root: Path) -> dict[str, int]:
    """Bytes, and plain numbers for counts."""
    rows = re.findall(r"^(\w+):\s+(\d+)( kB)?$", _text(root / "proc/meminfo"), flags=re.MULTILINE)
    return {name: int(value) * (1024 if unit else 1) for name, value, unit in rows}


def _chosen(path: Path) -> str | None:
    """The word in brackets: always [madvise] never."""
    chosen = re.search(r"\[(\w+)\]", _text(path))
    return chosen[1] if chosen else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
