"""Moving state: what the optimizer keeps of a bucket, on its way from one side to the other through shared memory.

A bucket that may go either way has an optimizer on each side, and one of the two knows its state:

    to the devices    UPDATE(o,b) of the last step on the host writes it     UP(r,s,b) of that step brings it up
    to the host       DOWN(r,s,b) of the first step on the host writes it    UPDATE(o,b) of that step reads it first

With it go the parameters: up as after any update of the host's, down beside the state. Where CPU replicas compute on
the shared parameters, owners update those in any case and keep their state, so nothing has to come down.

    place of a parameter    │ exp_avg ········· │ exp_avg_sq ········· │      in the parameter's order of elements
    numbers                 float64, owners × parameters × (is there any, step, ...)

Owners whose ranges part a parameter have numbers each, since they write at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.plan.buckets import Bucket, Route
from weft.plan.course import Course
from weft.plan.inspection import StateFacts
from weft.plan.itinerary import Iteration
from weft.plan.plan import ReplicaPlan
from weft.transport.memory.arena import aligned, dtype_of, typed
from weft.transport.memory.directory import Directory
from weft.workers.devices.device import Memory
from weft.workers.memory.bucket_memory import BucketMemory
from weft.workers.updates.optimizer_state import Segment, State
from weft.workers.updates.updates import Updates
from weft.workload.workload import WorkloadError

_PYTHON = {"int": int, "float": float, "bool": bool}


class MovingState:
    """One bucket's place in shared memory; opened at set-up."""

    def __init__(self, directory: Directory, bucket: Bucket) -> None:
        self._ranges = bucket.ranges
        self._parameters = [place.parameter for place in bucket.places]
        self._offsets = {place.parameter: place.offset for place in bucket.places}
        self._state = dict(zip(self._parameters, bucket.state, strict=True))
        width = 1 + max((len(self._numbers_of(parameter)) for parameter in self._parameters), default=0)
        shape = (len(self._ranges), len(self._parameters), width)
        offset = 8 * torch.Size(shape).numel()
        places: dict[tuple[int, str], tuple[int, int, str]] = {}
        for place in bucket.places:
            for facts in self._state[place.parameter]:
                if facts.kind == "elements":
                    offset = aligned(offset)
                    places[place.parameter, facts.name] = (offset, place.num_elements, facts.dtype)
                    offset += place.num_elements * dtype_of(facts.dtype).itemsize
        block = directory.block(f"optimizer-state-{bucket.index}", max(1, offset))
        self._numbers = typed(block, 0, shape, "float64")
        self._elements = {key: typed(block, start, (count,), dtype) for key, (start, count, dtype) in places.items()}

    def write(self, segment: Segment, state: State) -> None:
        """Raises WorkloadError for an entry that the optimizer did not have when the job was planned."""
        parameter, count = segment.parameter, segment.stop - segment.start
        numbers = self._numbers_of(parameter)
        if strangers := state.keys() - {facts.name for facts in self._state[parameter]}:
            raise WorkloadError(
                f"the optimizer keeps {min(strangers)!r} of a parameter, which it did not in its first steps, so a "
                "bucket cannot move between device and host; use strategy.update = 'cpu' or 'local'"
            )
        for row in self._rows(segment):
            found = self._numbers[row, self._parameters.index(parameter)]
            found[0] = float(bool(state))
            for place, facts in enumerate(numbers if state else (), start=1):
                found[place] = float(state[facts.name])
        for facts in self._state[parameter] if state else ():
            if facts.kind == "elements":
                own = self._elements[parameter, facts.name][segment.offset : segment.offset + count]
                own.copy_(state[facts.name])

    def read(self, segment: Segment) -> State:
        """Tensors of elements are the shared ones."""
        parameter, count = segment.parameter, segment.stop - segment.start
        found = self._numbers[self._rows(segment)[0], self._parameters.index(parameter)].tolist()
        if not found[0]:
            return {}
        state: State = {
            facts.name: self._elements[parameter, facts.name][segment.offset : segment.offset + count]
            for facts in self._state[parameter]
            if facts.kind == "elements"
        }
        for facts, number in zip(self._numbers_of(parameter), found[1:], strict=False):
            is_tensor = facts.kind == "tensor"
            state[facts.name] = (
                torch.tensor(number, dtype=dtype_of(facts.dtype)) if is_tensor else _PYTHON[facts.kind](number)
            )
        return state

    def _numbers_of(self, parameter: int) -> list[StateFacts]:
        return [facts for facts in self._state[parameter] if facts.kind != "elements"]

    def _rows(self, segment: Segment) -> list[int]:
        """Of the owners on the host that have a part of the segment."""
        begin = self._offsets[segment.parameter] + segment.offset
        end = begin + segment.stop - segment.start
        return [row for row, owned in enumerate(self._ranges) if owned.start < end and begin < owned.stop]


class Moves:
    """Which buckets' state moves in which iteration, and the moving."""

    def __init__(
        self,
        directory: Directory,
        memory: BucketMemory,
        course: Course,
        replicas: Sequence[ReplicaPlan],
        device: Memory,
    ) -> None:
        self._memory = memory
        self._course = course
        self._device = device
        either = [bucket for bucket in memory.buckets if bucket.route is Route.EITHER]
        self._states = {bucket.index: MovingState(directory, bucket) for bucket in either}
        self._on_cpu = {
            bucket.index: any(replicas[r].device == "cpu" for r, _ in bucket.holders) for bucket in memory.buckets
        }

    def host_takes(self, bucket: Bucket, iteration: Iteration) -> bool:
        """Whether owners on the host update the shared parameters."""
        if bucket.route is not Route.EITHER or self._on_cpu[bucket.index]:
            return True
        return not self._course.is_local(bucket.index, iteration)

    def device_takes(self, bucket: Bucket, iteration: Iteration) -> bool:
        """Whether a device updates its own."""
        return bucket.route is not Route.EITHER or self._course.is_local(bucket.index, iteration)

    # --- the host's side

    def begin(self, updates: Updates, bucket: Bucket, iteration: Iteration) -> None:
        """Before an owner's update."""
        if self._comes_down(bucket, iteration):
            updates.give_state(bucket, self._states[bucket.index].read)

    def done(self, updates: Updates, bucket: Bucket, iteration: Iteration) -> None:
        """Once an owner's update stands."""
        if self._goes_up(bucket, iteration):
            is_copied = self._course.snapshot_place(iteration) is not None  # by a task that is still to come
            self._write(updates, bucket, keeps=self._on_cpu[bucket.index] or is_copied)

    # --- a device's side

    def down(self, updates: Updates, bucket: Bucket, values: torch.Tensor, iteration: Iteration) -> None:
        """Beside the gradient, of the first holder. values: its parameters."""
        if self._comes_down(bucket, iteration):
            self._write(updates, bucket, keeps=False)
            self._device.copy(self._memory.parameters(bucket), values)

    def up(self, updates: Updates, bucket: Bucket, iteration: Iteration) -> None:
        """Beside the parameters, of every holder."""
        if self._goes_up(bucket, iteration):
            updates.give_state(bucket, self._states[bucket.index].read)

    def _write(self, updates: Updates, bucket: Bucket, *, keeps: bool) -> None:
        for segment, state in updates.take_state(bucket, keeps=keeps):
            self._states[bucket.index].write(segment, state)

    def _comes_down(self, bucket: Bucket, iteration: Iteration) -> bool:
        if bucket.route is not Route.EITHER or self._on_cpu[bucket.index]:
            return False
        return not self._course.is_local(bucket.index, iteration) and self._course.has_turned(bucket.index, iteration)

    def _goes_up(self, bucket: Bucket, iteration: Iteration) -> bool:
        if bucket.route is not Route.EITHER or self._course.is_local(bucket.index, iteration):
            return False
        return self._course.will_turn(bucket.index, iteration)
