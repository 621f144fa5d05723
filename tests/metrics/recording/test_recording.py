"""A recording keeps the newest rows of every lane, knows which iterations are whole, and comes back from its file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgpack
import pytest

from weft.metrics.recording.recording import Recorder, Recording, RecordingError
from weft.plan.kinds import MODES
from weft.plan.plan import Plan
from weft.plan.rows import packed_rows, unpack

FORWARD, BACKWARD = MODES.index("forward"), MODES.index("backward")
PipelineOf, RecordingOf = Callable[..., Plan], Callable[..., Recording]


@pytest.fixture(scope="module")
def recording(pipeline_of: PipelineOf, recording_of: RecordingOf) -> Recording:
    return recording_of(pipeline_of(stages=2, microbatches=4))


def test_a_recording_comes_back_from_its_file_as_it_was(recording: Recording, tmp_path: Path) -> None:
    recording.save(tmp_path / "recording.msgpack")
    again = Recording.load(tmp_path / "recording.msgpack")
    assert again == recording
    assert again.rows == recording.rows
    assert sorted(path.name for path in tmp_path.iterdir()) == ["recording.msgpack"]


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "is no recording"),
        (b"\xc1 not msgpack", "is no recording"),
        (msgpack.packb({"job": "digits-1"}), "is no recording"),
        (msgpack.packb([1, 2]), "is no recording"),
        (msgpack.packb({"weft_recording": 99}), "is of version 99 and this Weft reads 3; run the job again"),
        (msgpack.packb({"weft_recording": 3, "job": "digits-1"}), "is no recording"),
    ],
)
def test_a_file_that_is_no_recording_is_refused_by_name(data: bytes, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "recording.msgpack"
    path.write_bytes(data)
    with pytest.raises(RecordingError, match=problem) as refusal:
        Recording.load(path)
    assert str(path) in str(refusal.value)


def test_a_recording_that_is_cut_short_is_refused(recording: Recording) -> None:
    with pytest.raises(RecordingError):
        Recording.decode(recording.encode()[:-100])


def test_a_recorder_forgets_the_oldest_reports_of_all_lanes_first() -> None:
    recorder = Recorder(max_bytes=3 * 48)
    for number in range(4):
        recorder.add(f"cpu-{number % 2}/compute", packed_rows([(FORWARD, 0, number, -1, number, number + 1)]))
    kept = {lane: [row[2] for row in unpack(data)] for lane, data in recorder.packed().items()}
    assert kept == {"cpu-0/compute": [2], "cpu-1/compute": [1, 3]}
    assert recorder.dropped() == ["cpu-0/compute"]


def test_one_report_is_kept_however_large_it_is() -> None:
    recorder = Recorder(max_bytes=48)
    rows = [(FORWARD, 0, 0, -1, n, n + 1) for n in range(5)]
    recorder.add("cpu-0/compute", packed_rows(rows))
    assert list(unpack(recorder.packed()["cpu-0/compute"])) == rows


def test_iterations_of_which_a_lane_lacks_rows_do_not_count_as_whole(recording: Recording) -> None:
    lane = "cpu-1/compute"
    cut = [row for row in recording.rows[lane] if row[2] >= 4]
    late = replace(recording, packed={**recording.packed, lane: packed_rows(cut)})
    assert min(late.iteration_ends) == 5  # of iteration 4 rows may be missing, too
    assert max(late.iteration_ends) == max(recording.iteration_ends) == 11
    assert max(replace(recording, finished=10).iteration_ends) == 9


def test_a_lane_that_begins_late_lacks_nothing_where_nothing_was_dropped(recording: Recording) -> None:
    lane = "cpu-1/compute"  # as the second of two loaders that take turns, whose first row is of iteration 1
    turns = packed_rows([row for row in recording.rows[lane] if row[2] % 2])
    late = replace(recording, packed={**recording.packed, lane: turns}, facts={**recording.facts, "dropped": []})
    assert list(late.iteration_ends) == list(range(12))
    cut = replace(late, facts={**recording.facts, "dropped": [lane]})
    assert list(cut.iteration_ends) == list(range(2, 12))


def test_an_iteration_in_which_a_lane_stamped_nothing_is_whole_once_all_have_finished_it(recording: Recording) -> None:
    lane = "cpu-1/compute"
    silent = [row for row in recording.rows[lane] if row[2] != 11]  # as a sync lane may be while the job validates
    validating = replace(recording, packed={**recording.packed, lane: packed_rows(silent)})
    assert max(validating.iteration_ends) == 11


def test_the_window_is_the_last_training_iterations_that_follow_one_another(recording: Recording) -> None:
    ends = recording.iteration_ends
    assert recording.window(3) == (ends[8], ends[11])
    assert recording.window(1000) == (ends[0], ends[11])
    without_backward = {
        lane: packed_rows([row for row in rows if not (row[0] == BACKWARD and row[2] == 9)])
        for lane, rows in recording.rows.items()
    }
    validated = replace(recording, packed=without_backward)
    ends = validated.iteration_ends
    assert validated.window(5) == (ends[9], ends[11])


def test_there_is_no_window_before_two_iterations_are_whole(recording: Recording) -> None:
    first = {lane: packed_rows([row for row in rows if row[2] == 0]) for lane, rows in recording.rows.items()}
    assert replace(recording, packed=first).window(8) is None
    assert replace(recording, packed={}).window(8) is None
