"""Speed and time left, over the interval since they were last asked for."""

from __future__ import annotations

import pytest

from weft.metrics.accounts.speed import IntervalSpeed, SpeedAccount


def test_the_pace_is_that_of_the_interval_and_the_eta_follows_from_it() -> None:
    progress = SpeedAccount(num_steps=100)
    for step in range(11):
        progress.add(step, samples=step * 32, now=50 + step * 0.5)
    assert progress.take_interval() == IntervalSpeed(samples_per_second=64.0, steps_per_second=2.0, eta_seconds=45.0)


def test_an_interval_begins_where_the_last_one_ended() -> None:
    progress = SpeedAccount(num_steps=10)
    progress.add(0, 0, now=0.0)
    progress.add(1, 100, now=1.0)
    progress.take_interval()
    progress.add(2, 200, now=3.0)
    pace = progress.take_interval()
    assert pace is not None
    assert (pace.samples_per_second, pace.eta_seconds) == (50.0, 16.0)


def test_without_a_step_there_is_no_pace() -> None:
    progress = SpeedAccount(num_steps=10)
    assert progress.take_interval() is None
    progress.add(3, 30, now=1.0)
    assert progress.take_interval() is None
    progress.add(3, 30, now=2.0)
    assert progress.take_interval() is None


def test_the_last_step_leaves_nothing_to_wait_for() -> None:
    progress = SpeedAccount(num_steps=2)
    progress.add(1, 10, now=1.0)
    progress.add(2, 20, now=2.0)
    pace = progress.take_interval()
    assert pace is not None
    assert pace.eta_seconds == 0


@pytest.mark.parametrize("replayed_from", [0, 4, 5])
def test_steps_that_a_recovery_replays_are_no_progress(replayed_from: int) -> None:
    progress = SpeedAccount(num_steps=10)
    progress.add(4, 40, now=0.0)
    progress.add(6, 60, now=2.0)
    progress.add(replayed_from, 10 * replayed_from, now=100.0)
    assert progress.take_interval() is None
    progress.add(replayed_from + 1, 10 * replayed_from + 10, now=101.0)
    pace = progress.take_interval()
    assert pace is not None
    assert pace.samples_per_second == 10.0
