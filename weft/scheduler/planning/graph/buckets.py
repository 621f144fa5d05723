"""Bucket graph: the tasks and edges from gradients to parameters, of a job with buckets. Pure.

A bucket of the route "either" has the tasks of both ways, and each iteration takes one: the tasks of the other pass,
without a wait, and are posted at once. So an edge that a lane needs in both ways must not come from a task of one:

    one holder          host     GRAD → DOWN → SYNC(o) → UPDATE(o) → UP —1→ FORWARD
                        device   GRAD → SYNC(d) → UPDATE(d) —1→ FORWARD              d: the device's own lane
    several holders     host     SYNC(o) → UPDATE(o) → UP —1→ FORWARD
                        device   SYNC(o) → UP → UPDATE(r,s) —1→ FORWARD             beside the rest of backward

An owner's last UPDATE of an iteration runs in both, since it ends the owner's step: so the norm, which other owners
write again two steps later, is read by then.

A stage's first FORWARD is in parts where what it reads later may come later: what a part reads first it waits for. In
each lane buckets come in the order of weft.scheduler.planning.graph.lane_order, and no part begins for what is there
once the one before may begin.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from weft.plan.buckets import Bucket, Holder, Route, parts_of_forward
from weft.plan.graph import (
    Key,
    Lane,
    down,
    forward,
    grad,
    own_update,
    own_validate,
    owned_snapshot,
    refresh,
    snapshot,
    sync,
    up,
    update,
    validate,
)
from weft.plan.kinds import Cause, Kind, Way
from weft.plan.placement import DOWN, SYNC, UP
from weft.plan.plan import Synchronisation
from weft.scheduler.planning.graph.lane_order import LaneOrder
from weft.scheduler.planning.graph.pipeline import GraphBuilder
from weft.scheduler.planning.graph.window import WindowGraph

_Placed = tuple[Key, Lane, Way | None]


class BucketGraph:
    """The tasks and edges from gradients to parameters, of a job with buckets."""

    def __init__(self, builder: GraphBuilder, synchronisation: Synchronisation, order: LaneOrder) -> None:
        self._builder = builder
        self._plan = synchronisation
        self._order = order
        self._placement = builder.placement
        self._windows = [
            WindowGraph(builder, r, held=self._held, completions=self._completions)
            for r in range(len(self._placement.replicas))
            if builder.streams(r)
        ]

    # --- tasks, in the order of their lanes

    def milestones(self, r: int, s: int) -> list[Key]:
        """Of a stage."""
        return [grad(r, s, part.index) for part in self._with_gradient(r, s)]

    def tasks(self) -> None:
        for window in self._windows:
            window.tasks()
        for key, lane, way in self._placed():
            self._builder.add(key, lane, way)

    def _placed(self) -> Iterator[_Placed]:
        for owner in range(len(self._plan.owners)):
            yield from self._owner_tasks(owner)
        for r in dict.fromkeys(holder.replica for holder in self._holders()):
            if self._placement.replicas[r].private:
                yield from self._copy_tasks(r)
        for r, s in self._holders():
            yield from self._closing_tasks(r, s)

    def _holders(self) -> list[Holder]:
        """Without the layers of working windows. Later stages first, since their gradients are there first: stages may
        share a GPU, and with it the lanes."""
        return [holder for holder in reversed(self._placement.holders()) if not self._builder.streams(holder.replica)]

    def _held(self, r: int, s: int) -> list[Bucket]:
        return [part for part in self._plan.buckets if (r, s) in part.holders]

    def _with_gradient(self, r: int, s: int) -> list[Bucket]:
        """Of those that it holds; what another stage of the replica holds before it is that one's."""
        return [part for part in self._plan.buckets if (r, s) in part.gradient_holders]

    @property
    def _waits_for_norm(self) -> bool:
        return self._plan.bounded and not self._plan.speculative

    def _owned(self, owner: int) -> list[Bucket]:
        """In the order in which the owner sums them."""
        owned = [part for part in self._plan.buckets if owner in part.owners()]
        return owned if self._plan.bounded else self._order.as_done(owned, owner)

    def _updated(self, owner: int) -> list[Bucket]:
        """Those of which the owner has parameters to update, in that order."""
        updated = [part for part in self._owned(owner) if self._owners_update(part)]
        return self._order.as_read(updated) if self._waits_for_norm else updated

    def _owners_update(self, part: Bucket) -> bool:
        """Not where every holder is a device that updates its own."""
        return part.route is not Route.SUM or self._on_cpu(part)

    def _on_cpu(self, part: Bucket) -> bool:
        """Whether a CPU replica computes on the shared parameters."""
        return any(not self._builder.is_device(r) for r, _ in part.holders)

    # --- the ways of a bucket that has two

    def _sync_way(self, owner: int, part: Bucket) -> Way | None:
        if not part.device_ranges:
            return None
        return Way.DEVICE if any(owned.owner == owner for owned in part.device_ranges) else Way.HOST

    def _update_way(self, owner: int, part: Bucket) -> Way | None:
        if part.route is not Route.EITHER or part.device_ranges:
            return self._sync_way(owner, part)
        return None if self._on_cpu(part) else Way.HOST

    def _openers(self, ways: Sequence[tuple[Bucket, Way | None]]) -> list[Bucket]:
        """Those of which one is the first that the owner does in an iteration, whatever passes."""
        fixed = next((number for number, (_, way) in enumerate(ways) if way is None), len(ways))
        return [part for part, _ in ways[: fixed + 1]]

    def _owner_tasks(self, owner: int) -> Iterator[_Placed]:
        """Where the norm must be known first, all SYNC come before all UPDATE; speculation needs no such order."""
        lane = self._plan.owners[owner]
        updated = self._updated(owner)
        for part in self._owned(owner):
            yield sync(owner, part.index), lane, self._sync_way(owner, part)
            if not self._waits_for_norm and part in updated:
                yield update(owner, part.index), lane, self._update_way(owner, part)
        for part in updated if self._waits_for_norm else ():
            yield update(owner, part.index), lane, self._update_way(owner, part)
        if self._plan.speculative and updated:
            yield validate(owner), lane, None

    def _copy_tasks(self, r: int) -> Iterator[_Placed]:
        """What a private replica does to get its gradients to the owners, and its parameters back. Its stages may share
        a GPU, and with it the lanes."""
        device = self._builder.is_device(r)
        own = [part for part in self._plan.buckets if any(holder.replica == r for holder in part.holders)]
        moved = [part for part in own if part.route is not Route.DEVICE]
        for part in moved if device else ():
            holder = next(each for each in part.gradient_holders if each.replica == r)
            way = Way.HOST if part.device_ranges else None
            yield down(*holder, part.index), self._builder.lane(*holder, DOWN), way
        for part in self._in_order_of_up(moved):
            way = Way.HOST if part.device_ranges else None
            for holder in [each for each in part.holders if each.replica == r]:
                yield up(*holder, part.index), self._builder.lane(*holder, UP if device else None), way
        for part in self._in_own_order([part for part in own if part.comes_up_summed]) if device else ():
            way = Way.DEVICE if part.route is Route.EITHER else None
            for holder in [each for each in part.holders if each.replica == r]:
                yield own_update(*holder, part.index), self._own_lane(*holder), way

    def _in_order_of_up(self, held: Sequence[Bucket]) -> list[Bucket]:
        """Sums are there before the norm is."""
        if not self._plan.bounded:
            return self._order.as_updated(held)
        return [*held] if any(part.comes_up_summed for part in held) else self._order.as_read(held)

    def _in_own_order(self, summed: Sequence[Bucket]) -> list[Bucket]:
        if self._plan.devices_speculate:
            return [*summed]
        return (self._order.as_read if self._plan.bounded else self._order.as_updated)(summed)

    def _closing_tasks(self, r: int, s: int) -> Iterator[_Placed]:
        """What waits for all of the iteration, behind all else of lanes that stages may share."""
        summed = self._summed(r, s)
        if self._plan.devices_speculate and summed:
            yield own_validate(r, s), self._own_lane(r, s), None
        if any(self._on_cpu(part) for part in summed):
            yield refresh(r, s), self._builder.lane(r, s, UP), None

    def _summed(self, r: int, s: int) -> list[Bucket]:
        """Those that a device may update with the sum."""
        return [part for part in self._held(r, s) if part.comes_up_summed] if self._builder.is_device(r) else []

    def _own_lane(self, r: int, s: int) -> Lane:
        return self._builder.lane(r, s, None if self._plan.coarse else SYNC)

    def snapshot_tasks(self) -> None:
        """Of owners, behind their updates. A device's own updates are in its stage's snapshot."""
        for owner, lane in enumerate(self._plan.owners):
            if self._updated(owner):
                self._builder.add(owned_snapshot(owner), lane)

    # --- edges

    def verify_edges(self) -> None:
        """Behind a validation's forwards an owner looks whether what they have read was still as it had left it."""
        for owner in range(len(self._plan.owners)):
            for r, s in self._holders() if self._updated(owner) else ():
                for m in range(self._placement.replicas[r].microbatches):
                    self._builder.edge(forward(r, s, m), owned_snapshot(owner), 0, Cause.UPDATE)

    def snapshot_edges(self) -> None:
        """A stage's snapshot has what its device has updated in another lane, and no owner shows."""
        for r, s in self._holders():
            for part in self._summed(r, s):
                if not self._on_cpu(part):
                    self._builder.edge(self._own_completion(r, s, part), snapshot(r, s), 0, Cause.UPDATE)

    def edges(self) -> None:
        for window in self._windows:
            window.edges()
        for r, s in self._holders():
            self._gradient_edges(r, s)
        for owner in range(len(self._plan.owners)):
            self._owner_edges(owner)
        for r, s in self._holders():
            if self._placement.replicas[r].private:
                self._private_edges(r, s)
                self._refresh_edges(r, s)
            self._reading_edges(r, s)

    def _gradient_edges(self, r: int, s: int) -> None:
        for part in self._with_gradient(r, s):
            b = part.index
            self._builder.edge(self._builder.last_backward[Holder(r, s)], grad(r, s, b), 0, Cause.GRADIENT)
            if self._builder.is_device(r) and part.route is not Route.DEVICE:
                self._builder.edge(grad(r, s, b), down(r, s, b), 0, Cause.GRADIENT)
                # the device's copy of the gradient is written again
                self._builder.edge(down(r, s, b), self._builder.first_backward[Holder(r, s)], 1, Cause.SLOT)

    def _arrival(self, r: int, s: int, part: Bucket, owner: int) -> Key:
        """The task after which the owner can read a holder's gradient."""
        on_device = part.route is Route.DEVICE or self._sync_way(owner, part) is Way.DEVICE
        comes_down = self._builder.is_device(r) and not on_device
        return (down if comes_down else grad)(r, s, part.index)

    def _owner_edges(self, owner: int) -> None:
        owned = self._owned(owner)
        for part in owned:
            for r, s in part.gradient_holders:
                self._builder.edge(self._arrival(r, s, part, owner), sync(owner, part.index), 0, Cause.SYNC)
        for part in self._openers([(part, self._sync_way(owner, part)) for part in owned]) if self._plan.coarse else ():
            for holder in self._placement.holders():
                last = self._builder.last_backward[holder]
                self._builder.edge(last, sync(owner, part.index), 0, Cause.SYNC)
        updated = self._updated(owner)
        for part in updated:
            b = part.index
            self._builder.edge(sync(owner, b), update(owner, b), 0, Cause.SYNC)
            for holder in part.holders:
                if self._reads_late(holder, part) and self._reads_what_is_updated(holder, part):
                    self._builder.edge(self._builder.last_backward[holder], update(owner, b), 0, Cause.GRADIENT)
            if part.comes_up_summed and self._builder.is_device(part.holders[0][0]):
                # unlike a replica on shared parameters, the device whose gradient gave way to the sum does not wait
                self._builder.edge(self._completion(owner, part), self._writer_of_sum(part), 1, Cause.SLOT)
        if self._plan.speculative and updated:
            self._norm_edges(validate(owner))
        elif self._plan.bounded:
            for part in self._openers([(part, self._update_way(owner, part)) for part in updated]):
                self._norm_edges(update(owner, part.index))

    def _reads_late(self, holder: Holder, part: Bucket) -> bool:
        """Whether the stage, whose gradient of the bucket an earlier one has, may read the parameters when that one's
        backward is over: in the second part of its own."""
        is_split = self._builder.last_backward[holder].kind is Kind.WEIGHT
        return is_split and holder not in part.gradient_holders

    def _reads_what_is_updated(self, holder: Holder, part: Bucket) -> bool:
        """And no copy, which comes up later."""
        return not self._placement.replicas[holder.replica].private or part.route in (Route.DEVICE, Route.EITHER)

    def _norm_edges(self, target: Key) -> None:
        """The norm is known once every owner has done its last SYNC."""
        for other in range(len(self._plan.owners)):
            last = self._owned(other)[-1].index
            self._builder.edge(sync(other, last), target, 0, Cause.SYNC)

    def _completions(self, part: Bucket) -> list[Key]:
        """The tasks after which a bucket's parameters stand where they are shared; of the route "device", its own."""
        return [self._completion(owned.owner, part) for owned in part.ranges]

    def _completion(self, owner: int, part: Bucket) -> Key:
        return validate(owner) if self._plan.speculative else update(owner, part.index)

    def _own_completion(self, r: int, s: int, part: Bucket) -> Key:
        return own_validate(r, s) if self._plan.devices_speculate else own_update(r, s, part.index)

    def _private_edges(self, r: int, s: int) -> None:
        for part in self._held(r, s):
            if part.route in (Route.HOST, Route.EITHER):
                self._parameters_come_up(r, s, part)
            if part.comes_up_summed:
                self._sum_comes_up(r, s, part)

    # --- parts of a forward, and what each waits for

    def borders(self) -> Mapping[Holder, Sequence[int]]:
        """Of stages whose first forward is in parts, the buckets with which these begin but the first."""
        if not self._order.by_layer:
            return {}
        places = {key: (lane, number) for number, (key, lane, _) in enumerate(self._placed())}
        found = {holder: self._borders_of(holder, places) for holder in self._placement.holders()}
        return {holder: borders for holder, borders in found.items() if borders}

    def _borders_of(self, holder: Holder, places: Mapping[Key, tuple[Lane, int]]) -> list[int]:
        """A part begins where what it reads may come after all that the parts before it have waited for. places: lane
        of each task, and its place there."""
        own, (begins, _) = self._builder.lane(*holder), self._placement.cuts[holder.replica][holder.stage]
        borders: list[int] = []
        first, waited = begins, dict[Lane, int]()
        for part in self._as_read_by(holder):
            unit = part.first_read(holder)
            ready = dict(places[key] for key in self._ready(*holder, part))
            is_late = any(number > waited.get(lane, -1) for lane, number in ready.items() if lane != own)
            if is_late and unit > first and self._order.is_worth(holder, begins, first, unit):
                borders.append(part.index)
                first = unit
            waited |= {lane: max(number, waited.get(lane, -1)) for lane, number in ready.items()}
        return borders

    def _as_read_by(self, holder: Holder) -> list[Bucket]:
        return sorted(self._held(*holder), key=lambda each: (each.first_read(holder), -each.index))

    def _ready(self, r: int, s: int, part: Bucket) -> list[Key]:
        """The tasks behind which a stage may read a bucket's parameters."""
        if not self._placement.replicas[r].private or part.route is Route.DEVICE:
            return self._completions(part)
        if part.route is Route.SUM:
            return [self._own_completion(r, s, part)]
        if part.route is Route.EITHER and not part.device_ranges:
            return [up(r, s, part.index), self._own_completion(r, s, part)]
        return [up(r, s, part.index), *(self._completion(owned.owner, part) for owned in part.device_ranges)]

    def _reading_edges(self, r: int, s: int) -> None:
        """What a part has waited for the next need not."""
        holder, known = Holder(r, s), set[Key]()
        numbers = parts_of_forward(self._plan.buckets, holder, self._builder.borders.get(holder, ()))
        for part in self._as_read_by(holder):
            for key in self._ready(r, s, part):
                if key not in known:
                    self._builder.edge(key, self._builder.part(r, s, numbers[part.index]), 1, Cause.UPDATE)
            known.update(self._ready(r, s, part))

    # --- copies and sums that come up

    def _parameters_come_up(self, r: int, s: int, part: Bucket) -> None:
        """Where UP has another load as well, it waits for these only in the iterations that take this way. The bucket's
        parameters have been read by then, or it would have no gradient; but a stale one goes by an older gradient, and
        a later stage may read on."""
        staleness, target = self._placement.replicas[r].staleness, up(r, s, part.index)
        way = Way.HOST if part.comes_up_summed else None
        if staleness or self._reads_late(Holder(r, s), part):
            self._builder.edge(self._builder.last_backward[Holder(r, s)], target, 0, Cause.GRADIENT, way)
        for key in self._completions(part):
            self._builder.edge(key, target, staleness, Cause.UPDATE, way)

    def _sum_comes_up(self, r: int, s: int, part: Bucket) -> None:
        b = part.index
        for owned in part.ranges:
            self._builder.edge(sync(owned.owner, b), up(r, s, b), 0, Cause.SYNC)
        self._builder.edge(up(r, s, b), own_update(r, s, b), 0, Cause.UPDATE)
        if self._plan.coarse or self._reads_late(Holder(r, s), part):
            self._builder.edge(self._builder.last_backward[Holder(r, s)], own_update(r, s, b), 0, Cause.GRADIENT)
        if self._plan.bounded:
            self._norm_edges(self._own_completion(r, s, part))
        self._builder.edge(up(r, s, b), self._writer_of_sum(part), 1, Cause.SLOT)

    def _refresh_edges(self, r: int, s: int) -> None:
        """The shared parameters stay as they are until the device's next gradient has come down."""
        for part in self._summed(r, s):
            if self._on_cpu(part):
                for key in (*self._completions(part), self._own_completion(r, s, part)):
                    self._builder.edge(key, refresh(r, s), 0, Cause.UPDATE)
                self._builder.edge(refresh(r, s), self._builder.begin(r, s), 1, Cause.UPDATE)

    def _writer_of_sum(self, part: Bucket) -> Key:
        """The sum stands where the first holder's gradient was, and will be."""
        first = part.holders[0]
        if self._builder.is_device(first.replica):
            return down(*first, part.index)
        return self._builder.first_backward[first]
