"""Lane order: in which order lanes take the buckets, so that what the next forward reads first is there first. Pure.

Gradients are born in the reverse of the order in which the next forward reads. An owner that keeps up with backward
takes them as they come, and then nothing is left to wait for but the last. One that has several before it takes the one
that is read first, and has those left when the forward begins that it reads late:

    compute   ▕ backward  b0 ▏ b1 ▏ b2 ▏ b3 ▏        ▕ forward  b3 ▏      b2 ▏    b1 ▏  b0 ▏
    owner                     ▕   b0   ▏▕   b1   ▏▕   b3   ▏▕   b2   ▏

This is Schrage's rule: of the jobs that have come, the one after which most is left to do (Carlier, The one-machine
sequencing problem, EJOR 1982, section 2). Where a norm bounds the updates none stands before all gradients are summed:
then these are taken as they come, and the updates in the order of reading.

Times are the inspection's. They decide no more than an order; but an owner that is told to take what is not there yet
stands, with others there. A backward beside which updates run takes up to three times as long as alone, where both want
the same memory. So an order is made for each of several paces of the backwards, and of these the one is taken that
loses least where it loses most: it takes a few more buckets as they come.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from weft.plan.buckets import Bucket, Holder, Route
from weft.plan.graph import Graph
from weft.plan.inspection import Inspection
from weft.plan.kinds import Cause, Kind
from weft.plan.placement import Placement
from weft.plan.plan import Synchronisation
from weft.scheduler.planning.costs import sum_seconds
from weft.spec.schedule_text import DYNAMIC
from weft.spec.strategy import Strategy

MAX_PARTS = 16  # of a forward; arbitrary: a task each, and no part hides more than a sixteenth less than it could
LEAST_PART_SECONDS = 100e-6  # of a part that is worth a task's 20 to 50 microseconds
PACES = (1.0, 1.5, 2.0, 3.0)  # of backwards, in the inspection's times; arbitrary, the last more than was seen
PACES_APART = (1.0,)  # of devices with memory of their own


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneOrder:
    """By default lanes take buckets as they come, and each forward is whole."""

    by_layer: bool = False
    local: frozenset[int] = frozenset()  # buckets that devices update themselves at the start
    reads: Mapping[int, int] = field(default_factory=dict)  # by bucket, the first unit that reads of it, of any replica
    # By owner and bucket, when the owner would be done with it, in seconds from the end of the last backward.
    ends: Mapping[tuple[int, int], float] = field(default_factory=dict)
    forward_ends: Mapping[Holder, Sequence[float]] = field(default_factory=dict)  # seconds of a stage's first n units

    def as_read(self, buckets: Sequence[Bucket]) -> list[Bucket]:
        return sorted(buckets, key=lambda each: (self.reads[each.index], -each.index)) if self.by_layer else [*buckets]

    def as_done(self, buckets: Sequence[Bucket], owner: int) -> list[Bucket]:
        """By the owner."""
        return sorted(buckets, key=lambda each: self.ends[owner, each.index]) if self.by_layer else [*buckets]

    def as_updated(self, buckets: Sequence[Bucket]) -> list[Bucket]:
        """By their owners; first those that devices update, whose copies have nothing to wait for. One without elements
        has no owner."""
        if not self.by_layer:
            return [*buckets]
        goes = [each for each in buckets if not self._stays(each)]
        ends = {
            each.index: max((self.ends[owned.owner, each.index] for owned in each.ranges), default=0.0) for each in goes
        }
        stay = self.as_read([each for each in buckets if self._stays(each)])
        return [*stay, *sorted(goes, key=lambda each: ends[each.index])]

    def _stays(self, bucket: Bucket) -> bool:
        return bool(bucket.device_ranges) and bucket.index in self.local

    def is_worth(self, holder: Holder, begins: int, first: int, unit: int) -> bool:
        """Whether the units first .. unit - 1 of a stage that begins with `begins` are worth a part of its forward."""
        ends = self.forward_ends[holder]
        seconds = ends[unit - begins] - ends[first - begins]
        return seconds >= max(LEAST_PART_SECONDS, ends[-1] / MAX_PARTS)


def lane_order(strategy: Strategy, inspection: Inspection, placement: Placement) -> LaneOrder:
    sync = placement.synchronisation
    if sync is None or not waits_by_layer(strategy, placement):
        return LaneOrder()
    times = _Times(strategy, inspection, placement, sync)
    return LaneOrder(
        by_layer=True,
        local=frozenset(sync.local),
        reads={part.index: min(part.first_reads) for part in sync.buckets},
        ends={(owner, b): end for owner in range(len(sync.owners)) for b, end in times.ends(owner)},
        forward_ends={holder: times.forward_ends(holder) for holder in placement.holders()},
    )


def waits_by_layer(strategy: Strategy, placement: Placement) -> bool:
    """Not where all is done behind all backwards; where copies come late, in the compute lane; where layers stream
    through a device; and where a lane's next pass shows as it runs."""
    shows = strategy.steals or strategy.schedule == DYNAMIC
    late = any(each.staleness or each.working_window is not None for each in placement.replicas)
    return strategy.waits == "layer" and strategy.sync == "fine" and not shows and not late


def work_beside_forwards(graph: Graph) -> Iterator[tuple[int, int]]:
    """(a part of a forward, a task of the same worker that the next part waits for): such a task takes the cores of the
    forward that it runs beside, unless it is a copy."""
    tasks = graph.tasks
    before = {task.id: earlier.id for earlier, task in pairwise(tasks) if earlier.goes_on}
    for edge in graph.edges:
        if edge.target in before and edge.cause is Cause.UPDATE:
            source = tasks[edge.source]
            is_own = source.lane.worker == tasks[edge.target].lane.worker
            if is_own and source.kind is not Kind.UP:
                yield before[edge.target], source.id


class _Times:
    """All replicas are taken to end their last backwards at one moment, from which times count."""

    def __init__(self, strategy: Strategy, inspection: Inspection, placement: Placement, sync: Synchronisation) -> None:
        self._inspection, self._placement, self._sync = inspection, placement, sync
        self._all_bytes = sum(unit.parameter_bytes for unit in inspection.units) or 1
        self._backwards = {  # seconds from the end of each unit's backward to that of the first one's
            device: [0.0, *accumulate(unit.backward_seconds for unit in inspection.units_on(device))]
            for device in ("cpu", "gpu")
        }
        has_gpus = inspection.link_bytes_per_second is not None
        self._paces = PACES_APART if has_gpus and all(each.device == "gpu" for each in placement.replicas) else PACES
        shares = zip(strategy.share_list, strategy.microbatch_counts, strict=True)
        sizes = [share / count for share, count in shares]  # of microbatches, next to one another
        self._sizes = [size / max(sizes) for size in sizes]

    def forward_ends(self, holder: Holder) -> list[float]:
        first, last = self._placement.cuts[holder.replica][holder.stage]
        units = self._inspection.units_on(self._placement.replicas[holder.replica].device)[first:last]
        size = self._sizes[holder.replica]
        return [0.0, *accumulate(unit.forward_seconds * size for unit in units)]

    def ends(self, owner: int) -> Iterator[tuple[int, float]]:
        """Of the buckets that the owner has to do with; those of the other way stand where they do not matter."""
        coming: dict[int, list[float]] = {}  # by bucket, when it comes at each pace
        for part in self._sync.buckets:
            if owner not in part.owners():
                continue
            is_local = part.index in self._sync.local
            of_device = any(owned.owner == owner for owned in part.device_ranges)
            if part.device_ranges and of_device is not is_local:
                yield part.index, -math.inf if of_device else math.inf
            else:
                stays = of_device or part.route is Route.DEVICE
                coming[part.index] = [self._comes(part, pace, stays=stays) for pace in self._paces]
        takes = {index: self._takes(owner, self._sync.buckets[index]) for index in coming}
        reads = {index: min(self._sync.buckets[index].first_reads) for index in coming}
        at_paces = [{index: comes[number] for index, comes in coming.items()} for number in range(len(self._paces))]
        orders = list(dict.fromkeys(tuple(_schrage(comes, takes, reads)) for comes in at_paces))
        losses = [0.0 for _ in orders]  # the most
        for comes in at_paces:
            ends = [self._forward_end(_ends(order, comes, takes), reads) for order in orders]
            losses = [max(loss, end / min(ends)) for loss, end in zip(losses, ends, strict=True)]
        yield from _ends(orders[losses.index(min(losses))], at_paces[0], takes).items()

    def _forward_end(self, ends: Mapping[int, float], reads: Mapping[int, int]) -> float:
        """Of the first replica's next forward, each of whose units waits for the buckets that it reads first."""
        there = dict.fromkeys(reads.values(), 0.0)
        for index, unit in reads.items():
            there[unit] = max(there[unit], ends[index])
        now = 0.0
        for unit, facts in enumerate(self._inspection.units_on(self._placement.replicas[0].device)):
            now = max(now, there.get(unit, 0.0)) + facts.forward_seconds * self._sizes[0]
        return now or 1.0  # nothing, where nothing takes any time

    def _comes(self, part: Bucket, pace: float, *, stays: bool) -> float:
        """When the last of its gradients is there. stays: on the device where it is born."""
        comes = []
        for holder in part.gradient_holders:
            device = self._placement.replicas[holder.replica].device
            down = 0.0 if device == "cpu" or stays else self._inspection.link_seconds(part.num_bytes)
            left = self._backwards[device][part.first_read(holder)] * self._sizes[holder.replica]
            comes.append(down - pace * left)
        return max(comes)

    def _takes(self, owner: int, part: Bucket) -> float:
        """Its sum, and its update."""
        device = self._placement.workers[self._sync.owners[owner].worker]
        start, stop = part.range_of(owner)
        num_bytes = part.itemsize * (stop - start)
        update = self._inspection.update_seconds_on(device) * num_bytes / self._all_bytes
        return sum_seconds(self._inspection, part, num_bytes, device) + update


def _schrage(comes: Mapping[int, float], takes: Mapping[int, float], reads: Mapping[int, int]) -> Iterator[int]:
    """Buckets; of those that are there, the one that is read first."""
    later = sorted(comes, key=lambda index: comes[index], reverse=True)
    now, there = -math.inf, list[tuple[int, int]]()
    while later or there:
        now = now if there else max(now, comes[later[-1]])
        while later and comes[later[-1]] <= now:
            index = later.pop()
            heapq.heappush(there, (reads[index], -index))
        index = -heapq.heappop(there)[1]
        now += takes[index]
        yield index


def _ends(order: Iterable[int], comes: Mapping[int, float], takes: Mapping[int, float]) -> dict[int, float]:
    """When the owner is done with each, one after the other."""
    now, ends = -math.inf, dict[int, float]()
    for index in order:
        now = ends[index] = max(now, comes[index]) + takes[index]
    return ends
