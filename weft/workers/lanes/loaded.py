"""Loaded: what LOAD leaves in slots, FETCH takes to a device, and stages read: pairs of tensors, or any batches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import torch

from weft.plan.buckets import Holder
from weft.plan.course import Course
from weft.plan.division import Part
from weft.plan.itinerary import Iteration
from weft.plan.plan import ReplicaPlan, Ring, Role
from weft.workers.compute.pairs import PairReader
from weft.workers.compute.stage_tasks import ReadBatch
from weft.workers.compute.weights import Weights
from weft.workers.devices.device import Memory
from weft.workers.memory.batch_slots import BatchSlots
from weft.workers.memory.slots import SlotRing
from weft.workload.code.own_classes import Modules
from weft.workload.data.batches import Batches
from weft.workload.data.resident import ResidentData
from weft.workload.data.tree import build, flatten

NUMBERS = {Role.INPUT: 0, Role.TARGET: 1}  # of the tensors of a pair
Rings = Sequence[tuple[Ring, SlotRing]]


class Loaded(Protocol):
    def load(self, batches: Batches, weights: Weights, iteration: Iteration, replica: int, microbatch: int) -> None: ...
    def fetch(self, holder: Holder, iteration: Iteration, microbatch: int) -> None: ...
    def reader(self, holder: Holder, modules: Modules) -> ReadBatch: ...
    def loaded(self, iteration: Iteration, replica: int, microbatch: int) -> list[torch.Tensor]: ...


class LoadedPairs(Loaded):
    """The first stage reads inputs, the last one targets."""

    def __init__(
        self,
        rings: Rings,
        course: Course,
        replicas: Sequence[ReplicaPlan],
        device: Memory,
        resident: ResidentData | None,
    ) -> None:
        self._course, self._replicas, self._device, self._resident = course, replicas, device, resident
        self._rings = {  # by the memory, of each role and replica
            (role, replica): {
                ring.memory: made
                for ring, made in rings
                if ring.role is role and (ring.by_number or ring.replica == replica)
            }
            for role in (Role.INPUT, Role.TARGET)
            for replica in range(len(replicas))
        }

    def load(self, batches: Batches, weights: Weights, iteration: Iteration, replica: int, microbatch: int) -> None:
        part = self._course.loaded_part(iteration, replica, microbatch)
        if part.size == 0:
            weights.set(iteration, part, 0.0, 0)
            return
        if not weights.weighs and is_taken_by_devices(
            self._replicas, replica, self._rings[Role.INPUT, replica]["shared"]
        ):
            return
        rings = (self._rings[role, replica]["shared"] for role in (Role.INPUT, Role.TARGET))
        inputs, targets = (ring.slot(iteration.index, microbatch, part.size) for ring in rings)
        pair = batches.load(iteration, part, (inputs, targets))
        if weights.weighs:
            weights.set(iteration, part, batches.weight(iteration, part, pair), batches.count(iteration, part))

    def fetch(self, holder: Holder, iteration: Iteration, microbatch: int) -> None:
        part = self._course.part(iteration, holder.replica, microbatch)
        for role in self._roles(holder) if part.size else ():
            rings = self._rings[role, holder.replica]
            if self._replicas[holder.replica].resident:
                assert self._resident is not None
                slot = rings["device"].slot(iteration.index, microbatch, part.size)
                self._resident.fill(NUMBERS[role], slot, iteration, part)
                continue
            shared, device = rings["shared"], rings["device"]
            source = shared.slot(iteration.index, part.number if shared.by_number else microbatch, part.size)
            self._device.copy(device.slot(iteration.index, microbatch, part.size), source)

    def reader(self, holder: Holder, modules: Modules) -> ReadBatch:
        read = {role: self._rings[role, holder.replica] for role in self._roles(holder)}
        own = {role: rings["device"] if "device" in rings else rings["shared"] for role, rings in read.items()}
        return PairReader(own.get(Role.INPUT), own.get(Role.TARGET))

    def loaded(self, iteration: Iteration, replica: int, microbatch: int) -> list[torch.Tensor]:
        size = self._course.loaded_part(iteration, replica, microbatch).size
        rings = (self._rings[role, replica]["shared"] for role in (Role.INPUT, Role.TARGET))
        return [ring.slot(iteration.index, microbatch, size) for ring in rings] if size else []

    def _roles(self, holder: Holder) -> list[Role]:
        ends = ((Role.INPUT, 0), (Role.TARGET, self._replicas[holder.replica].num_stages - 1))
        return [role for role, stage in ends if stage == holder.stage]


class LoadedBatches(Loaded):
    """Every stage reads all of it."""

    def __init__(
        self,
        made: Sequence[tuple[Ring, BatchSlots]],
        course: Course,
        replicas: Sequence[ReplicaPlan],
        resident: ResidentData | None,
    ) -> None:
        self._course, self._replicas, self._resident = course, replicas, resident
        self._shared = {ring.replica: slots for ring, slots in made if ring.memory == "shared"}
        self._own = {Holder(ring.replica, ring.stages[0]): slots for ring, slots in made if ring.memory == "device"}

    def load(self, batches: Batches, weights: Weights, iteration: Iteration, replica: int, microbatch: int) -> None:
        part = self._course.loaded_part(iteration, replica, microbatch)
        if part.size == 0:
            weights.set(iteration, part, 0.0, 0)
            return
        if not weights.weighs and is_taken_by_devices(self._replicas, replica, self._shared_by(replica)):
            return
        tensors, skeleton = batches.batch(iteration, part)
        self._shared_by(replica).write(iteration.index, microbatch, tensors, skeleton)
        if weights.weighs:
            weight = batches.weight(iteration, part, build(skeleton, tensors))
            weights.set(iteration, part, weight, batches.count(iteration, part))

    def fetch(self, holder: Holder, iteration: Iteration, microbatch: int) -> None:
        part = self._course.part(iteration, holder.replica, microbatch)
        if part.size and self._replicas[holder.replica].resident:
            assert self._resident is not None
            self._own[holder].take(iteration.index, microbatch, *self._resident.batch(iteration, part))
        elif part.size:
            shared = self._shared_by(holder.replica)
            number = part.number if shared.by_number else microbatch
            self._own[holder].fetch(shared, iteration.index, number, microbatch)

    def reader(self, holder: Holder, modules: Modules) -> ReadBatch:
        return partial(_read, self._own.get(holder) or self._shared_by(holder.replica), modules)

    def loaded(self, iteration: Iteration, replica: int, microbatch: int) -> list[torch.Tensor]:
        if not self._course.loaded_part(iteration, replica, microbatch).size:
            return []
        return flatten(self._shared_by(replica).read(iteration.index, microbatch))[0]

    def _shared_by(self, replica: int) -> BatchSlots:
        slots = self._shared.get(replica)
        return slots if slots is not None else self._shared[0]  # of all replicas, where they steal


def is_taken_by_devices(replicas: Sequence[ReplicaPlan], replica: int, slots: SlotRing | BatchSlots) -> bool:
    """Whether nobody reads what would be loaded for the replica, or for all, where they steal."""
    return all(each.resident for each in (replicas if slots.by_number else [replicas[replica]]))


def _read(slots: BatchSlots, modules: Modules, iteration: Iteration, microbatch: int, part: Part) -> Any:
    return slots.read(iteration.index, part.number if slots.by_number else microbatch, modules)
