"""Facts of a machine with which nothing is amiss: 8 cores, 64 GiB, no GPU. Tests change one thing and look.

Modules of this directory take it with `runpy`, since tests are no package.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from weft.cli.doctor.daemon_facts import DaemonFacts, RuntimeDirectoryFacts, StorageFacts
from weft.cli.doctor.facts import Facts
from weft.cli.doctor.finding import Finding
from weft.cli.doctor.machine_findings import findings
from weft.cli.doctor.preset_fit import fit_presets
from weft.machine.cgroups import CgroupLimits
from weft.machine.facts import Limits, Machine, MemoryPolicy, NumaNode, SharedMemory
from weft.machine.gpus import Gpu, Inventory
from weft.machine.versions import EXTRAS, PACKAGES, Software

GIB = 1 << 30
CPUS = tuple(range(8))

SOUND = Facts(
    machine=Machine(
        cpu_model="A processor",
        num_sockets=1,
        num_cores=8,
        cpus=CPUS,
        one_cpu_per_core=CPUS,
        core_speeds={},
        num_online=8,
        last_cache_bytes=32 << 20,
        nodes=(NumaNode(index=0, cpus=CPUS, total_bytes=64 * GIB),),
        total_bytes=64 * GIB,
        available_bytes=60 * GIB,
        num_nvidia_cards=0,
    ),
    cgroup=CgroupLimits(),
    shared_memory=SharedMemory(kind="tmpfs", total_bytes=32 * GIB, free_bytes=32 * GIB),
    limits=Limits(memlock_bytes=8 << 20, nofile=20_000, nproc=100_000),
    memory_policy=MemoryPolicy(
        huge_pages="madvise",
        shared_huge_pages="never",
        num_reserved_huge_pages=0,
        huge_page_bytes=2 << 20,
        overcommit=0,
        uncommitted_bytes=32 * GIB,
    ),
    software=Software(
        python="3.11.7",
        kernel="6.1.0",
        weft="0.1.0",
        packages=dict.fromkeys(PACKAGES, "1.0"),
        extras=dict.fromkeys(EXTRAS),
        torch_cuda=None,
    ),
    inventory=Inventory(missing="library", reason="there is no NVIDIA driver library (libnvidia-ml.so.1)"),
    visible_gpus=None,
    daemon=DaemonFacts(
        runtime_dir=RuntimeDirectoryFacts(path="/run/user/1000/weft", kind="directory", owner=os.geteuid(), mode=0o700),
        state_dir=StorageFacts(path="/home/me/.local/state/weft", exists=True, writable=True, free_bytes=500 * GIB),
        runs_dir=StorageFacts(path="/home/me/.local/state/weft/runs", exists=True, writable=True, free_bytes=500 * GIB),
        socket="absent",
        why=None,
        lock_pid=None,
        lock_held=False,
        status=None,
    ),
    workers={"cpu": 8, "gpu": 1},
    crew_error=None,
    threads=1,
    presets=tuple(fit_presets({"cpu": 8, "gpu": 1})),
    speeds=None,
)

GPU = Gpu(
    index=0,
    uuid="GPU-0000",
    name="A GPU",
    total_bytes=24 * GIB,
    free_bytes=23 * GIB,
    numa_node=0,
    pci_address="00000000:3B:00.0",
    compute_capability=(9, 0),
    pcie_generation=1,
    max_pcie_generation=4,
    pcie_width=16,
    max_pcie_width=16,
    ecc=True,
    persistence=True,
    mig=False,
    processes=(),
)


def changed(part: str, **changes: Any) -> Facts:
    """The sound facts with another value of some fields of one part."""
    return replace(SOUND, **{part: replace(getattr(SOUND, part), **changes)})


def with_gpu(**changes: Any) -> Facts:
    """The sound facts with a GPU, and a PyTorch that can use it."""
    inventory = Inventory(gpus=(replace(GPU, **changes),), driver="580.1", driver_cuda="13.0")
    machine = replace(SOUND.machine, num_nvidia_cards=1)
    return replace(SOUND, inventory=inventory, machine=machine, software=replace(SOUND.software, torch_cuda="12.8"))


def of(check: str, facts: Facts) -> list[Finding]:
    return [finding for finding in findings(facts) if finding.check == check]


def the(check: str, facts: Facts) -> Finding:
    (finding,) = of(check, facts)
    return finding
