"""Which iterations of a recording a view is of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from weft.metrics.recording.recording import Recording
from weft.metrics.recording.window import Window, iterations_between, last_iterations
from weft.plan.kinds import FIRST_STALL, MODES
from weft.plan.plan import Plan
from weft.plan.rows import packed_rows


@pytest.fixture(scope="module")
def recording(pipeline_of: Callable[..., Plan], recording_of: Callable[..., Recording]) -> Recording:
    return recording_of(pipeline_of(stages=2, microbatches=4))


def window_of(recording: Recording, iterations: int | None) -> Window:
    window = last_iterations(recording, iterations)
    assert window is not None
    return window


def test_a_window_of_all_begins_with_the_first_task_and_ends_with_the_last(
    recording: Recording,
) -> None:
    window = window_of(recording, None)
    assert (window.first, window.last, window.num_iterations) == (0, 11, 12)
    starts = [row[4] for rows in recording.rows.values() for row in rows if row[0] < FIRST_STALL]
    assert (window.start_ns, window.end_ns) == (min(starts), recording.iteration_ends[11])


def test_of_a_recording_that_has_lost_its_beginning_the_first_whole_iteration_gives_the_start(
    recording: Recording,
) -> None:
    lost = {lane: packed_rows(rows[len(rows) // 2 :]) for lane, rows in recording.rows.items()}
    recording = replace(recording, packed=lost)
    window = window_of(recording, None)
    assert window.first == min(recording.iteration_ends) + 1
    assert window.start_ns == recording.iteration_ends[window.first - 1]


def test_more_iterations_than_there_are_is_all_of_them(recording: Recording) -> None:
    assert window_of(recording, 1000) == window_of(recording, None)


def test_a_recording_without_a_whole_iteration_has_no_window(recording: Recording) -> None:
    assert last_iterations(replace(recording, packed={})) is None
    begun = {lane: packed_rows(rows[:1]) for lane, rows in recording.rows.items()}
    assert last_iterations(replace(recording, packed=begun, finished=0)) is None


def test_the_last_few_end_with_the_last_that_trains(recording: Recording) -> None:
    quiet = {
        lane: packed_rows([row for row in rows if row[2] < 10 or MODES[row[0]] not in ("backward", "update")])
        for lane, rows in recording.rows.items()
    }
    validated = replace(recording, packed=quiet)
    assert (window_of(validated, None).first, window_of(validated, None).last) == (0, 11)
    assert (window_of(validated, 3).first, window_of(validated, 3).last) == (7, 9)


def test_iterations_between_two_are_whole_and_those_that_are_there(recording: Recording) -> None:
    window = iterations_between(recording, 3, 5)
    assert window == Window(first=3, last=5, start_ns=recording.iteration_ends[2], end_ns=recording.iteration_ends[5])
    assert iterations_between(recording, 0, 11) == window_of(recording, None)
    cut = iterations_between(recording, 10, 40)
    assert cut is not None
    assert (cut.first, cut.last) == (10, 11)
    assert iterations_between(recording, 12, 40) is None


def test_iterations_whose_beginning_is_lost_are_not_between_any(recording: Recording) -> None:
    lost = {lane: packed_rows(rows[len(rows) // 2 :]) for lane, rows in recording.rows.items()}
    recording = replace(recording, packed=lost)
    first = min(recording.iteration_ends)
    assert iterations_between(recording, 0, first) is None
    window = iterations_between(recording, 0, first + 1)
    assert window is not None
    assert (window.first, window.start_ns) == (first + 1, recording.iteration_ends[first])
