"""The tasks of one owner: SYNC, UPDATE and VALIDATE of its range of every bucket that it owns.

    SYNC(o,b)      every replica's gradient  → their sum, in the first holder's place; its squares
    UPDATE(o,b)    the sum                   → the parameters, in place
    VALIDATE(o)    the norm                  → nothing, or the updates undone and made again

The sum has a fixed order, that of the replicas, so the same run gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from weft.plan.buckets import Bucket, Holder
from weft.plan.course import Course
from weft.plan.graph import Task
from weft.plan.itinerary import Iteration
from weft.plan.kinds import Kind
from weft.transport.memory.collectives import Reduction, as_real
from weft.workers.compute.measured import Measured
from weft.workers.devices.device import Memory
from weft.workers.memory.bucket_memory import BucketMemory
from weft.workers.updates.updates import Updates

TILE_ELEMENTS = 1 << 26  # of a device: cuBLAS counts in int32, and a wider copy of a tile has to fit beside the job


class Owner:
    """own_gradients: flat, by bucket, of those that a device synchronises with nobody. updates: None for an owner that
    only sums. squares: whether anybody asks for the norm. device: which has own_gradients."""

    def __init__(
        self,
        number: int,
        memory: BucketMemory,
        course: Course,
        own_gradients: Mapping[int, torch.Tensor],
        updates: Updates | None,
        *,
        squares: bool,
        device: Memory,
    ) -> None:
        self._number = number
        self._memory = memory
        self._course = course
        self._own_gradients = own_gradients
        self._updates = updates
        self._squares = squares
        self._device = device
        self._buckets = {bucket.index: bucket for bucket in memory.buckets if number in bucket.owners()}
        for bucket in self._buckets.values():  # opened now: the directory is not asked while iterations run
            if bucket.index in own_gradients:
                continue
            memory.sum(bucket)
            for holder in bucket.gradient_holders:
                memory.gradient(holder, bucket, 0)
        self._reductions: dict[tuple[int, tuple[tuple[Holder, int], ...]], Reduction] = {}

    def bind(self, task: Task, measured: Measured) -> Callable[[Iteration], None]:
        """What a task of the owner does in an iteration."""
        match task.kind, task.bucket:
            case Kind.SYNC, int(b):
                return partial(self.sync, b)
            case Kind.UPDATE, int(b):
                return partial(self.update, b, measured=measured)
            case Kind.VALIDATE, None:
                return partial(self.validate, measured=measured)
            case _:
                raise AssertionError(f"{task} is nothing that an owner does")

    def is_own(self, bucket: int) -> bool:
        """Whether a device synchronises it with nobody."""
        return bucket in self._own_gradients

    def sync(self, bucket: int, iteration: Iteration) -> None:
        view = self._buckets[bucket]
        if self.is_own(bucket):  # one holder: there is nothing to add up
            if self._squares:
                place = self._memory.norms(iteration.step)[bucket, self._number]
                self._device.copy(place, _squares(self._own_gradients[bucket]))
            return
        squares = self._reduction(view, iteration).run(squares=self._squares)
        if self._squares:
            self._memory.norms(iteration.step)[bucket, self._number] = squares

    def gradients(self, bucket: int, iteration: Iteration) -> list[tuple[int, torch.Tensor]]:
        """What `sync` is about to add up: (replica, its gradient of the range)."""
        view = self._buckets[bucket]
        start, stop = view.range_of(self._number)
        holders = contributors(self._course, view, iteration)
        return [(h.replica, self._memory.gradient(h, view, iteration.step)[start:stop]) for h in holders]

    def update(self, bucket: int, iteration: Iteration, measured: Measured) -> None:
        assert self._updates is not None
        self._updates.update(self._buckets[bucket], iteration, measured)

    def validate(self, iteration: Iteration, measured: Measured) -> None:
        assert self._updates is not None
        self._updates.validate(iteration, measured)

    def _reduction(self, bucket: Bucket, iteration: Iteration) -> Reduction:
        """Views are made once for each set of contributing holders and the slots that their gradients are in."""
        holders = contributors(self._course, bucket, iteration)
        key = (bucket.index, tuple((h, iteration.step % self._memory.gradient_depth(h)) for h in holders))
        if key not in self._reductions:
            start, stop = bucket.range_of(self._number)
            out = self._memory.sum(bucket)
            sources = [self._memory.gradient(holder, bucket, iteration.step) for holder in holders]
            self._reductions[key] = Reduction(out[start:stop], [source[start:stop] for source in sources])
        return self._reductions[key]


def _squares(gradient: torch.Tensor) -> torch.Tensor:
    """A number of the device's own, float64; as Reduction's, in tiles."""
    wide = (tile if tile.itemsize >= 4 else tile.float() for tile in torch.split(as_real(gradient), TILE_ELEMENTS))
    return torch.stack([torch.dot(tile, tile).double() for tile in wide]).sum()


def contributors(course: Course, bucket: Bucket, iteration: Iteration) -> list[Holder]:
    """The holders of a gradient whose replica has samples of the batch."""
    return [holder for holder in bucket.gradient_holders if course.contributes(iteration, holder[0])]


def missing_parameters(memory: BucketMemory, course: Course) -> Callable[[Bucket, Iteration], frozenset[int]]:
    return lambda bucket, iteration: memory.missing_in(bucket, contributors(course, bucket, iteration), iteration.step)
