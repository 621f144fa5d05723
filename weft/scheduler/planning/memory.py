"""Memory: how many bytes a plan takes, of shared memory and beside it. Pure; the optimizer's as far as the inspection
knows what it keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from weft.plan.buckets import Bucket, Holder
from weft.plan.inspection import Inspection
from weft.plan.placement import Placement
from weft.plan.plan import Plan, Ring, num_snapshot_places
from weft.scheduler.planning.costs import part_of_largest
from weft.scheduler.planning.partition import NoRoom, PlanError
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
    sync = placement.synchronisation
    if sync is None or not sync.devices_speculate or inspection.device_bytes is None:
        return True
    needed: Counter[int] = Counter()
    for bucket in sync.buckets:
        for holder in bucket.holders if bucket.comes_up_summed else ():
            if placement.replicas[holder.replica].device == "gpu":
                needed[placement.worker_of[holder]] += bucket.num_bytes + _state_bytes(inspection, bucket)
    num_bytes = {worker: _bytes_of(inspection, placement.workers, worker) for worker in needed}
    return all(own <= num_bytes[worker] * SPECULATION_SHARE for worker, own in needed.items())


def activation_bytes(spec: JobSpec, inspection: Inspection, placement: Placement) -> tuple[int, ...]:
    """By worker: the most that its forwards keep for their backwards at one time, or those that are run again in
    backward. Of the layers of a working window nobody knows."""
    found: Counter[int] = Counter()
    for r, schedule in enumerate(placement.schedules if placement.learns else ()):
        if schedule is None:
            continue
        units, part = inspection.units_on(placement.replicas[r].device), part_of_largest(spec, inspection, r)
        kept = [round(part * sum(unit.kept_bytes for unit in units[first:last])) for first, last in placement.cuts[r]]
        for program in schedule.programs:
            worker = placement.worker_of[Holder(r, program[0].stage)]
            found[worker] += schedule.most_kept(program, kept, recomputes=spec.strategy.recompute)
    return tuple(found[worker] for worker in range(len(placement.workers)))


def optimizer_bytes(inspection: Inspection, placement: Placement) -> tuple[int, ...]:
    """By worker: the state that its updates keep, without what lies in shared memory since it may move."""
    found: Counter[int] = Counter()
    sync = placement.synchronisation
    if sync is not None:
        for bucket in sync.buckets:
            own = 0 if bucket.state else _state_bytes(inspection, bucket)
            for owned in bucket.ranges:
                found[sync.owners[owned.owner].worker] += own * (owned.stop - owned.start) // bucket.num_elements
    elif placement.learns:
        (cuts,) = placement.cuts
        for stage, (first, last) in enumerate(cuts):
            found[placement.worker_of[Holder(0, stage)]] += sum(
                parameter.state_bytes
                for parameter in inspection.parameters
                if parameter.trained and first <= parameter.units[0] < last
            )
    return tuple(found[worker] for worker in range(len(placement.workers)))


def check_shared(spec: JobSpec, shared: int, shared_bytes_free: int, why_no_snapshots: str | None) -> None:
    """Errors: PlanError; NoRoom."""
    if spec.checkpoint is not None and why_no_snapshots is not None:
        raise PlanError(f"[checkpoint]: there can be none, since {why_no_snapshots}; leave the table out")
    if shared > shared_bytes_free:
        needed, free = told_apart(shared, shared_bytes_free)
        raise NoRoom(
            f"the plan needs {needed} of shared memory (parameters and slots) and /dev/shm has {free} free; use fewer "
            "microbatches, a smaller batch, or a larger /dev/shm"
        )


def check_room(inspection: Inspection, plan: Plan, *, host_bytes_free: float) -> None:
    """Of what is needed in any case, on the host and on each GPU. Errors: NoRoom."""
    beside = list(zip(plan.activation_bytes, plan.optimizer_bytes, strict=True))
    on_host = [own for own, kind in zip(beside, plan.workers, strict=True) if kind == "cpu"]
    _check_sum(
        "the plan",
        "of the host's memory",
        [
            ("parameters, gradients and slots", plan.shared_bytes),
            ("activations", sum(kept for kept, _ in on_host)),
            ("the optimizer's state", sum(state for _, state in on_host)),
        ],
        host_bytes_free,
    )
    if inspection.device_bytes is None:
        return
    windows = {stage.worker for stage in plan.stages if plan.replicas[stage.replica].working_window is not None}
    for worker, (kept, state) in enumerate(beside):
        if plan.workers[worker] == "gpu" and worker not in windows:
            own = sum(2 * stage.parameter_bytes for stage in plan.stages if stage.worker == worker)
            parts = [("parameters and gradients", own), ("activations", kept), ("the optimizer's state", state)]
            _check_sum("a GPU's part of the plan", "of its memory", parts, _bytes_of(inspection, plan.workers, worker))


def _bytes_of(inspection: Inspection, workers: Sequence[str], worker: int) -> int:
    """Free memory of the GPU of a worker, where GPUs tell."""
    return inspection.bytes_of_gpu(worker - workers.index("gpu")) or 0


def _check_sum(what: str, of: str, parts: Sequence[tuple[str, int]], bytes_free: float) -> None:
    needed = sum(num_bytes for _, num_bytes in parts)
    if needed <= bytes_free:
        return
    least, free = told_apart(needed, bytes_free)
    listed = ", ".join(f"{name} {num_bytes / 2**20:.4g}" for name, num_bytes in parts if num_bytes)
    raise NoRoom(
        f"{what} needs {least} {of} at the least (in MiB: {listed}) and {free} are free; use recompute = true, more "
        "microbatches, more stages, a smaller batch, or a preset that keeps less there (weft presets)"
    )


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
    state = sum(parameter.state_bytes for parameter in trained)
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
    """Gradients of every holder, the versions of the parameters that stale replicas read, beside which sums have
    places of their own, and the optimizer's state where it may have to move."""
    if placement.synchronisation is None:
        return 0
    depths = [1 + replica.staleness for replica in placement.replicas]
    beside = max(depths) + 1 if max(depths) > 1 else 0
    return sum(
        bucket.num_bytes * (beside + sum(depths[r] for r, _ in bucket.gradient_holders)) + bucket.state_bytes()
        for bucket in placement.synchronisation.buckets
    )
