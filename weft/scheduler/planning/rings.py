"""Slot rings of a placed job: how many microbatches of each kind may be on their way at once. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from weft.plan.buckets import Holder
from weft.plan.inspection import Inspection, TensorFacts, UnitFacts, slot_bytes
from weft.plan.placement import Placement
from weft.plan.plan import Ring, Role
from weft.plan.shapes import ShapeError, check_affine
from weft.scheduler.planning.schedules import in_flight
from weft.spec.strategy import Strategy


def make_rings(strategy: Strategy, inspection: Inspection, placement: Placement) -> tuple[Ring, ...]:
    """Input and target: whole batches, loaded ahead; for all replicas where they steal. Activations and
    gradients: as many as the schedule has in flight. A device's own input and target: those in flight and those
    that are fetched ahead.

    Errors: ShapeError where shares adapt and it is not clear how the shapes grow with a microbatch.
    """
    rings = tuple(
        ring for r in range(len(placement.replicas)) for ring in _of_replica(strategy, inspection, placement, r)
    )
    if strategy.share == "adaptive":
        for ring in rings:
            _check_any_size_fits(ring)
    return rings


def _check_any_size_fits(ring: Ring) -> None:
    try:
        check_affine(ring.shapes)
    except ShapeError as error:
        what = {Role.INPUT: "inputs", Role.TARGET: "targets"}.get(ring.role, "a stage's outputs")
        raise ShapeError(
            f"strategy.share = 'adaptive' makes microbatches of any size, and the shapes of {what} do not grow evenly "
            f"with them: {error}; use share = 'fixed' or 'stealing'"
        ) from None


def _of_replica(strategy: Strategy, inspection: Inspection, placement: Placement, r: int) -> Iterator[Ring]:
    replica = placement.replicas[r]
    count, num_stages = replica.microbatches, replica.num_stages

    def flying(stage: int) -> int:
        """Layers of a working window have the whole batch before the next one's turn."""
        return count if replica.working_window else in_flight(strategy.schedule, stage, num_stages, count)

    ends = ((Role.INPUT, inspection.input, 0), (Role.TARGET, inspection.target, num_stages - 1))
    for role, facts, stage in ends:
        if r == 0 or not strategy.steals:
            ring = _ring(role, Holder(r, stage), strategy.prefetch.load * count, facts)
            yield replace(ring, by_number=strategy.steals)
        if replica.device == "gpu":
            depth = flying(stage) + strategy.prefetch.transfer
            yield replace(_ring(role, Holder(r, stage), depth, facts), memory="device")
    for stage, (_, last) in enumerate(placement.cuts[r][:-1]):
        output = inspection.units_on(replica.device)[last - 1]
        for role, writer in ((Role.ACTIVATION, stage), (Role.GRADIENT, stage + 1)):
            ring = _ring(role, Holder(r, stage), flying(stage), output)
            if placement.is_within_device(r, stage):
                yield replace(ring, memory="device")
            elif replica.device == "gpu" and inspection.peer_access:
                yield replace(ring, memory="peer", lender=placement.worker_of[Holder(r, writer)])
            else:
                yield ring


def _ring(role: Role, holder: Holder, depth: int, facts: UnitFacts | TensorFacts) -> Ring:
    return Ring(
        role=role,
        replica=holder.replica,
        stage=holder.stage,
        depth=depth,
        dtype=facts.dtype or "",
        slot_bytes=slot_bytes(facts.shapes, facts.itemsize),
        shapes=facts.shapes,
    )


def shared_bytes(rings: Iterable[Ring]) -> int:
    return sum(ring.depth * ring.slot_bytes for ring in rings if ring.memory == "shared")
