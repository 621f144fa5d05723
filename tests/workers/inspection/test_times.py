"""How often what is timed in an inspection is run, and what of it counts; by a clock that work sets forward."""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from weft.spec.job_spec import JobSpec
from weft.workers.inspection import looked_at, times
from weft.workload.data.batches import Batches
from weft.workload.workload import Workload

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
    """Soon: what earlier tests have left in this process may be given back at that very moment."""

    def grown() -> int:
        before = times._resident_bytes()
        with mmap.mmap(-1, 8 * times.NEW_BYTES) as there:
            there.write(bytes(len(there)))
            return times._resident_bytes() - before

    assert any(grown() >= 7 * times.NEW_BYTES for _ in range(20))


class Cut:
    """What a trial's stages take in each run."""

    def __init__(self, *runs: times.Times, parts: times.Times) -> None:
        self.splits = False
        self._runs, self._parts = itertools.cycle(runs), parts

    def seconds(self) -> times.Times:
        return self._parts if self.splits else next(self._runs)


def test_what_stages_of_a_unit_take_more_than_one_of_all_is_around_the_units(spec_of: Callable[..., JobSpec]) -> None:
    """In each but the first, whose begin is another; the fastest of the runs counts, of each stage."""
    alone = Cut(
        [(3.0, 5.0), (4.0, 9.0), (7.0, 7.0), (9.0, 8.0)],
        [(9.0, 9.0), (5.0, 7.0), (6.0, 7.0), (5.0, 6.0)],
        parts=[(0.0, 3.0), (4.0, 4.0), (4.0, 4.0), (4.0, 4.0)],
    )
    together = Cut([(3.0, 5.0), (11.0, 18.0)], [(9.0, 9.0), (13.0, 16.0)], parts=[(0.0, 3.0), (10.0, 12.0)])
    timed = times.CutTimes(alone, together, lambda each, batch: None, spec_of())
    assert timed.of("batch", 2) == [(1.0, 3.0), (2.0, 5.0), (4.0, 5.0), (3.0, 4.0)]
    assert timed.around == (2.0, 2.0)
    assert timed.of_other("batch", 2) == timed.of("batch", 2)
    assert timed.parts_of("batch", 2) == ([(0.0, 3.0), (3.0, 4.0), (3.0, 4.0), (3.0, 4.0)], (1.0, 0.0))
    assert timed.around == (2.0, 2.0), "of whole backwards"


def test_what_is_around_units_is_never_all_that_they_take_and_never_less_than_nothing(
    spec_of: Callable[..., JobSpec],
) -> None:
    alone, slower = Cut([(1.0, 1.0), (9.0, 9.0), (1.0, 1.0)], parts=[]), Cut([(1.0, 1.0), (30.0, 2.0)], parts=[])
    timed = times.CutTimes(alone, slower, lambda each, batch: None, spec_of())
    assert timed.of("batch", 1) == [(1.0, pytest.approx(0.1)), (9.0, 1.0), (1.0, pytest.approx(0.1))]
    assert timed.around == (0.0, 8.0)
    two = times.CutTimes(alone, None, lambda each, batch: None, spec_of())
    assert (two.of("batch", 1), two.around) == ([(1.0, 1.0), (9.0, 9.0), (1.0, 1.0)], (0.0, 0.0))


def test_a_stage_of_all_units_that_raises_costs_no_more_than_what_it_would_have_told(
    spec_of: Callable[..., JobSpec],
) -> None:
    alone, broken = Cut([(1.0, 1.0), (9.0, 9.0), (1.0, 1.0)], parts=[]), Cut([], parts=[])

    def run(trial: Cut, batch: str) -> None:
        if trial is broken:
            raise RuntimeError("of the user's")

    timed = times.CutTimes(alone, broken, run, spec_of())
    assert (timed.of("batch", 1), timed.around) == ([(1.0, 1.0), (9.0, 9.0), (1.0, 1.0)], (0.0, 0.0))


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


@pytest.mark.parametrize("ready", [False, True])
def test_what_loading_takes_is_for_the_samples_that_the_job_says(ready: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of the user's batches has three of them, a job's has six."""
    rows = [list(range(3)), list(range(3, 11)), [11]]
    numbers = torch.arange(12.0)[:, None]
    data = [numbers[batch] for batch in rows] if ready else list(numbers)
    how: dict[str, Any] = {"batch_size": None} if ready else {"batch_sampler": rows}
    loader: DataLoader[Any] = DataLoader(data, shuffle=False if ready else None, **how)  # type: ignore[arg-type]
    made = Workload(
        torch.nn.Linear(1, 1),
        loader,
        step=lambda model, x: model(x).mean(),
        optimizer=lambda p: torch.optim.SGD(p, 0.1),
    )
    monkeypatch.setattr(looked_at, "loaded", lambda load, again: (load(), 1.0))
    assert looked_at.LookedAt.of(Batches(made, seed=0, batch_size=6), [6]).load_seconds == 2.0
