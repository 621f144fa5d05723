"""How often what is timed in an inspection is run, and what of it counts."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from weft.spec.job_spec import JobSpec
from weft.workers.inspection import times


def test_what_is_quick_runs_more_often_where_plans_are_compared(
    monkeypatch: pytest.MonkeyPatch, spec_of: Callable[..., JobSpec]
) -> None:
    """And nothing runs more often than it must where the strategy is given: the job waits for it."""
    given, compared = spec_of(), spec_of(preset="auto")
    asked = given.model_copy(update={"plan_for": "time"})
    monkeypatch.setattr(times, "MORE_SECONDS", 60.0)
    assert [times.repeated(lambda: 7, 3, spec) for spec in (compared, asked)] == [[7] * times.MORE_RUNS] * 2
    assert times.repeated(lambda: 7, 3, given) == [7] * 3
    monkeypatch.setattr(times, "MORE_SECONDS", 0.01)
    assert len(times.repeated(lambda: time.sleep(0.02), 3, compared)) == 3


def calls_of(seconds: float, *, again: bool) -> int:
    """Of a load that takes so long."""
    calls: list[None] = []

    def load() -> str:
        time.sleep(seconds)
        calls.append(None)
        return "batch"

    batch, fastest = times.loaded(load, again=again)
    assert batch == "batch"
    assert fastest >= seconds
    return len(calls)


def test_a_quick_load_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one has made what all of them use."""
    monkeypatch.setattr(times, "LOADING_SECONDS", 100.0)
    assert calls_of(0.0, again=True) == 1 + times.LOADS
    assert calls_of(0.0, again=False) == 1, "what is drawn from a stream may not be there again"


def test_a_load_that_takes_long_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(times, "LOADING_SECONDS", 0.01)
    assert calls_of(0.02, again=True) == 1
