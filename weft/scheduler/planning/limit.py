"""The speed limit of a timed event graph: the largest ratio of cost to distance over its cycles.

In steady state no execution can start iterations faster than one every `max over cycles of Σ cost ÷ Σ distance`, and an
execution with no overhead reaches it (Baccelli, Cohen, Olsder and Quadrat, Synchronization and Linearity, 1992,
theorem 2.59). Found by improvement: take a cycle's ratio as a guess, look for a cycle that beats it (a positive cycle
under the weights cost - guess × distance, by Bellman and Ford), take its ratio, and stop where none is left.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from weft.plan.graph import Graph

_TOLERANCE = 1e-12  # relative to the guess: below it an improvement is rounding


@dataclass(frozen=True, slots=True)
class Limit:
    seconds: float  # the shortest iteration
    cycle: tuple[int, ...]  # the tasks that set it, in order


def speed_limit(graph: Graph, seconds: Sequence[float]) -> Limit:
    """The limit of a checked graph; seconds[i] is the cost of task i. Every task is in a cycle, its lane's at least."""
    best = Limit(0.0, ())
    for program in graph.programs.values():
        total = sum(seconds[task] for task in program)
        if total >= best.seconds:
            best = Limit(total, tuple(program))
    outgoing: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for edge in [*graph.edges, *graph.lane_edges()]:
        outgoing[edge.source].append((edge.target, edge.distance))
    longest = [0.0] * len(graph.tasks)
    while cycle := _better_cycle(outgoing, seconds, best.seconds, longest):
        tasks = tuple(source for source, _ in cycle)
        ratio = sum(seconds[task] for task in tasks) / sum(distance for _, distance in cycle)
        if ratio <= best.seconds * (1 + _TOLERANCE):
            break
        best = Limit(ratio, tasks)
    return best


def _better_cycle(
    outgoing: dict[int, list[tuple[int, int]]], seconds: Sequence[float], guess: float, longest: list[float]
) -> list[tuple[int, int]]:
    """A cycle whose ratio beats the guess as (task, distance of the edge that leaves it), or [] if there is none.

    longest: of paths to each task, from any numbers on, and left for the next guess, of which few are then exceeded.
    """
    slack, num_tasks = guess * _TOLERANCE, len(longest)
    parent: list[tuple[int, int] | None] = [None] * num_tasks
    num_relaxed = 0
    queue, queued = deque(range(num_tasks)), [True] * num_tasks
    while queue:
        source = queue.popleft()
        queued[source] = False
        for target, distance in outgoing[source]:
            length = longest[source] + seconds[source] - guess * distance
            if length > longest[target] + slack:
                longest[target] = length
                parent[target] = (source, distance)
                num_relaxed += 1
                if num_relaxed % num_tasks == 0 and (cycle := _cycle_of(parent)):
                    return cycle
                if not queued[target]:
                    queue.append(target)
                    queued[target] = True
    return []


def _cycle_of(parent: Sequence[tuple[int, int] | None]) -> list[tuple[int, int]]:
    """A cycle of parents, or [] where there is none yet. It walks each task once."""
    walk_of = [-1] * len(parent)
    for start in range(len(parent)):
        task = start
        while walk_of[task] < 0:
            walk_of[task] = start
            link = parent[task]
            if link is None:
                break
            task = link[0]
        else:
            if walk_of[task] == start:
                return _around(parent, task)
    return []


def _around(parent: Sequence[tuple[int, int] | None], end: int) -> list[tuple[int, int]]:
    cycle: list[tuple[int, int]] = []
    task = end
    while not cycle or task != end:
        link = parent[task]
        assert link is not None
        cycle.append(link)
        task = link[0]
    return cycle[::-1]
