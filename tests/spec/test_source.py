"""What a job is named by: a TOML file, or a Python file with a function in it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from weft.spec.job_spec import JobSpec, SpecError
from weft.spec.source import python_function

ENOUGH = ["job.batch_size=4", "job.epochs=2"]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("train.py", ("train.py", "workload")),
        ("train.py:small", ("train.py", "small")),
        ("jobs/train.py:small", ("jobs/train.py", "small")),
        ("a:b.py", ("a:b.py", "workload")),
        ("train.toml", ("", "")),
        ("train.py.toml", ("", "")),
        ("train:small", ("", "")),
    ],
)
def test_a_source_is_a_python_file_by_its_name(source: str, expected: tuple[str, str]) -> None:
    assert python_function(source) == expected
    assert python_function(Path(source)) == expected


@pytest.mark.parametrize(("named", "function"), [("", "workload"), (":small", "small")])
def test_a_python_file_and_the_rest_as_overrides_are_a_spec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str, function: str
) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    spec = JobSpec.load(f"jobs/train.py{named}", [*ENOUGH, "job.args.hidden=128", "strategy.preset=1f1b"])
    assert (spec.job.entry, spec.directory) == (f"train.py:{function}", str(tmp_path / "jobs"))
    assert (spec.job.batch_size, spec.job.epochs, spec.job.args) == (4, 2, {"hidden": 128})
    assert (spec.strategy.preset, spec.strategy.stages) == ("1f1b", 2)
    assert spec.entry_file == tmp_path / "jobs" / "train.py"
    spec.check_files()


@pytest.mark.parametrize(
    ("source", "entry"),
    [
        ("package.train:small", "package/train.py:small"),
        ("package.train", "package/train.py:workload"),
        ("package:small", "package/__init__.py:small"),
        ("alone:small", "alone.py:small"),
    ],
)
def test_a_module_and_a_function_are_a_spec_of_the_directory_that_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, entry: str
) -> None:
    """`weft init` took such a name, and `weft run` said that there was no such file."""
    (tmp_path / "package").mkdir()
    for name in ("package/train.py", "package/__init__.py", "alone.py"):
        (tmp_path / name).write_text("")
    monkeypatch.chdir(tmp_path)
    spec = JobSpec.load(source, ENOUGH)
    assert (spec.job.entry, spec.directory) == (entry, str(tmp_path))
    with pytest.raises(SpecError, match=r"package.gone:small: no such file; .* MODULE:FUNCTION in the directory"):
        JobSpec.load("package.gone:small", ENOUGH)


def test_a_file_may_say_where_its_entry_begins(tmp_path: Path) -> None:
    """A relative `directory` was refused, so a file beside a package of sources could not name it."""
    (tmp_path / "configs").mkdir()
    path = tmp_path / "configs" / "small.toml"
    tables = '[job]\nentry = "package/train.py:workload"\nepochs = 3\nbatch_size = 4\n'
    for named in ("../src", str(tmp_path / "src")):
        path.write_text(f"directory = {named!r}\n{tables}")
        assert JobSpec.load(path).directory == str(tmp_path / "src")
    path.write_text(f"directory = 3\n{tables}")
    with pytest.raises(SpecError, match="directory"):
        JobSpec.load(path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gone.py", "no such file; give the path of a job spec in TOML, or FILE.py"),
        ("gone.py:small", "no such file; give the path of a job spec in TOML, or FILE.py"),
        ("folder.py", "not a file; give the path of a job spec in TOML, or FILE.py"),
        ("nul\0.py", "no such file; give the path of a job spec in TOML, or FILE.py"),
        ("here.py:", "job.entry: 'here.py:' is not FILE.py:FUNCTION"),
        ("here.py:a-b", "job.entry: 'here.py:a-b' is not FILE.py:FUNCTION"),
    ],
)
def test_a_python_file_that_cannot_be_one_is_refused_with_a_remedy(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "here.py").write_text("")
    with pytest.raises(SpecError) as caught:
        JobSpec.load(tmp_path / name, ENOUGH)
    assert text in str(caught.value)


def test_a_length_among_the_overrides_replaces_that_of_the_file(tmp_path: Path) -> None:
    """`--set job.steps=5` beside a file's epochs was refused, and nothing but an editor could take the epochs away."""
    path = tmp_path / "digits.toml"
    path.write_text('[job]\nentry = "digits.py:workload"\nepochs = 3\nbatch_size = 4\n')
    job = JobSpec.load(path, ["job.steps=5"]).job
    assert (job.steps, job.epochs) == (5, None)
    assert JobSpec.load(path, ["job.epochs=5"]).job.epochs == 5
    with pytest.raises(SpecError, match="epochs = 5 and steps = 6 are both given; leave one of them out"):
        JobSpec.load(path, ["job.epochs=5", "job.steps=6"])


def test_a_spec_from_a_pipe_is_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`weft run <(sed … digits.toml)` looked for digits.py below /proc."""
    monkeypatch.chdir(tmp_path)
    reading, writing = os.pipe()
    os.write(writing, b'directory = "jobs"\n[job]\nentry = "train.py:workload"\nbatch_size = 4\nepochs = 2\n')
    os.close(writing)
    try:
        assert JobSpec.load(f"/dev/fd/{reading}").directory == str(tmp_path / "jobs")
    finally:
        os.close(reading)


def test_what_is_too_large_for_a_spec_is_refused_before_all_of_it_is_read() -> None:
    """/dev/zero, or a model by mistake, took memory until there was none."""
    with pytest.raises(SpecError, match="/dev/zero: larger than 16 MiB, which no job spec is; give the path of a job"):
        JobSpec.load("/dev/zero")
