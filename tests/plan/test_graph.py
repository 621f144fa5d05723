"""The iteration graph as a value: what it says about itself, and the graphs that it refuses."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from weft.plan.graph import Edge, Graph, GraphError, Lane, Task, backward, forward, grad, load, sync, update, validate
from weft.plan.kinds import Cause, Kind
from weft.plan.plan import Plan

A, B = Lane(0, "compute"), Lane(1, "compute")


def graph(edges: list[tuple[int, int, int]], programs: dict[Lane, tuple[int, ...]]) -> Graph:
    """Four forwards, two on each of two stages; edges as (source, target, distance)."""
    tasks = tuple(
        Task(id=number, kind=Kind.FORWARD, stage=number // 2, microbatch=number % 2, lane=(A, B)[number // 2])
        for number in range(4)
    )
    return Graph(tasks, tuple(Edge(*edge, Cause.ACTIVATION) for edge in edges), programs)


PROGRAMS = {A: (0, 1), B: (2, 3)}


def test_a_lane_waits_only_for_what_other_lanes_do() -> None:
    made = graph([(0, 2, 0), (1, 3, 0), (2, 3, 0)], PROGRAMS)
    made.check()
    assert [edge.source for edge in made.inputs(3)] == [1, 2]
    assert [edge.source for edge in made.cross_lane_inputs(3)] == [1]
    assert made.inputs(0) == ()


def test_the_order_of_a_lane_is_edges_that_wrap_around_to_the_next_iteration() -> None:
    edges = graph([], PROGRAMS).lane_edges()
    assert [(edge.source, edge.target, edge.distance) for edge in edges] == [(0, 1, 0), (1, 0, 1), (2, 3, 0), (3, 2, 1)]


def test_a_cycle_within_one_iteration_is_refused_by_name() -> None:
    with pytest.raises(GraphError, match="the plan deadlocks: ") as caught:
        graph([(3, 0, 0), (0, 2, 0)], PROGRAMS).check()
    for name in ("FORWARD(0,0)", "FORWARD(1,0)", "FORWARD(1,1)"):
        assert name in str(caught.value)
    assert "FORWARD(0,1)" not in str(caught.value), "it stands in no cycle"


def test_a_cycle_that_goes_back_an_iteration_can_run() -> None:
    graph([(3, 0, 1), (0, 2, 0)], PROGRAMS).check()


def test_the_order_of_a_lane_can_close_a_cycle() -> None:
    with pytest.raises(GraphError, match="the plan deadlocks"):
        graph([(1, 2, 0), (3, 0, 0)], PROGRAMS).check()


@pytest.mark.parametrize(
    "programs", [{A: (0, 1), B: (2,)}, {A: (0, 1), B: (2, 3, 1)}, {A: (0, 0), B: (2, 3)}], ids=["none", "two", "twice"]
)
def test_a_task_in_no_lane_or_in_two_is_refused(programs: dict[Lane, tuple[int, ...]]) -> None:
    with pytest.raises(GraphError, match="exactly once in the program of exactly one lane"):
        graph([], programs).check()


def test_tasks_and_lanes_are_written_as_people_write_them(plan_of: Callable[..., Plan]) -> None:
    made = plan_of(stages=1, microbatches=2).graph
    assert made.describe(made.programs[A]) == (
        "FORWARD(0,0) BACKWARD(0,0) FORWARD(0,1) BACKWARD(0,1) UPDATE(0) SNAPSHOT(0)"
    )
    assert [str(lane) for lane in made.programs] == ["1/load", "0/compute"]


def test_a_pipeline_has_the_edges_of_the_design(plan_of: Callable[..., Plan]) -> None:
    made = plan_of(stages=2, microbatches=2, schedule="gpipe").graph
    name = [str(task) for task in made.tasks]
    edges = {(name[edge.source], name[edge.target], edge.distance, str(edge.cause)) for edge in made.edges}
    for m in ("0", "1"):
        assert edges >= {
            (f"LOAD(0,{m})", f"FORWARD(0,{m})", 0, "data"),
            (f"LOAD(0,{m})", f"FORWARD(1,{m})", 0, "data"),
            (f"FORWARD(0,{m})", f"FORWARD(1,{m})", 0, "activation"),
            (f"FORWARD(1,{m})", f"BACKWARD(1,{m})", 0, "activation"),
            (f"BACKWARD(1,{m})", f"BACKWARD(0,{m})", 0, "gradient"),
            (f"BACKWARD(0,{m})", "UPDATE(0)", 0, "gradient"),
            ("UPDATE(0)", f"FORWARD(0,{m})", 1, "update"),
        }
    assert {cause for *_, cause in edges} <= {"data", "activation", "gradient", "update", "slot"}


def test_a_key_is_written_as_in_the_theory_and_names_one_task(plan_of: Callable[..., Plan]) -> None:
    made = plan_of(replicas=2, stages=2, microbatches=2, clip_norm=1.0).graph
    assert [str(key) for key in (load(1, 0), forward(0, 1, 0), backward(1, 0, 1), grad(1, 1, 0))] == [
        "LOAD(r1,0,0)",
        "FORWARD(1,0)",
        "BACKWARD(r1,0,1)",
        "GRAD(r1,1,b0)",
    ]
    assert [str(key) for key in (sync(1, 0), update(0, 1), validate(1))] == [
        "SYNC(o1,b0)",
        "UPDATE(o0,b1)",
        "VALIDATE(o1)",
    ]
    assert [made.by_key()[task.key] for task in made.tasks] == list(made.tasks)
    assert {load(1, 0), forward(0, 1, 0), backward(1, 0, 1), grad(1, 1, 0), sync(0, 0)} <= made.by_key().keys()
