"""Replica memory: where one stage of one replica has its parameters and gradients, and what brings them to and fro.

A CPU replica computes on the shared parameters, so an owner's update is there without another copy. A private one, on a
device or stale, has its own, and for these are the tasks

    DOWN(r,s,b)   a device's gradient                   → the holder's shared gradient
    UP(r,s,b)     the shared parameters, or a version   → own parameters            (route "host")
                  the sum of all gradients              → own gradient              (route "sum")
                  one or the other                                                  (route "either")
    RELOAD(r,s,b) the shared parameters                 → own parameters            (of a layer that streams)
    REFRESH(r,s)  the shared parameters                 → own parameters            (now and then: "sum", "either")
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from weft.plan.buckets import Bucket, Holder, Route
from weft.plan.course import Course
from weft.plan.itinerary import Iteration
from weft.workers.devices.device import Memory
from weft.workers.memory.bucket_memory import BucketMemory, shaped_like
from weft.workers.memory.layer_window import LayerWindow


class ReplicaMemory:
    """values, gradients: flat, by bucket; gradients only of a device. writes: it gives the shared parameters their
    first values. parameters: the model's; those in buckets move to their places, where modules compute from now on.
    device: which has what is private to it. window: which has the places instead, of a layer that streams.
    """

    def __init__(
        self,
        memory: BucketMemory,
        course: Course,
        holder: Holder,
        parameters: Sequence[nn.Parameter],
        *,
        is_private: bool,
        is_device: bool,
        writes: bool,
        device: Memory,
        window: LayerWindow | None = None,
    ) -> None:
        self._device = device
        self._memory = memory
        self._course = course
        self._holder = holder
        self._buckets = {bucket.index: bucket for bucket in memory.held(holder)}
        self._versions = dict.fromkeys(self._buckets, 0)
        self._streams = window is not None
        self._copies = writes and is_private  # its values to the shared ones
        self.values: Mapping[int, torch.Tensor]
        self.gradients: Mapping[int, torch.Tensor] | None = None
        if window is not None:
            self.values, self.gradients = window.places(holder)
        else:
            shared = {index: memory.parameters(bucket) for index, bucket in self._buckets.items()}
            self.values = _zeros(device, shared) if is_private else shared
            self.gradients = _zeros(device, {i: shared[i] for i in self._with_gradient()}) if is_device else None
        if is_device:
            for bucket in self._buckets.values():  # opened now: the directory is not asked while iterations run
                if bucket.route is not Route.DEVICE:  # of that nothing comes down, and page-locked memory is scarce
                    if holder in bucket.gradient_holders:
                        memory.gradient(holder, bucket, 0)
                    memory.sum(bucket)
        self._parameters = parameters
        for bucket in self._buckets.values():
            self._place(bucket, writes=writes)

    def _with_gradient(self) -> list[int]:
        """The buckets of which there is a gradient here: made here, or come up as the sum."""
        return [
            index
            for index, bucket in self._buckets.items()
            if self._holder in bucket.gradient_holders or bucket.route in (Route.SUM, Route.EITHER)
        ]

    def _place(self, bucket: Bucket, *, writes: bool) -> None:
        """Moves the bucket's parameters to their places; those of a layer that streams get their numbers by UP."""
        for where in bucket.places:
            tensor, start = self._parameters[where.parameter], where.offset
            if writes:
                shaped_like(tensor, self._memory.parameters(bucket), start).copy_(tensor.data)
                if self._memory.num_versions:  # a stale replica comes back to the first one after a validation
                    shaped_like(tensor, self._memory.version(bucket, 0), start).copy_(tensor.data)
            place = shaped_like(tensor, self.values[bucket.index], start)
            if not self._streams:
                place.copy_(tensor.data)
            tensor.data = place.data

    def rewind(self) -> None:
        """The parameters are those that training goes on with. Of a layer that does not stream."""
        self._versions = dict.fromkeys(self._buckets, 0)
        for bucket in self._buckets.values() if self._copies else ():
            self._device.copy(self._memory.parameters(bucket), self.values[bucket.index])

    def held_parameters(self) -> dict[int, nn.Parameter]:
        return {p.parameter: self._parameters[p.parameter] for bucket in self._buckets.values() for p in bucket.places}

    def down(self, bucket: int, iteration: Iteration) -> None:
        assert self.gradients is not None
        if self._course.contributes(iteration, self._holder[0]):
            view = self._buckets[bucket]
            self._device.copy(self._memory.gradient(self._holder, view, iteration.step), self.gradients[bucket])

    def load(self, bucket: int) -> None:
        """The shared parameters as they are now."""
        self._device.copy(self.values[bucket], self._memory.parameters(self._buckets[bucket]))

    def refresh(self) -> None:
        """Of all buckets that come up summed."""
        for index, bucket in self._buckets.items():
            if bucket.comes_up_summed:
                self.load(index)

    def up(self, bucket: int, iteration: Iteration) -> None:
        if self._streams:
            self.load(bucket)
            return
        view = self._buckets[bucket]
        is_local = self._course.is_local(bucket, iteration)
        if view.route is Route.EITHER and not is_local:
            if iteration.learns:
                self.load(bucket)
            return
        if view.route in (Route.SUM, Route.EITHER):
            assert self.gradients is not None
            if iteration.learns:
                self._device.copy(self.gradients[bucket], self._memory.sum(view))
            return
        version = self.next_version(iteration)
        if version != self._versions[bucket]:
            source = self._memory.version(view, version) if self._memory.num_versions else self._memory.parameters(view)
            self._device.copy(self.values[bucket], source)
            self._versions[bucket] = version

    def next_version(self, iteration: Iteration) -> int:
        """The version that the iteration after this one computes with."""
        if iteration.index + 1 == self._course.itinerary.num_iterations:
            return self._versions[min(self._versions)]
        return self._course.version(iteration.index + 1, self._holder[0])

    def publish(self, bucket: Bucket, bounds: tuple[int, int]) -> None:
        """Own parameters to the shared place, from where they are saved."""
        start, stop = bounds
        own = self.values[bucket.index][start:stop]
        self._device.copy(self._memory.parameters(bucket)[start:stop], own)


def _zeros(device: Memory, like: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    return {index: device.zeros(flat.numel(), flat.dtype) for index, flat in like.items()}
