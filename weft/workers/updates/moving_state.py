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

from collections.abc import Mapping
from typing import Any

import torch

from weft.plan.course import Course
from weft.plan.itinerary import Iteration
from weft.transport.memory.arena import ALIGNMENT, dtype_of, typed
from weft.transport.memory.directory import Directory
from weft.workers.devices.device import Memory
from weft.workers.memory.bucket_memory import BucketMemory, BucketView
from weft.workers.updates.optimizer_state import Segment, State
from weft.workers.updates.updates import Updates
from weft.workload.workload import WorkloadError

_PYTHON = {"int": int, "float": float, "bool": bool}


class MovingState:
    """One bucket's place in shared memory; opened at set-up."""

    def __init__(self, directory: Directory, bucket: BucketView) -> None:
        self._bucket = bucket
        self._parameters = list(bucket.places)
        self._ranges = list(bucket.ranges.values())
        width = 1 + max((len(self._numbers_of(parameter)) for parameter in self._parameters), default=0)
        shape = (len(self._ranges), len(self._parameters), width)
        offset = 8 * torch.Size(shape).numel()
        places: dict[tuple[int, str], tuple[int, int, str]] = {}
        for parameter in self._parameters:
            count = bucket.places[parameter][1]
            for name, kind, dtype in bucket.state[parameter]:
                if kind == "elements":
                    offset = -(-offset // ALIGNMENT) * ALIGNMENT
                    places[parameter, name] = (offset, count, dtype)
                    offset += count * dtype_of(dtype).itemsize
        block = directory.block(f"optimizer-state-{bucket.index}", max(1, offset))
        self._numbers = typed(block, 0, shape, "float64")
        self._elements = {key: typed(block, start, (count,), dtype) for key, (start, count, dtype) in places.items()}

    def write(self, segment: Segment, state: State) -> None:
        """Raises WorkloadError for an entry that the optimizer did not have when the job was planned."""
        parameter, count = segment.parameter, segment.stop - segment.start
        numbers = self._numbers_of(parameter)
        if strangers := state.keys() - {name for name, _, _ in self._bucket.state[parameter]}:
            raise WorkloadError(
                f"the optimizer keeps {min(strangers)!r} of a parameter, which it did not in its first steps, so a "
                "bucket cannot move between device and host; use strategy.update = 'cpu' or 'local'"
            )
        for row in self._rows(segment):
            found = self._numbers[row, self._parameters.index(parameter)]
            found[0] = float(bool(state))
            for place, (name, _, _) in enumerate(numbers if state else (), start=1):
                found[place] = float(state[name])
        for name, kind, _ in self._bucket.state[parameter] if state else ():
            if kind == "elements":
                self._elements[parameter, name][segment.offset : segment.offset + count].copy_(state[name])

    def read(self, segment: Segment) -> State:
        """Tensors of elements are the shared ones."""
        parameter, count = segment.parameter, segment.stop - segment.start
        found = self._numbers[self._rows(segment)[0], self._parameters.index(parameter)].tolist()
        if not found[0]:
            return {}
        state: State = {
            name: self._elements[parameter, name][segment.offset : segment.offset + count]
            for name, kind, _ in self._bucket.state[parameter]
            if kind == "elements"
        }
        for (name, kind, dtype), number in zip(self._numbers_of(parameter), found[1:], strict=False):
            state[name] = torch.tensor(number, dtype=dtype_of(dtype)) if kind == "tensor" else _PYTHON[kind](number)
        return state

    def _numbers_of(self, parameter: int) -> list[tuple[str, str, str]]:
        return [entry for entry in self._bucket.state[parameter] if entry[1] != "elements"]

    def _rows(self, segment: Segment) -> list[int]:
        """Of the owners on the host that have a part of the segment."""
        begin = self._bucket.places[segment.parameter][0] + segment.offset
        end = begin + segment.stop - segment.start
        return [row for row, (first, last) in enumerate(self._ranges) if first < end and begin < last]


class Moves:
    """Which buckets' state moves in which iteration, and the moving. replicas: as in the plan's worker view."""

    def __init__(
        self,
        directory: Directory,
        memory: BucketMemory,
        course: Course,
        replicas: list[Mapping[str, Any]],
        device: Memory,
    ) -> None:
        self._memory = memory
        self._course = course
        self._device = device
        either = [bucket for bucket in memory.buckets if bucket.route == "either"]
        self._states = {bucket.index: MovingState(directory, bucket) for bucket in either}
        self._on_cpu = {
            bucket.index: any(replicas[r]["device"] == "cpu" for r, _ in bucket.holders) for bucket in memory.buckets
        }

    def host_takes(self, bucket: BucketView, iteration: Iteration) -> bool:
        """Whether owners on the host update the shared parameters."""
        if bucket.route != "either" or self._on_cpu[bucket.index]:
            return True
        return not self._course.is_local(bucket.index, iteration)

    def device_takes(self, bucket: BucketView, iteration: Iteration) -> bool:
        """Whether a device updates its own."""
        return bucket.route != "either" or self._course.is_local(bucket.index, iteration)

    # --- the host's side

    def begin(self, updates: Updates, bucket: BucketView, iteration: Iteration) -> None:
        """Before an owner's update."""
        if self._comes_down(bucket, iteration):
            updates.give_state(bucket, self._states[bucket.index].read)

    def done(self, updates: Updates, bucket: BucketView, iteration: Iteration) -> None:
        """Once an owner's update stands."""
        if self._goes_up(bucket, iteration):
            self._write(updates, bucket, keeps=self._on_cpu[bucket.index])

    # --- a device's side

    def down(self, updates: Updates, bucket: BucketView, values: torch.Tensor, iteration: Iteration) -> None:
        """Beside the gradient, of the first holder. values: its parameters."""
        if self._comes_down(bucket, iteration):
            self._write(updates, bucket, keeps=False)
            self._device.copy(self._memory.parameters(bucket), values)

    def up(self, updates: Updates, bucket: BucketView, iteration: Iteration) -> None:
        """Beside the parameters, of every holder."""
        if self._goes_up(bucket, iteration):
            updates.give_state(bucket, self._states[bucket.index].read)

    def _write(self, updates: Updates, bucket: BucketView, *, keeps: bool) -> None:
        for segment, state in updates.take_state(bucket, keeps=keeps):
            self._states[bucket.index].write(segment, state)

    def _comes_down(self, bucket: BucketView, iteration: Iteration) -> bool:
        if bucket.route != "either" or self._on_cpu[bucket.index]:
            return False
        return not self._course.is_local(bucket.index, iteration) and self._course.has_turned(bucket.index, iteration)

    def _goes_up(self, bucket: BucketView, iteration: Iteration) -> bool:
        if bucket.route != "either" or self._course.is_local(bucket.index, iteration):
            return False
        return self._course.will_turn(bucket.index, iteration)
