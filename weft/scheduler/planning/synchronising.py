"""Synchronising: which buckets a plan has, who reduces and updates each, and by which way. Pure."""

from __future__ import annotations

from dataclasses import replace

from weft.plan.buckets import Bucket, Holder, OwnedRange, Route, make_buckets, owned_ranges
from weft.plan.graph import Lane
from weft.plan.inspection import Inspection, StateFacts
from weft.plan.placement import COMPUTE, SYNC, Placement
from weft.plan.plan import Synchronisation
from weft.spec.strategy import Strategy


def needs_buckets(strategy: Strategy, inspection: Inspection, placement: Placement) -> bool:
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


def synchronisation_of(
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
            replace(
                bucket,
                route=route,
                ranges=ranges(bucket, route),
                device_ranges=ranges(bucket, Route.DEVICE) if has_two else (),
                state=state if route is Route.EITHER and state is not None else (),
                first_reads=tuple(_first_read(inspection, placement, bucket, holder) for holder in bucket.holders),
            )
        )
    speculative = bounded and fine and _hides_updates(placement, hosts)
    on_cpu = all(placement.workers[owner.worker] == "cpu" for owner in owners)
    return Synchronisation(
        buckets=tuple(plans),
        owners=tuple(owners),
        coarse=not fine,
        bounded=bounded,
        speculative=speculative,
        devices_speculate=speculative and on_cpu and any(p.comes_up_summed for p in plans),
        warmup=strategy.staleness_warmup,
        local=tuple(p.index for p in plans if p.route is Route.EITHER and p.index in local),
    )


def _first_read(inspection: Inspection, placement: Placement, bucket: Bucket, holder: Holder) -> int:
    first, last = placement.cuts[holder.replica][holder.stage]
    users = (unit for place in bucket.places for unit in inspection.parameters[place.parameter].units)
    unit = min(unit for unit in users if first <= unit < last)
    while unit > first and unit in inspection.cut_problems:
        unit -= 1
    return unit


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
    speculative update needs is copied in time that the norm would not have cost. A device speculates where all owners
    are CPU workers: its host knows the norm then, without waiting for the device."""
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
    of_cpu = [holder for holder in bucket.holders if placement.replicas[holder.replica].device == "cpu"]
    on_cpu = dict.fromkeys(placement.worker_of[holder] for holder in of_cpu)  # a worker may have several of its stages
    if on_cpu:
        return [Lane(worker, SYNC if fine else COMPUTE) for worker in on_cpu]
    return [Lane(worker, SYNC) for worker in hosts or [placement.worker_of[bucket.holders[0]]]]
