"""Slot rings of a placed job: how many microbatches of each kind may be on their way at once. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from weft.plan.buckets import Holder
from weft.plan.division import Turns
from weft.plan.inspection import Inspection, TensorFacts, ValueFacts, slot_bytes
from weft.plan.placement import Placement
from weft.plan.plan import Ring, Role, SlotValue
from weft.plan.schedules.schedule import Schedule
from weft.plan.shapes import ShapeError, check_affine
from weft.scheduler.planning.crossing import TiedParameter, by_hop, crossing_values, tied_parameters
from weft.spec.strategy import SMALL_BATCH_BYTES, Strategy

TIED_SPARE_SLOTS = 1  # beyond those that stages of one speed need, so that neither waits at each task for the other


def make_rings(strategy: Strategy, inspection: Inspection, placement: Placement) -> tuple[Ring, ...]:
    """Input and target: whole batches, loaded ahead; for all replicas where they steal. A device's own input and
    target: those in flight and those that are fetched ahead. What crosses: as many as the schedule has in flight, of
    activations in the stage that writes them, of gradients in the one that reads them. Gradients of parameters that
    stages share are large, and wait for no more than the backwards in between: one for each stage on the way.

    Errors: ShapeError where shares adapt, stages expect the shapes that were planned, and it is not clear how these
    grow with a microbatch. Those of a model that is cut by its own forward expect none.
    """
    rings = tuple(
        ring for r in range(len(placement.replicas)) for ring in _of_replica(strategy, inspection, placement, r)
    )
    if strategy.share == "adaptive" and not inspection.is_cut_by_calls:
        for ring in rings:
            for value in ring.values if ring.role is not Role.TIED else ():  # a parameter has one size
                _check_any_size_fits(ring.role, value)
    return rings


def _check_any_size_fits(role: Role, value: SlotValue) -> None:
    try:
        check_affine(value.shapes)
    except ShapeError as error:
        what = {Role.INPUT: "inputs", Role.TARGET: "targets"}.get(role, "a stage's outputs")
        raise ShapeError(
            f"strategy.share = 'adaptive' makes microbatches of any size, and the shapes of {what} do not grow evenly "
            f"with them: {error}; use share = 'fixed' or 'stealing'"
        ) from None


def _of_replica(strategy: Strategy, inspection: Inspection, placement: Placement, r: int) -> Iterator[Ring]:
    replica = placement.replicas[r]
    count, num_stages = replica.microbatches, replica.num_stages
    depths = _Depths(count, placement.schedules[r])
    data = list(_data(inspection, num_stages))
    batch_bytes = count * sum(_slot_value(str(role), facts, stages).num_bytes for role, facts, stages in data)
    # Where replicas steal, their first steps decide what they are given: no loader is to be beside them for long then.
    small = not strategy.steals and batch_bytes <= SMALL_BATCH_BYTES
    ahead = Turns.of(strategy).batches_ahead(strategy.prefetch.batches(are_small=small))
    for role, facts, stages in data:
        if r == 0 or not strategy.steals:
            yield replace(_data_ring(role, r, stages, ahead * count, facts), by_number=strategy.steals)
        for stage in stages if replica.device == "gpu" else ():
            depth = depths.fetched(stage, stages) + strategy.prefetch.transfer
            yield replace(_data_ring(role, r, [stage], depth, facts), memory="device")
    crossing = crossing_values(inspection.values_on(replica.device), placement.cuts[r])
    for stage in range(num_stages):
        if made := [value for value in crossing if value.writer == stage]:
            readers = sorted({reader for value in made for reader in value.readers})
            values = _one_behind_the_other(_slot_value(each.facts.name, each.facts, each.readers) for each in made)
            ring = _ring(Role.ACTIVATION, r, readers, depths.activation(stage, readers), values)
            yield _placed(replace(ring, writer=stage), inspection, placement)
    for (source, target), summed in by_hop(crossing).items():
        values = _one_behind_the_other(_slot_value(each.facts.name, each.facts, [target]) for each in summed)
        ring = _ring(Role.GRADIENT, r, [target], depths.gradient(source, target), values)
        yield _placed(replace(ring, writer=source), inspection, placement)
    if placement.synchronisation is not None:
        yield from _tied(inspection, placement, r, depths)


@dataclass(frozen=True, slots=True)
class _Depths:
    """Of a replica's rings."""

    microbatches: int
    schedule: Schedule | None  # None: layers of a working window have the whole batch before the next one's turn

    def fetched(self, stage: int, readers: Sequence[int]) -> int:
        """Readers that take turns in a lane have what they read fetched in one lane, too, microbatch by microbatch: the
        last one may have as many there as the first has in flight."""
        if self.schedule is None:
            return self.microbatches
        line = self.schedule.worker_of
        return max(self.schedule.in_flight(reader) for reader in readers if line[reader] == line[stage])

    def activation(self, writer: int, readers: Sequence[int]) -> int:
        return self.microbatches if self.schedule is None else self.schedule.activation_slots(writer, readers)

    def gradient(self, writer: int, reader: int) -> int:
        return self.microbatches if self.schedule is None else self.schedule.gradient_slots(writer, reader)

    def tied(self, writer: int, reader: int) -> int:
        """These are large: no more than are on the way, and those that the reader has not done with. Where workers
        have several stages, a group of microbatches goes through one before the next one's turn."""
        if self.schedule is None:
            return self.microbatches
        slots = self.schedule.gradient_slots(writer, reader)
        if len(self.schedule.programs) < self.schedule.num_stages:
            return slots
        return min(slots, writer - reader + 1 + TIED_SPARE_SLOTS + self.schedule.backlog(reader))


def _tied(inspection: Inspection, placement: Placement, r: int, depths: _Depths) -> Iterator[Ring]:
    """Of a working window, which has a whole batch of them at once, they are in the host's memory."""
    streams = placement.replicas[r].working_window is not None
    for (source, target), parameters in by_hop(tied_parameters(inspection.parameters, placement.cuts[r])).items():
        depth = depths.tied(source, target)
        ring = replace(_ring(Role.TIED, r, [target], depth, _tied_in_slot(parameters, target)), writer=source)
        yield ring if streams else _placed(ring, inspection, placement)


def _data(inspection: Inspection, num_stages: int) -> Iterator[tuple[Role, TensorFacts, Sequence[int]]]:
    """What is loaded, and the stages that read it."""
    if inspection.target is None:
        yield Role.BATCH, inspection.input, range(num_stages)
        return
    yield Role.INPUT, inspection.input, [0]
    yield Role.TARGET, inspection.target, [num_stages - 1]


def _placed(ring: Ring, inspection: Inspection, placement: Placement) -> Ring:
    """In the memory that what crosses stands in."""
    assert ring.writer is not None
    if placement.is_within_device(ring.replica, [ring.writer, *ring.stages]):
        return replace(ring, memory="device")
    if placement.replicas[ring.replica].device == "gpu" and inspection.peer_access:
        return replace(ring, memory="peer", lender=placement.worker_of[Holder(ring.replica, ring.writer)])
    return ring


def _data_ring(role: Role, replica: int, stages: Sequence[int], depth: int, facts: TensorFacts) -> Ring:
    return _ring(role, replica, stages, depth, (_slot_value(str(role), facts, stages),))


def _ring(role: Role, replica: int, stages: Sequence[int], depth: int, values: tuple[SlotValue, ...]) -> Ring:
    num_bytes = sum(value.num_bytes for value in values)
    return Ring(role=role, replica=replica, stages=tuple(stages), depth=depth, slot_bytes=num_bytes, values=values)


def _slot_value(name: str, facts: TensorFacts | ValueFacts, stages: Sequence[int]) -> SlotValue:
    """stages: that read it."""
    return SlotValue(
        name=name,
        dtype=facts.dtype,
        shapes=facts.shapes,
        offset=0,
        num_bytes=slot_bytes(facts.shapes, facts.itemsize),
        stages=tuple(stages),
    )


def _tied_in_slot(parameters: Iterable[TiedParameter], stage: int) -> tuple[SlotValue, ...]:
    """stage: that reads them."""
    return _one_behind_the_other(
        SlotValue(
            name=f"parameter {parameter.number}",
            dtype=parameter.facts.dtype,
            shapes={},
            offset=0,
            num_bytes=slot_bytes({1: (parameter.facts.num_elements,)}, parameter.facts.itemsize),
            stages=(stage,),
            parameter=parameter.number,
        )
        for parameter in parameters
    )


def _one_behind_the_other(places: Iterable[SlotValue]) -> tuple[SlotValue, ...]:
    laid_out: list[SlotValue] = []
    end = 0
    for place in places:
        laid_out.append(replace(place, offset=end))
        end += place.num_bytes
    return tuple(laid_out)


def shared_bytes(rings: Iterable[Ring]) -> int:
    return sum(ring.depth * ring.slot_bytes for ring in rings if ring.memory == "shared")
