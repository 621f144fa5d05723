"""Workers needed: how many workers of each kind a strategy takes, and which of them inspects. Pure.

A CPU worker that computes with more threads than it has cores for takes the cores of others, its lenders. The job holds
these too, and they do nothing:

    position       0          1          2          3          4          5
    threads = 3    computes   computes   lends to 0 lends to 0 lends to 1 lends to 1
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from weft.spec.replica import Replica
from weft.spec.schedule_text import num_lines
from weft.spec.strategy import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What a daemon has for one job."""

    workers: int = 1  # on the CPU
    threads: int = 1  # of each of them, and cores where they have cores of their own
    gpus: int = 0
    processors: float | None = None  # that all of them may use, parts of one by a quota; None: each has enough
    stand_ins: bool = False  # its GPUs are, and so compute on these, too


ONE_CORE: Final = Host()


def workers_needed(strategy: Strategy, host: Host = ONE_CORE) -> dict[str, int]:
    """How many workers of each kind a job holds while it runs. host: asked about where `threads` is given."""
    counts = _computing(strategy)
    counts["cpu"] *= seats_of(strategy, host)
    return {kind: count for kind, count in counts.items() if count}


def threads_of(strategy: Strategy, host: Host) -> int:
    """Of each of the job's CPU workers that do anything."""
    match strategy.threads:
        case None:
            return host.threads
        case "all":
            return seats_of(strategy, host) * host.threads
        case threads:
            return threads


def seats_of(strategy: Strategy, host: Host) -> int:
    """CPU workers whose cores such a worker has, itself among them."""
    match strategy.threads:
        case None:
            return 1
        case "all":
            return max(1, host.workers // max(1, _computing(strategy)["cpu"]))
        case threads:
            return -(-threads // host.threads)


def cores_lent(strategy: Strategy, host: Host, position: int) -> list[int]:
    """The positions of the workers whose cores that at a position has: its own and its lenders'. Empty for one whose
    threads and cores are as ever."""
    num_computing, num_lenders = _computing(strategy)["cpu"], seats_of(strategy, host) - 1
    if strategy.threads is None or position >= num_computing:
        return []
    first = num_computing + position * num_lenders
    return [position, *range(first, first + num_lenders)]


def _computing(strategy: Strategy) -> dict[str, int]:
    """By kind, those that do something."""
    workers = {"cpu": 0, "gpu": 0}
    for replica, count in zip(strategy.replica_list, worker_counts(strategy), strict=True):
        workers[replica.device] += count
    return {"cpu": workers["cpu"] + num_hosts(strategy), "gpu": workers["gpu"], "loader": strategy.loaders}


def worker_counts(strategy: Strategy) -> list[int]:
    """Of each replica, those that have its stages."""
    return [
        1 if replica.working_window is not None else replica.gpus or lines_of(strategy, replica)
        for replica in strategy.replica_list
    ]


def numbers_by_stage(strategy: Strategy, r: int, lines: Mapping[int, int]) -> dict[int, int]:
    """Of a replica, by stage, the number of its worker among the job's of that kind. lines: of the replica's schedule,
    by stage; neighbours share a worker where there are fewer of these."""
    counts, devices = worker_counts(strategy), [replica.device for replica in strategy.replica_list]
    before = sum(count for count, device in zip(counts[:r], devices, strict=False) if device == devices[r])
    num_lines = 1 + max(lines.values())
    return {stage: before + line * counts[r] // num_lines for stage, line in lines.items()}


def lines_of(strategy: Strategy, replica: Replica) -> int:
    """Of its schedule: each is a worker, if GPUs do not have several."""
    return num_lines(strategy.schedule, replica.num_stages, strategy.stages_per_worker)


def inspecting_worker(needed: Mapping[str, int]) -> int:
    """The position that inspects: the first device's stage, since that process computes on the host too, with as many
    threads as a CPU worker; without devices the first. needed: as of `workers_needed`."""
    return needed.get("cpu", 0) if "gpu" in needed else 0


def num_hosts(strategy: Strategy) -> int:
    """Devices alone still need a CPU worker where their gradients meet, or where their updates are made."""
    devices = [replica.device for replica in strategy.replica_list]
    on_host = strategy.update != "local" or any(strategy.staleness_list)
    return int("cpu" not in devices and (len(devices) > 1 or on_host))
