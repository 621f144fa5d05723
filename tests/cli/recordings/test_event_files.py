"""Event files, read back by TensorBoard's own reader."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from weft.cli.recordings.event_files import write_events
from weft.cli.recordings.recorded_job import RecordedJob

ENDED_AT = 1_700_000_000.0


def lines(steps: int, *, first: int = 1) -> str:
    written = []
    for number in range(first, first + steps):
        values = {"loss": 1 / number, "lr": 0.1, "grad_norm": None, "skipped": False, "samples": 16, "seconds": 0.5}
        written.append(json.dumps({"step": number, "epoch": 0, **values}))
    written.append(json.dumps({"step": first + steps - 1, "epoch": 0, "validation": {"loss": 0.5, "accuracy": 0.75}}))
    return "\n".join(written) + "\n"


def recorded_in(directory: Path, client: Any = None) -> RecordedJob:
    return RecordedJob(
        job="digits-1",
        directory=directory,
        recording=None,
        limit_seconds=None,
        ended_at=ENDED_AT,
        client=client,
    )


def read_back(directory: Path) -> Any:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(directory / "digits-1"))
    events.Reload()
    return events


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    pytest.importorskip("tensorboard")
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / "metrics.jsonl").write_text(lines(10))
    return directory


def test_tensorboard_reads_what_metrics_jsonl_says(run_directory: Path, tmp_path: Path) -> None:
    path = write_events(recorded_in(run_directory), tmp_path / "board")
    assert path.parent == tmp_path / "board" / "digits-1"
    events = read_back(tmp_path / "board")
    assert set(events.Tags()["scalars"]) == {
        *("train/loss", "train/learning_rate", "train/epoch", "train/iteration_seconds", "train/samples_per_second"),
        *("validation/loss", "validation/accuracy"),
    }
    losses = events.Scalars("train/loss")
    assert [(event.step, event.value) for event in losses] == [
        (number, pytest.approx(1 / number)) for number in range(1, 11)
    ]
    assert [event.value for event in events.Scalars("train/samples_per_second")] == 10 * [32.0]
    assert [(event.step, event.value) for event in events.Scalars("validation/accuracy")] == [(10, 0.75)]


def test_times_are_reckoned_back_from_the_end(run_directory: Path, tmp_path: Path) -> None:
    write_events(recorded_in(run_directory), tmp_path / "board")
    times = [event.wall_time for event in read_back(tmp_path / "board").Scalars("train/loss")]
    assert times == [pytest.approx(ENDED_AT - 0.5 * before) for before in range(9, -1, -1)]


def test_writing_again_leaves_nothing_twice(run_directory: Path, tmp_path: Path) -> None:
    for _ in range(2):
        write_events(recorded_in(run_directory), tmp_path / "board")
    assert len(read_back(tmp_path / "board").Scalars("train/loss")) == 10
    assert len(list((tmp_path / "board" / "digits-1").iterdir())) == 1


def test_a_job_is_followed_to_its_end(run_directory: Path, tmp_path: Path) -> None:
    """At each event of the daemon's the reader sees what is new; a job that begins again begins a new file."""
    log = run_directory / "metrics.jsonl"
    seen = []

    def follow(job: str) -> Any:
        log.write_text(lines(4))
        yield {"progress": {}}
        seen.append(len(read_back(tmp_path / "board").Scalars("train/loss")))
        with log.open("a") as file:
            file.write(lines(4, first=5))
        yield {"log": "not about numbers", "offset": 3}
        yield {"progress": {}}
        seen.append(len(read_back(tmp_path / "board").Scalars("train/loss")))
        log.write_text(lines(3))
        yield {"progress": {}}
        seen.append(len(read_back(tmp_path / "board").Scalars("train/loss")))
        with log.open("a") as file:
            file.write(lines(3, first=4))
        yield {"result": {}}

    write_events(recorded_in(run_directory, SimpleNamespace(follow=follow)), tmp_path / "board", follow=True)
    assert seen == [4, 8, 3]
    assert [event.step for event in read_back(tmp_path / "board").Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]


def test_a_job_without_a_step_has_no_events(run_directory: Path, tmp_path: Path, capsys: Any) -> None:
    (run_directory / "metrics.jsonl").write_text("")
    with pytest.raises(SystemExit) as left:
        write_events(recorded_in(run_directory), tmp_path / "board")
    assert left.value.code == 4
    assert "digits-1 has no step in" in capsys.readouterr().err


def test_a_place_that_cannot_be_made_is_named(run_directory: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"cannot be made.*give another --tensorboard DIR"):
        write_events(recorded_in(run_directory), tmp_path / "file")


def test_without_the_package_the_extra_is_named(monkeypatch: Any, tmp_path: Path, capsys: Any) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tensorboard", None)
    with pytest.raises(SystemExit) as left:
        write_events(recorded_in(tmp_path), tmp_path / "board")
    assert left.value.code == 2
    assert "pip install 'weft[tensorboard]'" in capsys.readouterr().err
