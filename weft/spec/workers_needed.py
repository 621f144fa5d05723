"""Workers needed: how many workers of each kind a strategy takes, and which of them inspects the job. Pure."""

from __future__ import annotations

from weft.spec.replica import Replica
from weft.spec.schedule_text import num_lines
from weft.spec.strategy import Strategy


def workers_needed(strategy: Strategy) -> dict[str, int]:
    """How many workers of each kind a job holds while it runs."""
    workers = {"cpu": 0, "gpu": 0}
    for replica, count in zip(strategy.replica_list, worker_counts(strategy), strict=True):
        workers[replica.device] += count
    needed = {"cpu": workers["cpu"] + _num_hosts(strategy), "gpu": workers["gpu"], "loader": strategy.loaders}
    return {kind: count for kind, count in needed.items() if count}


def worker_counts(strategy: Strategy) -> list[int]:
    """Of each replica, those that have its stages."""
    return [
        1 if replica.working_window is not None else replica.gpus or lines_of(strategy, replica)
        for replica in strategy.replica_list
    ]


def lines_of(strategy: Strategy, replica: Replica) -> int:
    """Of its schedule: each is a worker, if GPUs do not have several."""
    return num_lines(strategy.schedule, replica.num_stages, strategy.stages_per_worker)


def inspecting_worker(strategy: Strategy) -> int:
    """The position that inspects: the first device's stage, since that process computes on the host too, with as many
    threads as a CPU worker; without devices the first."""
    needed = workers_needed(strategy)
    return needed.get("cpu", 0) if "gpu" in needed else 0


def _num_hosts(strategy: Strategy) -> int:
    """Devices alone still need a CPU worker where their gradients meet, or where their updates are made."""
    devices = [replica.device for replica in strategy.replica_list]
    on_host = strategy.update != "local" or any(strategy.staleness_list)
    return int("cpu" not in devices and (len(devices) > 1 or on_host))
