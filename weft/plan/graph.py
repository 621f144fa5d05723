"""The iteration graph: tasks, edges with distances, and the lane that each task is bound to. Pure values.

A *timed event graph*: an edge (source, target, distance d) says that the target of iteration i waits for the source of
iteration i - d (for i < d there is nothing to wait for). The tasks of one lane run in the lane's order, iteration after
iteration, which is one more edge between neighbours and one of distance 1 from the last to the first.

For replica r, stage s, microbatch m, loader l, bucket b and owner o (who reduces and updates a range of the bucket):

    LOAD(r,l,m)           → FORWARD(r,0,m), FORWARD(r,S-1,m); or all stages data     (by FETCH(r,s,m) on a device)
    FORWARD(r,s,m)        → FORWARD(r,s+1,m), BACKWARD(r,s,m)               activation
    BACKWARD(r,s,m)       → BACKWARD(r,s-1,m)                               gradient
    INPUT(r,s,m)          → WEIGHT(r,s,m): a backward in two parts; others wait for the first as for the whole
    GRAD(r,s,b)           posted from inside the last BACKWARD(r,s,·)       (then DOWN(r,s,b) from a device)
    GRAD(·,·,b)           → SYNC(o,b) → UPDATE(o,b)                         sync
    SYNC(·,·)             → VALIDATE(o) or (r,s): the norm is known         sync
    UPDATE(·,b)     —1→ FORWARD(r,s,·)                                      update   (by UP(r,s,b) to a device)
    FORWARD(r,s,0,b)      the part of FORWARD(r,s,0) that is over where bucket b is first read; in its lane right before
    RELOAD(r,s,b)         → BACKWARD(r,s,0)                                 update   (of a layer that had made room)
    UPDATE(o,·), (r,s,·)  → REFRESH(r,s) —1→ FORWARD(r,s,0)                 update   (now and then)
    last reader of a slot → the slot's next writer                          slot

A job of one replica whose stages can update their own parameters has no buckets: BACKWARD(s,M-1) → UPDATE(s).

SNAPSHOT(r,s) and SNAPSHOT(o) need no edges: each stands behind all that changes what it copies in a lane's order, and
before all of the next iteration; what of it goes on beside its lane, the lane's next UPDATE waits for. Where it copies
what a device has updated in another lane it has some. With verify = "digest" SNAPSHOT(o) also looks behind a
validation's forwards whether its parameters are as they were left, and so has an edge from each FORWARD(r,s,m).
"""

from __future__ import annotations

import graphlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from weft.plan.buckets import Holder
from weft.plan.kinds import KINDS, Cause, Kind, Way


class Lane(NamedTuple):
    """One ordered executor: the plan's worker `worker` (a position in Plan.workers) and the lane's name in it."""

    worker: int
    name: str

    def __str__(self) -> str:
        return f"{self.worker}/{self.name}"


class Key(NamedTuple):
    """What a task is about; no two of a graph are about the same. None: it is about no such thing. Of a LOAD the
    number of its loader stands as the stage.

    As text: the stage and what the task is about, the replica or owner before it where it is not the first.
    """

    kind: Kind
    replica: int | None = None
    stage: int | None = None
    microbatch: int | None = None
    bucket: int | None = None
    owner: int | None = None

    def __str__(self) -> str:
        about = [f"r{self.replica}"] if self.replica else []
        named = (("o", self.owner), ("", self.stage), ("", self.microbatch), ("b", self.bucket))
        about += [f"{letter}{number}" for letter, number in named if number is not None]
        return f"{self.kind.name}({','.join(about)})"


def _of_bucket(kind: Kind, r: int, s: int, b: int) -> Key:
    return Key(kind, r, s, bucket=b)


fetch = partial(Key, Kind.FETCH)  # r, s, m
forward = partial(Key, Kind.FORWARD)
backward = partial(Key, Kind.BACKWARD)
grad = partial(_of_bucket, Kind.GRAD)  # r, s, b
down = partial(_of_bucket, Kind.DOWN)
up = partial(_of_bucket, Kind.UP)
reload = partial(_of_bucket, Kind.RELOAD)


def forward_until(r: int, s: int, m: int, b: int) -> Key:
    """Of a forward in parts, the one that is over where a bucket is first read; the last is the forward itself."""
    return Key(Kind.FORWARD, r, s, m, b)


def load(r: int, m: int, loader: int = 0) -> Key:
    return Key(Kind.LOAD, r, loader, m)


def sync(owner: int, b: int) -> Key:
    return Key(Kind.SYNC, owner=owner, bucket=b)


def update(owner: int, b: int) -> Key:
    return Key(Kind.UPDATE, owner=owner, bucket=b)


def own_update(r: int, s: int, b: int | None = None) -> Key:
    """Of the stage's own parameters; without buckets, of all of them."""
    return Key(Kind.UPDATE, r, s, bucket=b)


def validate(owner: int) -> Key:
    return Key(Kind.VALIDATE, owner=owner)


def own_validate(r: int, s: int) -> Key:
    """Of the stage's own parameters, all of them."""
    return Key(Kind.VALIDATE, r, s)


refresh = partial(Key, Kind.REFRESH)  # r, s
snapshot = partial(Key, Kind.SNAPSHOT)


def owned_snapshot(owner: int) -> Key:
    return Key(Kind.SNAPSHOT, owner=owner)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One task of every iteration. Its key's numbers, and where it runs."""

    id: int
    kind: Kind
    lane: Lane
    replica: int | None = None
    stage: int | None = None
    microbatch: int | None = None
    bucket: int | None = None
    owner: int | None = None
    way: Way | None = None  # it passes in iterations in which its bucket goes the other way; None where it runs in all

    @property
    def key(self) -> Key:
        return Key(self.kind, self.replica, self.stage, self.microbatch, self.bucket, self.owner)

    @property
    def holder(self) -> Holder:
        """Of a task that is no owner's."""
        assert self.replica is not None
        assert self.stage is not None
        return Holder(self.replica, self.stage)

    @property
    def goes_on(self) -> bool:
        """Whether it is a part of a forward, and the lane's next task is the next one."""
        return self.kind is Kind.FORWARD and self.bucket is not None

    def passes(self, local: Collection[int]) -> bool:
        """Whether it does nothing while devices update these buckets themselves."""
        return self.way is not None and (self.way is Way.DEVICE) is not (self.bucket in local)

    def __str__(self) -> str:
        return str(self.key)


class Edge(NamedTuple):
    source: int
    target: int
    distance: int
    cause: Cause
    way: Way | None = None  # it is waited for where the target's bucket goes this way; None in all iterations


class GraphError(ValueError):
    """A graph that cannot run. The text names the cycle or the task at fault."""


@dataclass(frozen=True, slots=True)
class Graph:
    """Errors: GraphError from `check`."""

    tasks: tuple[Task, ...]  # tasks[i].id == i
    edges: tuple[Edge, ...]
    programs: Mapping[Lane, tuple[int, ...]]  # each lane's tasks of one iteration, in order
    # Lanes that begin whichever pass is ready, and the most microbatches that each has in flight. The others begin
    # their tasks as they stand in their programs.
    free: Mapping[Lane, int] = field(default_factory=dict)
    _inputs: dict[int, tuple[Edge, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        inputs: defaultdict[int, list[Edge]] = defaultdict(list)
        for edge in self.edges:
            inputs[edge.target].append(edge)
        object.__setattr__(self, "_inputs", {target: tuple(edges) for target, edges in inputs.items()})

    def by_key(self) -> dict[Key, Task]:
        return {task.key: task for task in self.tasks}

    def last_backwards(self) -> dict[Holder, Task]:
        """Those that complete the gradients of their stages."""
        placed = (self.tasks[task] for program in self.programs.values() for task in program)
        return {task.holder: task for task in placed if KINDS[task.kind].makes_gradient}

    def inputs(self, task: int) -> tuple[Edge, ...]:
        return self._inputs.get(task, ())

    def cross_lane_inputs(self, task: int) -> tuple[Edge, ...]:
        """The edges that a lane must wait for; those inside a lane hold by its order."""
        lane = self.tasks[task].lane
        return tuple(edge for edge in self.inputs(task) if self.tasks[edge.source].lane != lane)

    def going(self, local: Collection[int]) -> Graph:
        """With the edges alone that most iterations wait for while devices update these buckets themselves."""

        def counts(edge: Edge) -> bool:
            target = self.tasks[edge.target]
            of_this_way = edge.way is None or (edge.way is Way.DEVICE) is (target.bucket in local)
            return of_this_way and not target.passes(local) and not KINDS[target.kind].seldom

        kept = tuple(edge for edge in self.edges if counts(edge))
        return self if len(kept) == len(self.edges) else Graph(self.tasks, kept, self.programs, self.free)

    def lane_edges(self) -> list[Edge]:
        """Each lane's own order as edges, the wrap-around to the next iteration included; of a free one what is fixed
        of it: its forwards, its backwards, and that all else comes behind them."""
        edges = []
        for lane, program in self.programs.items():
            for row in self._rows(program) if lane in self.free else [program]:
                edges += [Edge(a, b, 0, Cause.DISPATCH) for a, b in pairwise(row)]
                edges.append(Edge(row[-1], row[0], 1, Cause.DISPATCH))
        return edges

    def _rows(self, program: Sequence[int]) -> list[list[int]]:
        rest = [task for task in program if not KINDS[self.tasks[task].kind].computes]
        rows = ([t for t in program if self.tasks[t].kind is kind] for kind in (Kind.FORWARD, Kind.BACKWARD))
        return [[*row, *rest] for row in rows]

    def check(self) -> None:
        """Raises GraphError if a task is in no lane, in two, or if a cycle of distance 0 would deadlock."""
        placed = [task for program in self.programs.values() for task in program]
        if sorted(placed) != list(range(len(self.tasks))):
            raise GraphError("every task must stand exactly once in the program of exactly one lane")
        sorter = graphlib.TopologicalSorter[int]({task.id: () for task in self.tasks})
        for edge in [*self.edges, *self.lane_edges()]:
            if edge.distance == 0:
                sorter.add(edge.target, edge.source)
        try:
            sorter.prepare()
        except graphlib.CycleError as error:
            raise GraphError(f"the plan deadlocks: {self.describe_cycle(error.args[1])}") from None

    def describe_cycle(self, tasks: Sequence[int]) -> str:
        return " → ".join(str(self.tasks[task]) for task in tasks)

    def describe(self, tasks: Iterable[int]) -> str:
        return " ".join(str(self.tasks[task]) for task in tasks)
