"""How often what is timed in an inspection is run, and what of it counts; by a clock that work sets forward."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from weft.spec.job_spec import JobSpec
from weft.workers.inspection import times

Work = Callable[[float], Callable[[], str]]
QUICK = 0.001


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    """What takes so many seconds, each time."""
    now = 0.0

    def of(seconds: float) -> Callable[[], str]:
        def once() -> str:
            nonlocal now
            now += seconds
            return "done"

        return once

    monkeypatch.setattr(times, "time", SimpleNamespace(perf_counter=lambda: now))
    return of


def test_what_is_quick_runs_more_often_where_plans_are_compared(work: Work, spec_of: Callable[..., JobSpec]) -> None:
    """And nothing runs more often than it must where the strategy is given: the job waits for it."""
    given, compared = spec_of(), spec_of(preset="auto")
    asked = given.model_copy(update={"plan_for": "time"})
    for spec, runs in ((compared, times.MORE_RUNS), (asked, times.MORE_RUNS), (given, 3)):
        assert times.repeated(work(QUICK), 3, spec) == ["done"] * runs
    assert len(times.repeated(work(times.MORE_SECONDS / 3.5), 3, compared)) == 4
    assert len(times.repeated(work(times.MORE_SECONDS), 3, compared)) == 3
    assert len(times.repeated(work(times.MORE_SECONDS / 3.5), 1, compared, parts=2)) == 2


def test_a_quick_load_is_made_again_and_the_first_counts_for_no_more_than_the_others(work: Work) -> None:
    """It has made what all of them use."""
    loads = iter([work(5 * QUICK), work(2 * QUICK), work(3 * QUICK)])
    assert times.loaded(lambda: next(loads)(), again=True) == ("done", pytest.approx(2 * QUICK))
    assert list(loads) == []


def test_what_is_drawn_from_a_stream_or_takes_long_is_loaded_once(work: Work) -> None:
    """A stream may not have it again."""
    for seconds, again in ((QUICK, False), (2 * times.LOADING_SECONDS, True)):
        loads = iter([work(seconds)])
        assert times.loaded(lambda loads=loads: next(loads)(), again=again) == ("done", pytest.approx(seconds))
