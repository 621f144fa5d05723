"""The speed limit against two other ways to find it: every cycle one by one, and running the graph."""

from __future__ import annotations

from itertools import pairwise

import networkx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.plan.graph import Edge, Graph, Lane, Task
from weft.plan.kinds import Cause, Kind
from weft.scheduler.planning.limit import speed_limit

Timed = tuple[Graph, list[float]]


def graph_of(lanes: list[int], edges: list[tuple[int, int, int]]) -> Graph:
    """Task i on lane lanes[i], each lane in order of ids."""
    places = [Lane(number, "compute") for number in lanes]
    tasks = tuple(
        Task(id=number, kind=Kind.FORWARD, stage=lane.worker, microbatch=number, lane=lane)
        for number, lane in enumerate(places)
    )
    programs = {lane: tuple(task.id for task in tasks if task.lane == lane) for lane in places}
    return Graph(tasks, tuple(Edge(*edge, Cause.ACTIVATION) for edge in edges), programs)


@st.composite
def timed_graphs(draw: st.DrawFn, most_tasks: int = 7, most_distance: int = 3) -> Timed:
    """Edges within an iteration go from lower to higher ids, so that none deadlocks."""
    count = draw(st.integers(1, most_tasks))
    lanes = draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
    task = st.integers(0, count - 1)
    edges = draw(st.lists(st.tuples(task, task, st.integers(0, most_distance)), max_size=8))
    graph = graph_of(lanes, [(a, b, d if a < b else max(1, d)) for a, b, d in edges])
    graph.check()
    return graph, draw(st.lists(st.integers(0, 20).map(float), min_size=count, max_size=count))


def all_edges(graph: Graph) -> dict[tuple[int, int], int]:
    """The least distance of each pair: of parallel edges the one that binds most."""
    edges: dict[tuple[int, int], int] = {}
    for edge in [*graph.edges, *graph.lane_edges()]:
        key = edge.source, edge.target
        edges[key] = min(edge.distance, edges.get(key, edge.distance))
    return edges


def limit_by_enumeration(graph: Graph, seconds: list[float]) -> float:
    edges = all_edges(graph)
    cycles = networkx.simple_cycles(networkx.DiGraph(list(edges)))
    return max(
        sum(seconds[task] for task in cycle) / sum(edges[pair] for pair in pairwise([*cycle, cycle[0]]))
        for cycle in cycles
    )


def ends_as_soon_as_possible(graph: Graph, seconds: list[float], iterations: int) -> list[float]:
    """When each iteration's last task ends if every task starts once its inputs are there."""
    edges = all_edges(graph)
    ends: list[list[float]] = []
    for iteration in range(iterations):
        row = [0.0] * len(seconds)
        for task, cost in enumerate(seconds):  # ids are in a topological order
            inputs = [(s, iteration - d) for (s, t), d in edges.items() if t == task and d <= iteration]
            start = max((row[s] if i == iteration else ends[i][s] for s, i in inputs), default=0.0)
            row[task] = start + cost
        ends.append(row)
    return [max(row) for row in ends]


@settings(max_examples=150)
@given(timed_graphs())
def test_the_limit_is_the_worst_of_all_cycles(timed: Timed) -> None:
    graph, seconds = timed
    assert speed_limit(graph, seconds).seconds == pytest.approx(limit_by_enumeration(graph, seconds), rel=1e-9)


@given(timed_graphs())
def test_the_tasks_that_set_the_limit_are_a_cycle_with_that_ratio(timed: Timed) -> None:
    graph, seconds = timed
    limit = speed_limit(graph, seconds)
    edges = all_edges(graph)
    distance = sum(edges[pair] for pair in pairwise([*limit.cycle, limit.cycle[0]]))
    assert sum(seconds[task] for task in limit.cycle) / distance == pytest.approx(limit.seconds, rel=1e-9)


@settings(max_examples=30)
@given(timed_graphs(most_tasks=5, most_distance=1))
def test_the_limit_is_what_running_the_graph_settles_to(timed: Timed) -> None:
    """A cycle has at most 5 edges of distance 1, so the steady state repeats every 60 iterations at the latest."""
    graph, seconds = timed
    ends = ends_as_soon_as_possible(graph, seconds, 361)
    assert (ends[360] - ends[300]) / 60 == pytest.approx(speed_limit(graph, seconds).seconds, rel=1e-9)


def test_a_lane_alone_is_limited_by_its_own_work() -> None:
    limit = speed_limit(graph_of([0, 0, 1], []), [1.0, 2.0, 2.5])
    assert (limit.seconds, limit.cycle) == (3.0, (0, 1))


def test_a_cycle_through_two_lanes_can_be_worse_than_either() -> None:
    """0 → 1 on the other lane → 0 of the next iteration: the lanes take turns."""
    limit = speed_limit(graph_of([0, 1], [(0, 1, 0), (1, 0, 1)]), [2.0, 3.0])
    assert limit.seconds == 5.0
    assert set(limit.cycle) == {0, 1}


def test_an_edge_that_reaches_further_back_binds_less() -> None:
    assert speed_limit(graph_of([0, 1], [(0, 1, 0), (1, 0, 2)]), [2.0, 2.0]).seconds == 2.0


def test_tasks_that_cost_nothing_have_no_limit() -> None:
    assert speed_limit(graph_of([0, 1], [(0, 1, 0), (1, 0, 1)]), [0.0, 0.0]).seconds == 0.0
