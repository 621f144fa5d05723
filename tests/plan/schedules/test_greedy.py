"""Orders that are made of what passes take."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.plan.kinds import Kind
from weft.plan.schedules.checking import check_schedule
from weft.plan.schedules.greedy import OrderRule, Seconds, fastest, greedy, period
from weft.plan.schedules.grid import grid_of, schedule_of
from weft.plan.schedules.named import SCHEDULES
from weft.plan.schedules.schedule import Pass
from weft.spec.schedule_text import MEASURED

shapes = st.tuples(st.integers(1, 5), st.integers(1, 7))


def by_stage(*forward_and_backward: tuple[float, float]) -> Seconds:
    """Each part of a backward takes half of it."""
    parts = {Kind.BACKWARD: 1.0, Kind.INPUT: 0.5, Kind.WEIGHT: 0.5}
    return lambda each: (
        forward_and_backward[each.stage][0]
        if each.kind is Kind.FORWARD
        else parts[each.kind] * forward_and_backward[each.stage][1]
    )


@settings(max_examples=40)
@given(shapes, st.data())
def test_whatever_passes_take_an_order_has_no_deadlock_and_keeps_no_more_than_it_may(
    shape: tuple[int, int], data: st.DataObject
) -> None:
    """Passes of no time among them, as a stage without parameters that are trained may have."""
    num_stages, num_microbatches = shape
    times = data.draw(st.dictionaries(st.integers(), st.sampled_from([0.0, 0.5, 1.0, 7.0]), min_size=8, max_size=8))
    rule = OrderRule(
        limits=tuple(data.draw(st.lists(st.integers(1, 8), min_size=num_stages, max_size=num_stages))),
        whole=data.draw(st.none() | st.integers(0, num_microbatches)),
        patience=data.draw(st.sampled_from([0.0, 0.5, 2.0])),
    )
    made = greedy(num_stages, num_microbatches, lambda each: list(times.values())[hash(each) % 8], rule)
    check_schedule(made)
    assert (made.num_stages, made.num_microbatches) == shape
    assert all(made.in_flight(stage) <= limit for stage, limit in enumerate(rule.limits))


def test_a_second_part_stands_where_a_stage_would_wait() -> None:
    made = schedule_of(MEASURED, 2, 3)
    assert [" ".join(line) for line in grid_of(made)] == [
        "F0 F1 F2 B0 . B1 . B2",
        ". F0 I0 F1 I1 F2 I2 W0 W1 W2",
    ]
    alike = by_stage((1, 2), (1, 2))
    assert period(SCHEDULES["1f1b"](2, 3), alike) == 12
    assert period(SCHEDULES["zero-bubble"](2, 3), alike) == 10
    assert period(made, alike) == 9, "the first stage never waits"


def test_backwards_are_whole_as_long_as_nobody_waits_for_their_first_parts() -> None:
    """A part of its own costs something."""

    def seconds(each: Pass) -> float:
        return {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0}.get(each.kind, 1.05)

    made = fastest(2, 8, seconds, splits=True)
    assert [" ".join(line) for line in grid_of(made)] == [
        "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 . B6 . B7",
        ". F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 I5 F6 I6 F7 I7 W5 W6 W7",
    ]
    assert period(made, seconds) == pytest.approx(8 * 3 + 3 * 0.1)
    assert period(SCHEDULES["zero-bubble"](2, 8), seconds) > 25.5
    assert period(SCHEDULES["1f1b"](2, 8), seconds) == 27


def test_an_order_does_not_hang_on_one_stages_being_the_slowest() -> None:
    """The first one was taken to need 66.8, and needs 60: with one split less nobody would have waited."""

    def seconds_with(first: float) -> Seconds:
        backward = {0: first, 1: 41.0}
        parts = {Kind.INPUT: 24.5, Kind.WEIGHT: 19.2}
        whole = {Kind.FORWARD: lambda each: 20.0 + 2 * each.stage, Kind.BACKWARD: lambda each: backward[each.stage]}
        return lambda each: parts[each.kind] if each.kind in parts else whole[each.kind](each)

    measured, so_it_is = seconds_with(46.8), seconds_with(40.0)
    made = fastest(2, 8, measured, splits=True)
    assert period(made, measured) <= 1.01 * 8 * 66.8
    assert period(made, so_it_is) <= 1.03 * 8 * 63


def test_of_orders_that_are_as_fast_the_one_that_keeps_the_fewest_microbatches_is_taken() -> None:
    made = fastest(3, 6, by_stage((1, 1), (1, 1), (9, 9)), splits=False)
    assert [made.in_flight(stage) for stage in range(3)] == [3, 2, 1]


@pytest.mark.parametrize(
    "times", [[(12, 5), (7, 11), (4, 3)], [(1, 12), (9, 7), (2, 8), (2, 2)]], ids=["3 stages", "4 stages"]
)
def test_on_unequal_stages_it_is_faster_than_every_named_schedule(times: list[tuple[float, float]]) -> None:
    num_stages, seconds = len(times), by_stage(*times)
    made = period(fastest(num_stages, 4, seconds, splits=True), seconds)
    for make in SCHEDULES.values():
        assert period(make(num_stages, 4), seconds) > 1.1 * made
