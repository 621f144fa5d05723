"""Balance: which buckets a device updates itself and which go to the host, by reuse distance. Pure.

A bucket's gradient is born inside the last backward and its parameters are next read by the following forward. It goes
to the host if it can be down, updated and up again by then, in lanes that are shared with the buckets before it;
otherwise the device updates it, which gives the others more time:

    compute   ▕ backward  b0 ▏ b1 ▏ b2 ▏▕ update b2 ▏▕ next forward
    down                  ▕ b0 ▏▕ b1 ▏
    host                       ▕ b0 ▏▕ b1 ▏
    up                              ▕ b0 ▏▕ b1 ▏                       b2 would come too late

Buckets born first are those read last, so they are the ones that go. After CoTrain (Li et al., ICPP 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.scheduler.buckets import Bucket, Holder
from weft.scheduler.inspection import Inspection
from weft.scheduler.placement import Placement


@dataclass(frozen=True, slots=True)
class Trip:
    """One bucket of one stage, in seconds: when its gradient is there, and how long each step takes."""

    bucket: int
    born: float
    copy: float
    host_update: float
    device_update: float


def local_buckets(inspection: Inspection, placement: Placement) -> frozenset[int]:
    """Buckets that devices update themselves; one that several stages hold stays where any of them would keep it."""
    assert placement.synchronisation is not None
    buckets = [part.bucket for part in placement.synchronisation.buckets]
    local: set[int] = set()
    for holder in placement.holders():
        if placement.replicas[holder[0]].device == "gpu":
            trips = _trips(inspection, placement, holder, [b for b in buckets if holder in b.holders])
            local |= kept(
                trips, _backward_end(inspection, placement, holder), _head_start(inspection, placement, holder)
            )
    return frozenset(local)


def kept(trips: Sequence[Trip], backward_end: float, head_start: float) -> set[int]:
    """The buckets that stay: all behind the longest run, in order of birth, of those that are back in time.

    head_start: from the end of this stage's last backward to its next forward, with nothing to update.
    """
    down = host = up = 0.0
    updates = sum(trip.device_update for trip in trips)
    gone = 0
    for number, trip in enumerate(trips):
        down = max(down, trip.born) + trip.copy
        host = max(host, down) + trip.host_update
        up = max(up, host) + trip.copy
        updates -= trip.device_update
        if up <= backward_end + max(head_start, updates):
            gone = number + 1
    return {trip.bucket for trip in trips[gone:]}


def _trips(inspection: Inspection, placement: Placement, holder: Holder, buckets: Sequence[Bucket]) -> list[Trip]:
    first, last = placement.cuts[holder[0]][holder[1]]
    whole = sum(unit.parameter_bytes for unit in inspection.units) or 1
    trips = []
    for bucket in buckets:
        unit = min(u for place in bucket.places for u in inspection.parameters[place.parameter].units if u >= first)
        update = inspection.update_seconds * bucket.num_bytes / whole
        trips.append(
            Trip(
                bucket=bucket.index,
                born=sum(each.backward_seconds for each in inspection.units[unit:last]),
                copy=bucket.num_bytes / inspection.copy_bytes_per_second,
                host_update=update,
                device_update=update,
            )
        )
    return sorted(trips, key=lambda trip: trip.born)


def _backward_end(inspection: Inspection, placement: Placement, holder: Holder) -> float:
    first, last = placement.cuts[holder[0]][holder[1]]
    return sum(unit.backward_seconds for unit in inspection.units[first:last])


def _head_start(inspection: Inspection, placement: Placement, holder: Holder) -> float:
    """Later stages begin an iteration later, and their last backward ends earlier than the first stage's."""
    first, _ = placement.cuts[holder[0]][holder[1]]
    return sum(unit.forward_seconds + unit.backward_seconds for unit in inspection.units[:first])
