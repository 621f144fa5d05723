"""Settings: flag, then environment, then weft.toml, then default; and errors that say which of them it was."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest

from weft.spec.job_spec import SpecError
from weft.spec.settings import Settings, load_settings


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def write(text: str, name: str = "weft.toml") -> Path:
    path = Path(name)
    path.write_text(text, encoding="utf-8")
    return path


def given_in(field: str, value: Any, source: str) -> tuple[dict[str, Any], dict[str, str], str]:
    """(flags, environment, text of weft.toml) with the field's value in one of them."""
    flags = {field: value} if source == "flag" else {}
    environment = {f"WEFT_{field.upper()}": str(value)} if source == "environment" else {}
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return flags, environment, f"[daemon]\n{field} = {text}\n" if source == "file" else ""


@pytest.mark.parametrize("present", list(itertools.product([True, False], repeat=3)), ids=str)
def test_a_flag_beats_the_environment_which_beats_the_file_which_beats_the_default(
    present: tuple[bool, bool, bool],
) -> None:
    flag, variable, file = present
    write("[daemon]\nworkers = 3\n" if file else "")
    flags = {"workers": 1 if flag else None}
    environment = {"WEFT_WORKERS": "2"} if variable else {}
    expected = next(value for value, there in zip((1, 2, 3, 0), (*present, True), strict=True) if there)
    assert load_settings(flags, environment, None).workers == expected


def test_a_file_may_begin_with_a_mark_of_its_byte_order() -> None:
    Path("weft.toml").write_bytes("[daemon]\nworkers = 3\n".encode("utf-8-sig"))
    assert load_settings({}, {}, None).workers == 3


def test_every_setting_can_come_from_every_source() -> None:
    values = {
        "runtime_dir": "r",
        "state_dir": "s",
        "runs_dir": "u",
        "cache_dir": "c",
        "keep_inspections": False,
        "workers": 5,
        "stand_ins": 3,
        "gpus": 2,
        "loaders": 6,
        "threads": 2,
        "metrics": "",
        "accounting": False,
        "max_queued": 7,
        "drain_seconds": 1.5,
    }
    assert values.keys() == Settings.model_fields.keys()
    for (field, value), source in itertools.product(values.items(), ("flag", "environment", "file")):
        flags, environment, text = given_in(field, value, source)
        write(text)
        loaded = getattr(load_settings(flags, environment, None), field)
        assert loaded == (Path(value).absolute() if field.endswith("_dir") else value), (field, source)


BAD = [
    ("workers", -1, "too small; write 0 or more"),
    ("workers", 1025, "too large; write 1024 or less"),
    ("workers", "many", "no whole number; write one"),
    ("stand_ins", -1, "too small; write 0 or more"),
    ("stand_ins", 65, "too large; write 64 or less"),
    ("threads", 0, "too small; write 1 or more"),
    ("max_queued", 0, "too small; write 1 or more"),
    ("drain_seconds", 0, "too small; write a number above 0"),
    ("drain_seconds", float("inf"), "no finite number; write one"),
    ("metrics", "9464", "not HOST:PORT; write for example"),
    ("metrics", "localhost:http", "not HOST:PORT; write for example"),
    ("metrics", "localhost:65536", "not HOST:PORT; write for example"),
    ("metrics", "localhost:-1", "not HOST:PORT; write for example"),
    ("metrics", "[::1]", "not HOST:PORT; write for example"),
    ("metrics", "[::1:9464", "not HOST:PORT; write for example"),
    ("metrics", "[]:9464", "not HOST:PORT; write for example"),
]


@pytest.mark.parametrize("source", ["flag", "environment", "file"])
@pytest.mark.parametrize(("field", "value", "problem"), BAD)
def test_a_bad_value_is_named_with_its_source_its_field_and_a_remedy(
    field: str, value: Any, problem: str, source: str
) -> None:
    flags, environment, text = given_in(field, value, source)
    write(text)
    named = {
        "flag": f"--{field.replace('_', '-')}",
        "environment": f"WEFT_{field.upper()}",
        "file": f"weft.toml: {field}",
    }
    with pytest.raises(SpecError) as caught:
        load_settings(flags, environment, None)
    assert str(caught.value).startswith(f"{named[source]}: ")
    assert (f": {field}: " in str(caught.value)) == (source == "file")  # it said "--workers: workers: -1 is ..."
    assert problem in str(caught.value)


def test_a_bad_value_that_a_better_source_overrides_does_no_harm() -> None:
    write("[daemon]\nworkers = -1\n")
    assert load_settings({"workers": 1}, {}, None).workers == 1


@pytest.mark.parametrize("value", ["3", '"cpu"', "[1, 2]", "true"])
def test_a_daemon_that_is_no_table_is_named(value: str) -> None:
    """`daemon = 3` in weft.toml ended every verb with a bare TypeError."""
    write(f"daemon = {value}\n")
    with pytest.raises(SpecError, match=r"weft\.toml: daemon: .* is no table; write \[daemon\] on a line"):
        load_settings({}, {}, None)


@pytest.mark.parametrize("name", ["workers", "stand_ins", "gpus", "loaders", "threads", "max_queued", "drain_seconds"])
def test_true_is_no_number(name: str) -> None:
    """`workers = true` was one worker; `weft.Daemon(threads=True)` died with a usage message of the command's."""
    write(f"[daemon]\n{name} = true\n")
    with pytest.raises(SpecError, match=rf"weft\.toml: {name}: true is no whole number; write one without quotes"):
        load_settings({}, {}, None)


def test_an_unknown_table_is_named() -> None:
    write("[deamon]\nworkers = 3\n")
    with pytest.raises(SpecError, match=r"weft\.toml: 'deamon': unknown key; the settings stand under \[daemon\]"):
        load_settings({}, {}, None)


def test_an_unknown_setting_is_named_with_the_one_that_was_meant() -> None:
    write("[daemon]\nworker = 3\n")
    with pytest.raises(SpecError, match=r"weft\.toml: worker: unknown key; did you mean workers\?"):
        load_settings({}, {}, None)


@pytest.mark.parametrize("content", [b"[daemon", b"workers = \xff", b"x = " + b"[" * 5000])
def test_a_file_that_is_no_toml_is_named(content: bytes) -> None:
    Path("weft.toml").write_bytes(content)
    with pytest.raises(SpecError, match=r"weft\.toml: cannot be read as TOML"):
        load_settings({}, {}, None)


def test_a_file_that_was_asked_for_must_be_there_and_the_default_one_need_not() -> None:
    assert load_settings({}, {}, None).workers == 0
    with pytest.raises(SpecError, match=r"mine\.toml: cannot be read"):
        load_settings({}, {}, Path("mine.toml"))
    assert load_settings({}, {}, write("[daemon]\nworkers = 4\n", "mine.toml")).workers == 4


def test_every_problem_has_a_line_of_its_own() -> None:
    write("[daemon]\nthreads = 0\n")
    with pytest.raises(SpecError) as caught:
        load_settings({"workers": -1}, {"WEFT_MAX_QUEUED": "0"}, None)
    starts = sorted(line.partition(":")[0] for line in str(caught.value).splitlines())
    assert starts == ["--workers", "WEFT_MAX_QUEUED", "weft.toml"]


def test_paths_follow_from_the_directories(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    monkeypatch.setenv("XDG_STATE_HOME", "/home/me/.state")
    settings = load_settings({}, {}, None)
    assert settings.socket_path == Path("/run/user/7/weft/weft.sock")
    assert settings.runs_path == Path("/home/me/.state/weft/runs")
    assert load_settings({"runs_dir": "/big/runs"}, {}, None).runs_path == Path("/big/runs")


def test_directories_are_those_of_where_it_was_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "x")
    fields = ("runtime_dir", "state_dir", "runs_dir", "cache_dir")
    settings = load_settings({"runs_dir": "../runs"}, {"WEFT_STATE_DIR": "s", "WEFT_CACHE_DIR": ""}, None)
    found = [getattr(settings, field) for field in fields]
    assert found == [tmp_path / "x/weft", tmp_path / "s", tmp_path / "../runs", tmp_path]


def test_one_that_is_written_from_a_directory_that_is_gone_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(SpecError, match=r"--state-dir: s stands in a directory that is gone; write an absolute path"):
        load_settings({"state_dir": "s", "runtime_dir": "/r", "cache_dir": "/c"}, {}, None)


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may run as a user that has no entry in /etc/passwd: pathlib's traceback was all that was told."""
    for variable in ("HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # KeyError, as of one that has none
    with pytest.raises(SpecError, match="no entry in /etc/passwd; set HOME, or both WEFT_STATE_DIR and WEFT_CACHE_DIR"):
        load_settings({}, {}, None)
    assert load_settings({}, {"WEFT_STATE_DIR": "/s", "WEFT_CACHE_DIR": "/c"}, None).state_dir == Path("/s")


@pytest.mark.parametrize("field", ["runtime_dir", "state_dir", "runs_dir", "cache_dir"])
def test_a_directory_that_no_message_can_name_is_refused(field: str) -> None:
    """Of a run directory each job failed with the traceback of a UnicodeEncodeError, as a fault of Weft's."""
    with pytest.raises(
        SpecError, match=r": '/a/d\\udcff' has bytes that are not UTF-8; give another path, or rename it"
    ):
        load_settings({field: "/a/d\udcff"}, {}, None)


def test_the_number_of_workers_follows_from_the_cores_and_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    assert load_settings({}, {}, None).num_workers(6) == 6
    assert load_settings({"threads": 4}, {}, None).num_workers(6) == 1
    assert load_settings({"threads": 7}, {}, None).num_workers(6) == 1
    assert load_settings({"threads": 4, "workers": 3}, {}, None).num_workers(6) == 3


def test_stand_ins_take_cores_from_the_workers_that_nobody_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    assert load_settings({"stand_ins": 2}, {}, None).num_workers(6) == 4
    assert load_settings({"stand_ins": 9}, {}, None).num_workers(6) == 1
    assert load_settings({"stand_ins": 2, "workers": 6}, {}, None).num_workers(6) == 6


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:0", ("127.0.0.1", 0)),
        (":9464", ("127.0.0.1", 9464)),
        ("::1:80", ("::1", 80)),
        ("[::1]:80", ("::1", 80)),
        ("", None),
    ],
)
def test_an_address_is_a_host_and_a_port(text: str, address: tuple[str, int] | None) -> None:
    assert load_settings({"metrics": text}, {}, None).metrics_address == address
