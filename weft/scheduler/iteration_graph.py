"""The iteration graph of a placed job: its tasks in the order of their lanes, and every edge between them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from weft.scheduler.graph import Cause, Edge, Graph, Kind, Lane, Task
from weft.scheduler.placement import COMPUTE, DOWN, FETCH, LOAD, UP, Placement
from weft.scheduler.plan import BucketPlan, Ring, Route, Synchronisation
from weft.scheduler.schedules import SCHEDULES

Key = tuple[Kind, int, int, int, int]  # kind, replica or owner, stage, microbatch, bucket


def build_graph(
    schedule: str,
    placement: Placement,
    rings: Sequence[Ring],
    *,
    coarse: bool = False,
    has_buffers: bool = False,
    recompute: bool = False,
    weighted: bool = False,
    steals: bool = False,
) -> Graph:
    """coarse: every SYNC waits for every BACKWARD. has_buffers: replicas share those of the first one. recompute:
    BACKWARD changes buffers too, for a while. weighted: what a microbatch counts is known once its whole batch is
    loaded. steals: microbatches are loaded by their number, and a replica's position may come to have any of them."""
    builder = _Builder(schedule, placement, steals=steals)
    builder.load_tasks()
    builder.compute_tasks()
    if placement.synchronisation is not None:
        synchronise = _Synchronise(builder, placement.synchronisation)
        synchronise.tasks()
        builder.flow_edges()
        synchronise.edges(coarse=coarse)
    else:
        builder.flow_edges()
        if placement.learns:
            builder.update_edges()
    for ring in rings:
        builder.ring(ring)
    if has_buffers:
        builder.buffer_edges(Kind.BACKWARD if recompute else Kind.FORWARD)
    if weighted and not steals:
        builder.weight_edges()
    return builder.graph()


class _Builder:
    """Collects tasks by key, then edges between them."""

    def __init__(self, schedule: str, placement: Placement, *, steals: bool) -> None:
        self.placement = placement
        self._steals = steals
        self._schedule = schedule
        self._tasks: dict[Key, Task] = {}
        self._edges: dict[tuple[int, int, int], Edge] = {}

    def add(self, key: Key, lane: Lane) -> None:
        kind, replica, stage, microbatch, bucket = key
        self._tasks[key] = Task(
            id=len(self._tasks),
            kind=kind,
            replica=replica,
            stage=stage,
            microbatch=microbatch,
            bucket=bucket,
            lane=lane,
        )

    def edge(self, source: Key, target: Key, distance: int, cause: Cause) -> None:
        key = (self._tasks[source].id, self._tasks[target].id, distance)
        self._edges.setdefault(key, Edge(*key, cause))  # the first cause given stands: data before slot

    def graph(self) -> Graph:
        programs: dict[Lane, list[int]] = {}
        for task in self._tasks.values():
            programs.setdefault(task.lane, []).append(task.id)
        return Graph(
            tasks=tuple(self._tasks.values()),
            edges=tuple(self._edges.values()),
            programs={lane: tuple(program) for lane, program in programs.items()},
        )

    def lane(self, r: int, s: int, name: str = COMPUTE) -> Lane:
        return Lane(self.placement.worker_of[r, s], name)

    def is_device(self, r: int) -> bool:
        return self.placement.replicas[r].device == "gpu"

    # --- tasks

    def load_tasks(self) -> None:
        replicas = self.placement.replicas[:1] if self._steals else self.placement.replicas
        for m in range(max(replica.microbatches for replica in replicas)):
            for r, replica in enumerate(replicas):
                if m < replica.microbatches:
                    self.add((Kind.LOAD, r, 0, m, -1), Lane(self.placement.loader, LOAD))

    def compute_tasks(self) -> None:
        for r, replica in enumerate(self.placement.replicas):
            for s in range(replica.num_stages):
                if self.is_device(r) and s in (0, replica.num_stages - 1):
                    for m in range(replica.microbatches):
                        self.add((Kind.FETCH, r, s, m, -1), self.lane(r, s, FETCH))
                for kind, m in SCHEDULES[self._schedule](s, replica.num_stages, replica.microbatches):
                    self.add((kind, r, s, m, -1), self.lane(r, s))
                if self.placement.learns and self.placement.synchronisation is None:
                    self.add((Kind.UPDATE, r, s, -1, -1), self.lane(r, s))

    # --- edges of the pipelines

    def flow_edges(self) -> None:
        for r, replica in enumerate(self.placement.replicas):
            for m in range(replica.microbatches):
                for s in sorted({0, replica.num_stages - 1}):
                    self._data_edges(r, s, m)
                for s in range(replica.num_stages):
                    forward, backward = (Kind.FORWARD, r, s, m, -1), (Kind.BACKWARD, r, s, m, -1)
                    self.edge(forward, backward, 0, Cause.ACTIVATION)
                    if s < replica.num_stages - 1:
                        self.edge(forward, (Kind.FORWARD, r, s + 1, m, -1), 0, Cause.ACTIVATION)
                        self.edge((Kind.BACKWARD, r, s + 1, m, -1), backward, 0, Cause.GRADIENT)

    def _data_edges(self, r: int, s: int, m: int) -> None:
        """Where replicas steal, all of a batch is there before the first of it is taken."""
        forward = (Kind.FORWARD, r, s, m, -1)
        reader = (Kind.FETCH, r, s, m, -1) if self.is_device(r) else forward
        if not self._steals:
            self.edge((Kind.LOAD, r, 0, m, -1), reader, 0, Cause.DATA)
        elif m == 0:
            self.edge((Kind.LOAD, 0, 0, self.placement.replicas[0].microbatches - 1, -1), reader, 0, Cause.DATA)
        if self.is_device(r):
            self.edge(reader, forward, 0, Cause.DATA)

    def update_edges(self) -> None:
        """Of stages that update their own parameters."""
        (replica,) = self.placement.replicas
        for s in range(replica.num_stages):
            update = (Kind.UPDATE, 0, s, -1, -1)
            for m in range(replica.microbatches):
                self.edge((Kind.BACKWARD, 0, s, m, -1), update, 0, Cause.GRADIENT)
                self.edge(update, (Kind.FORWARD, 0, s, m, -1), 1, Cause.UPDATE)

    def buffer_edges(self, changes: Kind) -> None:
        """Other replicas read the first one's buffers where they evaluate: after it has changed them, before again."""
        (first, *others) = self.placement.replicas
        for r, replica in enumerate(others, start=1):
            for s in range(replica.num_stages):
                for own in range(first.num_stages):
                    last, start = (changes, 0, own, first.microbatches - 1, -1), (Kind.FORWARD, r, s, 0, -1)
                    self.edge(last, start, 1, Cause.SYNC)
                    end = (Kind.FORWARD, r, s, replica.microbatches - 1, -1)
                    self.edge(end, (Kind.FORWARD, 0, own, 0, -1), 1, Cause.SYNC)

    def weight_edges(self) -> None:
        """The loader's lane ends with the last microbatch of the replicas that have the most."""
        replicas = self.placement.replicas
        count, r = max((replica.microbatches, r) for r, replica in enumerate(replicas))
        last = (Kind.LOAD, r, 0, count - 1, -1)
        for r, replica in enumerate(replicas):
            self.edge(last, (Kind.FORWARD, r, replica.num_stages - 1, 0, -1), 0, Cause.DATA)

    # --- edges of the slots

    def ring(self, ring: Ring) -> None:
        r, last = ring.replica, self.placement.replicas[ring.replica].num_stages - 1
        readers = range(len(self.placement.replicas)) if ring.by_number else [r]
        match ring.name.split("-"):
            case ["input", _]:
                for reader in readers:
                    self._batch_edge(ring, self._reader(reader, 0))
            case ["target", _]:
                for reader in readers:
                    self._batch_edge(ring, self._reader(reader, self.placement.replicas[reader].num_stages - 1))
            case ["device", "input", _]:
                self._ring_edges(ring, (Kind.FETCH, 0), (Kind.BACKWARD, 0))
            case ["device", "target", _]:
                self._ring_edges(ring, (Kind.FETCH, last), (Kind.BACKWARD, last))
            case ["activation", _, s]:
                self._ring_edges(ring, (Kind.FORWARD, int(s)), (Kind.BACKWARD, int(s) + 1))
            case ["gradient", _, s]:
                self._ring_edges(ring, (Kind.BACKWARD, int(s) + 1), (Kind.BACKWARD, int(s)))

    def _reader(self, r: int, s: int) -> Key:
        kind = Kind.FETCH if self.is_device(r) else Kind.BACKWARD
        return (kind, r, s, self.placement.replicas[r].microbatches - 1, -1)

    def _ring_edges(self, ring: Ring, writer: tuple[Kind, int], reader: tuple[Kind, int]) -> None:
        """The writer of microbatch u of the replica's run waits for the last reader of microbatch u - depth."""
        r = ring.replica
        count = self.placement.replicas[r].microbatches
        for m in range(count):
            iterations_back, before = divmod(m - ring.depth, count)
            source = (reader[0], r, reader[1], before, -1)
            self.edge(source, (writer[0], r, writer[1], m, -1), -iterations_back, Cause.SLOT)

    def _batch_edge(self, ring: Ring, reader: Key) -> None:
        """A ring of whole batches is handed back a batch at a time.

        The first write of a batch waits for the last read of the batch whose slots it takes; lane order does the rest.
        So the writer wakes once an iteration and not once a microbatch: on a machine where every core computes, each
        wake-up of a loader takes its time from a compute lane.
        """
        batches = ring.depth // self.placement.replicas[ring.replica].microbatches
        self.edge(reader, (Kind.LOAD, ring.replica, 0, 0, -1), batches, Cause.SLOT)


class _Synchronise:
    """The tasks and edges from gradients to parameters, of a job with buckets."""

    def __init__(self, builder: _Builder, synchronisation: Synchronisation) -> None:
        self._builder = builder
        self._plan = synchronisation
        self._placement = builder.placement

    # --- tasks, in the order of their lanes

    def tasks(self) -> None:
        for r, s in self._placement.holders():
            held = self._held(r, s)
            for part in held:
                self._add(Kind.GRAD, r, s, part, self._builder.lane(r, s))
        for owner in range(len(self._plan.owners)):
            self._owner_tasks(owner)
        for r, s in self._placement.holders():
            self._holder_tasks(r, s)

    def _held(self, r: int, s: int) -> list[BucketPlan]:
        return [part for part in self._plan.buckets if (r, s) in part.bucket.holders]

    def _owned(self, owner: int) -> list[BucketPlan]:
        return [part for part in self._plan.buckets if any(owner == owned.owner for owned in part.ranges)]

    def _updated(self, owner: int) -> list[BucketPlan]:
        """Those of which the owner has parameters to update."""
        return [part for part in self._owned(owner) if self._owners_update(part)]

    def _owners_update(self, part: BucketPlan) -> bool:
        """Not where every holder is a device that updates its own."""
        if part.route is not Route.SUM:
            return True
        return any(not self._builder.is_device(r) for r, _ in part.bucket.holders)

    def _add(self, kind: Kind, r: int, s: int, part: BucketPlan, lane: Lane) -> None:
        self._builder.add((kind, r, s, -1, part.bucket.index), lane)

    def _owner_tasks(self, owner: int) -> None:
        """Where the norm must be known first, all SYNC come before all UPDATE; speculation needs no such order."""
        lane = self._plan.owners[owner]
        waits = self._plan.bounded and not self._plan.speculative
        updated = self._updated(owner)
        for part in self._owned(owner):
            self._add(Kind.SYNC, owner, -1, part, lane)
            if not waits and part in updated:
                self._add(Kind.UPDATE, owner, -1, part, lane)
        if waits:
            for part in updated:
                self._add(Kind.UPDATE, owner, -1, part, lane)
        if self._plan.speculative and updated:
            self._builder.add((Kind.VALIDATE, owner, -1, -1, -1), lane)

    def _holder_tasks(self, r: int, s: int) -> None:
        """What a private replica does to get its gradients to the owners, and its parameters back."""
        device = self._builder.is_device(r)
        if not self._placement.replicas[r].private:
            return
        held = [part for part in self._held(r, s) if part.route is not Route.DEVICE]
        if device:
            for part in held:
                self._add(Kind.DOWN, r, s, part, self._builder.lane(r, s, DOWN))
        for part in held:
            self._add(Kind.UP, r, s, part, self._builder.lane(r, s, UP if device else COMPUTE))
        for part in held:
            if part.route is Route.SUM:
                self._add(Kind.UPDATE, r, s, part, self._builder.lane(r, s))

    # --- edges

    def edges(self, *, coarse: bool) -> None:
        for r, s in self._placement.holders():
            self._gradient_edges(r, s)
        for owner in range(len(self._plan.owners)):
            self._owner_edges(owner, coarse=coarse)
        for r, s in self._placement.holders():
            if self._placement.replicas[r].private:
                self._private_edges(r, s)
            else:
                self._shared_edges(r, s)

    def _gradient_edges(self, r: int, s: int) -> None:
        last = (Kind.BACKWARD, r, s, self._placement.replicas[r].microbatches - 1, -1)
        for part in self._held(r, s):
            b = part.bucket.index
            self._builder.edge(last, (Kind.GRAD, r, s, -1, b), 0, Cause.GRADIENT)
            if self._builder.is_device(r) and part.route is not Route.DEVICE:
                self._builder.edge((Kind.GRAD, r, s, -1, b), (Kind.DOWN, r, s, -1, b), 0, Cause.GRADIENT)
                # the device's copy of the gradient is written again
                self._builder.edge((Kind.DOWN, r, s, -1, b), (Kind.BACKWARD, r, s, 0, -1), 1, Cause.SLOT)

    def _arrival(self, r: int, s: int, part: BucketPlan) -> tuple[Kind, int, int, int, int]:
        """The task after which owners can read a holder's gradient."""
        comes_down = self._builder.is_device(r) and part.route is not Route.DEVICE
        return (Kind.DOWN if comes_down else Kind.GRAD, r, s, -1, part.bucket.index)

    def _owner_edges(self, owner: int, *, coarse: bool) -> None:
        owned = self._owned(owner)
        for part in owned:
            sync = (Kind.SYNC, owner, -1, -1, part.bucket.index)
            for r, s in part.bucket.holders:
                self._builder.edge(self._arrival(r, s, part), sync, 0, Cause.SYNC)
        first = (Kind.SYNC, owner, -1, -1, owned[0].bucket.index)
        if coarse:
            for r, s in self._placement.holders():
                last = (Kind.BACKWARD, r, s, self._placement.replicas[r].microbatches - 1, -1)
                self._builder.edge(last, first, 0, Cause.SYNC)
        updated = self._updated(owner)
        for part in updated:
            b = part.bucket.index
            self._builder.edge((Kind.SYNC, owner, -1, -1, b), (Kind.UPDATE, owner, -1, -1, b), 0, Cause.SYNC)
            if part.route is Route.SUM and self._builder.is_device(part.bucket.holders[0][0]):
                # unlike a replica on shared parameters, the device whose gradient gave way to the sum does not wait
                self._builder.edge(self._completion(owner, part), self._writer_of_sum(part), 1, Cause.SLOT)
        if self._plan.bounded and updated:
            self._norm_edges(
                (Kind.VALIDATE, owner, -1, -1, -1)
                if self._plan.speculative
                else (Kind.UPDATE, owner, -1, -1, updated[0].bucket.index)
            )

    def _norm_edges(self, target: Key) -> None:
        """The norm is known once every owner has done its last SYNC."""
        for other in range(len(self._plan.owners)):
            last = self._owned(other)[-1].bucket.index
            self._builder.edge((Kind.SYNC, other, -1, -1, last), target, 0, Cause.SYNC)

    def _completions(self, part: BucketPlan) -> list[Key]:
        """The tasks after which the shared parameters of a bucket stand."""
        return [self._completion(owned.owner, part) for owned in part.ranges]

    def _completion(self, owner: int, part: BucketPlan) -> Key:
        if self._plan.speculative:
            return (Kind.VALIDATE, owner, -1, -1, -1)
        return (Kind.UPDATE, owner, -1, -1, part.bucket.index)

    def _shared_edges(self, r: int, s: int) -> None:
        """The stage computes on the owners' parameters."""
        for key in {key: None for part in self._held(r, s) for key in self._completions(part)}:
            self._builder.edge(key, (Kind.FORWARD, r, s, 0, -1), 1, Cause.UPDATE)

    def _private_edges(self, r: int, s: int) -> None:
        staleness = self._placement.replicas[r].staleness
        last = (Kind.BACKWARD, r, s, self._placement.replicas[r].microbatches - 1, -1)
        start = (Kind.FORWARD, r, s, 0, -1)
        for part in self._held(r, s):
            b = part.bucket.index
            up = (Kind.UP, r, s, -1, b)
            match part.route:
                case Route.DEVICE:
                    for key in self._completions(part):
                        self._builder.edge(key, start, 1, Cause.UPDATE)
                case Route.HOST:
                    self._builder.edge(last, up, 0, Cause.GRADIENT)  # backward reads the parameters to its end
                    for key in self._completions(part):
                        self._builder.edge(key, up, staleness, Cause.UPDATE)
                    self._builder.edge(up, start, 1, Cause.UPDATE)
                case Route.SUM:
                    for owned in part.ranges:
                        self._builder.edge((Kind.SYNC, owned.owner, -1, -1, b), up, 0, Cause.SYNC)
                    update = (Kind.UPDATE, r, s, -1, b)
                    self._builder.edge(up, update, 0, Cause.UPDATE)
                    self._builder.edge(last, update, 0, Cause.GRADIENT)
                    if self._plan.bounded:
                        self._norm_edges(update)
                    self._builder.edge(update, start, 1, Cause.UPDATE)
                    self._builder.edge(up, self._writer_of_sum(part), 1, Cause.SLOT)

    def _writer_of_sum(self, part: BucketPlan) -> Key:
        """The sum stands where the first holder's gradient was, and will be."""
        r, s = part.bucket.holders[0]
        return (Kind.DOWN, r, s, -1, part.bucket.index) if self._builder.is_device(r) else (Kind.BACKWARD, r, s, 0, -1)
