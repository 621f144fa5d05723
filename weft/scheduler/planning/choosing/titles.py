"""Titles: a strategy in a few words, and why it was chosen in three lines. Pure."""

from __future__ import annotations

from collections import Counter
from typing import Final

from weft.spec.replica import Replica
from weft.spec.schedule_text import schedule_title
from weft.spec.strategy import Strategy
from weft.spec.workers_needed import Host, lines_of, threads_of

_PROCESS: Final = "one process"


def title_of(strategy: Strategy, host: Host) -> str:
    """As in "2 replicas of a pipeline of 2 workers (1f1b, 4 microbatches)"."""
    kinds = Counter(_place(strategy, replica) for replica in strategy.replica_list)
    replicas = " and ".join(_several(count, place) for place, count in kinds.items())
    details = [*_of_units(strategy), *_of_passes(strategy), *_of_updates(strategy), *_of_shares(strategy)]
    if strategy.threads is not None:
        details.append(_counted(threads_of(strategy, host), "thread") + (" each" if max(kinds.values()) > 1 else ""))
    return f"{replicas} ({', '.join(details)})" if details else replicas


def _several(count: int, place: str) -> str:
    return place if count == 1 else f"{count} replicas" if place == _PROCESS else f"{count} replicas of {place}"


def _place(strategy: Strategy, replica: Replica) -> str:
    if replica.working_window is not None:
        return "one GPU that streams its layers"
    if replica.num_stages == 1:
        return _PROCESS if replica.device == "cpu" else "one GPU"
    count = replica.gpus or lines_of(strategy, replica)
    return f"a pipeline of {_counted(count, 'worker' if replica.device == 'cpu' else 'GPU')}"


def _of_units(strategy: Strategy) -> list[str]:
    return ["compiled"] if strategy.compile is True else []


def _of_passes(strategy: Strategy) -> list[str]:
    is_cut = any(replica.num_stages > 1 for replica in strategy.replica_list)
    is_streamed = any(replica.working_window is not None for replica in strategy.replica_list)
    count = max(strategy.microbatch_counts)
    return [
        *([schedule_title(strategy.schedule)] if is_cut else []),
        *([_counted(count, "microbatch", "microbatches")] if is_cut or count > 1 else []),
        *(["recompute"] if strategy.recompute and not is_streamed else []),
    ]


def _of_updates(strategy: Strategy) -> list[str]:
    on_cpus = all(replica.device == "cpu" for replica in strategy.replica_list)
    place = None if on_cpus else {"cpu": "updates on the CPU", "balanced": "updates on both"}.get(strategy.update)
    is_coarse = strategy.sync == "coarse" and (len(strategy.replica_list) > 1 or place is not None)
    return [*([place] if place else []), *(["coarse sync"] if is_coarse else [])]


def _of_shares(strategy: Strategy) -> list[str]:
    return [f"shares {' : '.join(f'{share:g}' for share in strategy.shares)}"] if strategy.shares else []


def _counted(count: int, one: str, several: str = "") -> str:
    return f"{count} {one if count == 1 else several or one + 's'}"
