"""Graph builder: collects the iteration graph's tasks by key, then edges between them; has those of pipelines. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from weft.plan.buckets import Holder
from weft.plan.division import Turns
from weft.plan.graph import Edge, Graph, Key, Lane, Task, fetch, forward, forward_until, load, own_update, snapshot
from weft.plan.kinds import KINDS, Cause, Kind, Way
from weft.plan.placement import FETCH, LOAD, Placement
from weft.plan.plan import Ring, Role
from weft.spec.schedule_text import DYNAMIC
from weft.spec.strategy import Strategy


class GraphBuilder:
    def __init__(self, strategy: Strategy, placement: Placement, *, all_read: bool = False) -> None:
        """all_read: every stage reads the batch."""
        self.strategy = strategy
        self.placement = placement
        self._all_read = all_read
        self._tasks: dict[Key, Task] = {}
        self._edges: dict[tuple[int, int, int], Edge] = {}
        self._loads: dict[tuple[int, int], list[Key]] = {}  # of a replica's microbatch, by loader
        self._turns = Turns.of(strategy)
        self.last_backward: dict[Holder, Key] = {}  # of those added, the one that completes its stage's gradients
        self.first_backward: dict[Holder, Key] = {}  # of those added, the one that begins them
        self._gradient: dict[Holder, list[Key]] = {}  # of a stage, all that makes any of its parameters' gradients
        self._handed_back: dict[tuple[int, int, int], Key] = {}  # what makes the gradient of what a stage received
        self._done: dict[tuple[int, int, int], Key] = {}  # the last that a stage does with a microbatch
        # Of stages whose first forward is in parts, the buckets with which these begin but the first. Set before tasks.
        self.borders: Mapping[Holder, Sequence[int]] = {}

    def add(self, key: Key, lane: Lane, way: Way | None = None) -> None:
        task = self._tasks[key] = Task(id=len(self._tasks), lane=lane, way=way, **key._asdict())
        facts = KINDS[task.kind]
        if facts.makes_gradient:
            self._gradient.setdefault(task.holder, []).append(key)
            self.last_backward[task.holder] = key
        if facts.hands_back:
            self.first_backward.setdefault(task.holder, key)
        if task.microbatch is not None:
            place = (*task.holder, task.microbatch)
            self._done[place] = key
            if facts.hands_back:
                self._handed_back[place] = key

    def edge(self, source: Key, target: Key, distance: int, cause: Cause, way: Way | None = None) -> None:
        key = (self._tasks[source].id, self._tasks[target].id, distance)
        self._edges.setdefault(key, Edge(*key, cause, way))  # the first cause given stands: data before slot

    def graph(self) -> Graph:
        programs: dict[Lane, list[int]] = {}
        for task in self._tasks.values():
            programs.setdefault(task.lane, []).append(task.id)
        return Graph(
            tasks=tuple(self._tasks.values()),
            edges=tuple(self._edges.values()),
            programs={lane: tuple(program) for lane, program in programs.items()},
            free={self.lane(r, s): limit for r, s, limit in self._free()},
        )

    def _free(self) -> Iterator[tuple[int, int, int]]:
        """(replica, stage, microbatches in flight) where passes begin as they are ready."""
        for r, schedule in enumerate(self.placement.schedules):
            if schedule is not None and self.strategy.schedule == DYNAMIC:
                yield from ((r, s, schedule.in_flight(s)) for s in range(schedule.num_stages))

    def lane(self, r: int, s: int, name: str | None = None) -> Lane:
        """Of a stage's worker; without a name the one that the stage computes in."""
        return self.placement.compute_lane(r, s) if name is None else Lane(self.placement.worker_of[Holder(r, s)], name)

    def is_device(self, r: int) -> bool:
        return self.placement.replicas[r].device == "gpu"

    def streams(self, r: int) -> bool:
        """Whether its stages are layers that take turns on the device."""
        return self.placement.replicas[r].working_window is not None

    def begin(self, r: int, s: int, m: int = 0) -> Key:
        """The task with which a forward begins."""
        return forward(r, s, m) if m else self.part(r, s, 0)

    def part(self, r: int, s: int, number: int) -> Key:
        """Of a stage's first forward."""
        borders = self.borders.get(Holder(r, s), ())
        return forward_until(r, s, 0, borders[number]) if number < len(borders) else forward(r, s, 0)

    # --- tasks

    def load_tasks(self) -> None:
        for position, (r, m) in enumerate(self._turns.order()):
            takers = self._turns.takers_of(position)
            self._loads[r, m] = [load(r, m, loader) for loader in takers]
            for key, loader in zip(self._loads[r, m], takers, strict=True):
                self.add(key, Lane(self.placement.loaders[loader], LOAD))

    def _last_loads(self) -> Iterable[Key]:
        """Of each loader's lane: after them all of a batch is there."""
        last = {self._tasks[key].lane: key for keys in self._loads.values() for key in keys}
        return last.values()

    def compute_tasks(self, milestones: Callable[[int, int], Iterable[Key]] = lambda r, s: ()) -> None:
        """milestones: of a stage, behind the pass that completes its gradients."""
        for r in range(len(self.placement.replicas)):
            self._fetch_tasks(r)
            schedule = self.placement.schedules[r]
            for program in schedule.programs if schedule is not None else ():
                lane = self.lane(r, program[0].stage)
                completes = {each.stage: each for each in program if KINDS[each.kind].makes_gradient}
                for each in program:
                    if each.kind is Kind.FORWARD and each.microbatch == 0:
                        for b in self.borders.get(Holder(r, each.stage), ()):
                            self.add(forward_until(r, each.stage, 0, b), lane)
                    self.add(Key(each.kind, r, each.stage, each.microbatch), lane)
                    for milestone in milestones(r, each.stage) if completes[each.stage] == each else ():
                        self.add(milestone, lane)
                if self.placement.learns and self.placement.synchronisation is None:
                    for s in completes:
                        self.add(own_update(r, s), lane)

    def _data_stages(self, r: int) -> list[int]:
        """Those that read what is loaded."""
        count = self.placement.replicas[r].num_stages
        return list(range(count)) if self._all_read else sorted({0, count - 1})

    def _fetch_tasks(self, r: int) -> None:
        """Input and target of a microbatch one after the other, since both ends may be one GPU's."""
        replica = self.placement.replicas[r]
        for m in range(replica.microbatches) if self.is_device(r) else ():
            for s in self._data_stages(r):
                self.add(fetch(r, s, m), self.lane(r, s, FETCH))

    def snapshot_tasks(self) -> None:
        """Last in the lanes in which stages compute."""
        for r, s in self.placement.holders():
            self.add(snapshot(r, s), self.lane(r, s))

    # --- edges of the pipelines

    def flow_edges(self) -> None:
        for r, replica in enumerate(self.placement.replicas):
            for m in range(replica.microbatches):
                for s in self._data_stages(r):
                    self._data_edges(r, s, m)
                for s in range(replica.num_stages):
                    handed_back = self._handed_back[r, s, m]
                    self.edge(forward(r, s, m), handed_back, 0, Cause.ACTIVATION)
                    if handed_back != self._done[r, s, m]:  # a backward in two parts
                        self.edge(handed_back, self._done[r, s, m], 0, Cause.GRADIENT)
                    if s < replica.num_stages - 1:
                        self.edge(forward(r, s, m), self.begin(r, s + 1, m), 0, Cause.ACTIVATION)
                        self.edge(self._handed_back[r, s + 1, m], handed_back, 0, Cause.GRADIENT)
        for r, s, limit in self._free():
            for m in range(limit, self.placement.replicas[r].microbatches):
                self.edge(self._done[r, s, m - limit], forward(r, s, m), 0, Cause.SLOT)

    def _data_edges(self, r: int, s: int, m: int) -> None:
        """Where replicas steal, all of a batch is there before the first of it is taken."""
        reader = (fetch if self.is_device(r) else self.begin)(r, s, m)
        loads = self._loads[r, m] if not self.strategy.steals else self._last_loads() if m == 0 else ()
        for key in loads:
            self.edge(key, reader, 0, Cause.DATA)
        if self.is_device(r):
            self.edge(reader, self.begin(r, s, m), 0, Cause.DATA)

    def update_edges(self) -> None:
        """Of stages that update their own parameters."""
        (replica,) = self.placement.replicas
        for s in range(replica.num_stages):
            for key in self._gradient[Holder(0, s)]:
                self.edge(key, own_update(0, s), 0, Cause.GRADIENT)
            for m in range(replica.microbatches):
                self.edge(own_update(0, s), forward(0, s, m), 1, Cause.UPDATE)

    def buffer_edges(self, *, recomputes: bool) -> None:
        """Other replicas read the first one's buffers where they evaluate: after it has changed them, before again.

        recomputes: a forward runs again as its microbatch goes back, and changes them then, too."""
        (first, *others) = self.placement.replicas
        changes = {
            own: self._handed_back[0, own, first.microbatches - 1]
            if recomputes
            else forward(0, own, first.microbatches - 1)
            for own in range(first.num_stages)
        }
        for r, replica in enumerate(others, start=1):
            for s in range(replica.num_stages):
                for own in range(first.num_stages):
                    self.edge(changes[own], self.begin(r, s), 1, Cause.SYNC)
                    self.edge(forward(r, s, replica.microbatches - 1), self.begin(0, own), 1, Cause.SYNC)

    def weight_edges(self) -> None:
        """What a microbatch counts in its batch is known once that is loaded."""
        for last in self._last_loads():
            for r, replica in enumerate(self.placement.replicas):
                self.edge(last, self.begin(r, replica.num_stages - 1), 0, Cause.DATA)

    # --- edges of the slots

    def ring(self, ring: Ring) -> None:
        if not ring.is_loaded:
            for reader in ring.stages:
                self._ring_edges(ring, reader)
            return
        for holder in ring.readers(self.placement.replicas):
            self._batch_edge(ring, *holder)

    def _reader(self, r: int, s: int) -> Key:
        last = self.placement.replicas[r].microbatches - 1
        return fetch(r, s, last) if self.is_device(r) else self._done[r, s, last]

    def _next_reader(self, r: int, s: int) -> Key:
        return fetch(r, s, 0) if self.is_device(r) else self.begin(r, s)

    def _writer(self, ring: Ring, m: int) -> Key:
        """Of what is not loaded."""
        if ring.writer is None:
            return fetch(ring.replica, ring.stages[0], m)
        if ring.role is Role.ACTIVATION:
            return forward(ring.replica, ring.writer, m)
        return self._handed_back[ring.replica, ring.writer, m]

    def _ring_edges(self, ring: Ring, reader: int) -> None:
        """The writer of microbatch u of the replica's run waits until a reader is done with microbatch u - depth.

        In training the lowest reader's last pass is the last of these. In validation backwards wait for nothing, and
        any reader's FORWARD may be the last.
        """
        r = ring.replica
        count = self.placement.replicas[r].microbatches
        for m in range(count):
            iterations_back, before = divmod(m - ring.depth, count)
            self.edge(self._done[r, reader, before], self._writer(ring, m), -iterations_back, Cause.SLOT)

    def _batch_edge(self, ring: Ring, r: int, s: int) -> None:
        """A ring of whole batches is handed back a batch at a time.

        A loader's first write of a batch waits for the last read of the batch whose slots it takes; lane order does the
        rest. So it wakes once an iteration and not once a microbatch: on a machine where every core computes, each
        wake-up of a loader takes its time from a compute lane. Where loaders take turns at a microbatch any may be the
        first that one has. Where replicas steal, all that is computed meanwhile is shared out between them, and what
        comes behind it is not: loading begins with the next batch, and not beside the sums and updates of the last one.
        """
        batches, reader = ring.depth // self.placement.replicas[ring.replica].microbatches, self._reader(r, s)
        if self.strategy.steals and batches > 1:
            batches, reader = batches - 1, self._next_reader(r, s)
        loads = [key for (r, _), keys in self._loads.items() if r == ring.replica for key in keys]
        if self._turns.takers == 1:
            loads = list({self._tasks[key].lane: key for key in reversed(loads)}.values())
        for key in loads:
            self.edge(reader, key, batches, Cause.SLOT)
