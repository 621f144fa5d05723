"""Curves of bounded length: what of many values is kept."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.metrics.accounts.history import MAX_POINTS, Curve, History


def test_few_values_are_all_there() -> None:
    curve = Curve()
    for step, value in ((1, 3.0), (2, 2.0), (5, 1.0)):
        curve.add(step, value)
    assert curve.points() == [[1, 3.0], [2, 2.0], [5, 1.0]]


def test_a_full_curve_halves_itself_and_its_points_are_means_of_as_many_values() -> None:
    curve = Curve(max_points=4)
    for step in range(1, 8):
        curve.add(step, float(step))
    assert curve.points() == [[2, 1.5], [4, 3.5], [6, 5.5], [7, 7.0]]  # the last one is not full yet


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200), st.sampled_from([2, 4, 10]))
def test_no_number_of_values_makes_it_longer_than_its_bound_or_changes_the_mean(
    values: list[float], max_points: int
) -> None:
    curve = Curve(max_points)
    for step, value in enumerate(values):
        curve.add(step, value)
    points = curve.points()
    assert 1 <= len(points) <= max_points
    assert [step for step, _ in points] == sorted({step for step, _ in points})
    assert points[-1][0] == len(values) - 1
    assert all(min(values) - 1e-6 <= mean <= max(values) + 1e-6 for _, mean in points)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_left_out(value: float) -> None:
    curve = Curve()
    curve.add(1, 2.0)
    curve.add(2, value)
    curve.add(3, 4.0)
    assert curve.points() == [[1, 2.0], [3, 4.0]]


def test_throughput_is_samples_over_the_seconds_that_they_took_together() -> None:
    history = History()
    for step in range(MAX_POINTS):
        history.add_step(step + 1, 1.0, samples=10, seconds=1.0 if step % 2 else 4.0)
    first = history.curves()["samples_per_second"][0]
    assert first == [2, pytest.approx(20 / 5.0)]


def test_a_step_of_unknown_length_is_in_the_loss_alone_and_a_validation_without_loss_nowhere() -> None:
    history = History()
    history.add_step(1, 0.5, samples=8, seconds=None)
    history.add_validation(1, None)
    history.add_validation(2, 0.75)
    assert history.curves() == {"loss": [[1, 0.5]], "samples_per_second": [], "validation_loss": [[2, 0.75]]}
