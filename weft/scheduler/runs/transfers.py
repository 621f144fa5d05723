"""Transfers: how many bytes a plan's FETCH, DOWN, UP, RELOAD and REFRESH tasks have moved, from what was done. Pure.

What a task moves follows from the plan: a FETCH the samples of its microbatch, a REFRESH all of its stage that comes up
summed, the others a bucket. So nothing is measured where it is moved.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from weft.plan.course import Course
from weft.plan.graph import Task
from weft.plan.itinerary import Iteration
from weft.plan.kinds import KINDS, Kind
from weft.plan.plan import Plan, Ring, SlotValue


class Transfers:
    """One attempt's. Counts are by the kind of task, as text."""

    def __init__(self, plan: Plan) -> None:
        self._fetched_per_sample = [0.0] * len(plan.replicas)
        for ring in plan.rings:
            if ring.memory == "device" and not ring.crosses:
                self._fetched_per_sample[ring.replica] += _bytes_per_sample(ring)
        self._streams = [replica.working_window is not None for replica in plan.replicas]
        self._bucket_bytes = {
            kind: [0] * len(plan.replicas) for kind, facts in KINDS.items() if facts.moves == "bucket"
        }
        for task in plan.graph.tasks:
            if task.kind in self._bucket_bytes and plan.synchronisation is not None:
                num_bytes = plan.synchronisation.bucket_of(task).num_bytes
                self._bucket_bytes[task.kind][task.holder.replica] += num_bytes
        self._refreshed_bytes = sum(_refreshed_bytes(task, plan) for task in plan.graph.tasks)
        self._moved: dict[str, float] = {}

    def finish(self, iteration: Iteration, samples: Sequence[int]) -> None:
        """The iteration is over. samples: those that each replica had of it; one that had none sends no gradients."""
        fetched = sum(each * count for each, count in zip(self._fetched_per_sample, samples, strict=True))
        self._add(Kind.FETCH, fetched)
        for kind, by_replica in self._bucket_bytes.items():
            runs = [iteration.learns or (streams and not KINDS[kind].learns) for streams in self._streams]
            sent = [count > 0 or KINDS[kind].link != "d2h" for count in samples]
            counted = zip(by_replica, runs, sent, strict=True)
            self._add(kind, sum(num_bytes for num_bytes, run, send in counted if run and send))
        if Course.refreshes(iteration):
            self._add(Kind.REFRESH, self._refreshed_bytes)

    def _add(self, kind: Kind, num_bytes: float) -> None:
        if num_bytes:
            self._moved[str(kind)] = self._moved.get(str(kind), 0) + num_bytes

    def take_bytes(self) -> Mapping[str, float]:
        """What was moved since the last call."""
        taken, self._moved = self._moved, {}
        return taken


def _refreshed_bytes(task: Task, plan: Plan) -> int:
    if task.kind is not Kind.REFRESH or plan.synchronisation is None:
        return 0
    held = (bucket for bucket in plan.synchronisation.buckets if task.holder in bucket.holders)
    return sum(bucket.num_bytes for bucket in held if bucket.comes_up_summed)


def _bytes_per_sample(ring: Ring) -> float:
    return sum(_value_bytes_per_sample(value) for value in ring.values)


def _value_bytes_per_sample(value: SlotValue) -> float:
    size = max(value.shapes, default=0)
    return math.prod(value.shapes[size]) * _item_bytes(value.dtype) / size if size else 0.0


def _item_bytes(dtype: str) -> int:
    """Of torch's dtypes by name: the bits stand in it, except of bool."""
    bits = re.search(r"\d+", dtype)
    return int(bits[0]) // 8 if bits else 1
