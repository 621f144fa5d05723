"""Balance: which buckets a device updates itself and which go to the host, by reuse distance. Pure.

A bucket's gradient is born inside the last backward and its parameters are next read by the following forward. It goes
to the host if it can be down, updated and up again by then, in lanes that are shared with the buckets before it;
otherwise the device updates it, which gives the others more time:

    compute   ▕ backward  b0 ▏ b1 ▏ b2 ▏▕ update b2 ▏▕ next forward  b2 ▏ b1 ▏ b0 ▏
    down                  ▕ b0 ▏▕ b1 ▏
    host                       ▕ b0 ▏▕ b1 ▏
    up                              ▕ b0 ▏▕ b1 ▏        b2 would come too late

Buckets born first are those read last, so they are the ones that go. Where the forward waits for all before it begins,
all are read then. After CoTrain (Li et al., ICPP 2023).

Before the job runs, the times are the inspection's; as it runs, those of its own tasks. A task of a way that its bucket
has never gone is estimated by the largest of its kind and device that has run: in proportion where it is smaller, and
where it is larger the rest as the inspection had it, since what a small task takes is hardly its bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from weft.plan.buckets import Bucket, Holder, Route, parts_of_forward
from weft.plan.graph import Key, Task, down, own_update, sync, up, update
from weft.plan.inspection import Inspection
from weft.plan.kinds import Kind
from weft.plan.placement import Placement
from weft.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class Trip:
    """One bucket of one stage, in seconds."""

    bucket: int
    born: float  # when its gradient is there
    down: float  # how long each step takes
    host_update: float
    up: float
    device_update: float
    read: float = 0.0  # from the start of the next forward to where this waits for it


def local_buckets(inspection: Inspection, placement: Placement, *, by_layer: bool = False) -> frozenset[int]:
    """Buckets that devices update themselves; one that several stages hold stays where any of them would keep it.
    by_layer: forwards wait for each where they read it."""
    assert placement.synchronisation is not None
    buckets = placement.synchronisation.buckets
    local: set[int] = set()
    for holder in placement.holders():
        if placement.replicas[holder[0]].device == "gpu":
            held = [b for b in buckets if holder in b.holders]
            trips = _trips(inspection, placement, holder, held, by_layer=by_layer)
            local |= kept(
                trips,
                _backward_end(inspection, placement, holder),
                _head_start(inspection, placement, holder),
                coarse=placement.synchronisation.coarse,
            )
    return frozenset(local)


def kept(trips: Sequence[Trip], backward_end: float, head_start: float, *, coarse: bool = False) -> set[int]:
    """The buckets that stay: all behind the longest run, in order of birth, of those that are back in time.

    head_start: from the end of this stage's last backward to its next forward, with nothing to update. coarse: the host
    begins when backward has ended.
    """
    down = up = 0.0
    host = backward_end if coarse else 0.0
    updates = sum(trip.device_update for trip in trips)
    gone = 0
    for number, trip in enumerate(trips):
        down = max(down, trip.born) + trip.down
        host = max(host, down) + trip.host_update
        up = max(up, host) + trip.up
        updates -= trip.device_update
        if up <= backward_end + max(head_start, updates) + trip.read:
            gone = number + 1
    return {trip.bucket for trip in trips[gone:]}


def _trips(
    inspection: Inspection, placement: Placement, holder: Holder, buckets: Sequence[Bucket], *, by_layer: bool
) -> list[Trip]:
    """Born by the device's backward; updated here and there in the time that each takes."""
    first, last = placement.cuts[holder[0]][holder[1]]
    units = inspection.units_on("gpu")
    whole = sum(unit.parameter_bytes for unit in units) or 1
    trips = []
    for bucket in buckets:
        unit = min(u for place in bucket.places for u in inspection.parameters[place.parameter].units if u >= first)
        part = bucket.num_bytes / whole
        trips.append(
            Trip(
                bucket=bucket.index,
                born=sum(each.backward_seconds for each in units[unit:last]),
                down=inspection.link_seconds(bucket.num_bytes),
                host_update=inspection.update_seconds_on("cpu") * part,
                up=inspection.link_seconds(bucket.num_bytes),
                device_update=inspection.update_seconds_on("gpu") * part,
                read=sum(each.forward_seconds for each in units[first : bucket.first_read(holder)])
                if by_layer
                else 0.0,
            )
        )
    return sorted(trips, key=lambda trip: trip.born)


def _backward_end(inspection: Inspection, placement: Placement, holder: Holder) -> float:
    first, last = placement.cuts[holder[0]][holder[1]]
    return sum(unit.backward_seconds for unit in inspection.units_on("gpu")[first:last])


def _head_start(inspection: Inspection, placement: Placement, holder: Holder) -> float:
    """Later stages begin an iteration later, and their last backward ends earlier than the first stage's."""
    first, _ = placement.cuts[holder[0]][holder[1]]
    return sum(unit.forward_seconds + unit.backward_seconds for unit in inspection.units_on("gpu")[:first])


# --- while the job runs


def measured_local(
    plan: Plan, seconds: Mapping[int, float], born: Mapping[tuple[int, Holder], float]
) -> frozenset[int]:
    """As `local_buckets`, of the buckets that may go either way. seconds: of each task that has run. born: seconds from
    the start of the holder's last backward, of those that are known."""
    assert plan.synchronisation is not None
    either = [part for part in plan.synchronisation.buckets if part.route is Route.EITHER]
    times = _Times(plan, seconds)
    local: set[int] = set()
    for r, replica in enumerate(plan.replicas):
        for s in range(replica.num_stages) if replica.device == "gpu" else ():
            holder = Holder(r, s)
            held = [part for part in either if holder in part.holders]
            end = times.last_backward(holder)
            births = [min(end, born.get((part.index, holder), end)) for part in held]
            reads = times.reads(holder)
            trips = [
                replace(_measured_trip(times, part, holder, birth), read=reads[part.index])
                for part, birth in zip(held, births, strict=True)
            ]
            trips.sort(key=lambda trip: trip.born)
            earlier = sum(times.first_forward(Holder(r, e)) + times.last_backward(Holder(r, e)) for e in range(s))
            local |= kept(trips, end, earlier, coarse=plan.synchronisation.coarse)
    return frozenset(local)


def _measured_trip(times: _Times, part: Bucket, holder: Holder, born: float) -> Trip:
    """Owners of a bucket work beside one another."""
    b = part.index

    def owned(owner: int) -> float:
        return times.of(sync(owner, b)) + times.of(update(owner, b))

    own = [owned(each.owner) for each in part.device_ranges]
    return Trip(
        bucket=b,
        born=born,
        down=times.of(down(*holder, b)),
        host_update=max(owned(each.owner) for each in part.ranges),
        up=times.of(up(*holder, b)),
        device_update=own[0] if own else times.of(own_update(*holder, b)),
    )


class _Times:
    """The seconds of each task: measured, or estimated."""

    def __init__(self, plan: Plan, seconds: Mapping[int, float]) -> None:
        self._plan = plan
        self._seconds = seconds
        self._tasks, self._last_backwards = plan.graph.by_key(), plan.graph.last_backwards()
        self._first_forwards: dict[Holder, list[Task]] = {}  # in parts, or whole
        for task in plan.graph.tasks:
            if task.kind is Kind.FORWARD and task.microbatch == 0:
                self._first_forwards.setdefault(task.holder, []).append(task)
        self._largest: dict[tuple[Kind, str], tuple[float, float]] = {}  # (planned, measured) seconds
        for task in plan.graph.tasks:
            if task.id in seconds:
                both = plan.task_seconds[task.id], seconds[task.id]
                self._largest[self._sort(task)] = max(both, self._largest.get(self._sort(task), both))

    def of(self, key: Key) -> float:
        task = self._tasks.get(key)
        if task is None:
            return 0.0
        return self._seconds[task.id] if task.id in self._seconds else self._estimate(task)

    def first_forward(self, holder: Holder) -> float:
        return sum(self.of(task.key) for task in self._first_forwards[holder])

    def reads(self, holder: Holder) -> Mapping[int, float]:
        """By bucket, from the start of the holder's first forward to that of the part that reads it first."""
        assert self._plan.synchronisation is not None
        parts = self._first_forwards[holder]
        begins = [0.0, *accumulate(self.of(task.key) for task in parts)]
        borders = [task.bucket for task in parts if task.bucket is not None]
        numbers = parts_of_forward(self._plan.synchronisation.buckets, holder, borders)
        return {bucket: begins[number] for bucket, number in numbers.items()}

    def last_backward(self, holder: Holder) -> float:
        return self.of(self._last_backwards[holder].key)

    def _estimate(self, task: Task) -> float:
        planned = self._plan.task_seconds[task.id]
        largest, measured = self._largest.get(self._sort(task), (0.0, 0.0))
        return measured * planned / largest if planned < largest else measured + planned - largest

    def _sort(self, task: Task) -> tuple[Kind, str]:
        return task.kind, self._plan.workers[task.lane.worker]
