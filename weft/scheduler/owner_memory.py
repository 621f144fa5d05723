"""Owner memory: what owners on the host keep for updates beside the shared memory. Pure; known as far as the inspection
knows what the optimizer keeps."""

from __future__ import annotations

from weft.scheduler.buckets import Bucket
from weft.scheduler.inspection import Inspection
from weft.scheduler.placement import Placement


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
    return [part.bucket for part in sync.buckets if on_host & {owned.owner for owned in part.ranges}]


def _state_bytes(inspection: Inspection, bucket: Bucket) -> int:
    return sum(
        place.num_elements * entry.itemsize
        for place in bucket.places
        for entry in inspection.parameters[place.parameter].state or ()
        if entry.kind == "elements"
    )
