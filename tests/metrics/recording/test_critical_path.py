"""The critical path covers its window without a gap in a perfect run, and names the stage that is slow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from weft.metrics.recording.critical_path import critical_path
from weft.metrics.recording.recording import Recording
from weft.plan.kinds import MODES, Kind
from weft.plan.plan import Plan
from weft.plan.rows import packed_rows

PipelineOf, RecordingOf = Callable[..., Plan], Callable[..., Recording]
DEVICE = {"device": "gpu", "stages": 2}


@settings(max_examples=40, deadline=None)
@given(
    data=st.data(),
    strategy=st.sampled_from(
        [
            {"stages": 2, "microbatches": 4},
            {"stages": 3, "microbatches": 2, "schedule": "gpipe"},
            {"replicas": [{"device": "cpu", "stages": 1}, {"device": "cpu", "stages": 2}], "microbatches": 2},
            {"replicas": [DEVICE], "update": "cpu", "sync": "fine", "microbatches": 3},
        ]
    ),
)
def test_steps_and_gaps_are_the_window_to_the_nanosecond(
    data: st.DataObject, strategy: dict[str, object], pipeline_of: PipelineOf, recording_of: RecordingOf
) -> None:
    plan = pipeline_of(**strategy)
    seconds = {
        task.id: data.draw(st.floats(1e-5, 5e-3), label=str(task))
        for task in plan.graph.tasks
        if task.kind is not Kind.GRAD
    }
    recording = recording_of(plan, seconds=seconds)
    window = recording.window(data.draw(st.integers(1, 20)))
    assert window is not None
    steps = critical_path(recording, *window)
    assert sum(step.end_ns - step.start_ns + step.gap_ns for step in steps) == window[1] - window[0]
    now = window[0]
    for step in steps:
        assert step.start_ns == now + step.gap_ns
        assert step.end_ns >= step.start_ns
        assert step.gap_ns >= 0
        now = step.end_ns
    assert now == window[1]


def test_a_perfect_run_has_no_gaps(pipeline_of: PipelineOf, recording_of: RecordingOf) -> None:
    recording = recording_of(pipeline_of(stages=2, microbatches=4))
    window = recording.window(5)
    assert window is not None
    assert sum(step.gap_ns for step in critical_path(recording, *window)) <= 200  # rounding to nanoseconds


def test_a_slow_stage_is_what_the_path_is_made_of(pipeline_of: PipelineOf, recording_of: RecordingOf) -> None:
    plan = pipeline_of(stages=2, microbatches=8)
    slow = {
        task.id: 5 * plan.task_seconds[task.id]
        for task in plan.graph.tasks
        if task.stage == 1 and task.kind in (Kind.FORWARD, Kind.BACKWARD)
    }
    recording = recording_of(plan, seconds=slow)
    window = recording.window(4)
    assert window is not None
    steps = critical_path(recording, *window)
    in_slow = sum(step.end_ns - step.start_ns for step in steps if step.lane == "cpu-1/compute")
    assert in_slow > 0.9 * (window[1] - window[0])


def test_a_slow_loader_is_what_the_path_is_made_of(pipeline_of: PipelineOf, recording_of: RecordingOf) -> None:
    recording = recording_of(pipeline_of(stages=2, microbatches=4, load=0.2))
    window = recording.window(4)
    assert window is not None
    loaded = sum(s.end_ns - s.start_ns for s in critical_path(recording, *window) if s.lane == "loader-2/load")
    assert loaded > 0.9 * (window[1] - window[0])


def test_a_late_wake_up_is_a_gap_of_the_task_that_came_late(pipeline_of: PipelineOf, recording_of: RecordingOf) -> None:
    """The stall before cpu-1's tasks is made longer than its producer took; everything after it moves."""
    recording = recording_of(pipeline_of(stages=2, microbatches=1), iterations=3)
    late_ns = 50_000
    lane, ready_at = "cpu-1/compute", None
    shifted = {}
    for name, rows in recording.rows.items():
        for row in rows:
            if name == lane and row[2] == 2 and row[0] == MODES.index("stall_activation"):
                ready_at = row[5]
        shifted[name] = rows
    assert ready_at is not None
    for name, rows in shifted.items():
        shifted[name] = [
            (
                *row[:4],
                row[4] + late_ns * (row[4] >= ready_at),
                row[5] + late_ns * (row[5] > ready_at or (name == lane and row[5] == ready_at)),
            )
            for row in rows
        ]
    late = replace(recording, packed={name: packed_rows(rows) for name, rows in shifted.items()})
    window = late.window(1)
    assert window is not None
    gaps = {late.tasks[step.task].name: step.gap_ns for step in critical_path(late, *window) if step.gap_ns > 1000}
    assert gaps == {"FORWARD(1,0)": late_ns}


def test_nothing_ran_in_an_empty_window(pipeline_of: PipelineOf, recording_of: RecordingOf) -> None:
    recording = recording_of(pipeline_of(stages=2))
    assert critical_path(recording, 0, 1000) == []


def test_a_milestone_is_waited_for_inside_the_backward_that_posts_it(
    pipeline_of: PipelineOf, recording_of: RecordingOf
) -> None:
    """SYNC waits for GRAD, which is posted in the middle of BACKWARD; GRAD's own run is after it. That of the iteration
    before lies in the wait too."""
    plan = pipeline_of(replicas=2, microbatches=1)
    recording = recording_of(plan)
    task = {each.name: each.id for each in recording.tasks}
    sync, grad = MODES.index("sync"), task["GRAD(0,b0)"]
    ms = 1_000_000
    compute = [
        row
        for i in range(4)
        for row in (
            (MODES.index("forward"), task["FORWARD(0,0)"], i, -1, 100 * i * ms, (100 * i + 30) * ms),
            (MODES.index("backward"), task["BACKWARD(0,0)"], i, -1, (100 * i + 30) * ms, (100 * i + 99) * ms),
            (MODES.index("backward"), grad, i, -1, (100 * i + 99) * ms, (100 * i + 100) * ms),
        )
    ]
    waits = MODES.index("stall_sync")
    beside = [
        row
        for i in range(4)
        for row in (
            (waits, task["SYNC(o0,b0)"], i, grad, (100 * i - 20) * ms, (100 * i + 70) * ms),
            (sync, task["SYNC(o0,b0)"], i, -1, (100 * i + 70) * ms, (100 * i + 80) * ms),
        )
    ]
    packed = {"cpu-0/compute": packed_rows(compute), "cpu-0/sync": packed_rows(beside)}
    only = replace(recording, packed=packed, programs={lane: recording.programs[lane] for lane in packed})
    steps = critical_path(only, 150 * ms, 380 * ms)
    assert sum(step.gap_ns for step in steps) == 0
    assert [only.tasks[step.task].name for step in steps][-3:] == ["FORWARD(0,0)", "BACKWARD(0,0)", "SYNC(o0,b0)"]
