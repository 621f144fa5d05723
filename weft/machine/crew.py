"""The crew: the workers of a daemon, what each computes on and where. Settled once, when the daemon starts.

cpu-0 cpu-1 ...     CPU workers, each with cores of its own where there are enough
gpu-0 gpu-1 ...     one for each GPU, with host cores near it; or stand-ins, which compute on cores
loader-0 ...        one for each of these, since every worker may have another job; more where the settings say so
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from types import MappingProxyType

from weft.machine.cgroups import read_cgroup_limits
from weft.machine.facts import read_machine
from weft.machine.gpus import Gpu, Inventory, read_inventory
from weft.machine.versions import torch_cuda
from weft.spec.admission import problem_of_crew
from weft.spec.job_spec import JobSpec
from weft.spec.settings import Settings
from weft.spec.workers_needed import Host

LANES = {"cpu": "compute", "gpu": "compute", "loader": "load"}
ALIKE = 0.1  # relative: so near to each other workers count as equal; arbitrary
GPU_CORES = 2  # at least, for the threads of a GPU's lanes: launching, waiting for what was launched, autograd's own


class CrewError(RuntimeError):
    """The settings ask for GPUs that cannot be used. The text says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    name: str
    kind: str
    device: str  # "cpu", "stand-in" or the uuid of a GPU, as in WorkerConfig
    model: str  # what people call the device
    cores: tuple[int, ...]  # empty where the worker is not pinned
    core_speed: float = 1.0  # of the slowest of these, as a part of the fastest of the machine

    @property
    def lane(self) -> str:
        return LANES[self.kind]


@dataclass(frozen=True, slots=True)
class Crew:
    members: tuple[Member, ...]
    peers: frozenset[frozenset[str]] = frozenset()  # GPUs that can read each other's memory, by uuid, in pairs
    threads: int = 1  # compute threads of each worker that is no loader
    processors: float | None = None  # that it may use, as of `Host`

    def __getitem__(self, name: str) -> Member:
        return next(member for member in self.members if member.name == name)

    def __str__(self) -> str:
        counts = Counter(member.model for member in self.members if member.kind != "loader")
        return ", ".join(f"{count} {model} worker{'s' * (count > 1)}" for model, count in counts.items())

    def kinds(self) -> dict[str, str]:
        return {member.name: member.kind for member in self.members}

    def has_peer_access(self, workers: Iterable[str]) -> bool:
        """Whether each of these workers' GPUs can read the memory of every other one. Stand-ins can."""
        devices = {self[worker].device for worker in workers if self[worker].kind == "gpu"}
        return all(frozenset(pair) in self.peers for pair in combinations(devices, 2))

    @property
    def is_unlike(self) -> bool:
        """It has GPUs of several models."""
        return len({member.model for member in self.members if member.kind == "gpu"}) > 1

    def slowness(
        self, workers: Iterable[str], inspector: str, probe_seconds: Mapping[str, float]
    ) -> dict[str, list[float]]:
        """As in an inspection. probe_seconds: by worker, of the same work on each one's device; GPUs of one model are
        as fast as the fastest of these."""
        by_model: dict[str, float] = {}
        for worker, seconds in probe_seconds.items():
            model = self[worker].model
            by_model[model] = min(seconds, by_model.get(model, seconds))
        inspecting, found = self[inspector], dict[str, list[float]]()
        for member in map(self.__getitem__, workers):
            own = inspecting.core_speed / member.core_speed
            if member.kind == "gpu" and {member.model, inspecting.model} <= by_model.keys():
                own = by_model[member.model] / by_model[inspecting.model]
            if member.kind != "loader":
                found.setdefault(member.kind, []).append(1.0 if abs(own - 1.0) <= ALIKE else own)
        return found if any(own != 1.0 for each in found.values() for own in each) else {}

    @property
    def host(self) -> Host:
        kinds = Counter(member.kind for member in self.members)
        return Host(
            workers=kinds["cpu"],
            threads=self.threads,
            gpus=kinds["gpu"],
            processors=self.processors,
            stand_ins=any(member.device == "stand-in" for member in self.members),
        )

    def cores_of(self, workers: Iterable[str]) -> list[int]:
        """Of all of them together; empty where they are not pinned."""
        return sorted(core for worker in workers for core in self[worker].cores)

    def why_not(self, spec: JobSpec) -> str | None:
        """What it has too few workers for."""
        return problem_of_crew(spec, self.kinds().values(), self.threads)

    @property
    def is_pinned(self) -> bool:
        return any(member.cores for member in self.members)


def muster(settings: Settings) -> Crew:
    """The crew on this machine. Errors: CrewError."""
    inventory = read_inventory()
    gpus = usable_gpus(settings, inventory, torch_cuda(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    machine = read_machine()
    near = {node.index: frozenset(node.cpus) for node in machine.nodes} if gpus else {}
    quota = read_cgroup_limits().cpus
    return make_crew(settings, gpus, machine.cpus, near, peers_of(inventory), machine.core_speeds, quota=quota)


def peers_of(inventory: Inventory) -> frozenset[frozenset[str]]:
    """GPUs that can read each other's memory, by uuid, in pairs. A GPU that is cut into instances (MIG) can't."""
    whole = {gpu.index: gpu.uuid for gpu in inventory.gpus if not gpu.mig}
    return frozenset(
        frozenset((whole[pair.first], whole[pair.second]))
        for pair in inventory.peers
        if pair.access and pair.first in whole and pair.second in whole
    )


def usable_gpus(
    settings: Settings, inventory: Inventory, built_for: str | None, visible: str | None
) -> tuple[Gpu, ...]:
    """Those that get a worker. built_for: the CUDA version of the installed PyTorch. visible: CUDA_VISIBLE_DEVICES.

    Errors: CrewError.
    """
    if settings.stand_ins and settings.gpus is None:
        return ()
    if settings.stand_ins and settings.gpus:
        raise CrewError(f"gpus = {settings.gpus} beside stand_ins = {settings.stand_ins}; have the one or the other")
    found = _visible(inventory.gpus, visible) if built_for is not None else ()
    wanted = len(found) if settings.gpus is None else settings.gpus
    if wanted <= len(found):
        return found[:wanted]
    why = inventory.reason or ("CUDA_VISIBLE_DEVICES hides the others" if visible is not None else "there are no more")
    if inventory.gpus and built_for is None:
        why = "the installed PyTorch is built without CUDA"
    raise CrewError(
        f"gpus = {wanted}, and {len(found)} can be used: {why}; ask for fewer; `weft doctor` says what there is"
    )


def _visible(gpus: tuple[Gpu, ...], visible: str | None) -> tuple[Gpu, ...]:
    """As CUDA has it: up to the first name of none; a uuid may be cut short. Numbers are those of the PCI bus."""
    if visible is None:
        return gpus
    chosen: list[Gpu] = []
    for name in visible.split(","):
        matches = [
            gpu
            for gpu in gpus
            if name.strip() and (name.strip() == str(gpu.index) or gpu.uuid.startswith(name.strip()))
        ]
        if len(matches) != 1:
            break
        chosen += matches
    return tuple(chosen)


@dataclass(frozen=True, slots=True)
class _Post:
    """A worker to be."""

    kind: str
    device: str
    model: str
    num_cores: int
    node: int | None = None  # where its cores had better be


def make_crew(
    settings: Settings,
    gpus: Sequence[Gpu],
    cores: Sequence[int],
    near: Mapping[int, frozenset[int]],
    peers: frozenset[frozenset[str]] = frozenset(),
    core_speeds: Mapping[int, float] = MappingProxyType({}),
    *,
    quota: float | None = None,
) -> Crew:
    """cores: that may be used. near: by NUMA node. core_speeds: as parts of the fastest core's, which is what others
    have. quota: processors' worth of time, where there is one. Nobody is pinned where not everybody can have cores of
    their own."""
    host_cores = max(GPU_CORES, settings.threads)
    num_cpu = settings.num_workers(len(cores) - host_cores * len(gpus))
    posts = [_Post("cpu", "cpu", "CPU", settings.threads)] * num_cpu
    posts += [_Post("gpu", gpu.uuid, gpu.name, host_cores, gpu.numa_node) for gpu in gpus]
    posts += [_Post("gpu", "stand-in", "stand-in", settings.threads)] * settings.stand_ins
    sets = _core_sets(posts, cores, near)
    counts = Counter[str]()
    members = []
    for post, own in zip(posts, sets, strict=True):
        name = f"{post.kind}-{counts[post.kind]}"
        counts[post.kind] += 1
        speed = min((core_speeds.get(core, 1.0) for core in own), default=1.0)
        members.append(
            Member(name=name, kind=post.kind, device=post.device, model=post.model, cores=own, core_speed=speed)
        )
    loaders = [
        Member(name=f"loader-{n}", kind="loader", device="cpu", model="CPU", cores=())
        for n in range(max(settings.loaders, len(posts)))
    ]
    processors = float(len(cores)) if quota is None else min(quota, len(cores))
    return Crew((*members, *loaders), peers, settings.threads, processors)


def _core_sets(
    posts: Sequence[_Post], cores: Sequence[int], near: Mapping[int, frozenset[int]]
) -> list[tuple[int, ...]]:
    """Who has a place that is better than others chooses first."""
    sets: list[tuple[int, ...]] = [()] * len(posts)
    if sum(post.num_cores for post in posts) > len(cores):
        return sets
    free = list(cores)
    for number in sorted(range(len(posts)), key=lambda number: posts[number].node is None):
        node = posts[number].node
        close = frozenset(cores) if node is None else near.get(node, frozenset())
        sets[number] = tuple(sorted(free, key=lambda core: core not in close)[: posts[number].num_cores])
        free = [core for core in free if core not in sets[number]]
    return sets
