"""What is amiss with the machine, from its facts. Pure; `findings` runs every check, those of other files included."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from weft.cli.doctor.daemon_findings import DAEMON_CHECKS
from weft.cli.doctor.facts import Facts
from weft.cli.doctor.finding import Finding, mebibytes, note, ok, problem
from weft.cli.doctor.gpu_findings import GPU_CHECKS

LEAST_MEMORY_BYTES = 2 << 30  # torch in the fork server and some workers, and a small model; arbitrary beyond that
LEAST_SHARED_BYTES = 256 << 20  # arbitrary: a small model's parameters, gradients and slots; containers begin at 64 MiB
PART_FOR_SHARED = 4  # a machine that shares less than this part of its memory has models that fit and cannot be trained
CLIENT_DESCRIPTORS = 256  # the connections that the daemon takes at once
WORKER_DESCRIPTORS = 8  # sockets and pipes of each worker, in the daemon and the fork server
BLOCK_DESCRIPTORS = 256  # shared blocks of a job: some four for each stage and replica
WORKER_TASKS = 16  # lanes, control thread and what libraries start, above the compute threads
SPARE_TASKS = 64


def findings(facts: Facts) -> list[Finding]:
    """One for each check, or more where several things are amiss; in the order in which they are shown."""
    found: list[Finding] = []
    for check in (*MACHINE_CHECKS, *GPU_CHECKS, *DAEMON_CHECKS):
        found += check(facts)
    return found


def check_processors(facts: Facts) -> Iterable[Finding]:
    machine = facts.machine
    cpus, wanted = len(machine.cpus), facts.workers.get("cpu", 0) * facts.threads
    if cpus < machine.num_online:
        yield note(
            "processors",
            f"This process may use {cpus} of {machine.num_online} processors; so may the daemon that it starts.",
            "Start it without taskset, or widen the cpuset of its container or unit (AllowedCPUs).",
        )
    elif wanted > cpus:
        yield note(
            "processors",
            f"{facts.workers['cpu']} CPU workers with {facts.threads} threads each share {cpus} processors: they are "
            "not pinned, and wait for each other's turns.",
            "Set workers or threads lower in weft.toml.",
        )
    else:
        yield ok("processors", f"All {cpus} processors may be used.")


def check_processor_quota(facts: Facts) -> Iterable[Finding]:
    allowed, cpus = facts.cgroup.cpus, len(facts.machine.cpus)
    if allowed is None or allowed >= cpus:
        yield ok("processor-quota", "No quota of processor time binds.")
        return
    sentence = (
        f"{cpus} processors are seen, and {facts.cgroup.cpus_from} allows the time of {allowed:g}: once it is used up, "
        "every process is stopped for the rest of each period, and a stopped lane stops those that wait for it."
    )
    fitting = max(1, math.floor(allowed) // facts.threads)
    remedy = f"Raise the quota (docker --cpus, CPUQuota= of the unit), or set workers = {fitting} in weft.toml."
    wanted = facts.workers.get("cpu", 0) * facts.threads
    yield (problem if wanted > math.ceil(allowed) else note)("processor-quota", sentence, remedy)


def check_memory(facts: Facts) -> Iterable[Finding]:
    limit, total = facts.cgroup.memory_bytes, facts.machine.total_bytes
    if facts.usable_bytes < LEAST_MEMORY_BYTES:
        yield problem(
            "memory",
            f"{mebibytes(facts.usable_bytes)} of memory may be used: PyTorch in the daemon's processes takes most of "
            "it, and the kernel kills workers.",
            f"Give at least {mebibytes(LEAST_MEMORY_BYTES)}"
            + (f": raise the limit of {facts.cgroup.memory_from}." if limit is not None and limit < total else "."),
        )
    elif limit is not None and limit < total:
        yield note(
            "memory",
            f"{mebibytes(total)} of memory are seen, and {facts.cgroup.memory_from} allows {mebibytes(limit)}: above "
            "it the kernel kills a worker, and its job starts again.",
            "Raise the limit (docker --memory, MemoryMax= of the unit), or keep jobs below it: `weft show JOB` says "
            "what each stage takes.",
        )
    elif facts.machine.available_bytes < LEAST_MEMORY_BYTES:
        yield note(
            "memory",
            f"Of {mebibytes(total)} of memory only {mebibytes(facts.machine.available_bytes)} are available now: "
            "workers may swap or be killed.",
            "End what holds it, or use fewer workers.",
        )
    else:
        yield ok("memory", f"{mebibytes(facts.machine.available_bytes)} of {mebibytes(total)} are available.")


def check_overcommit(facts: Facts) -> Iterable[Finding]:
    policy = facts.memory_policy
    if policy.overcommit != 2:
        yield ok("overcommit", f"vm.overcommit_memory is {policy.overcommit}: workers can be forked.")
        return
    yield note(
        "overcommit",
        f"vm.overcommit_memory is 2, and {mebibytes(policy.uncommitted_bytes)} are left to promise: each worker counts "
        "with all that it may write, so a fork or a tensor fails while memory is free.",
        "sysctl vm.overcommit_memory=0, or raise vm.overcommit_ratio.",
    )


def check_shared_memory(facts: Facts) -> Iterable[Finding]:
    shared = facts.shared_memory
    enlarge = "docker run --shm-size=8g, a larger emptyDir of medium Memory, or mount -o remount,size=50% /dev/shm."
    if shared.total_bytes == 0:
        yield problem(
            "shared-memory",
            "There is no /dev/shm: nothing that workers share can be made.",
            "mount -t tmpfs shm /dev/shm.",
        )
    elif shared.kind not in ("tmpfs", "ramfs", None):
        yield problem(
            "shared-memory",
            f"/dev/shm is on {shared.kind}: what workers share goes to a disk.",
            "mount -t tmpfs shm /dev/shm.",
        )
    elif shared.free_bytes < LEAST_SHARED_BYTES:
        full = shared.total_bytes >= LEAST_SHARED_BYTES
        yield problem(
            "shared-memory",
            f"/dev/shm has {mebibytes(shared.free_bytes)} free of {mebibytes(shared.total_bytes)}: parameters, "
            "gradients and slots lie there, and a worker that writes beyond it is killed by SIGBUS.",
            "Remove what fills it (ls -l /dev/shm)." if full else enlarge,
        )
    elif shared.free_bytes < facts.usable_bytes // PART_FOR_SHARED:
        yield note(
            "shared-memory",
            f"/dev/shm has {mebibytes(shared.free_bytes)} free, and {mebibytes(facts.usable_bytes)} of memory may be "
            "used: a job whose parameters, gradients and slots need more fails although memory is there.",
            enlarge,
        )
    else:
        yield ok("shared-memory", f"/dev/shm has {mebibytes(shared.free_bytes)} free.")


def check_huge_pages(facts: Facts) -> Iterable[Finding]:
    chosen = facts.memory_policy.huge_pages
    if chosen in ("always", "madvise"):
        yield ok("huge-pages", f"Transparent huge pages are on {chosen}: workers ask for them.")
        return
    yield note(
        "huge-pages",
        "Transparent huge pages are "
        + ("never given" if chosen else "not in this kernel")
        + ": large tensors are touched "
        "first in pages of 4 KiB, and small ones found through them, which cost 1.1 to 1.3 times the iteration where "
        "we measured it.",
        "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled, as root.",
    )


def check_open_files(facts: Facts) -> Iterable[Finding]:
    needed = CLIENT_DESCRIPTORS + BLOCK_DESCRIPTORS + WORKER_DESCRIPTORS * (sum(facts.workers.values()) + 2)
    whose, cost = "clients, workers and shared blocks", "connections are refused, and jobs fail as they open blocks"
    yield _limit("open-files", "NOFILE", "-n", facts.limits.nofile, needed, whose, cost)


def check_processes(facts: Facts) -> Iterable[Finding]:
    needed = SPARE_TASKS + (WORKER_TASKS + facts.threads) * (sum(facts.workers.values()) + 2)
    whose, cost = "workers, their threads and all else of this user", "a worker that cannot start a thread dies"
    yield _limit("processes", "NPROC", "-u", facts.limits.nproc, needed, whose, cost)


def _limit(check: str, name: str, flag: str, limit: int | None, needed: int, whose: str, cost: str) -> Finding:
    """name: of the RLIMIT, and of the unit's key; flag: ulimit's."""
    if limit is None or limit >= needed:
        return ok(check, f"RLIMIT_{name} suffices for {whose}.")
    better = max(needed, 4096)
    sentence = f"RLIMIT_{name} is {limit}, and {whose} may need {needed}: {cost}."
    return problem(check, sentence, f"ulimit {flag} {better}, or Limit{name}={better} in the unit.")


def check_software(facts: Facts) -> Iterable[Finding]:
    missing = [name for name, version in facts.software.packages.items() if version is None]
    if missing:
        yield problem(
            "software",
            f"Weft needs {', '.join(missing)}, not installed in this environment.",
            "Install Weft anew: pip install . in its sources, or make install.",
        )
    else:
        yield ok("software", f"PyTorch {facts.software.packages['torch']} and all that Weft needs is installed.")


def check_speeds(facts: Facts) -> Iterable[Finding]:
    if facts.speeds is None:
        return
    if facts.speeds["error"]:
        yield problem(
            "speeds",
            f"Not all speeds could be measured ({facts.speeds['error']}): PyTorch does not work as it should.",
            "python -m weft.transport.memory.speeds shows it whole.",
        )
    else:
        yield ok("speeds", "Measured.")


MACHINE_CHECKS: tuple[Callable[[Facts], Iterable[Finding]], ...] = (
    check_processors,
    check_processor_quota,
    check_memory,
    check_overcommit,
    check_shared_memory,
    check_huge_pages,
    check_open_files,
    check_processes,
    check_software,
    check_speeds,
)
