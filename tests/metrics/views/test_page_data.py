"""What the timeline page is told of a recording: which iterations, which rows, which times."""

from __future__ import annotations

import json
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from weft.metrics.recording.critical_path import critical_path
from weft.metrics.recording.recording import Recording
from weft.metrics.views import page_data
from weft.metrics.views.page_data import tail, timeline, window_of
from weft.plan.kinds import KINDS, MODES, Kind
from weft.plan.rows import Row, packed_rows

_RECORDED = runpy.run_path(str(Path(__file__).with_name("recorded.py")))
wide_recording, iteration_ns = _RECORDED["wide_recording"], _RECORDED["iteration_ns"]
FORWARD, BACKWARD, STALL = (MODES.index(mode) for mode in ("forward", "backward", "stall_gradient"))


def told(recording: Recording, iterations: int) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(b"".join(timeline(recording, iterations)))
    return value


def rows_of(lane: dict[str, Any]) -> list[list[int]]:
    flat = lane["rows"]
    return [flat[at : at + 6] for at in range(0, len(flat), 6)]


def small_recording(iterations: int, *, trains: frozenset[int] | None = None, **facts: Any) -> Recording:
    """One lane: in iteration i a forward from 100 i to 100 i + 40, then a wait of 10 for task 1, then a backward of 30.

    In an iteration that is not in `trains` there is no backward.
    """
    rows: list[Row] = []
    for i in range(iterations):
        rows.append((FORWARD, 0, i, -1, 100 * i, 100 * i + 40))
        if trains is None or i in trains:
            rows.append((STALL, 1, i, 0, 100 * i + 40, 100 * i + 50))
            rows.append((BACKWARD, 1, i, -1, 100 * i + 50, 100 * i + 80))
    base = wide_recording(1, 2, 1)
    tasks = tuple(
        replace(base.tasks[n], name=f"{kind.upper()}(0,0)", kind=kind, lane="a/compute")
        for n, kind in enumerate(("forward", "backward"))
    )
    programs, packed = {"a/compute": (0, 1)}, {"a/compute": packed_rows(rows)}
    facts = {"ended": True, **facts}
    whole = replace(base, tasks=tasks, programs=programs, packed=packed, finished=iterations, planned=(), facts=facts)
    return whole if facts["ended"] else replace(whole, finished=iterations - 1)


def test_the_window_is_of_the_last_whole_iterations_and_starts_at_0() -> None:
    window = told(small_recording(10), 3)
    assert [(each["iteration"], each["start"], each["end"]) for each in window["iterations"]] == [
        (7, 0, 100),
        (8, 100, 200),
        (9, 200, 300),
    ]
    assert window["duration"] == 300
    assert window["ended_at"] == pytest.approx((980 + 1_700_000_000_000_000_000) / 1e9)


def test_a_running_jobs_newest_iteration_is_left_out() -> None:
    assert [each["iteration"] for each in told(small_recording(10, ended=False), 2)["iterations"]] == [7, 8]


def test_rows_have_mode_task_iteration_task_waited_for_start_and_duration() -> None:
    window = told(small_recording(4), 1)
    (lane,) = window["lanes"]
    assert lane["lane"] == "a/compute"
    assert rows_of(lane) == [[FORWARD, 0, 3, -1, 20, 40], [STALL, 1, 3, 0, 60, 10], [BACKWARD, 1, 3, -1, 70, 30]]
    assert window["modes"][STALL] == "stall_gradient"
    assert window["tasks"] == [["FORWARD(0,0)", 0, FORWARD], ["BACKWARD(0,0)", 0, BACKWARD]]


def test_a_task_has_the_mode_of_its_kind() -> None:
    """The page had a table of kinds of its own, which lacked RELOAD: the plan's were drawn as loading data."""
    recording = small_recording(4)
    window = told(replace(recording, tasks=tuple(replace(recording.tasks[0], kind=kind) for kind in Kind)), 1)
    assert [window["modes"][mode] for _, _, mode in window["tasks"]] == [KINDS[kind].mode for kind in Kind]


def test_a_row_that_began_before_the_window_is_whole() -> None:
    recording = small_recording(4)
    begun = [(STALL, 0, 3, 1, 270, 300), *recording.rows["a/compute"][-3:]]
    rows = [*recording.rows["a/compute"][:-3], *begun]
    window = told(replace(recording, packed={"a/compute": packed_rows(rows)}), 1)
    assert rows_of(window["lanes"][0])[0] == [STALL, 0, 3, 1, -10, 30]


def test_an_ended_jobs_window_ends_with_training_and_a_running_ones_with_what_ran_last() -> None:
    trains = frozenset({0, 1, 2, 4, 5})
    ended = told(small_recording(8, trains=trains), 4)
    assert [(each["iteration"], each["trains"]) for each in ended["iterations"]] == [
        (2, True),
        (3, False),
        (4, True),
        (5, True),
    ]
    running = told(small_recording(8, trains=trains, ended=False), 3)
    assert [(each["iteration"], each["trains"]) for each in running["iterations"]] == [(4, True), (5, True), (6, False)]


def test_every_iteration_of_a_job_that_only_runs_forward_counts_as_training() -> None:
    forward = told(small_recording(5, trains=frozenset(), itinerary={"forward_only": True}), 2)
    assert [(each["iteration"], each["trains"]) for each in forward["iterations"]] == [(3, True), (4, True)]
    assert told(small_recording(5, trains=frozenset()), 2)["iterations"] == []


def test_what_has_no_whole_iteration_has_empty_lists() -> None:
    window = told(small_recording(0), 4)
    assert (window["iterations"], window["path"], window["duration"]) == ([], [], 0)
    assert window["ended_at"] is None
    assert [lane["rows"] for lane in window["lanes"]] == [[]]


def test_the_critical_path_is_that_of_the_window() -> None:
    recording = wide_recording(3, 4, 5)
    window = told(recording, 2)
    begin, end = recording.window(2)
    steps = [window["path"][at : at + 5] for at in range(0, len(window["path"]), 5)]
    lanes = list(recording.programs)
    assert steps == [
        [lanes.index(step.lane), step.task, step.iteration, step.start_ns - begin, step.end_ns - step.start_ns]
        for step in critical_path(recording, begin, end)
    ]
    assert {step[0] for step in steps} == {0, 1, 2}


def test_the_planned_iteration_starts_where_the_planned_one_before_it_ended() -> None:
    recording = wide_recording(2, 4, 3)
    planned = told(recording, 1)["planned"]
    assert planned["seconds"] == pytest.approx(iteration_ns(2, 4) / 1e9)
    starts = {task: start for _, task, start, _ in zip(*[iter(planned["spans"])] * 4, strict=True)}
    ends = [span.end for span in recording.planned if span.iteration == 0]
    second = {span.task: span.start for span in recording.planned if span.iteration == 1}
    assert starts == {task: round((start - max(ends)) * 1e9) for task, start in second.items()}


def test_a_plan_that_was_not_simulated_is_null() -> None:
    assert told(small_recording(3), 1)["planned"] is None


@pytest.mark.parametrize("iterations", [1, 3, 16])
@pytest.mark.parametrize("finished", [200, 199])
def test_the_tail_has_the_same_window_as_the_whole(iterations: int, finished: int) -> None:
    recording = replace(wide_recording(3, 4, 200), finished=finished)
    recent = tail(recording, iterations)
    assert window_of(recent, iterations) == window_of(recording, iterations)
    whole = sum(map(len, recording.packed.values()))
    assert sum(map(len, recent.packed.values())) < whole / 4


@pytest.mark.parametrize("facts", [{}, {"dropped": []}], ids=["not told", "nothing"])
def test_the_tail_grows_until_it_reaches_lanes_that_report_late(facts: dict[str, Any]) -> None:
    """Of a recording that has dropped nothing the tail lacks rows all the same: it ended iterations too early."""
    recording = replace(wide_recording(2, 4, 400), facts=facts)
    late, early = recording.programs
    behind = recording.packed[late][: len(recording.packed[late]) // 2]
    uneven = replace(recording, packed={late: behind, early: recording.packed[early]}, finished=199)
    assert window_of(tail(uneven, 4), 4) == window_of(uneven, 4)
    assert told(uneven, 4)["iterations"][-1]["iteration"] == 198


def test_a_window_of_too_many_rows_has_fewer_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = wide_recording(3, 4, 20)
    monkeypatch.setattr(page_data, "MAX_ROWS", 3 * 4 * 2 * 5 + 10)
    assert 1 <= len(told(recording, 12)["iterations"]) <= 5
    monkeypatch.setattr(page_data, "MAX_ROWS", 1)
    assert len(told(recording, 12)["iterations"]) == 1


def test_the_text_comes_in_a_piece_for_each_lane() -> None:
    pieces = list(timeline(wide_recording(5, 4, 4), 2))
    assert [json.loads(piece.lstrip(b","))["lane"] for piece in pieces[-6:-1]] == [f"cpu-{n}/compute" for n in range(5)]
