"""Memory: how many bytes a plan takes, of shared memory and beside it. Pure; the optimizer's as far as the inspection
knows what it keeps."""

from __future__ import annotations

from collections.abc import Sequence

from weft.plan.buckets import Bucket
from weft.plan.inspection import Inspection
from weft.plan.placement import Placement
from weft.plan.plan import Ring
from weft.scheduler.planning.rings import shared_bytes


def state_bytes(inspection: Inspection, placement: Placement) -> int:
    """Of the optimizer's state."""
    return sum(_state_bytes(inspection, bucket) for bucket in _updated_on_host(placement))


def copied_bytes(inspection: Inspection, placement: Placement) -> int:
    """Of what a speculative update has to keep as it was: values and state."""
    return sum(bucket.num_bytes + _state_bytes(inspection, bucket) for bucket in _updated_on_host(placement))


def _updated_on_host(placement: Placement) -> list[Bucket]:
    sync = placement.synchronisation
    if sync is None:
        return []
    on_host = {number for number, lane in enumerate(sync.owners) if placement.workers[lane.worker] == "cpu"}
    return [bucket for bucket in sync.buckets if on_host & {owned.owner for owned in bucket.ranges}]


def _state_bytes(inspection: Inspection, bucket: Bucket) -> int:
    return sum(
        place.num_elements * entry.itemsize
        for place in bucket.places
        for entry in inspection.parameters[place.parameter].state or ()
        if entry.kind == "elements"
    )


def plan_bytes(inspection: Inspection, placement: Placement, rings: Sequence[Ring], num_tasks: int) -> int:
    state = sum(unit.parameter_bytes + unit.buffer_bytes for unit in inspection.units)
    return state + shared_bytes(rings) + _synchronised_bytes(placement) + 4 * (num_tasks + 1)


def speculation_bytes(inspection: Inspection, placement: Placement, rings: Sequence[Ring]) -> int:
    """What the job needs of the host's memory with updates that can be undone; 0 where none has to be."""
    if placement.synchronisation is None or not placement.synchronisation.speculative:
        return 0
    owned = state_bytes(inspection, placement) + copied_bytes(inspection, placement)
    return plan_bytes(inspection, placement, rings, 0) + owned


def _synchronised_bytes(placement: Placement) -> int:
    """Gradients of every holder, the versions of the parameters that stale replicas read, and the optimizer's state
    where it may have to move."""
    if placement.synchronisation is None:
        return 0
    depths = [1 + replica.staleness for replica in placement.replicas]
    versions = max(depths) if max(depths) > 1 else 0
    return sum(
        bucket.num_bytes * (versions + sum(depths[r] for r, _ in bucket.gradient_holders)) + bucket.state_bytes()
        for bucket in placement.synchronisation.buckets
    )
