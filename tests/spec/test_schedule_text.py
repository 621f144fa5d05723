"""Schedule text: the file that a spec names is read with the spec, and what cannot be one is told with the remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from weft.spec.field_errors import SpecError
from weft.spec.job_spec import JobSpec
from weft.spec.schedule_text import MAX_GRID_CHARS, grid_file, known_schedule, read_grid_file, schedule_title

GRID = "# by hand\nF0 B0\nF0 B0\n"
READ = f"{GRID}# file: my.grid\n"
JOB = '[job]\nentry = "a.py:workload"\nsteps = 1\nbatch_size = 4\n[strategy]\nstages = 2\nschedule = "my.grid"\n'


def tables(directory: Path, name: object) -> dict[str, Any]:
    return {"directory": str(directory), "strategy": {"schedule": name}}


def test_a_spec_has_the_text_of_the_grid_that_it_names(tmp_path: Path) -> None:
    (tmp_path / "my.grid").write_text(GRID + "\n\n")
    (tmp_path / "job.toml").write_text(JOB)
    spec = JobSpec.load(tmp_path / "job.toml")
    assert spec.strategy.schedule == READ
    assert JobSpec.parse(spec.to_wire()) == spec, "whoever has it from the wire needs no file"


def test_files_as_windows_editors_save_them_are_read(tmp_path: Path) -> None:
    """With a mark of the byte order before the text, and two characters at a line's end."""
    for name, text in (("my.grid", GRID), ("job.toml", JOB)):
        (tmp_path / name).write_bytes(text.replace("\n", "\r\n").encode("utf-8-sig"))
    assert JobSpec.load(tmp_path / "job.toml").strategy.schedule == READ


def test_an_override_counts_before_the_grid_and_may_name_one(tmp_path: Path) -> None:
    (tmp_path / "other.grid").write_text(GRID)
    (tmp_path / "job.toml").write_text(JOB)
    path = tmp_path / "job.toml"
    assert JobSpec.load(path, ["strategy.schedule=gpipe"]).strategy.schedule == "gpipe"
    other = JobSpec.load(path, ["strategy.schedule=other.grid"]).strategy.schedule
    assert other == GRID + "# file: other.grid\n"


@pytest.mark.parametrize("name", ["gpipe", GRID, 3, None])
def test_what_names_no_file_stays_as_it_is(tmp_path: Path, name: object) -> None:
    given = tables(tmp_path, name)
    read_grid_file(given)
    assert given == tables(tmp_path, name)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "bytes.grid").write_bytes(b"\xff\xfe")
    (tmp_path / "folder.grid").mkdir()
    for name, why in (("no.grid", "No such file"), ("bytes.grid", "utf-8"), ("folder.grid", "Is a directory")):
        with pytest.raises(SpecError, match=rf"strategy\.schedule: .*{name}' cannot be read \(.*{why}"):
            read_grid_file(tables(tmp_path, name))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("1F1B", "did you mean 1f1b?"),
        ("fastest", "write model-parallel, gpipe, 1f1b"),
        ("my.grid", "has not been read; give it in a job's TOML file"),
        ("F0 B0\n" * MAX_GRID_CHARS, "is too long; write one of at most"),
    ],
)
def test_what_is_no_schedule_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=r"schedule|grid") as caught:
        known_schedule(text)
    assert sentence in str(caught.value)
    assert len(str(caught.value)) < 300


def test_a_grid_goes_by_its_file_or_else_by_its_first_comment() -> None:
    """Whatever its first line said, `# c` or a remark of a paragraph, once was its title in the log and in the plan."""
    assert [schedule_title(text) for text in ("gpipe", READ, GRID, "F0 B0\n")] == [
        "gpipe",
        "my.grid",
        "by hand",
        "a grid",
    ]


def test_a_grid_keeps_its_lines_and_a_name_is_one_line_whatever_is_in_it(tmp_path: Path) -> None:
    for name in ("a#b.grid", "two\u2028lines.grid", "grün.grid", "over/there.grid"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("\n\nF0 B0")
        given = tables(tmp_path, name)
        read_grid_file(given)
        text = given["strategy"]["schedule"]
        assert text.splitlines()[:-1] == ["", "", "F0 B0"]
        assert grid_file(text) in (name, ascii(name))
