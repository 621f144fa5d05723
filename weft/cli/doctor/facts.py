"""Everything that `weft doctor` knows before it judges: gathered once, then a value."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from weft.cli.doctor.daemon_facts import DaemonFacts, read_daemon
from weft.cli.doctor.preset_fit import PresetFit, fit_presets
from weft.machine.cgroups import CgroupLimits, read_cgroup_limits
from weft.machine.crew import CrewError, muster
from weft.machine.facts import (
    Limits,
    Machine,
    MemoryPolicy,
    SharedMemory,
    read_limits,
    read_machine,
    read_memory_policy,
    read_shared_memory,
)
from weft.machine.gpus import Inventory, read_inventory
from weft.machine.versions import Software, read_software
from weft.spec.settings import Settings
from weft.transport.wire.frames import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    machine: Machine
    cgroup: CgroupLimits
    shared_memory: SharedMemory
    limits: Limits
    memory_policy: MemoryPolicy
    software: Software
    inventory: Inventory
    visible_gpus: str | None  # CUDA_VISIBLE_DEVICES
    daemon: DaemonFacts
    workers: Mapping[str, int]  # by kind, the daemon's where one answers, else what one would have that starts now
    crew_error: str | None  # why none can start with these settings
    threads: int  # of each CPU worker
    presets: tuple[PresetFit, ...]
    speeds: Message | None  # None where nothing was measured

    @property
    def usable_bytes(self) -> int:
        """Memory that is there and that the control group lets us have."""
        return min(self.machine.total_bytes, self.cgroup.memory_bytes or self.machine.total_bytes)


def gather(settings: Settings, speeds: Message | None) -> Facts:
    inventory, daemon = read_inventory(), read_daemon(settings)
    workers, crew_error = _workers(settings, daemon)
    return Facts(
        machine=read_machine(),
        cgroup=read_cgroup_limits(),
        shared_memory=read_shared_memory(),
        limits=read_limits(),
        memory_policy=read_memory_policy(),
        software=read_software(),
        inventory=inventory,
        visible_gpus=os.environ.get("CUDA_VISIBLE_DEVICES"),
        daemon=daemon,
        workers=workers,
        crew_error=crew_error,
        threads=settings.threads,
        presets=tuple(fit_presets(workers)),
        speeds=speeds,
    )


def _workers(settings: Settings, daemon: DaemonFacts) -> tuple[dict[str, int], str | None]:
    if daemon.status is not None:
        return _count(worker["kind"] for worker in daemon.status["workers"]), None
    try:
        return _count(muster(settings).kinds().values()), None
    except CrewError as error:
        return _count(muster(settings.model_copy(update={"gpus": 0})).kinds().values()), str(error)


def _count(kinds: Iterable[str]) -> dict[str, int]:
    counts = Counter(kinds)
    return {kind: counts[kind] for kind in ("cpu", "gpu")}
