"""Named schedules as grids, and what holds for all of them."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.plan.kinds import KINDS, Kind
from weft.plan.schedules.checking import check_schedule
from weft.plan.schedules.grid import grid_of, schedule_of
from weft.plan.schedules.named import SCHEDULES, SEVERAL_STAGES
from weft.plan.schedules.schedule import Schedule
from weft.spec.schedule_text import DYNAMIC, MEASURED, SCHEDULE_NAMES

schedules = st.sampled_from(sorted(SCHEDULES))
several = st.one_of(
    st.tuples(st.just("interleaved"), st.integers(1, 4), st.integers(1, 3)),
    st.tuples(st.just("zero-bubble-v"), st.integers(1, 4), st.just(2)),
)  # with the number of workers, and of stages in each
stages, microbatches = st.integers(1, 6), st.integers(1, 9)


def lines(name: str, num_stages: int, num_microbatches: int) -> list[str]:
    return [" ".join(line) for line in grid_of(SCHEDULES[name](num_stages, num_microbatches))]


def test_a_spec_may_name_every_schedule_and_no_other() -> None:
    assert set(SCHEDULE_NAMES) == {*SCHEDULES, *SEVERAL_STAGES, MEASURED, DYNAMIC}


def test_in_model_parallel_one_stage_computes_at_a_time() -> None:
    assert lines("model-parallel", 2, 2) == ["F0 . . B0 F1 . . B1", ". F0 B0 . . F1 B1"]


def test_gpipe_runs_all_forwards_and_then_all_backwards() -> None:
    assert lines("gpipe", 2, 4) == ["F0 F1 F2 F3 . . B0 B1 B2 B3", ". F0 F1 F2 F3 B0 B1 B2 B3"]
    assert lines("gpipe", 3, 2) == ["F0 F1 . . . . B0 B1", ". F0 F1 . . B0 B1", ". . F0 F1 B0 B1"]


def test_1f1b_warms_up_and_then_takes_turns() -> None:
    assert lines("1f1b", 2, 4) == ["F0 F1 . B0 F2 B1 F3 B2 . B3", ". F0 B0 F1 B1 F2 B2 F3 B3"]
    assert lines("1f1b", 1, 3) == ["F0 B0 F1 B1 F2 B2"]


def test_1f1b_with_fewer_microbatches_than_stages_begins_as_gpipe() -> None:
    assert lines("1f1b", 4, 2)[0] == "F0 F1 . . . . . B0 . B1"
    assert SCHEDULES["1f1b"](4, 2).programs[0] == SCHEDULES["gpipe"](4, 2).programs[0]


def test_last_stage_sends_back_at_once_and_computes_before_that_whatever_has_arrived() -> None:
    assert lines("last-stage", 3, 5) == [
        "F0 F1 F2 F3 F4 B0 . B1 . B2 . B3 . B4",
        ". F0 F1 F2 B0 F3 B1 F4 B2 . B3 . B4",
        ". . F0 B0 F1 B1 F2 B2 F3 B3 F4 B4",
    ]


@given(stages, st.integers(1, 12))
def test_what_is_in_flight_follows_from_the_programs(num_stages: int, num_microbatches: int) -> None:
    wanted = {
        "model-parallel": lambda after: 1,
        "gpipe": lambda after: num_microbatches,
        "1f1b": lambda after: after + 1,
        "last-stage": lambda after: 2 * after + 1,
        "zero-bubble": lambda after: num_stages,
    }
    for name, of_following in wanted.items():
        schedule = SCHEDULES[name](num_stages, num_microbatches)
        for stage in range(num_stages):
            assert schedule.in_flight(stage) == min(of_following(num_stages - stage - 1), num_microbatches)


@given(stages, st.integers(1, 12))
def test_run_again_a_microbatch_is_kept_until_the_second_part_of_its_backward(
    num_stages: int, num_microbatches: int
) -> None:
    """One was counted, though a backward in two parts keeps its graph in between: stage s has s that wait for their
    second part, beside the one that runs."""
    for name in ("gpipe", "1f1b", "zero-bubble"):
        schedule = SCHEDULES[name](num_stages, num_microbatches)
        for stage in range(num_stages):
            found = schedule.most_kept(schedule.passes(stage), [1] * num_stages, recomputes=True)
            splits = name == "zero-bubble" and stage > 0
            assert found == (min(stage + 1, num_microbatches) if splits else 1)


def with_several(name: str, num_workers: int, each: int, num_microbatches: int) -> Schedule:
    given = each if name == "interleaved" else None
    return schedule_of(name, num_workers * each, num_microbatches, given)


@given(several, microbatches)
def test_with_several_stages_in_each_worker_too(shape: tuple[str, int, int], num_microbatches: int) -> None:
    _, num_workers, each = shape
    schedule = with_several(*shape, num_microbatches)
    assert len(schedule.programs) == num_workers
    check_ends_in_order(schedule, num_workers * each, num_microbatches)


@given(schedules, stages, microbatches)
def test_each_comes_to_its_end_in_the_plain_loops_order(name: str, num_stages: int, num_microbatches: int) -> None:
    check_ends_in_order(SCHEDULES[name](num_stages, num_microbatches), num_stages, num_microbatches)


def check_ends_in_order(schedule: Schedule, num_stages: int, num_microbatches: int) -> None:
    check_schedule(schedule)
    assert (schedule.num_stages, schedule.num_microbatches) == (num_stages, num_microbatches)
    for stage in range(num_stages):
        for kinds in ({Kind.FORWARD}, {Kind.BACKWARD, Kind.INPUT}, {Kind.BACKWARD, Kind.WEIGHT}):
            order = [each.microbatch for each in schedule.passes(stage) if each.kind in kinds]
            assert order == list(range(num_microbatches))


@given(schedules, stages, microbatches)
def test_no_writer_waits_for_a_slot_longer_than_the_programs_make_it_wait(
    name: str, num_stages: int, num_microbatches: int
) -> None:
    """By time: where all passes take as long, a slot is free when its next writer begins; with one less it is not."""
    schedule = SCHEDULES[name](num_stages, num_microbatches)
    starts = {each: start for start, _, each in schedule.timeline()}
    for stage in range(num_stages - 1):
        depth = schedule.activation_slots(stage, [stage + 1])
        ends = [starts[schedule.ends[stage + 1, m]] + 1 for m in range(num_microbatches)]
        writes = [starts[schedule.passes(stage)[0]._replace(microbatch=m)] for m in range(num_microbatches)]
        for m in range(depth, num_microbatches):
            assert ends[m - depth] <= writes[m]
        if name != "zero-bubble":
            assert depth == schedule.in_flight(stage)
            assert schedule.gradient_slots(stage + 1, stage) == schedule.in_flight(stage)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "last-stage"])
@pytest.mark.parametrize(("forward", "backward"), [(1, 1), (1, 2), (3, 4)])
def test_the_bubble_of_a_flush_is_the_formulas(name: str, forward: int, backward: int) -> None:
    p, m = 4, 8
    seconds = {Kind.FORWARD: forward, Kind.BACKWARD: backward}
    ends = [start + seconds[each.kind] for start, _, each in SCHEDULES[name](p, m).timeline(seconds)]
    assert max(ends) == m * (forward + backward) + (p - 1) * (forward + backward)


@pytest.mark.parametrize(("forward", "inputs", "weights"), [(1, 1, 1), (2, 2, 2), (3, 4, 2)])
@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_the_bubble_of_zero_bubble_is_the_formulas(p: int, forward: int, inputs: int, weights: int) -> None:
    m, backward = 2 * p, inputs + weights
    seconds = {Kind.FORWARD: forward, Kind.BACKWARD: backward, Kind.INPUT: inputs, Kind.WEIGHT: weights}
    ends = [start + seconds[each.kind] for start, _, each in SCHEDULES["zero-bubble"](p, m).timeline(seconds)]
    assert max(ends) == m * (forward + backward) + (p - 1) * (forward + backward - 2 * weights)


def test_zero_bubble_has_the_weights_part_run_where_the_stage_would_wait() -> None:
    assert lines("zero-bubble", 3, 4)[1:] == [
        ". F0 F1 . I0 F2 I1 W0 F3 I2 W1 I3 W2 W3",
        ". . F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3",
    ]


def test_interleaved_has_a_group_go_through_one_stage_of_a_worker_before_the_next() -> None:
    assert [" ".join(line) for line in grid_of(with_several("interleaved", 2, 2, 2))] == [
        "F0 F1 2F0 2F1 . 2B0 . 2B1 B0 B1",
        ". F0 F1 3F0 3B0 3F1 3B1 B0 B1",
    ]


def test_zero_bubble_v_comes_back_to_the_worker_with_which_it_began() -> None:
    assert [" ".join(line) for line in grid_of(with_several("zero-bubble-v", 2, 2, 3))] == [
        "F0 F1 F2 3F0 3I0 3W0 3F1 3I1 3W1 B0 . 3F2 3I2 3W2 B1 . B2",
        ". F0 2F0 F1 2F1 2I0 2W0 F2 I0 W0 2F2 2I1 2W1 I1 2I2 I2 W1 2W2 W2",
    ]


@pytest.mark.parametrize(("forward", "backward"), [(1, 1), (1, 2), (3, 4)])
@pytest.mark.parametrize(("p", "v"), [(1, 2), (2, 2), (4, 2), (4, 3), (8, 2)])
def test_the_bubble_of_interleaved_is_the_formulas(p: int, v: int, forward: int, backward: int) -> None:
    """That of 1F1B by v: forward and backward are of one stage, the v-th part of what a worker has."""
    m = 2 * p
    seconds = {Kind.FORWARD: forward, Kind.BACKWARD: backward}
    ends = [start + seconds[each.kind] for start, _, each in with_several("interleaved", p, v, m).timeline(seconds)]
    assert max(ends) == m * v * (forward + backward) + (p - 1) * (forward + backward)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("more", [0, 1, 5])
def test_in_zero_bubble_v_no_worker_waits_once_it_has_begun(p: int, more: int) -> None:
    schedule = with_several("zero-bubble-v", p, 2, 2 * p - 1 + more)
    whole = {Kind.BACKWARD: 2}
    spans: dict[int, list[tuple[int, int]]] = {}
    for start, worker, each in schedule.timeline(whole):
        spans.setdefault(worker, []).append((start, start + whole.get(each.kind, 1)))
    for own in spans.values():
        assert all(start == end for (_, end), (start, _) in pairwise(own))


@pytest.mark.parametrize("name", SCHEDULES)
def test_one_microbatch_on_one_stage_goes_forward_and_back(name: str) -> None:
    (program,) = SCHEDULES[name](1, 1).programs
    assert "".join(KINDS[each.kind].letter for each in program) == "FB"
