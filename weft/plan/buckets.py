"""Buckets: contiguous runs of the model's parameters, in reverse order of use, and who owns which range of each. Pure.

A bucket is what is synchronised and updated at once. It lies in one stage of each replica, wherever each replica is
cut; only parameters that several stages use (an embedding that is the head's weight too) are in several, and all of a
bucket's are then: their gradient is that of the first stage, to which the others hand theirs on. Within a bucket,
parameters of one optimizer group lie together, so that a step is one call for each group.

    model        |unit 0|unit 1|unit 2|unit 3|
    replica 0    |  stage 0    |  stage 1    |
    replica 1    |      stage 0       |  1   |
    buckets      | 3    | 2    |  1   |  0   |      cut wherever any replica is
    owners       o0│o1 ...                          each owner has one range of every bucket that its stage holds
"""

from __future__ import annotations

import enum
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from weft.plan.inspection import ParameterFacts, StateFacts

ALIGNMENT_BYTES = 128  # of places and ranges: two cache lines, at which fused kernels round as on whole parameters
FIRST_BUCKET_BYTES = 1 << 20  # as DDP's: the first gradients of backward should not wait for many others


class Holder(NamedTuple):
    """Who uses parameters."""

    replica: int
    stage: int


class Route(enum.StrEnum):
    """How a bucket's update is placed."""

    HOST = "host"  # owners update the shared parameters, devices get them
    SUM = "sum"  # owners only sum, every device gets the sum and updates its own parameters
    DEVICE = "device"  # the only replica updates its own
    EITHER = "either"  # HOST, or what devices do without it: the table of routes says in which iteration which


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where in its bucket a parameter lies; offset and length in elements, without the padding behind it."""

    parameter: int
    offset: int
    num_elements: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedRange:
    """Elements start .. stop - 1 of a bucket, which the plan's owner `owner` reduces and updates."""

    owner: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    index: int
    dtype: str
    itemsize: int
    offset: int  # in the block of all buckets, in bytes
    num_elements: int  # the padding too
    places: tuple[Place, ...]
    holders: tuple[Holder, ...]  # every stage that uses its parameters
    # What follows is the synchronisation's: `make_buckets` leaves it open.
    route: Route = Route.HOST
    ranges: tuple[OwnedRange, ...] = ()
    device_ranges: tuple[OwnedRange, ...] = ()  # of EITHER, where the only holder updates all of it the other way
    state: tuple[tuple[StateFacts, ...], ...] = ()  # of EITHER: by place, what of the optimizer's moves with the bucket
    # By holder, the unit with whose call at the latest its forward must wait for the parameters: one before which the
    # model can be cut, so that what comes before it is known to read none of them.
    first_reads: tuple[int, ...] = ()

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.itemsize

    @property
    def all_ranges(self) -> tuple[OwnedRange, ...]:
        return (*self.ranges, *self.device_ranges)

    @property
    def gradient_holders(self) -> tuple[Holder, ...]:
        """Of each replica the first stage, whose gradient has what the others have made in it."""
        firsts: dict[int, Holder] = {}
        for holder in self.holders:
            firsts.setdefault(holder[0], holder)
        return tuple(firsts.values())

    def first_read(self, holder: Holder) -> int:
        return self.first_reads[self.holders.index(holder)]

    @property
    def comes_up_summed(self) -> bool:
        """Whether devices may update it with the sum of several holders' gradients."""
        return self.route is Route.SUM or (self.route is Route.EITHER and not self.device_ranges)

    def owners(self) -> list[int]:
        return [owned.owner for owned in self.all_ranges]

    def range_of(self, owner: int) -> tuple[int, int]:
        """The first element of an owner's, and the one behind its last."""
        return next((owned.start, owned.stop) for owned in self.all_ranges if owned.owner == owner)

    def state_bytes(self) -> int:
        """Of all that moves. One number counts 8 bytes, and each owner has its own."""
        places = zip(self.places, self.state, strict=True) if self.state else ()
        return sum(
            place.num_elements * facts.itemsize if facts.kind == "elements" else 8 * len(self.ranges)
            for place, entries in places
            for facts in entries
        )


def make_buckets(
    parameters: Sequence[ParameterFacts], stages: Sequence[Sequence[tuple[int, int]]], bucket_bytes: int
) -> tuple[Bucket, ...]:
    """Buckets of at most `bucket_bytes` (unless one parameter is larger), the first of at most FIRST_BUCKET_BYTES.

    stages: for each replica the units (first, last) of each stage, last exclusive.
    """
    order = sorted(
        (index for index, facts in enumerate(parameters) if facts.trained),
        key=lambda index: (-min(parameters[index].units), -index),
    )
    open_runs: dict[tuple[tuple[Holder, ...], str], list[int]] = {}
    runs: list[tuple[tuple[Holder, ...], list[int]]] = []
    for index in order:
        facts = parameters[index]
        holders = _holders(facts.units, stages)
        run = open_runs.get((holders, facts.dtype))
        limit = min(bucket_bytes, FIRST_BUCKET_BYTES) if runs and run is runs[0][1] else bucket_bytes
        if run is None or sum(parameters[i].num_bytes for i in run) + facts.num_bytes > limit:
            run = open_runs[holders, facts.dtype] = []
            runs.append((holders, run))
        run.append(index)
    buckets: list[Bucket] = []
    offset = 0
    for number, (holders, run) in enumerate(runs):
        bucket = _bucket(number, offset, parameters, holders, run)
        buckets.append(bucket)
        offset += bucket.num_bytes
    return tuple(buckets)


def _holders(units: Sequence[int], stages: Sequence[Sequence[tuple[int, int]]]) -> tuple[Holder, ...]:
    return tuple(
        Holder(replica, stage)
        for replica, cuts in enumerate(stages)
        for stage, (first, last) in enumerate(cuts)
        if any(first <= unit < last for unit in units)
    )


def _bucket(
    number: int, offset: int, parameters: Sequence[ParameterFacts], holders: tuple[Holder, ...], run: Sequence[int]
) -> Bucket:
    places = []
    elements = 0
    itemsize = parameters[run[0]].itemsize
    for index in sorted(run, key=lambda index: parameters[index].group):  # stable: in reverse order of use otherwise
        size = parameters[index].num_elements
        places.append(Place(parameter=index, offset=elements, num_elements=size))
        elements += _aligned(size, itemsize)
    return Bucket(
        index=number,
        dtype=parameters[run[0]].dtype,
        itemsize=itemsize,
        offset=offset,
        num_elements=elements,
        places=tuple(places),
        holders=holders,
    )


def _aligned(elements: int, itemsize: int) -> int:
    step = ALIGNMENT_BYTES // itemsize
    return -(-elements // step) * step


def owned_ranges(bucket: Bucket, owners: Sequence[int], *, elementwise: bool) -> tuple[OwnedRange, ...]:
    """The bucket cut into nearly equal ranges, one for each owner that gets any.

    elementwise: a range may end inside a parameter. Otherwise each parameter goes whole to one owner, since such an
    optimizer looks at all of it.
    """
    ends = [bucket.num_elements * (number + 1) // len(owners) for number in range(len(owners))]
    if elementwise:
        cuts = [min(_aligned(end, bucket.itemsize), bucket.num_elements) for end in ends]
    else:
        starts = [*(place.offset for place in bucket.places), bucket.num_elements]
        cuts = [min(starts, key=lambda start: abs(start - end)) for end in ends]
    bounds = [0, *cuts]
    return tuple(
        OwnedRange(owner=owner, start=bounds[number], stop=bounds[number + 1])
        for number, owner in enumerate(owners)
        if bounds[number] < bounds[number + 1]
    )


def parts_of_forward(buckets: Sequence[Bucket], holder: Holder, borders: Sequence[int]) -> Mapping[int, int]:
    """By bucket that the holder reads, the number of the part of its forward that reads it first. buckets: all of the
    plan's. borders: of each part but the first, the bucket that it begins with."""
    if not borders:  # nor need it be known then where buckets are read
        return dict.fromkeys((each.index for each in buckets if holder in each.holders), 0)
    begins = [buckets[border].first_read(holder) for border in borders]
    return {each.index: bisect_right(begins, each.first_read(holder)) for each in buckets if holder in each.holders}
