"""How often what is timed in an inspection is run, and what of it counts."""

from __future__ import annotations

import time

import pytest

from weft.workers.inspection import times


def test_what_is_quick_runs_more_often_and_what_is_not_no_more_than_it_must(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(times, "MORE_SECONDS", 60.0)
    assert times.repeated(lambda: 7, 3) == [7] * times.MORE_RUNS
    monkeypatch.setattr(times, "MORE_SECONDS", 0.01)
    assert len(times.repeated(lambda: time.sleep(0.02), 3)) == 3


def test_a_quick_load_is_made_again_and_the_fastest_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one has made what all of them use."""
    monkeypatch.setattr(times, "LOADING_SECONDS", 100.0)
    calls: list[None] = []
    assert times.of_loading(lambda: calls.append(None), 50.0) < 50.0
    assert len(calls) == times.LOADS
    assert times.of_loading(lambda: time.sleep(0.02), 0.01) == 0.01


def test_a_load_that_takes_long_is_not_made_again() -> None:
    calls: list[None] = []
    assert times.of_loading(lambda: calls.append(None), 2 * times.LOADING_SECONDS) == 2 * times.LOADING_SECONDS
    assert calls == []
