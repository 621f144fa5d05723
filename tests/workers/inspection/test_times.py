"""How often what is timed in an inspection is run, and what of it counts; by a clock that work sets forward."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

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


def test_what_had_to_fault_in_memory_is_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job has its memory after the first iterations. What frees some, or never comes to rest, is not run for ever."""

    def runs_with(*grown: int) -> int:
        resident = iter(itertools.accumulate(size for each in (*grown, 0, 0, 0, 0) for size in (0, each)))
        monkeypatch.setattr(times, "_resident_bytes", lambda: next(resident))
        return len(times.repeated(lambda: None, 3))

    new = times.NEW_BYTES
    assert runs_with(0, 0, 0) == runs_with(new, 0, new) == runs_with(new, new, -new) == 3
    assert runs_with(new - 1, new, new) == 3
    assert runs_with(*[new] * 3) == 4
    assert runs_with(*[new] * 5) == 6
    assert runs_with(*[new] * 9) == 3 + times.AGAIN


def test_memory_that_is_new_to_the_process_shows() -> None:
    before = times._resident_bytes()
    there = torch.ones(8 * times.NEW_BYTES, dtype=torch.uint8)
    assert times._resident_bytes() - before >= 7 * times.NEW_BYTES
    del there


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
