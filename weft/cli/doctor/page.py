"""The page of `weft doctor`: facts in sections, then what each check found. Scripts read `--json` instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from weft.cli.doctor.facts import Facts
from weft.cli.doctor.finding import Finding, counted
from weft.cli.screens.display import make_table, plain_text
from weft.machine.gpus import Gpu, Inventory
from weft.quantities import duration, size
from weft.transport.wire.frames import Message

_STYLES = {"ok": "dim", "note": "yellow", "problem": "red"}
_NONE = "-"


def doctor_page(console: Console, facts: Facts, findings: Sequence[Finding]) -> None:
    _section(console, "machine", _machine(facts))
    _section(console, "memory", _memory(facts))
    _section(console, "software", _software(facts))
    _section(console, "daemon", _daemon(facts))
    console.print("\nGPUs")
    console.print(_gpus(facts.inventory.gpus) if facts.inventory.gpus else f"  none: {facts.inventory.reason}")
    if facts.inventory.peers:
        console.print(_peers(facts.inventory))
    console.print("\nstrategies")
    console.print(_presets(facts))
    if facts.speeds is not None:
        _section(console, "speeds", _speeds(facts.speeds))
    console.print("\nfindings")
    for finding in findings:
        line = plain_text(f"  {finding.level:<8}", _STYLES[finding.level])
        console.print(line.append(f"{finding.check}: {finding.sentence}", style=""))
        if finding.remedy:
            console.print(plain_text(f"          {finding.remedy}", "bold"))
    counts = {level: sum(finding.level == level for finding in findings) for level in ("problem", "note", "ok")}
    console.print(f"\n{counted(counts['problem'], 'problem')}, {counted(counts['note'], 'note')}, {counts['ok']} ok")


def _section(console: Console, title: str, rows: Mapping[str, str]) -> None:
    console.print(title if title == "machine" else f"\n{title}")
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 2))
    for name, value in rows.items():
        table.add_row(name, plain_text(value))
    console.print(table)


def _machine(facts: Facts) -> dict[str, str]:
    machine = facts.machine
    rows = {
        "processor": machine.cpu_model,
        "usable": f"{counted(machine.num_sockets, 'socket')}, {counted(machine.num_cores, 'core')}, "
        f"{counted(len(machine.cpus), 'thread')} of {machine.num_online}",
        "last cache": size(machine.last_cache_bytes),
    }
    for speed in sorted({speed for speed in machine.core_speeds.values() if speed < 1.0}, reverse=True):
        slower = (cpu for cpu in machine.cpus if machine.core_speeds.get(cpu) == speed)
        rows[f"speed {speed:.2f}"] = f"processors {' '.join(map(str, slower))}, of the fastest ones' 1"
    for node in machine.nodes:
        cpus = " ".join(map(str, node.cpus)) or "none of ours"
        rows[f"NUMA node {node.index}"] = f"{size(node.total_bytes)}, processors {cpus}"
    if facts.cgroup.cpus is not None:
        rows["quota"] = f"{facts.cgroup.cpus:g} processors ({facts.cgroup.cpus_from})"
    return rows


def _memory(facts: Facts) -> dict[str, str]:
    policy, limits = facts.memory_policy, facts.limits
    rows = {"memory": f"{size(facts.machine.total_bytes)}, {size(facts.machine.available_bytes)} available"}
    if facts.cgroup.memory_bytes is not None:
        rows["limit"] = f"{size(facts.cgroup.memory_bytes)} ({facts.cgroup.memory_from})"
    rows["/dev/shm"] = f"{size(facts.shared_memory.total_bytes)}, {size(facts.shared_memory.free_bytes)} free"
    rows["huge pages"] = (
        f"{policy.huge_pages or 'none'}, of shared memory {policy.shared_huge_pages or 'none'}, "
        f"{policy.num_reserved_huge_pages} reserved of {size(policy.huge_page_bytes)}"
    )
    memlock = "unlimited" if limits.memlock_bytes is None else size(limits.memlock_bytes)
    rows["limits"] = f"locked memory {memlock}, open files {_limit(limits.nofile)}, processes {_limit(limits.nproc)}"
    return rows


def _limit(value: int | None) -> str:
    return "unlimited" if value is None else str(value)


def _software(facts: Facts) -> dict[str, str]:
    software, inventory = facts.software, facts.inventory
    return {
        "weft": f"{software.weft} on Python {software.python}, Linux {software.kernel}",
        "torch": f"{software.packages['torch'] or 'not installed'}, "
        + (f"CUDA {software.torch_cuda}" if software.torch_cuda else "without CUDA"),
        "NVIDIA driver": f"{inventory.driver}, up to CUDA {inventory.driver_cuda or '?'}"
        if inventory.driver
        else _NONE,
        "packages": ", ".join(
            f"{name} {found or 'MISSING'}" for name, found in software.packages.items() if name != "torch"
        ),
        "extras": ", ".join(f"{extra} {'yes' if found else 'no'}" for extra, found in software.extras.items()),
    }


def _daemon(facts: Facts) -> dict[str, str]:
    daemon = facts.daemon
    if daemon.status is None:
        said = {"answers": "no"}
    else:
        jobs = ", ".join(f"{count} {state}" for state, count in daemon.status["jobs"].items() if count) or "no jobs"
        workers = ", ".join(f"{each['worker']} {each['state']}" for each in daemon.status["workers"])
        said = {"answers": f"{daemon.status['version']}, pid {daemon.status['pid']}, {jobs}", "workers": workers}
    return said | {
        "runtime directory": daemon.runtime_dir.path,
        "state directory": daemon.state_dir.path,
        "run directories": daemon.runs_dir.path,
    }


def _gpus(gpus: Sequence[Gpu]) -> Table:
    table = make_table(
        "  gpu>",
        "name",
        "memory>",
        "free>",
        "capability",
        "PCIe",
        "NUMA node>",
        "ECC",
        "persistence",
        "processes>",
        "uuid",
    )
    for gpu in gpus:
        table.add_row(
            str(gpu.index),
            plain_text(gpu.name),
            size(gpu.total_bytes),
            size(gpu.free_bytes),
            ".".join(map(str, gpu.compute_capability or ())) or _NONE,
            f"gen {_of(gpu.pcie_generation, gpu.max_pcie_generation)}, x{_of(gpu.pcie_width, gpu.max_pcie_width)}",
            _NONE if gpu.numa_node is None else str(gpu.numa_node),
            _yes(gpu.ecc),
            _yes(gpu.persistence),
            str(len(gpu.processes)),
            gpu.uuid,
        )
    return table


def _of(now: int | None, most: int | None) -> str:
    return f"{_NONE if now is None else now} of {_NONE if most is None else most}"


def _yes(value: bool | None) -> str:
    return {True: "on", False: "off", None: _NONE}[value]


def _peers(inventory: Inventory) -> Table:
    table = make_table("  gpus", "peer access", "NVLink")
    for peers in inventory.peers:
        table.add_row(
            f"  {peers.first} and {peers.second}",
            *({True: "yes", False: "no", None: _NONE}[each] for each in (peers.access, peers.nvlink)),
        )
    return table


def _presets(facts: Facts) -> Table:
    there = ", ".join(f"{count} {kind}" for kind, count in facts.workers.items())
    table = make_table("  preset", "needs", f"with {there}")
    for fit in facts.presets:
        missing = " and ".join(
            f"{count} {kind} worker{'s' if count > 1 else ''}" for kind, count in fit.missing.items()
        )
        verdict = "runs" if fit.runs else f"lacks {missing}: {fit.remedy}"
        table.add_row(f"  {fit.preset}", " + ".join(f"{n} {kind}" for kind, n in fit.needs.items()), verdict)
    return table


def _speeds(speeds: Message) -> dict[str, str]:
    rows = {}
    if "one_core_bytes_per_second" in speeds:
        rows["memory, one core"] = _rate(speeds["one_core_bytes_per_second"])
        rows[f"memory, {speeds['num_cores']} cores"] = _rate(speeds["all_cores_bytes_per_second"])
        rows["first touch of shared memory"] = _rate(speeds["first_touch_bytes_per_second"])
        rows["wake-up on another core and back"] = duration(speeds["wake_round_trip_seconds"])
    for gpu in speeds["gpus"]:
        rows[f"gpu {gpu['index']} ({gpu['name']})"] = (
            f"to it {_rate(gpu['h2d_bytes_per_second'])}, from it {_rate(gpu['d2h_bytes_per_second'])}, "
            f"both at once {_rate(gpu['both_bytes_per_second'])}"
        )
    return rows


def _rate(bytes_per_second: float) -> str:
    """In powers of ten, as bandwidths are given everywhere."""
    return f"{bytes_per_second / 1e9:.3g} GB/s"
