"""Which pass a lane may begin next, of those that it was sent."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.plan.graph import Lane, Task
from weft.plan.kinds import Kind
from weft.plan.schedules.dynamic import PassOrder, of_equal_passes

Sent = list[tuple[int, int]]


def lane_of(text: str) -> tuple[list[Task], Sent]:
    """F0 B0 U: two passes and an update, as its program and as an iteration that was sent."""
    kinds = {"F": Kind.FORWARD, "B": Kind.BACKWARD, "U": Kind.UPDATE}
    program = [
        Task(id=number, kind=kinds[name[0]], lane=Lane(0, "compute"), microbatch=int(name[1:] or 0))
        for number, name in enumerate(text.split())
    ]
    return program, [(0, task.id) for task in program]


@pytest.fixture
def named() -> Callable[[str, int, str], list[str]]:
    """What may be begun, after so many of the names given have been."""

    def names(text: str, limit: int, begun: str) -> list[str]:
        program, sent = lane_of(text)
        order, ids = PassOrder(program, limit), dict(zip(text.split(), sent, strict=True))
        for name in begun.split():
            order.begin(ids[name][1])
            sent.remove(ids[name])
        return [text.split()[sent[place][1]] for place in order.places(sent)]

    return names


@pytest.mark.parametrize(
    ("limit", "begun", "may"),
    [
        (3, "", ["F0"]),
        (3, "F0", ["F1", "B0"]),
        (1, "F0", ["B0"]),
        (3, "F0 F1 F2", ["B0"]),
        (3, "F0 B0", ["F1"]),
        (3, "F0 F1 B0", ["F2", "B1"]),
        (3, "F0 F1 F2 B0 B1", ["B2"]),
        (3, "F0 F1 F2 B0 B1 B2", ["U"]),
    ],
)
def test_a_forward_goes_before_a_backward_while_it_keeps_to_the_limit(
    named: Callable[[str, int, str], list[str]], limit: int, begun: str, may: list[str]
) -> None:
    assert named("F0 F1 B0 F2 B1 B2 U", limit, begun) == may


def test_the_next_iteration_begins_behind_all_of_this_one() -> None:
    program, sent = lane_of("F0 B0 U")
    order = PassOrder(program, 3)
    order.begin(0)
    order.begin(1)
    assert order.places([sent[2], *((1, task) for _, task in sent)]) == [0]
    order.begin(2)
    assert order.places([(1, task) for _, task in sent]) == [0]


@given(
    stages=st.integers(1, 4),
    count=st.integers(1, 5),
    window=st.integers(1, 12),
    rng=st.randoms(use_true_random=False),
)
def test_however_passes_arrive_no_lanes_come_to_wait_for_one_another(
    stages: int, count: int, window: int, rng: random.Random
) -> None:
    """Lanes are sent `window` tasks ahead, and each begins any that is ready of those that it may begin."""
    base = of_equal_passes(stages, count)
    lane = Lane(0, "compute")
    programs = [
        [Task(id=n, kind=each.kind, lane=lane, microbatch=each.microbatch) for n, each in enumerate(program)]
        for program in base.programs
    ]
    orders = [PassOrder(program, base.in_flight(stage)) for stage, program in enumerate(programs)]
    left = [[(0, task.id) for task in program] for program in programs]
    done = set[object]()

    def able(stage: int) -> list[int]:
        sent = left[stage][:window]
        places = orders[stage].places(sent) if sent else []
        passes = ((place, base.programs[stage][sent[place][1]]) for place in places)
        return [place for place, each in passes if done.issuperset(base.needs(each))]

    for _ in itertools.chain(*programs):
        choices = [(stage, place) for stage in range(stages) for place in able(stage)]
        assert choices, "a deadlock"
        stage, place = rng.choice(choices)
        _, task = left[stage].pop(place)
        orders[stage].begin(task)
        done.add(base.programs[stage][task])
