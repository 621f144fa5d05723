"""When a running job is planned again, and what another plan has to bring."""

from __future__ import annotations

import itertools

import pytest

from weft.scheduler.adapting.switching import FIRST, HYSTERESIS, MAX_CHANGES, Gain, Switching

ITERATION = 0.1


@pytest.fixture
def switching() -> Switching:
    switching = Switching()
    switching.begin(0, may_change=True)
    switching.preparing_seconds = 0.2
    return switching


def asked(switching: Switching, steps: int) -> list[int]:
    """The steps at which it is planned again, of a long job."""
    return [step for step in range(steps) if switching.take_due(step, 10_000, ITERATION)]


def change(switching: Switching, *, left: float = 1.0, came: float = 1.5, expected: float = 0.05) -> None:
    switching.change("another plan", Gain(before_seconds=0.1, expected_seconds=expected), round(left * 1e9))
    switching.note_end(round(came * 1e9))
    switching.note_end(round((came + 9) * 1e9))


def test_it_is_asked_again_after_twice_as_many_steps_each_time(switching: Switching) -> None:
    assert asked(switching, 2000) == [FIRST, 3 * FIRST, 7 * FIRST, 15 * FIRST, 31 * FIRST]


def test_an_attempt_has_to_be_measured_first(switching: Switching) -> None:
    switching.begin(1000, may_change=True)
    assert asked(switching, 1100) == [1000 + FIRST]


def test_a_plan_to_which_there_are_no_others_is_never_looked_at(switching: Switching) -> None:
    switching.begin(0, may_change=False)
    assert not switching.is_due(1 << 30)


def test_a_job_that_is_about_to_end_is_not_planned_again(switching: Switching) -> None:
    assert not switching.take_due(FIRST, 3, ITERATION), "not even a plan that took nothing would pay"
    assert switching.take_due(3 * FIRST, 4, ITERATION)


def test_it_changes_a_few_times_and_less_and_less_often(switching: Switching) -> None:
    due = []
    for _ in range(MAX_CHANGES):
        due.append(next(step for step in range(switching.due, 1 << 20) if switching.take_due(step, 10_000, ITERATION)))
        change(switching)
        switching.begin(due[-1], may_change=True)
        switching.judge(0.05)
    assert [later - earlier for earlier, later in itertools.pairwise(due)] == [4 * FIRST, 16 * FIRST]
    assert not switching.is_due(1 << 30)


def test_a_gain_is_told_and_has_to_be_enough() -> None:
    assert not Gain(before_seconds=0.1, expected_seconds=0.1 / HYSTERESIS * 1.001).is_enough
    gain = Gain(before_seconds=1.0, expected_seconds=0.5)
    assert gain.is_enough
    assert gain.told() == "500 ms an iteration expected instead of 1.00 s, 50 % less"


def test_it_pays_if_it_saves_more_than_a_change_costs(switching: Switching) -> None:
    gain = Gain(before_seconds=0.1, expected_seconds=0.05)
    cost = 0.2 + 0.03 + 0.1  # preparing, a snapshot, lanes that run empty and fill again
    assert switching.cost_seconds(0.1, 0.03) == pytest.approx(cost)
    assert not switching.pays(gain, 6, 0.03)
    assert switching.pays(gain, 7, 0.03)


def test_once_it_has_changed_that_is_what_another_change_is_thought_to_take(switching: Switching) -> None:
    change(switching, left=1.0, came=1.5)
    told = switching.judge(0.06)
    assert told == "the other plan takes 60 ms an iteration, 40 % less than the one before; the change took 440 ms"
    assert switching.told() == ["another plan", told]
    assert switching.cost_seconds(0.1) == pytest.approx(0.44 + 0.1)


def test_a_plan_that_is_slower_than_was_thought_is_told_as_what_it_is(switching: Switching) -> None:
    change(switching)
    assert "125 ms an iteration, 25 % more than the one before" in switching.judge(0.125)
