"""Memory: how many bytes a plan takes, of shared memory and beside it. Pure; the optimizer's as far as the inspection
knows what it keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from weft.plan.buckets import Bucket
from weft.plan.inspection import Inspection
from weft.plan.placement import Placement
from weft.plan.plan import Ring, num_snapshot_places
from weft.scheduler.planning.rings import shared_bytes
from weft.spec.job_spec import JobSpec

SNAPSHOT_SHARE = (
    0.8  # of the free memory that a plan with snapshots may take: arbitrary; batches and activations come too
)
SPECULATION_SHARE = 1 / 8  # of a GPU's free memory, for what undoing an update needs: arbitrary; activations come too
UNKNOWN_STATE = 2  # times a parameter's bytes, of an optimizer whose state nobody could look into


def told_apart(*num_bytes: float) -> list[str]:
    """Of a sentence that says that one is more than another: with as many digits as show it."""
    for digits in range(8):  # the last of which is a tenth of a byte
        shown = [f"{each / 2**20:.{digits}f}" for each in num_bytes]
        if len(set(shown)) == len(set(num_bytes)):
            break
    return [f"{each} MiB" for each in shown]


def state_bytes(inspection: Inspection, placement: Placement) -> int:
    """Of the optimizer's state."""
    return sum(_state_bytes(inspection, bucket) for bucket in _updated_on_host(placement))


def copied_bytes(inspection: Inspection, placement: Placement) -> int:
    """Of what a speculative update has to keep as it was: values and state."""
    return sum(bucket.num_bytes + _state_bytes(inspection, bucket) for bucket in _updated_on_host(placement))


def devices_have_room(inspection: Inspection, placement: Placement) -> bool:
    """For a copy of what a speculative update of a device's changes; where none speculates there is nothing to keep."""
    sync, free = placement.synchronisation, inspection.device_bytes
    if sync is None or not sync.devices_speculate or free is None:
        return True
    needed: Counter[int] = Counter()
    for bucket in sync.buckets:
        for holder in bucket.holders if bucket.comes_up_summed else ():
            if placement.replicas[holder.replica].device == "gpu":
                needed[placement.worker_of[holder]] += bucket.num_bytes + _state_bytes(inspection, bucket)
    return max(needed.values(), default=0) <= free * SPECULATION_SHARE


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


def why_not_snapshots(spec: JobSpec, inspection: Inspection, other_bytes: int, *, bytes_free: float) -> str | None:
    """Why what training comes to is not copied; None where it is. other_bytes: of the plan. bytes_free: of shared
    memory, and of any of the host's."""
    if spec.job.mode != "train":
        return "nothing is trained (job.mode)"
    if spec.strategy.recovery == "off" and spec.checkpoint is None:
        return "strategy.recovery is 'off'"
    if any(spec.strategy.staleness_list):
        return "replicas compute with parameters of several ages (strategy.staleness)"
    if inspection.unsaved is not None:
        return inspection.unsaved
    needed = _num_places(spec) * snapshot_bytes(inspection)
    most = bytes_free * SNAPSHOT_SHARE
    if other_bytes + needed > most:
        copies, plan, room, free = told_apart(needed, other_bytes, most - other_bytes, bytes_free)
        return (
            f"they take {copies} of memory beside the plan's {plan}, and of the {free} that are free there is room for "
            f"{room if most > other_bytes else 'none'}"
        )
    return None


def _num_places(spec: JobSpec) -> int:
    best = spec.checkpoint is not None and spec.checkpoint.keep_best is not None
    each = spec.strategy.recovery == "iteration"
    return num_snapshot_places(each=each, checkpoints=spec.checkpoint is not None, best=best)


def snapshot_bytes(inspection: Inspection) -> int:
    """Of one: parameters, buffers, and the optimizer's state, as far as it is known."""
    trained = [parameter for parameter in inspection.parameters if parameter.trained]
    values = sum(parameter.num_bytes for parameter in inspection.parameters)
    state = sum(
        entry.itemsize * parameter.num_elements
        for parameter in trained
        for entry in parameter.state or ()
        if entry.kind == "elements"
    )
    unknown = sum(UNKNOWN_STATE * parameter.num_bytes for parameter in trained if parameter.state is None)
    buffers = sum(unit.buffer_bytes for unit in inspection.units)
    return values + state + unknown + buffers


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
