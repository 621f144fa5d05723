"""A replay: the runs of one iteration from one snapshot, by other workers each time, and where they differ. Pure.

    snapshot ── iteration ── run 1: cpu-0, cpu-1 ─┐
        └────── iteration ── run 2: cpu-1, cpu-0 ─┴ compared, task by task: the first that differs is the place

A task that differs though nothing before it does was computed wrong in one of the two runs. Which one, a third run
says: the iteration stands once two runs agree in which no stage had the same worker. A worker that is wrong each time
agrees with itself alone, so of two workers nobody can say which.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from weft.plan.graph import Graph, Task
from weft.plan.kinds import Cause, Kind

MAX_RUNS: Final = 4  # of two workers in turn each has confirmed itself by then, or contradicted

_DOING: Final = {
    Kind.LOAD: "load",
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT: "the first part of backward",
    Kind.GRAD: "the gradient",
    Kind.SNAPSHOT: "update",
}


class Made(NamedTuple):
    """What a digest is of."""

    task: int
    replica: int | None  # whose gradient a SYNC has found; None: what the task itself has made


@dataclass(frozen=True, slots=True)
class ReplayRun:
    workers: tuple[str, ...]  # by position in the plan
    digests: Mapping[Made, bytes]


@dataclass(slots=True)
class Replay:
    """Of a job that runs."""

    after: int  # the iteration whose snapshot all runs begin with
    iteration: int  # that is compared, the next that learns
    computing: tuple[int, ...]  # the positions that other workers take in each run
    runs: list[ReplayRun] = field(default_factory=list)  # that are over
    digests: dict[Made, bytes] = field(default_factory=dict)  # of the one that is under way
    positions: tuple[str, ...] = ()  # who is to have which place in the next one
    began: float = 0.0  # when the first run was over

    def end_run(self, workers: tuple[str, ...]) -> None:
        self.runs.append(ReplayRun(workers, self.digests))
        self.digests = {}

    @property
    def is_same(self) -> bool:
        """All runs so far had the same bits."""
        return all(run.digests == self.runs[0].digests for run in self.runs)

    @property
    def stands(self) -> bool:
        """What the last run has come to is right, as far as others can tell."""
        *others, last = self.runs
        if not others or self.is_same:
            return bool(others)
        return any(run.digests == last.digests and self._are_others(run, last) for run in others)

    def _are_others(self, one: ReplayRun, other: ReplayRun) -> bool:
        """No place had the same worker, or there is one worker alone."""
        known = {run.workers[place] for run in self.runs for place in self.computing}
        return len(known) == 1 or all(one.workers[place] != other.workers[place] for place in self.computing)

    def wrong(self, graph: Graph) -> list[tuple[str, Task]]:
        """Of one that stands: who has computed what otherwise than the runs that agree."""
        last = self.runs[-1]
        odd = [run for run in self.runs if run.digests != last.digests]
        found = [(run.workers[t.lane.worker], t) for run in odd for t in first_differing(graph, run, last)]
        return list(dict.fromkeys(found))

    def differences(self, graph: Graph) -> Iterator[str]:
        """Of each run and the one before it, in words."""
        for one, other in zip(self.runs, self.runs[1:], strict=False):
            for task in first_differing(graph, one, other):
                place = task.lane.worker
                yield f"{told(task)} on {one.workers[place]} and then on {other.workers[place]}"


def first_differing(graph: Graph, one: ReplayRun, other: ReplayRun) -> list[Task]:
    """The tasks of which two runs differ though what they had was the same: those behind no other such task, by what
    they read or in their lane."""
    keys = one.digests.keys() | other.digests.keys()
    found = {_maker(graph, made) for made in keys if one.digests.get(made) != other.digests.get(made)}
    sources: dict[int, list[int]] = {task.id: [] for task in graph.tasks}
    for edge in [*graph.edges, *graph.lane_edges()]:
        if edge.distance == 0 and edge.cause is not Cause.SLOT:
            sources[edge.target].append(edge.source)
    return [graph.tasks[task] for task in sorted(found) if not _before(task, sources) & found]


def _before(task: int, sources: Mapping[int, Sequence[int]]) -> set[int]:
    before: set[int] = set()
    waiting = [*sources[task]]
    while waiting:
        source = waiting.pop()
        if source not in before:
            before.add(source)
            waiting += sources[source]
    return before


def _maker(graph: Graph, made: Made) -> int:
    """The task whose worker has made it: of a gradient that a SYNC has found, the GRAD."""
    task = graph.tasks[made.task]
    if made.replica is None:
        return task.id
    sources = (graph.tasks[edge.source] for edge in graph.inputs(task.id))
    found = (each.id for each in sources if each.kind is Kind.GRAD and each.replica == made.replica)
    return next(found, task.id)


def told(task: Task) -> str:
    """What it does, for people."""
    about = [_DOING.get(task.kind, str(task.kind))]
    named = (("stage", task.stage if task.kind is not Kind.LOAD else None), ("replica", task.replica or None))
    numbers = (*named, ("microbatch", task.microbatch), ("bucket", task.bucket), ("owner", task.owner))
    return ", ".join(about + [f"{name} {number}" for name, number in numbers if number is not None])
