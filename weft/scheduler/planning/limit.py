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
    while cycle := _better_cycle(outgoing, seconds, best.seconds, len(graph.tasks)):
        tasks = tuple(source for source, _ in cycle)
        ratio = sum(seconds[task] for task in tasks) / sum(distance for _, distance in cycle)
        if ratio <= best.seconds * (1 + _TOLERANCE):
            break
        best = Limit(ratio, tasks)
    return best


def _better_cycle(
    outgoing: dict[int, list[tuple[int, int]]], seconds: Sequence[float], guess: float, num_tasks: int
) -> list[tuple[int, int]]:
    """A cycle whose ratio beats the guess as (task, distance of the edge that leaves it), or [] if there is none."""
    slack = guess * _TOLERANCE
    longest = [0.0] * num_tasks
    parent: list[tuple[int, int] | None] = [None] * num_tasks
    relaxed = [0] * num_tasks
    queue, queued = deque(range(num_tasks)), [True] * num_tasks
    while queue:
        source = queue.popleft()
        queued[source] = False
        for target, distance in outgoing[source]:
            length = longest[source] + seconds[source] - guess * distance
            if length > longest[target] + slack:
                longest[target] = length
                parent[target] = (source, distance)
                relaxed[target] += 1
                if relaxed[target] % 8 == 0 and (cycle := _cycle_through(parent, target)):
                    return cycle
                if not queued[target]:
                    queue.append(target)
                    queued[target] = True
    return []


def _cycle_through(parent: Sequence[tuple[int, int] | None], start: int) -> list[tuple[int, int]]:
    """The cycle that following parents from `start` runs into, or [] if it ends at a root."""
    seen: set[int] = set()
    task = start
    while task not in seen:
        seen.add(task)
        link = parent[task]
        if link is None:
            return []
        task = link[0]
    cycle = []
    end = task
    while True:
        link = parent[task]
        assert link is not None
        cycle.append(link)
        task = link[0]
        if task == end:
            return cycle[::-1]
