"""The parts of what the core knows that compute: runs of a lane's endless program, and the workers of a job."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.scheduler.adapting.lane_state import work_between
from weft.scheduler.core.job import MOVES, Phase
from weft.spec.job_spec import JobSpec
from weft.spec.workers_needed import workers_needed


def test_positions_of_the_endless_program_come_by_iteration() -> None:
    program = (7, 8, 9)
    assert work_between(program, 0, 2) == ((0, (7, 8)),)
    assert work_between(program, 2, 3) == ((0, (9,)),)
    assert work_between(program, 0, 3) == ((0, (7, 8, 9)),)
    assert work_between(program, 3, 4) == ((1, (7,)),)
    assert work_between(program, 2, 8) == ((0, (9,)), (1, (7, 8, 9)), (2, (7, 8)))


@given(program=st.lists(st.integers(), min_size=1, max_size=6), first=st.integers(0, 40), count=st.integers(1, 40))
def test_a_run_holds_each_of_its_positions_once_and_in_order(program: list[int], first: int, count: int) -> None:
    work = work_between(tuple(program), first, first + count)
    told = [(iteration, task) for iteration, tasks in work for task in tasks]
    places = [divmod(position, len(program)) for position in range(first, first + count)]
    assert told == [(iteration, program[place]) for iteration, place in places]
    iterations = [iteration for iteration, _ in work]
    assert iterations == sorted(set(iterations))


@pytest.mark.parametrize("stages", [1, 3])
def test_a_job_holds_a_worker_for_each_stage_and_a_loader(spec_of: Callable[..., JobSpec], stages: int) -> None:
    assert workers_needed(spec_of(stages=stages).strategy) == {"cpu": stages, "loader": 1}


def test_every_phase_has_its_moves_and_only_the_end_has_none() -> None:
    assert MOVES.keys() == set(Phase)
    assert [phase for phase, moves in MOVES.items() if not moves] == [Phase.ENDED]
