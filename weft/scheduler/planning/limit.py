"""The speed limit of a timed event graph: the largest ratio of cost to distance over its cycles.

In steady state no execution can start iterations faster than one every `max over cycles of Σ cost ÷ Σ distance`, and an
execution with no overhead reaches it (Baccelli, Cohen, Olsder and Quadrat, Synchronization and Linearity, 1992,
theorem 2.59). Found by improvement: take a cycle's ratio as a guess, look for a cycle that beats it (a positive cycle
under the weights cost - guess × distance, by Bellman and Ford), take its ratio, and stop where none is left.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from weft.plan.graph import Graph

_TOLERANCE = 1e-12  # relative to the guess: below it an improvement is rounding


@dataclass(frozen=True, slots=True)
class Limit:
    seconds: float  # the shortest iteration
    cycle: tuple[int, ...]  # the tasks that set it, in order


Milestones = Mapping[int, Mapping[int, float]]  # task -> milestone -> part of the task after which it is posted


class _Step(NamedTuple):
    """From a task's start to that of one which waits for it."""

    task: int  # the other one
    distance: int
    seconds: float


def speed_limit(graph: Graph, seconds: Sequence[float], milestones: Milestones | None = None) -> Limit:
    """The limit of a checked graph; seconds[i] is the cost of task i. Every task is in a cycle, its lane's at least.

    milestones: those that are posted from inside another task; without them each comes in its lane's order.
    """
    best = Limit(0.0, ())
    for program in graph.programs.values():
        total = sum(seconds[task] for task in program)
        if total >= best.seconds:
            best = Limit(total, tuple(program))
    posted = {each: (task, part) for task, inside in (milestones or {}).items() for each, part in inside.items()}
    outgoing: defaultdict[int, list[_Step]] = defaultdict(list)
    for edge in graph.lane_edges():
        outgoing[edge.source].append(_Step(edge.target, edge.distance, seconds[edge.source]))
    for edge in graph.edges:
        source, part = posted.get(edge.source, (edge.source, 1.0))
        outgoing[source].append(_Step(edge.target, edge.distance, part * seconds[source]))
    longest = [0.0] * len(graph.tasks)
    while cycle := _better_cycle(outgoing, best.seconds, longest):
        tasks = tuple(step.task for step in cycle)
        ratio = sum(step.seconds for step in cycle) / sum(step.distance for step in cycle)
        if ratio <= best.seconds * (1 + _TOLERANCE):
            break
        best = Limit(ratio, tasks)
    return best


def _better_cycle(outgoing: defaultdict[int, list[_Step]], guess: float, longest: list[float]) -> list[_Step]:
    """A cycle whose ratio beats the guess as steps with the task that each leaves, or [] if there is none.

    longest: of paths to each task, from any numbers on, and left for the next guess, of which few are then exceeded.
    """
    slack, num_tasks = guess * _TOLERANCE, len(longest)
    parent: list[_Step | None] = [None] * num_tasks
    num_relaxed = 0
    queue, queued = deque(range(num_tasks)), [True] * num_tasks
    while queue:
        source = queue.popleft()
        queued[source] = False
        for target, distance, seconds in outgoing[source]:
            length = longest[source] + seconds - guess * distance
            if length > longest[target] + slack:
                longest[target] = length
                parent[target] = _Step(source, distance, seconds)
                num_relaxed += 1
                if num_relaxed % num_tasks == 0 and (cycle := _cycle_of(parent)):
                    return cycle
                if not queued[target]:
                    queue.append(target)
                    queued[target] = True
    return []


def _cycle_of(parent: Sequence[_Step | None]) -> list[_Step]:
    """A cycle of parents, or [] where there is none yet. It walks each task once."""
    walk_of = [-1] * len(parent)
    for start in range(len(parent)):
        task = start
        while walk_of[task] < 0:
            walk_of[task] = start
            link = parent[task]
            if link is None:
                break
            task = link.task
        else:
            if walk_of[task] == start:
                return _around(parent, task)
    return []


def _around(parent: Sequence[_Step | None], end: int) -> list[_Step]:
    cycle: list[_Step] = []
    task = end
    while not cycle or task != end:
        link = parent[task]
        assert link is not None
        cycle.append(link)
        task = link.task
    return cycle[::-1]
