"""Placement: which worker holds which stage of which replica, and who reduces and updates each bucket. Pure.

Positions of workers, as `workers_needed` counts them: the CPU replicas' stages, then hosts (CPU workers that only
reduce and update for devices), then the devices' stages, then the loader.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from weft.scheduler.buckets import Bucket, Holder, OwnedRange, make_buckets, owned_ranges
from weft.scheduler.graph import Lane
from weft.scheduler.inspection import Inspection, StateFacts
from weft.scheduler.plan import BucketPlan, ReplicaPlan, Route, Synchronisation
from weft.strategy import Strategy

COMPUTE, SYNC, LOAD, FETCH, DOWN, UP = "compute", "sync", "load", "fetch", "d2h", "h2d"

Cuts = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """cuts: units (first, last) of each stage of each replica. worker_of: the position that holds a stage."""

    replicas: tuple[ReplicaPlan, ...]
    cuts: tuple[Cuts, ...]
    workers: tuple[str, ...]
    worker_of: Mapping[Holder, int]
    loader: int
    learns: bool = True
    synchronisation: Synchronisation | None

    def holders(self) -> list[Holder]:
        return [(r, s) for r, cuts in enumerate(self.cuts) for s in range(len(cuts))]

    def compute_lane(self, r: int, s: int) -> Lane:
        """Stages that share a GPU have a stream each, so that one computes where another one waits. The layers of a
        working window take turns in one."""
        worker = self.worker_of[r, s]
        before = sum(self.worker_of[r, other] == worker for other in range(s))
        if before == 0 or self.replicas[r].working_window is not None:
            return Lane(worker, COMPUTE)
        return Lane(worker, f"{COMPUTE}-{before}")

    def is_within_device(self, r: int, s: int) -> bool:
        """Whether what a stage hands to the next one stays on their GPU."""
        return self.replicas[r].device == "gpu" and self.worker_of[r, s] == self.worker_of[r, s + 1]


def workers_needed(strategy: Strategy) -> dict[str, int]:
    """How many workers of each kind a job holds while it runs."""
    workers = {"cpu": 0, "gpu": 0}
    for replica in strategy.replica_list:
        workers[replica.device] += replica.num_workers
    needed = {"cpu": workers["cpu"] + _num_hosts(strategy), "gpu": workers["gpu"], "loader": 1}
    return {kind: count for kind, count in needed.items() if count}


def stages_asked(strategy: Strategy) -> str:
    """As the spec has it, for the error that says there are too many."""
    if strategy.replicas is None:
        return str(strategy.stages)
    return ", ".join(f"{replica.device} × {replica.stages}" for replica in strategy.replica_list)


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


def place(
    strategy: Strategy,
    inspection: Inspection,
    cuts: Sequence[Cuts],
    local: frozenset[int] = frozenset(),
    *,
    windows: Sequence[int | None] = (),
    learns: bool = True,
) -> Placement:
    """local: buckets that devices update themselves where the update is balanced. windows: the working window of each
    replica, where any has one. learns: the job has updates."""
    needed = workers_needed(strategy)
    next_position = {"cpu": 0, "gpu": needed.get("cpu", 0)}
    worker_of: dict[Holder, int] = {}
    for r, replica in enumerate(strategy.replica_list):
        for s in range(len(cuts[r])):  # neighbours share a worker where there are fewer of these
            worker_of[r, s] = next_position[replica.device] + s * replica.num_workers // len(cuts[r])
        next_position[replica.device] += replica.num_workers
    hosts = range(next_position["cpu"], needed.get("cpu", 0))
    workers = tuple(kind for kind, count in needed.items() for _ in range(count))
    placement = Placement(
        replicas=_replica_plans(strategy, cuts, windows or [None] * len(cuts)),
        cuts=tuple(cuts),
        workers=workers,
        worker_of=worker_of,
        loader=len(workers) - 1,
        learns=learns,
        synchronisation=None,
    )
    if not learns or not _needs_buckets(strategy, inspection, placement):
        return placement
    return replace(placement, synchronisation=_synchronisation(strategy, inspection, placement, list(hosts), local))


def _replica_plans(strategy: Strategy, cuts: Sequence[Cuts], windows: Sequence[int | None]) -> tuple[ReplicaPlan, ...]:
    return tuple(
        ReplicaPlan(
            device=replica.device,
            num_stages=len(own_cuts),
            microbatches=count,
            private=replica.device == "gpu" or staleness > 0,
            staleness=staleness,
            working_window=window,
        )
        for replica, own_cuts, window, count, staleness in zip(
            strategy.replica_list, cuts, windows, strategy.microbatch_counts, strategy.staleness_list, strict=True
        )
    )


def _needs_buckets(strategy: Strategy, inspection: Inspection, placement: Placement) -> bool:
    """Whether a stage's update concerns anybody but the stage."""
    tied = any(
        len({s for s, (first, last) in enumerate(cuts) for unit in facts.units if first <= unit < last}) > 1
        for cuts in placement.cuts
        for facts in inspection.parameters
    )
    return (
        tied
        or len(placement.replicas) > 1
        or placement.replicas[0].private
        or strategy.clip_norm is not None
        or strategy.skip_nonfinite
    )


def _synchronisation(
    strategy: Strategy, inspection: Inspection, placement: Placement, hosts: list[int], local: frozenset[int]
) -> Synchronisation:
    bounded = strategy.clip_norm is not None or strategy.skip_nonfinite
    fine = strategy.sync == "fine"
    owners: list[Lane] = []

    def ranges(bucket: Bucket, route: Route) -> tuple[OwnedRange, ...]:
        lanes = _owner_lanes(placement, bucket, route, hosts, fine=fine)
        owned = owned_ranges(bucket, range(len(lanes)), elementwise=inspection.elementwise)
        owners.extend(lanes[part.owner] for part in owned if lanes[part.owner] not in owners)  # some may get nothing
        return tuple(replace(part, owner=owners.index(lanes[part.owner])) for part in owned)

    plans = []
    for bucket in make_buckets(inspection.parameters, placement.cuts, int(strategy.bucket_mib * 2**20)):
        route = _route(strategy, placement, bucket, local)
        state = _moving_state(inspection, bucket)
        if state is not None and _may_go_either_way(strategy, placement, bucket):
            route = Route.EITHER
        has_two = route is Route.EITHER and len(bucket.holders) == 1
        plans.append(
            BucketPlan(
                bucket=bucket,
                route=route,
                ranges=ranges(bucket, route),
                device_ranges=ranges(bucket, Route.DEVICE) if has_two else (),
                state=state if route is Route.EITHER and state is not None else (),
            )
        )
    return Synchronisation(
        buckets=tuple(plans),
        owners=tuple(owners),
        elementwise=inspection.elementwise,
        coarse=not fine,
        bounded=bounded,
        speculative=bounded and fine and _hides_updates(placement, hosts),
        warmup=strategy.staleness_warmup,
        local=tuple(p.bucket.index for p in plans if p.route is Route.EITHER and p.bucket.index in local),
    )


def _moving_state(inspection: Inspection, bucket: Bucket) -> tuple[tuple[StateFacts, ...], ...] | None:
    """What moves with the bucket if it goes another way; None where that is not known of each of its parameters."""
    entries = [inspection.parameters[place.parameter].state for place in bucket.places]
    known = [entry for entry in entries if entry is not None]
    return tuple(known) if len(known) == len(entries) else None


def _may_go_either_way(strategy: Strategy, placement: Placement, bucket: Bucket) -> bool:
    """Not where replicas steal: their lanes are sent as far ahead as microbatches are granted."""
    if strategy.update != "balanced" or strategy.steals:
        return False
    holders = [placement.replicas[r] for r, _ in bucket.holders]
    return any(r.device == "gpu" for r in holders) and not any(r.staleness for r in holders)


def _hides_updates(placement: Placement, hosts: list[int]) -> bool:
    """Whether owners have time that nobody computes in: a bubble, or a core of their own. Otherwise what undoing a
    speculative update needs is copied in time that the norm would not have cost. Devices never speculate: their hosts
    do not know the norm."""
    on_cpu = any(replica.device == "cpu" for replica in placement.replicas)
    return bool(hosts) or (on_cpu and any(replica.num_stages > 1 for replica in placement.replicas))


def _route(strategy: Strategy, placement: Placement, bucket: Bucket, local: frozenset[int]) -> Route:
    """A bucket that no device holds is the host's; so is every one whose parameters are versioned."""
    devices = {r for r, _ in bucket.holders if placement.replicas[r].device == "gpu"}
    stale = any(placement.replicas[r].staleness for r, _ in bucket.holders)
    on_device = strategy.update == "local" or (strategy.update == "balanced" and bucket.index in local)
    if not devices or stale or not on_device:
        return Route.HOST
    return Route.DEVICE if len(bucket.holders) == 1 else Route.SUM


def _owner_lanes(placement: Placement, bucket: Bucket, route: Route, hosts: list[int], *, fine: bool) -> list[Lane]:
    """Coarse: beside no backward, so in the compute lane. Fine: in a lane of its own, beside it."""
    if route is Route.DEVICE:
        lane = placement.compute_lane(*bucket.holders[0])
        return [Lane(lane.worker, SYNC) if fine else lane]
    on_cpu = [placement.worker_of[holder] for holder in bucket.holders if placement.replicas[holder[0]].device == "cpu"]
    if on_cpu:
        return [Lane(worker, SYNC if fine else COMPUTE) for worker in on_cpu]
    return [Lane(worker, SYNC) for worker in hosts or [placement.worker_of[bucket.holders[0]]]]
