"""Placing: the stages of every replica onto positions of workers. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from weft.plan.buckets import Holder
from weft.plan.inspection import Inspection
from weft.plan.placement import Cuts, Placement
from weft.plan.plan import ReplicaPlan
from weft.plan.schedules.grid import schedule_of
from weft.plan.schedules.schedule import Schedule
from weft.scheduler.planning.memory import told_apart
from weft.scheduler.planning.synchronising import needs_buckets, synchronisation_of
from weft.spec.replica import Replica
from weft.spec.strategy import Strategy
from weft.spec.workers_needed import num_hosts, numbers_by_stage, worker_counts, workers_needed

RESIDENT_SHARE = 1 / 8  # of a GPU's free memory, for data: arbitrary; the rest is for what is computed


def place(
    strategy: Strategy,
    inspection: Inspection,
    cuts: Sequence[Cuts],
    local: frozenset[int] = frozenset(),
    *,
    schedules: Sequence[Schedule | None] | None = None,
    windows: Sequence[int | None] = (),
    learns: bool = True,
) -> Placement:
    """local: buckets that devices update themselves where the update is balanced. schedules: of each replica; None: as
    the strategy has it. windows: the working window of each replica, where any has one. learns: the job has updates."""
    needed = workers_needed(strategy, inspection.host)
    first_position = {"cpu": 0, "gpu": needed.get("cpu", 0)}
    worker_of: dict[Holder, int] = {}
    schedules = tuple(schedules or (scheduled(strategy, replica) for replica in strategy.replica_list))
    for r, replica in enumerate(strategy.replica_list):
        for s, number in numbers_by_stage(strategy, r, _lines(schedules[r], len(cuts[r]))).items():
            worker_of[Holder(r, s)] = first_position[replica.device] + number
    counts = zip(strategy.replica_list, worker_counts(strategy), strict=True)
    num_computing = sum(count for replica, count in counts if replica.device == "cpu")
    hosts = range(num_computing, num_computing + num_hosts(strategy))
    workers = tuple(kind for kind, count in needed.items() for _ in range(count))
    placement = Placement(
        replicas=_replica_plans(strategy, inspection, cuts, windows or [None] * len(cuts)),
        cuts=tuple(cuts),
        workers=workers,
        worker_of=worker_of,
        schedules=schedules,
        loaders=tuple(range(len(workers) - strategy.loaders, len(workers))),
        learns=learns,
        synchronisation=None,
    )
    if not learns or not needs_buckets(strategy, inspection, placement):
        return placement
    return replace(placement, synchronisation=synchronisation_of(strategy, inspection, placement, list(hosts), local))


def scheduled(strategy: Strategy, replica: Replica) -> Schedule | None:
    """None where layers of a working window take turns. Errors: ScheduleError."""
    if replica.working_window is not None:
        return None
    count = replica.microbatches or strategy.microbatches
    return schedule_of(strategy.schedule, replica.num_stages, count, strategy.stages_per_worker)


def _lines(schedule: Schedule | None, num_layers: int) -> Mapping[int, int]:
    """By stage."""
    return dict.fromkeys(range(num_layers), 0) if schedule is None else schedule.worker_of


def why_not_resident(inspection: Inspection) -> str | None:
    """Why devices cannot have the data; None where they can."""
    num_bytes, free = inspection.data_bytes, inspection.device_bytes
    if num_bytes is None:
        return "they are no tensors, or the workload collates or samples them itself"
    if free is not None and num_bytes > RESIDENT_SHARE * free:
        data, most, whole = told_apart(num_bytes, RESIDENT_SHARE * free, free)
        return f"their {data} are more than an eighth ({most}) of a GPU's free {whole}"
    return None


def _replica_plans(
    strategy: Strategy, inspection: Inspection, cuts: Sequence[Cuts], windows: Sequence[int | None]
) -> tuple[ReplicaPlan, ...]:
    resident = strategy.resident and why_not_resident(inspection) is None
    return tuple(
        ReplicaPlan(
            device=replica.device,
            num_stages=len(own_cuts),
            microbatches=count,
            private=replica.device == "gpu" or staleness > 0,
            staleness=staleness,
            working_window=window,
            resident=resident and replica.device == "gpu",
        )
        for replica, own_cuts, window, count, staleness in zip(
            strategy.replica_list, cuts, windows, strategy.microbatch_counts, strategy.staleness_list, strict=True
        )
    )
