"""Schedules as printed timelines, and what holds for all of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.plan.kinds import Kind
from weft.scheduler.planning.schedules import SCHEDULES, in_flight

sizes = st.integers(1, 8).flatmap(lambda stages: st.tuples(st.integers(0, stages - 1), st.just(stages)))
schedules = st.sampled_from(sorted(SCHEDULES))


def timeline(schedule: str, num_stages: int, num_microbatches: int) -> list[str]:
    """Each stage as a line, a column an instant: forwards as digits, backwards as letters, waiting as dots."""
    orders = [list(SCHEDULES[schedule](stage, num_stages, num_microbatches)) for stage in range(num_stages)]
    done: dict[tuple[Kind, int, int], int] = {}
    lines = ["" for _ in orders]
    while any(orders):
        now = max(map(len, lines))
        for stage, order in enumerate(orders):
            if not order:
                continue
            kind, m = order[0]
            before = stage - 1 if kind is Kind.FORWARD else stage + 1
            ready = not 0 <= before < num_stages or done.get((kind, before, m), now) < now
            lines[stage] += ("0123456789"[m] if kind is Kind.FORWARD else "abcdefghij"[m]) if ready else "."
            if ready:
                done[kind, stage, m] = now
                order.pop(0)
        assert now < 100, "a deadlock"
    return lines


def test_gpipe_runs_all_forwards_and_then_all_backwards() -> None:
    assert timeline("gpipe", 2, 4) == ["0123..abcd", ".0123abcd"]
    assert timeline("gpipe", 3, 2) == ["01....ab", ".01..ab", "..01ab"]


def test_1f1b_warms_up_and_then_takes_turns() -> None:
    assert timeline("1f1b", 2, 4) == ["01.a2b3c.d", ".0a1b2c3d"]
    assert timeline("1f1b", 3, 4) == ["012..a3b.c.d", ".01.a2b3c.d", "..0a1b2c3d"]
    assert timeline("1f1b", 1, 3) == ["0a1b2c"]


def test_1f1b_with_fewer_microbatches_than_stages_begins_as_gpipe() -> None:
    assert timeline("1f1b", 4, 2) == ["01.....a.b", ".01...a.b", "..01.a.b", "...0a1b"]
    assert SCHEDULES["1f1b"](0, 4, 2) == SCHEDULES["gpipe"](0, 4, 2)


@given(schedules, sizes, st.integers(1, 12))
def test_each_microbatch_goes_forward_once_and_then_backward_once(
    schedule: str, place: tuple[int, int], num_microbatches: int
) -> None:
    order = SCHEDULES[schedule](*place, num_microbatches)
    everything = {(kind, m) for kind in (Kind.FORWARD, Kind.BACKWARD) for m in range(num_microbatches)}
    assert set(order) == everything
    assert len(order) == len(everything)
    for m in range(num_microbatches):
        assert order.index((Kind.FORWARD, m)) < order.index((Kind.BACKWARD, m))


@given(schedules, sizes, st.integers(1, 12))
def test_gradients_are_accumulated_in_the_order_of_the_plain_loop(
    schedule: str, place: tuple[int, int], num_microbatches: int
) -> None:
    order = SCHEDULES[schedule](*place, num_microbatches)
    for wanted in (Kind.FORWARD, Kind.BACKWARD):
        assert [m for kind, m in order if kind is wanted] == list(range(num_microbatches))


@given(sizes, st.integers(1, 12))
def test_the_slot_depth_is_what_the_schedule_keeps_in_flight(place: tuple[int, int], num_microbatches: int) -> None:
    stage, num_stages = place
    assert in_flight("gpipe", stage, num_stages, num_microbatches) == num_microbatches
    assert in_flight("1f1b", stage, num_stages, num_microbatches) == min(num_stages - stage, num_microbatches)


@given(schedules, st.integers(1, 5), st.integers(1, 9))
def test_every_schedule_comes_to_its_end(schedule: str, num_stages: int, num_microbatches: int) -> None:
    lines = timeline(schedule, num_stages, num_microbatches)
    assert all(len(line.replace(".", "")) == 2 * num_microbatches for line in lines)
    assert len(lines[0]) == 2 * (num_microbatches + num_stages - 1), "both have the bubble of a flush, no more"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_one_microbatch_on_one_stage_is_a_forward_and_a_backward(schedule: str) -> None:
    assert SCHEDULES[schedule](0, 1, 1) == ((Kind.FORWARD, 0), (Kind.BACKWARD, 0))
