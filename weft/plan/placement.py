"""Placement: which worker holds which stage of which replica. Pure.

Positions of workers, as `workers_needed` counts them: the CPU replicas' stages, then hosts (CPU workers that only
reduce and update for devices), then CPU workers that lend their cores to those, then the devices' stages, then the
loaders.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from weft.plan.buckets import Holder
from weft.plan.graph import Lane
from weft.plan.plan import ReplicaPlan, Synchronisation
from weft.plan.schedules.schedule import Schedule

COMPUTE, SYNC, LOAD, FETCH, DOWN, UP = "compute", "sync", "load", "fetch", "d2h", "h2d"
Cuts = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    replicas: tuple[ReplicaPlan, ...]
    cuts: tuple[Cuts, ...]  # units (first, last) of each stage of each replica
    workers: tuple[str, ...]  # the kind of each, by position
    worker_of: Mapping[Holder, int]  # the position that holds a stage
    schedules: tuple[Schedule | None, ...]  # of each replica; None: the layers of its working window take turns
    loaders: tuple[int, ...]  # their positions
    learns: bool = True
    synchronisation: Synchronisation | None

    def holders(self) -> list[Holder]:
        return [Holder(r, s) for r, cuts in enumerate(self.cuts) for s in range(len(cuts))]

    def compute_lane(self, r: int, s: int) -> Lane:
        """The stages of one line of the schedule take turns in one, and so do the layers of a working window. Lines
        that share a GPU have a stream each, so that one computes where another one waits."""
        worker, schedule = self.worker_of[Holder(r, s)], self.schedules[r]
        if schedule is None:
            return Lane(worker, COMPUTE)
        own = schedule.worker_of[s]
        lines = {
            schedule.worker_of[other] for other in schedule.worker_of if self.worker_of[Holder(r, other)] == worker
        }
        before = sum(line < own for line in lines)
        return Lane(worker, f"{COMPUTE}-{before}" if before else COMPUTE)

    def is_within_device(self, r: int, stages: Iterable[int]) -> bool:
        """Whether what goes between these stages stays on a GPU of theirs."""
        is_one = len({self.worker_of[Holder(r, s)] for s in stages}) == 1
        return self.replicas[r].device == "gpu" and is_one
