"""A job's memory with vector clocks instead of bytes: who may touch what, and what they find there.

Each task reads and writes the cells that a worker would. The only things that order two lanes are the words of the
board that one waits for and the other has posted (Mattern, Virtual time and global states of distributed systems, 1989,
has the clocks). Two accesses to a cell, one of them a write, that nothing orders are a race, whether or not this run
has met it: one run stands for every order in which the lanes could have gone, and an AssertionError names the two.

    lane A   write ─ post            clock of the post: A at 1
    lane B            └─▶ wait ─ read    B knows A up to 1: it reads what was written, in any run
    lane C   read                        C knows nothing of A: a race
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from weft.plan.buckets import Bucket, Holder, Route, parts_of_forward
from weft.plan.course import Course
from weft.plan.division import Part, Turns
from weft.plan.graph import Edge, Graph, Lane, Task
from weft.plan.itinerary import Iteration
from weft.plan.kinds import KINDS, Kind, Way
from weft.plan.placement import Placement
from weft.plan.plan import Ring, Role
from weft.spec.strategy import Strategy
from weft.workers.lanes.attempt import batches_under_way
from weft.workers.memory.bucket_memory import NORMS_DEPTH

Cell = tuple[object, ...]
Clock = dict[Lane, int]

# --- memory that knows who may be there at the same time


@dataclass(frozen=True, slots=True)
class Access:
    name: str
    lane: Lane
    tick: int


class Memory:
    """A cell's last write and the reads since; values are whatever tells one version from another."""

    def __init__(self) -> None:
        self._values: dict[Cell, object] = {}
        self._writes: dict[Cell, Access] = {}
        self._reads: defaultdict[Cell, dict[Lane, Access]] = defaultdict(dict)

    def read(self, cell: Cell, access: Access, clock: Clock) -> object:
        self._check(cell, self._writes.get(cell), access, clock, "reads")
        self._reads[cell][access.lane] = access
        return self._values.get(cell, 0)

    def write(self, cell: Cell, value: object, access: Access, clock: Clock) -> None:
        for earlier in (self._writes.get(cell), *self._reads.pop(cell, {}).values()):
            self._check(cell, earlier, access, clock, "writes")
        self._writes[cell] = access
        self._values[cell] = value

    def _check(self, cell: Cell, earlier: Access | None, access: Access, clock: Clock, does: str) -> None:
        if earlier is not None and clock.get(earlier.lane, 0) < earlier.tick:
            raise AssertionError(f"a race: {access.name} {does} {cell} and nothing holds it behind {earlier.name}")


# --- what each task does to it


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One job, resolved. absent: (holder, bucket, iteration) whose gradient has a parameter without any. weightless:
    (iteration, number) of microbatches in which nothing counts. taken: where replicas steal, the number of the
    microbatch at each (iteration, replica, position)."""

    strategy: Strategy
    placement: Placement
    rings: Mapping[str, Ring]
    graph: Graph
    course: Course
    has_buffers: bool
    weighted: bool
    absent: frozenset[tuple[Holder, int, int]]
    weightless: frozenset[tuple[int, int]]
    taken: Mapping[tuple[int, int, int], int]


class Running:
    """One task of one iteration: its lane's clock, and the memory as it sees it."""

    def __init__(self, name: str, lane: Lane, clock: Clock, memory: Memory) -> None:
        self._name, self._lane, self._clock, self._memory = name, lane, clock, memory
        self.tick()

    def tick(self) -> None:
        """What was done until now is before what is posted now; what is done from now on is not."""
        self._clock[self._lane] = self._clock.get(self._lane, 0) + 1

    def read(self, cell: Cell, expected: object) -> None:
        found = self.look(cell)
        assert found == expected, f"{self._name} reads {cell}: {found} and not {expected}"

    def look(self, cell: Cell) -> object:
        return self._memory.read(cell, self._access(), self._clock)

    def write(self, cell: Cell, value: object) -> None:
        self._memory.write(cell, value, self._access(), self._clock)

    def _access(self) -> Access:
        return Access(self._name, self._lane, self._clock[self._lane])


class Workers:
    """The tasks as weft.workers runs them. post: sets a GRAD's word from inside a BACKWARD."""

    def __init__(self, case: Case, post: Callable[[Task, int], None], rng: random.Random) -> None:
        self._case, self._course, self._post, self._rng = case, case.course, post, rng
        self._replicas = case.placement.replicas
        self._turns = Turns.of(case.strategy)
        sync = case.placement.synchronisation
        self._sync = sync
        self._parts: dict[int, Bucket] = {part.index: part for part in sync.buckets} if sync else {}
        depth = 1 + max(replica.staleness for replica in self._replicas)
        self._num_versions = depth if depth > 1 else 0
        self._versions: dict[tuple[Holder, int], int] = {}
        self._posted: set[tuple[Holder, int, int]] = set()  # milestones, from inside a backward
        self._marked: set[tuple[Holder, int, int]] = set()  # buckets with a parameter that got no gradient
        self._updates = [t for t in case.graph.tasks if t.kind is Kind.UPDATE and t.bucket is not None]
        self._last_updates = {t.id for t in {(t.owner, t.replica, t.stage): t for t in self._updates}.values()}
        self._milestones = {(t.replica, t.stage, t.bucket): t for t in case.graph.tasks if t.kind is Kind.GRAD}

    def takes(self, task: Task, i: Iteration) -> bool:
        """Whether the task's bucket goes its way; an owner's last update runs in any case, to end the step. A LOAD is
        done by the loader whose turn it is."""
        if task.kind is Kind.LOAD:
            return self._turns.has(task.stage, self._turns.order().index((task.replica, task.microbatch)), i.index)
        if task.kind is Kind.REFRESH:
            return i.learns and i.step % 2 == 1
        if task.way is None or task.id in self._last_updates:
            return True
        return i.learns and self._goes(task, i)

    def _goes(self, task: Task, i: Iteration) -> bool:
        return task.way is None or (task.way is Way.DEVICE) is self._course.is_local(task.bucket, i)

    def skips(self, edge: Edge, task: Task, i: Iteration) -> bool:
        return edge.way is not None and (edge.way is Way.DEVICE) is not self._course.is_local(task.bucket, i)

    def run(self, task: Task, i: Iteration, me: Running) -> None:
        match task.kind:
            case Kind.LOAD:
                self._load(task, i, me)
            case Kind.FETCH:
                self._fetch(task, i, me)
            case Kind.FORWARD:
                self._forward(task, i, me)
            case Kind.BACKWARD | Kind.INPUT | Kind.WEIGHT:
                self._backward(task, i, me)
            case Kind.GRAD:
                self._grad(task, i, me)
            case Kind.DOWN:
                self._down(task, i, me)
            case Kind.SYNC:
                self._reduce(task, i, me)
            case Kind.UPDATE if task.bucket is not None:
                self._update(task, i, me)
            case Kind.VALIDATE:
                self._validate(task, i, me)
            case Kind.UP:
                self._up(task, i, me)
            case Kind.RELOAD:
                self._load_layer(task, i, me)
            case Kind.REFRESH:
                self._refresh(task, i, me)

    # --- data and slots

    def _work(self, replica: int, i: Iteration) -> list[Part]:
        """What a replica's tasks at each position work on."""
        parts = self._course.parts(i)
        if not self._course.steals:
            return parts[replica]
        positions = range(self._replicas[replica].microbatches)
        numbers = [self._case.taken.get((i.index, replica, position)) for position in positions]
        return [Part(-1, 0, 0) if number is None else parts[0][number] for number in numbers]

    def _part(self, task: Task, i: Iteration) -> Part:
        return self._work(task.replica, i)[task.microbatch]

    def _slot(self, name: str, task: Task, i: Iteration) -> tuple[Cell, int]:
        ring, position = self._case.rings[name], task.microbatch
        if ring.by_number and task.kind is not Kind.LOAD:
            position = self._part(task, i).number
        unit = i.index * self._replicas[ring.replica].microbatches + position
        return (name, unit % ring.depth), unit

    def _shared_ring(self, name: str, task: Task) -> str:
        return f"{name}-{0 if self._course.steals else task.replica}"

    def _load(self, task: Task, i: Iteration, me: Running) -> None:
        part = self._course.loaded_part(i, task.replica, task.microbatch)
        for name in ("input", "target") if part.size else ():
            me.write(*self._slot(f"{name}-{task.replica}", task, i))
        if self._case.weighted:
            me.write(self._weight(i, part.number), i.index)

    def _weight(self, i: Iteration, number: int) -> Cell:
        return ("weight", i.index % batches_under_way(self._case.strategy), number)

    def _read_weights(self, i: Iteration, me: Running) -> None:
        for part in itertools.chain(*self._course.parts(i)) if self._case.weighted else ():
            me.read(self._weight(i, part.number), i.index)

    def _is_last(self, task: Task) -> bool:
        return task.stage == self._replicas[task.replica].num_stages - 1

    def _ends(self, task: Task) -> list[str]:
        """Of the rings that come from the loader, those that the stage reads."""
        names = ["input"] if task.stage == 0 else []
        return [*names, *(["target"] if self._is_last(task) else [])]

    def _fetch(self, task: Task, i: Iteration, me: Running) -> None:
        for name in self._ends(task) if self._part(task, i).size else ():
            me.read(*self._slot(self._shared_ring(name, task), task, i))
            me.write(*self._slot(f"device-{name}-{task.replica}", task, i))

    def _read_inputs(self, task: Task, i: Iteration, me: Running) -> None:
        device = self._replicas[task.replica].device == "gpu"
        before = [f"activation-{task.replica}-{task.stage - 1}"] if task.stage else []
        ends = [f"device-{n}-{task.replica}" if device else self._shared_ring(n, task) for n in self._ends(task)]
        for ring in [*before, *ends]:
            me.read(*self._slot(ring, task, i))

    # --- forward and backward

    def _forward(self, task: Task, i: Iteration, me: Running) -> None:
        if self._part(task, i).size == 0:
            return
        number, count, buckets = self._part_of_forward(task)
        if number == 0:
            self._read_inputs(task, i, me)
        if number == 0 and self._is_last(task):
            self._read_weights(i, me)
        for bucket in buckets:
            self._read_parameters(bucket, task, i, me)
        if number < count - 1:
            return
        if not self._is_last(task):
            me.write(*self._slot(f"activation-{task.replica}-{task.stage}", task, i))
        if self._case.has_buffers and i.learns and task.replica == 0:
            me.write(("buffers", task.stage), i.index)
        if self._case.has_buffers and not i.learns and task.replica:
            for stage in range(self._replicas[0].num_stages):
                me.look(("buffers", stage))

    def _part_of_forward(self, task: Task) -> tuple[int, int, list[int]]:
        """(its number, how many there are, the buckets that it reads first)."""
        held, holder = self._held(task), Holder(task.replica, task.stage)
        parts = (each for each in self._case.graph.tasks if each.goes_on and each.holder == holder)
        borders = [each.bucket for each in parts] if task.microbatch == 0 else []
        number = borders.index(task.bucket) if task.goes_on else len(borders)
        part_of = parts_of_forward(list(self._parts.values()), holder, borders) if borders else {}
        return number, len(borders) + 1, [bucket for bucket in held if part_of.get(bucket, 0) == number]

    def _held(self, task: Task) -> list[int]:
        return [b for b, part in self._parts.items() if (task.replica, task.stage) in part.holders]

    def _read_parameters(self, bucket: int, task: Task, i: Iteration, me: Running) -> None:
        private = self._replicas[task.replica].private
        place: Cell = ("own", task.replica, task.stage) if private else ("shared",)
        for owner in self._owners(bucket):
            me.read((*place, bucket, owner), self._course.version(i.index, task.replica))

    def _take_place(self, holder: Holder, me: Running, cell: Callable[[Holder, int, int], Cell]) -> None:
        """What the other layers had that have the same place in a working window is gone."""
        replica = self._replicas[holder[0]]
        if replica.working_window is None:
            return
        for s in range(holder[1] % replica.working_window, replica.num_stages, replica.working_window):
            other = holder[0], s
            for bucket in [b for b, part in self._parts.items() if other in part.holders and other != holder]:
                for owner in self._owners(bucket):
                    me.write(cell(other, bucket, owner), "gone")

    def _owners(self, bucket: int) -> list[int]:
        """Of parts of the parameters; the device's own range, of a bucket with one holder, is all of these."""
        return [owned.owner for owned in self._parts[bucket].ranges]

    def _reached(self, bucket: int, owner: int) -> list[int]:
        """The parts, by their owners, that a task of the owner works on."""
        return [owner] if owner in self._owners(bucket) else self._owners(bucket)

    def _is_own(self, bucket: int, owner: int) -> bool:
        """Whether the owner is the device that holds the bucket alone."""
        part = self._parts[bucket]
        return part.route is Route.DEVICE or owner in [owned.owner for owned in part.device_ranges]

    def _backward(self, task: Task, i: Iteration, me: Running) -> None:
        """Buckets are complete, and posted, in any order, at the last microbatch with samples; if that is known. Of a
        backward in two parts the first hands gradients back, and the second makes those of parameters."""
        facts = KINDS[task.kind]
        part = self._part(task, i)
        filled = [each for each in self._work(task.replica, i) if each.size]
        if task.microbatch == 0 and filled and facts.hands_back:
            self._read_weights(i, me)
        if part not in filled or (i.index, part.number) in self._case.weightless:
            return
        if facts.hands_back and self._case.has_buffers and self._case.strategy.recompute and task.replica == 0:
            me.write(("buffers", task.stage), i.index)
        held = self._held(task)
        for bucket in self._rng.sample(held, len(held)):
            self._read_parameters(bucket, task, i, me)
            if not facts.makes_gradient or (task.replica, task.stage) not in self._parts[bucket].gradient_holders:
                continue
            self._write_gradient(bucket, (task.replica, task.stage), i, me)
            absent = ((task.replica, task.stage), bucket, i.index) in self._case.absent
            if part == filled[-1] and not absent and not self._course.steals:
                self._posted.add(((task.replica, task.stage), bucket, i.index))
                self._post(self._milestones[task.replica, task.stage, bucket], i.index)
                me.tick()
        self._read_inputs(task, i, me)
        for ring in self._tied_rings(task):
            if ring.writer != task.stage:
                me.read(*self._slot(ring.name, task, i))
            elif facts.hands_back:
                me.write(*self._slot(ring.name, task, i))
        if not self._is_last(task):
            me.read(*self._slot(f"gradient-{task.replica}-{task.stage}", task, i))
        if task.stage and facts.hands_back:
            me.write(*self._slot(f"gradient-{task.replica}-{task.stage - 1}", task, i))

    def _tied_rings(self, task: Task) -> list[Ring]:
        rings = [each for each in self._case.rings.values() if each.role is Role.TIED and each.replica == task.replica]
        return [each for each in rings if task.stage in (each.writer, *each.stages)]

    # --- gradients

    def _gradient(self, holder: Holder, bucket: int, i: Iteration) -> Cell:
        """The shared place of a step's gradient."""
        return ("gradient", holder, i.step % (1 + self._replicas[holder[0]].staleness), bucket)

    def _write_gradient(self, bucket: int, holder: Holder, i: Iteration, me: Running) -> None:
        device = self._replicas[holder[0]].device == "gpu"
        place: Cell = ("device-gradient", holder, bucket) if device else self._gradient(holder, bucket, i)
        self._take_place(holder, me, lambda other, b, owner: ("device-gradient", other, b, owner))
        for owner in self._owners(bucket):
            me.write((*place, owner), ("part", i.step))

    def _missing(self, holder: Holder, bucket: int, i: Iteration) -> Cell:
        return ("missing", holder, bucket, i.step % (1 + max(1, self._num_versions)))

    def _grad(self, task: Task, i: Iteration, me: Running) -> None:
        """What no backward has posted is filled up here; without a microbatch that counts, with nothing but zeros."""
        key = (task.replica, task.stage), task.bucket, i.index
        if key in self._posted or not self._course.contributes(i, task.replica):
            return
        self._write_gradient(task.bucket, key[0], i, me)
        counts = (
            part.size and (i.index, part.number) not in self._case.weightless for part in self._work(task.replica, i)
        )
        if key in self._case.absent or not any(counts):
            me.write(self._missing(key[0], task.bucket, i), i.index + 1)
            self._marked.add(key)

    def _down(self, task: Task, i: Iteration, me: Running) -> None:
        holder = (task.replica, task.stage)
        for owner in self._owners(task.bucket) if self._course.contributes(i, task.replica) else ():
            me.read(("device-gradient", holder, task.bucket, owner), ("part", i.step))
            me.write((*self._gradient(holder, task.bucket, i), owner), ("part", i.step))
        if self._state_comes_down(task.bucket, i) and holder == self._parts[task.bucket].holders[0]:
            for owner in self._owners(task.bucket):
                me.read(("device-state", holder, task.bucket, owner), i.step)
                me.write(("moving", task.bucket, owner), i.step)
                me.read(("own", *holder, task.bucket, owner), i.step)
                me.write(("shared", task.bucket, owner), i.step)

    def _contributors(self, bucket: int, i: Iteration) -> list[Holder]:
        return [holder for holder in self._parts[bucket].gradient_holders if self._course.contributes(i, holder[0])]

    def _sum(self, bucket: int, owner: int, i: Iteration) -> Cell:
        first = self._parts[bucket].holders[0]
        return ("sum", bucket, owner) if self._num_versions else (*self._gradient(first, bucket, i), owner)

    def _summed(self, bucket: int, owner: int, i: Iteration, *, own: bool) -> Cell:
        first = self._parts[bucket].holders[0]
        return ("device-gradient", first, bucket, owner) if own else self._sum(bucket, owner, i)

    def _reduce(self, task: Task, i: Iteration, me: Running) -> None:
        owner, bucket = task.owner, task.bucket
        own = self._is_own(bucket, owner)
        for reached in self._reached(bucket, owner):
            for holder in self._contributors(bucket, i):
                place = ("device-gradient", holder, bucket) if own else self._gradient(holder, bucket, i)
                me.read((*place, reached), ("part", i.step))
            me.write(self._summed(bucket, reached, i, own=own), ("sum", i.step))
        me.write(("norm", i.step % NORMS_DEPTH, bucket, owner), i.step)

    # --- parameters

    def _update(self, task: Task, i: Iteration, me: Running) -> None:
        assert self._sync is not None
        if task.owner is None:
            self._update_on_device(task, i, me)
            return
        if self._sync.bounded and not self._sync.speculative:
            self._read_norms(i, me)
        if not self._goes(task, i):
            return
        guess = ("guess", i.step + 1)
        self._step(task.bucket, task.owner, i, me, i.step, guess if self._sync.speculative else i.step + 1)

    def _validate(self, task: Task, i: Iteration, me: Running) -> None:
        """As if every norm were too large: undone, and made again."""
        self._read_norms(i, me)
        if task.owner is None:
            own = (None, task.replica, task.stage)
            for each in [t for t in self._updates if (t.owner, t.replica, t.stage) == own and self._goes(t, i)]:
                self._step_on_device(each, i, me, ("guess", i.step + 1), i.step + 1)
            return
        for bucket, part in self._parts.items():
            summed = part.route is Route.SUM and all(self._replicas[r].device == "gpu" for r, _ in part.holders)
            ways = {t.way for t in self._updates if (t.owner, t.bucket) == (task.owner, bucket)}
            passes = any(way and (way is Way.DEVICE) is not self._course.is_local(bucket, i) for way in ways)
            if task.owner in part.owners() and not summed and not passes:
                self._step(bucket, task.owner, i, me, ("guess", i.step + 1), i.step + 1)

    def _read_norms(self, i: Iteration, me: Running) -> None:
        for bucket, part in self._parts.items():
            for owner in part.owners():
                if part.device_ranges and self._is_own(bucket, owner) is not self._course.is_local(bucket, i):
                    continue  # what an owner wrote when the bucket went its way
                me.read(("norm", i.step % NORMS_DEPTH, bucket, owner), i.step)

    def _step(self, bucket: int, owner: int, i: Iteration, me: Running, before: object, after: object) -> None:
        part, own = self._parts[bucket], self._is_own(bucket, owner)
        self._read_missing(bucket, i, me)
        place: Cell = ("own", *part.holders[0]) if own else ("shared",)
        side: Cell = ("device-state", part.holders[0]) if own else ("host-state",)
        if not own and before == i.step and self._state_comes_down(bucket, i):
            me.read(("moving", bucket, owner), i.step)
            me.write((*side, bucket, owner), i.step)
        for reached in self._reached(bucket, owner):
            me.read(self._summed(bucket, reached, i, own=own), ("sum", i.step))
            for cell in (*place, bucket, reached), (*side, bucket, reached):
                me.read(cell, before)
                me.write(cell, after)
        if not own and after == i.step + 1 and self._state_goes_up(bucket, i):
            me.write(("moving", bucket, owner), after)
        if self._num_versions and after == i.step + 1:
            me.write(("version", after % self._num_versions, bucket, owner), after)

    def _state_comes_down(self, bucket: int, i: Iteration) -> bool:
        """A bucket that goes to the host again needs the device's state, unless CPU replicas have kept the host's."""
        part = self._parts[bucket]
        on_cpu = any(self._replicas[r].device == "cpu" for r, _ in part.holders)
        turns = part.route is Route.EITHER and self._course.has_turned(bucket, i)
        return turns and not on_cpu and not self._course.is_local(bucket, i)

    def _state_goes_up(self, bucket: int, i: Iteration) -> bool:
        turns = self._parts[bucket].route is Route.EITHER and self._course.will_turn(bucket, i)
        return turns and not self._course.is_local(bucket, i)

    def _read_missing(self, bucket: int, i: Iteration, me: Running) -> None:
        for holder in self._contributors(bucket, i):
            found = me.look(self._missing(holder, bucket, i)) == i.index + 1
            assert found is ((holder, bucket, i.index) in self._marked)

    def _update_on_device(self, task: Task, i: Iteration, me: Running) -> None:
        assert self._sync is not None
        guesses = self._sync.devices_speculate
        if self._sync.bounded and not guesses:
            self._read_norms(i, me)
        if self._goes(task, i):
            self._step_on_device(task, i, me, i.step, ("guess", i.step + 1) if guesses else i.step + 1)

    def _step_on_device(self, task: Task, i: Iteration, me: Running, before: object, after: object) -> None:
        self._read_missing(task.bucket, i, me)
        for owner in self._owners(task.bucket):
            me.read(("device-gradient", (task.replica, task.stage), task.bucket, owner), ("sum", i.step))
            state = ("device-state", (task.replica, task.stage), task.bucket, owner)
            for cell in state, ("own", task.replica, task.stage, task.bucket, owner):
                me.read(cell, before)
                me.write(cell, after)

    def next_version(self, task: Task, i: Iteration) -> int:
        if i.index + 1 == self._course.itinerary.num_iterations:
            return self._versions.get(((task.replica, task.stage), task.bucket), 0)
        return self._course.version(i.index + 1, task.replica)

    def _load_layer(self, task: Task, i: Iteration, me: Running) -> None:
        """A part of a layer into its place, which may have had another layer."""
        holder = (task.replica, task.stage)
        self._take_place(holder, me, lambda other, b, owner: ("own", *other, b, owner))
        for owner in self._owners(task.bucket):
            me.read(("shared", task.bucket, owner), i.step)
            me.write(("own", *holder, task.bucket, owner), i.step)

    def _refresh(self, task: Task, i: Iteration, me: Running) -> None:
        for bucket in self._held(task) if i.learns else ():
            for owner in self._owners(bucket) if self._parts[bucket].comes_up_summed else ():
                me.read(("shared", bucket, owner), i.step + 1)
                me.write(("own", task.replica, task.stage, bucket, owner), i.step + 1)

    def _up(self, task: Task, i: Iteration, me: Running) -> None:
        holder, bucket = (task.replica, task.stage), task.bucket
        if self._replicas[holder[0]].working_window is not None:
            self._load_layer(task, i, me)
            return
        if self._parts[bucket].route is Route.EITHER and not self._course.is_local(bucket, i):
            self._up_either(holder, bucket, i, me)
            return
        if self._parts[bucket].route in (Route.SUM, Route.EITHER):
            for owner in self._owners(bucket) if i.learns else ():
                me.read(self._sum(bucket, owner, i), ("sum", i.step))
                me.write(("device-gradient", holder, bucket, owner), ("sum", i.step))
            return
        version = self.next_version(task, i)
        if version == self._versions.get((holder, bucket), 0):
            return
        self._versions[holder, bucket] = version
        for owner in self._owners(bucket):
            place: Cell = ("version", version % self._num_versions) if self._num_versions else ("shared",)
            me.read((*place, bucket, owner), version)
            me.write(("own", *holder, bucket, owner), version)

    def _up_either(self, holder: Holder, bucket: int, i: Iteration, me: Running) -> None:
        """What an owner has updated, and before the bucket goes the other way its state."""
        for owner in self._owners(bucket) if i.learns else ():
            me.read(("shared", bucket, owner), i.step + 1)
            me.write(("own", *holder, bucket, owner), i.step + 1)
            if self._state_goes_up(bucket, i):
                me.read(("moving", bucket, owner), i.step + 1)
                me.write(("device-state", holder, bucket, owner), i.step + 1)
