"""Job specs: what is taken, and that whatever is not is refused with the field's path and a remedy (promise B6)."""

from __future__ import annotations

import copy
import datetime
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from weft.spec.job_spec import (
    MAX_ARGS_DEPTH,
    CheckpointSection,
    JobSection,
    JobSpec,
    ProfileSection,
    SpecError,
    StopSection,
    Strategy,
)
from weft.transport.wire.frames import MAX_CLIENT_FRAME_BYTES, FrameReader, encode

FULL = """
[job]
entry = "digits.py:workload"
args = { hidden = 256, name = "wide", rates = [0.1, 0.2], deep = { on = true } }
epochs = 20
batch_size = 100
seed = 7
priority = -3
mode = "forward"
resume_from = "runs/digits-1"
on_hang = "notify"
hang_seconds = 90.0

[strategy]
schedule = "gpipe"
microbatches = 4
"""
GOOD: dict[str, Any] = {
    "job": {"entry": "digits.py:workload", "args": {}, "epochs": 2, "batch_size": 100, "seed": 7, "priority": 0},
    "strategy": {"schedule": "1f1b", "stages": 1, "microbatches": 1, "recompute": False},
    "profile": {"first": 10, "iterations": 3},
    "checkpoint": {"every": "500 steps", "keep": 2, "keep_best": "accuracy", "best": "max"},
    "stop": {"metric": "accuracy", "mode": "max", "patience": 3, "min_delta": 0.0, "max_time": "2 h"},
    "directory": "/jobs",
}
SECTIONS: dict[str, type[BaseModel]] = {
    "job": JobSection,
    "strategy": Strategy,
    "profile": ProfileSection,
    "checkpoint": CheckpointSection,
    "stop": StopSection,
}


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def changed(path: str, value: Any, *, remove: bool = False) -> dict[str, Any]:
    tables = copy.deepcopy(GOOD)
    table = tables
    *parents, name = path.split(".")
    for parent in parents:
        table = table[parent]
    if remove:
        del table[name]
    else:
        table[name] = value
    return tables


# --- what is taken


def test_every_field_of_a_toml_spec_reaches_the_spec(tmp_path: Path) -> None:
    path = tmp_path / "digits.toml"
    path.write_text(FULL)
    spec = JobSpec.load(path)
    assert spec.to_wire() == {
        "job": {
            "entry": "digits.py:workload",
            "args": {"hidden": 256, "name": "wide", "rates": [0.1, 0.2], "deep": {"on": True}},
            "epochs": 20,
            "batch_size": 100,
            "seed": 7,
            "priority": -3,
            "mode": "forward",
            "resume_from": "runs/digits-1",
            "on_hang": "notify",
            "hang_seconds": 90.0,
        },
        "strategy": Strategy(schedule="gpipe", microbatches=4).model_dump(exclude_none=True),
        "directory": str(tmp_path),
    }
    assert spec.to_wire()["job"].keys() | {"steps", "steps_per_epoch"} == JobSection.model_fields.keys()


@pytest.mark.parametrize("model", [JobSection, Strategy])
def test_every_field_says_what_it_is(model: type[BaseModel]) -> None:
    assert [name for name, field in model.model_fields.items() if not field.description] == []


def test_what_is_left_out_has_a_default() -> None:
    spec = JobSpec.parse({"job": {"entry": "a/b.py:f", "steps": 3, "batch_size": 1}})
    assert (spec.job.args, spec.job.epochs, spec.job.seed, spec.job.priority) == ({}, None, 0, 0)
    assert (spec.job.mode, spec.strategy) == ("train", Strategy())
    assert spec.directory == str(Path.cwd())


def test_one_of_a_directory_that_is_gone_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(SpecError, match="the working directory is gone; change to one that is there"):
        JobSpec(job={"entry": "a/b.py:f", "steps": 3, "batch_size": 1})


def test_the_entry_is_relative_to_the_specs_own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "digits.toml").write_text(FULL)
    monkeypatch.chdir(tmp_path)
    spec = JobSpec.load("jobs/digits.toml")
    assert spec.entry_file == tmp_path / "jobs" / "digits.py"
    assert spec.entry_function == "workload"
    with pytest.raises(SpecError, match=r"job\.entry: '.*/jobs/digits\.py' is not a file; the path in entry is"):
        spec.check_files()
    (tmp_path / "jobs" / "digits.py").touch()
    spec.check_files()


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(args=st.dictionaries(st.text(min_size=1, max_size=5), plain, max_size=3), seed=st.integers(0, 2**63 - 1))
def test_a_spec_is_the_same_on_the_other_side_of_the_wire(args: dict[str, Any], seed: int) -> None:
    spec = JobSpec.parse({**GOOD, "job": {**GOOD["job"], "args": args, "seed": seed}})
    [received] = FrameReader(MAX_CLIENT_FRAME_BYTES, strict=True).feed(encode(spec.to_wire()))
    assert JobSpec.parse(received) == spec


def test_a_spec_cannot_be_changed_once_it_is_built() -> None:
    spec = JobSpec.parse(GOOD)
    with pytest.raises(ValueError, match="frozen"):
        spec.job.seed = 8


# --- overrides


@pytest.mark.parametrize(
    ("override", "section", "field", "value"),
    [
        ("strategy.microbatches=3", "strategy", "microbatches", 3),
        (" strategy . microbatches = 3 ", "strategy", "microbatches", 3),
        ("strategy.schedule=1f1b", "strategy", "schedule", "1f1b"),
        ('strategy.schedule="1f1b"', "strategy", "schedule", "1f1b"),
        ("strategy.recompute=false", "strategy", "recompute", False),
        ("job.args={ hidden = 3 }", "job", "args", {"hidden": 3}),
        ("job.entry=a.py:f", "job", "entry", "a.py:f"),
        ("job.entry=a=b.py:f", "job", "entry", "a=b.py:f"),
    ],
)
def test_an_override_is_a_toml_value_or_a_bare_word(
    tmp_path: Path, override: str, section: str, field: str, value: Any
) -> None:
    path = tmp_path / "job.toml"
    path.write_text(FULL)
    assert getattr(getattr(JobSpec.load(path, [override]), section), field) == value


def test_an_override_reaches_into_args_and_makes_the_tables_it_needs(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('[job]\nentry = "a.py:f"\nsteps = 1\nbatch_size = 1\n')
    spec = JobSpec.load(path, ["job.args.model.hidden=3", "strategy.stages=2", "job.args.model.hidden=4"])
    assert spec.job.args == {"model": {"hidden": 4}}
    assert spec.strategy.stages == 2


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("stages", "write key.path=value, for example strategy.stages=2"),
        ("=3", "write key.path=value"),
        ("strategy..stages=3", "write key.path=value"),
        (".stages=3", "write key.path=value"),
        ("", "write key.path=value"),
        ("job.seed.x=3", "seed is no table; give a key that stands in a table"),
        ("strategy.stage=3", "strategy.stage: unknown key; did you mean stages?"),
        ("strategy.stages=many", "strategy.stages: 'many' is no whole number; write one without quotes"),
        ("strategy.stages=", "strategy.stages: '' is no whole number; write one without quotes"),
        ("job=3", "job: 3 is no table; write keys and values"),
        ("job.args.x=" + "[" * 5000, "--set job.args.x: nested too deep"),
        ("job.args.day=1979-05-27", "args.day = 1979-05-27 cannot be handed on; write text"),
    ],
    ids=lambda text: text[:30],
)
def test_an_override_that_cannot_be_applied_is_named_with_a_remedy(tmp_path: Path, override: str, text: str) -> None:
    path = tmp_path / "job.toml"
    path.write_text(FULL)
    with pytest.raises(SpecError, match=re.escape(text)):
        JobSpec.load(path, [override])


# --- files that are no specs


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"[job", "not valid TOML"),
        (b'entry = "\xff"', "cannot be read"),
        (b"[job]\nargs = { x = " + b"[" * 5000, "nested too deep"),
        (b"", "job: missing; add the table [job] with entry and batch_size"),
        (b"job = 3\n", "job: 3 is no table; write keys and values"),
    ],
    ids=["half", "no UTF-8", "deep", "empty", "no table"],
)
def test_a_file_that_is_no_spec_is_named_with_what_is_wrong(tmp_path: Path, content: bytes, text: str) -> None:
    path = tmp_path / "job.toml"
    path.write_bytes(content)
    with pytest.raises(SpecError) as caught:
        JobSpec.load(path)
    assert str(path) in str(caught.value)
    assert text in str(caught.value)


@pytest.mark.parametrize("name", ["missing.toml", ".", "nul\0.toml"])
def test_a_path_that_leads_to_no_file_is_refused_with_a_remedy(tmp_path: Path, name: str) -> None:
    with pytest.raises(SpecError, match="give the path of a job spec in TOML"):
        JobSpec.load(tmp_path / name)


# --- B6: mutated specs

POOL: dict[str, Any] = {
    "empty text": "",
    "text": "x",
    "negative": -1,
    "zero": 0,
    "fraction": 1.5,
    "true": True,
    "nan": float("nan"),
    "infinity": float("inf"),
    "huge": 10**30,
    "list": [],
    "full list": [1, {"a": 2}],
    "table": {},
    "bytes": b"x",
    "date": datetime.date(1979, 5, 27),
    "deep": nested(900),
    "object": object(),
}
TAKEN = {  # what a field takes of the pool
    "job.args": {"table"},
    "job.seed": {"zero"},
    "job.priority": {"negative", "zero"},
    "job.resume_from": {"text"},
    "strategy.recompute": {"true"},
    "job.hang_seconds": {"fraction"},
    "strategy.split": {"list"},
    "strategy.staleness": {"zero"},
    "strategy.staleness_warmup": {"zero"},
    "strategy.bucket_mib": {"fraction"},
    "strategy.prefetch": {"table"},
    "strategy.clip_norm": {"fraction", "huge"},
    "strategy.resident": {"true"},
    "strategy.compile": {"true"},
    "strategy.replan": {"true"},
    "strategy.spares": {"true"},
    "strategy.skip_nonfinite": {"true"},
    "profile.first": {"zero"},
    "stop.metric": {"text"},
    "checkpoint.keep_best": {"text"},
    "stop.min_delta": {"zero", "fraction", "huge"},
    "job": {"table"},
    "strategy": {"table"},
    "profile": {"table"},
}
FIELDS = [f"{section}.{name}" for section, model in SECTIONS.items() for name in model.model_fields]
WRONG_VALUES = [
    pytest.param(path, value, id=f"{path} is {name}")
    for path in [*FIELDS, *SECTIONS, "directory"]
    for name, value in POOL.items()
    if name not in TAKEN.get(path, set())
]
OUT_OF_RANGE = [
    pytest.param(path, value, id=f"{path} is {value!r:.20}")
    for path, values in {
        "job.entry": ["f", "a:f", "a.py", "a.py:", ":f", "a.py:a-b", "a\0.py:f", "a\n.py:f", "\ud800.py:f"],
        "job.args": [
            {1: 2},
            {"x": {"y": {3: 4}}},
            {"x": 2**63},
            {"x": [-(2**63) - 1]},
            {"x": "\ud800"},
            {"\ud800": 1},
            {"x": nested(MAX_ARGS_DEPTH + 1)},
            {"x": (1, 2)},
            {"x": {1, 2}},
            {"a\x1eb": {1, 2}},
        ],
        "job.epochs": [2**31],
        "profile.iterations": [0, 101],
        "profile.first": [-1],
        "job.steps": [2**31],
        "job.batch_size": [2**31],
        "job.seed": [2**63],
        "job.resume_from": ["", "a\0b", "\ud800"],
        "checkpoint.every": [
            "",
            "5",
            "steps",
            "0 steps",
            "-1 epoch",
            "1.5 steps",
            "nan s",
            "inf h",
            "2 weeks",
        ],
        "checkpoint.keep": [0, 1001],
        "stop.metric": ["a\nb", "\ud800"],
        "checkpoint.keep_best": ["a\nb", "\ud800"],
        "checkpoint.best": ["highest"],
        "stop.mode": ["highest"],
        "stop.patience": [2**31],
        "stop.max_time": ["500 steps", "1 epoch", "2 weeks"],
        "job.priority": [-1001, 1001],
        "strategy.schedule": ["1F1B", "gpipe ", "zero-buble", "mine.grid"],
        "strategy.stages": [257],
        "strategy.microbatches": [1025],
        "strategy.window": [2**31],
        "strategy.preset": ["GPipe", "automatic"],
        "strategy.replicas": [65, [{}] * 65, [{"device": "tpu"}], [{"stages": 257}], [{"microbatches": 0}]],
        "strategy.sync": ["none"],
        "strategy.staleness": [17, [17], [0] * 65],
        "strategy.staleness_warmup": [2**31],
        "strategy.update": ["gpu"],
        "strategy.share": ["equal"],
        "strategy.shares": [[-1], [float("nan")], [float("inf")], [1] * 65],
        "strategy.bucket_mib": [4096.5],
        "strategy.prefetch": [{"load": 0}, {"load": 17}, {"transfer": 0}, {"transfer": 17}],
        "strategy.precision": ["fp16"],
        "job.mode": ["test"],
        "directory": [".", "jobs", "/jobs\0", "/jobs\ud800"],
    }.items()
    for value in values
]
REMEDIES = re.compile("; (write|add|give|leave|did you mean|known here)|at most")


def assert_refused(tables: Any, path: str) -> None:
    with pytest.raises(SpecError) as caught:
        JobSpec.parse(tables, source="digits.toml")
    lines = str(caught.value).splitlines()
    assert any(line.startswith((f"digits.toml: {path}:", f"digits.toml: {path}.")) for line in lines), lines
    assert all(REMEDIES.search(line) for line in lines), lines
    assert all(len(line) < 300 for line in lines), "a sentence, however large the value"


@pytest.mark.parametrize(("path", "value"), WRONG_VALUES)
def test_a_value_of_the_wrong_kind_is_refused(path: str, value: Any) -> None:
    assert_refused(changed(path, value), path)


@pytest.mark.parametrize(("path", "value"), OUT_OF_RANGE)
def test_a_value_out_of_range_is_refused(path: str, value: Any) -> None:
    assert_refused(changed(path, value), path)


@pytest.mark.parametrize(
    ("path", "value"), [("job.entry", "d\udcff.py:f"), ("job.resume_from", "d\udcff"), ("directory", "/d\udcff")]
)
def test_a_path_with_bytes_of_another_encoding_is_told_to_be_that(path: str, value: str) -> None:
    """Of the directory, which nobody gives, it said to leave it out, since it were not absolute."""
    with pytest.raises(SpecError) as caught:
        JobSpec.parse(changed(path, value), source="a.toml")
    assert (
        str(caught.value) == f"a.toml: {path}: {value!r} has bytes that are not UTF-8; give another path, or rename it"
    )


@pytest.mark.parametrize("path", FIELDS)
def test_a_key_with_a_typing_error_is_refused_with_the_one_that_was_meant(path: str) -> None:
    section, name = path.split(".")
    typed = f"{name[:-1]}_"
    with pytest.raises(SpecError, match=rf"digits\.toml: {section}\.{typed}: unknown key; did you mean {name}?\?"):
        JobSpec.parse(changed(f"{section}.{typed}", 1), source="digits.toml")


def test_a_key_like_no_other_is_refused_with_those_that_are_known() -> None:
    known = "by_default, checkpoint, directory, job, plan_for, profile, stop, strategy"
    with pytest.raises(SpecError, match=f"zzz: unknown key; known here: {known}"):
        JobSpec.parse(changed("zzz", {}))
    with pytest.raises(SpecError, match=r"strategi: unknown key; did you mean strategy\?"):
        JobSpec.parse(changed("strategi", {}))


@pytest.mark.parametrize("path", ["job", "job.entry", "job.batch_size"])
def test_a_missing_field_is_refused_with_how_to_add_it(path: str) -> None:
    assert_refused(changed(path, None, remove=True), path)


def test_the_length_of_a_job_is_given_exactly_once() -> None:
    assert_refused(changed("job.steps", 3), "job")
    assert_refused(changed("job.epochs", None, remove=True), "job")
    assert_refused(changed("job.epochs", None), "job")


@pytest.mark.parametrize("tables", [None, 3, "job", [1], [("job", 1)], b"x"])
def test_what_is_no_mapping_at_all_is_refused(tables: Any) -> None:
    with pytest.raises(SpecError, match=r"job spec: .* is no table of keys and values; give the \[job\] table"):
        JobSpec.parse(tables)


def test_a_key_that_is_no_text_is_refused() -> None:
    assert_refused({**GOOD, 3: 4}, "3")


@pytest.mark.parametrize("key", ["\n", "\r", "a\nweft: all is well", "\x1b[31m", "k" * 5000, "\ud800"])
def test_a_key_adds_no_line_of_its_own_to_the_message(key: str) -> None:
    with pytest.raises(SpecError) as caught:
        JobSpec.parse({**GOOD, key: 1})
    [line] = str(caught.value).splitlines()
    assert "unknown key" in line or "no text" in line
    assert line.isprintable()
    assert len(line) < 300


def test_there_are_as_many_mutations_as_promised() -> None:
    assert len(WRONG_VALUES) + len(OUT_OF_RANGE) + len(FIELDS) >= 200


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.binary(max_size=4) | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4) | st.integers(), inner, max_size=3),
    max_leaves=6,
)
paths = st.sampled_from([*FIELDS, *SECTIONS, "directory", "job.x", "strategy.y", "z"])


@given(mutations=st.dictionaries(paths, anything, min_size=1, max_size=4))
def test_any_mutation_gives_a_spec_or_a_spec_error_that_names_a_field(mutations: dict[str, Any]) -> None:
    tables = copy.deepcopy(GOOD)
    for path, value in mutations.items():
        section, _, name = path.rpartition(".")
        table = tables[section] if section else tables
        if isinstance(table, dict):
            table[name] = value
    try:
        spec = JobSpec.parse(tables)
    except SpecError as error:
        for line in str(error).splitlines():
            assert re.match(r"job spec: .+: .", line), line
    else:
        encode(spec.to_wire())
