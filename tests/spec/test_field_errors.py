"""What a field is told that does not take a value: one line, the field's path, the value, what to write instead.

Every field of every table meets every kind of value, so that a new field cannot bring a sentence of pydantic's along.
"""

from __future__ import annotations

import datetime
import re
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import BaseModel

import weft.spec.field_errors
from weft.spec.job_spec import JobSection, JobSpec, ProfileSection, SpecError, StopSection, Strategy
from weft.spec.replica import Replica
from weft.spec.settings import Settings, load_settings
from weft.spec.strategy import Prefetch
from weft.workload.data.batches import Batches
from weft.workload.entry import load_workload
from weft.workload.optimizer import make_optimizer
from weft.workload.workload import Workload, WorkloadError, make_scheduler

TABLES: dict[type[BaseModel], dict[str, Any]] = {
    JobSection: {"entry": "a.py:f", "steps": 1, "batch_size": 4},
    Strategy: {},
    Replica: {"device": "gpu"},
    Prefetch: {},
    ProfileSection: {},
    StopSection: {"metric": "loss"},
    JobSpec: {"job": {"entry": "a.py:f", "steps": 1, "batch_size": 4}},
}
VALUES: Mapping[str, Any] = {
    "text": "no such",
    "empty text": "",
    "text of a number": "3",
    "negative": -1,
    "zero": 0,
    "large": 10**10,
    "huge": 10**30,
    "fraction": 1.5,
    "nan": float("nan"),
    "infinite": float("inf"),
    "true": True,
    "empty list": [],
    "list": [{"a": 2}, "x"],
    "numbers": [-1, 10**10, 0.5],
    "long list": [0] * 100,
    "table": {"a": 1},
    "keys that are no text": {1: 2},
    "bytes": b"x",
    "date": datetime.date(1979, 5, 27),
    "time": datetime.datetime(1979, 5, 27, 7, 32),
    "object": object(),
    "surrogate": "\ud800",
    "NUL": "\0",
}
JARGON = re.compile(
    r"[Ii]nput should|valid (dictionary|integer|string|number|list|boolean)|https?:|pydantic|validation error|"
    r"type=|NoneType|datetime\.|Errno|codec|Traceback|JobSection\.|does not fit; see"
)
REMEDY = re.compile(r"(; |, )?(write|give|add|leave|did you mean|known here|build|use) ?")


def problems_of(error: pytest.ExceptionInfo[SpecError]) -> list[str]:
    assert type(error.value) is SpecError
    return str(error.value).splitlines()


def assert_told(line: str, field: str) -> None:
    """A sentence for whoever wrote the field."""
    assert field in line, line
    assert not JARGON.search(line), line
    assert REMEDY.search(line), line
    assert line.isprintable(), line
    assert len(line) < 340, line


def takes(table: type[BaseModel], field: str, value: Any) -> bool:
    try:
        table(**TABLES[table] | {field: value})
    except SpecError:
        return False
    return True


EACH_FIELD = [
    pytest.param(table, field, id=f"{table.__name__}.{field}") for table in TABLES for field in table.model_fields
]


@pytest.mark.parametrize(("table", "field"), EACH_FIELD)
def test_a_field_tells_what_to_write_in_place_of_any_value_that_it_does_not_take(
    table: type[BaseModel], field: str
) -> None:
    refused = 0
    for name, value in VALUES.items():
        if takes(table, field, value):
            continue
        refused += 1
        with pytest.raises(SpecError) as caught:
            table(**TABLES[table] | {field: value})
        lines = problems_of(caught)
        for line in lines:
            assert line.startswith(f"{table.__name__}: "), line
            assert_told(line, field)
        plain = isinstance(value, (str, int, float)) and "\0" not in str(value) and name != "surrogate"
        told = weft.spec.field_errors.shown(value)
        if plain and len(lines) == 1 and "cannot stand beside" not in lines[0]:
            assert told in lines[0] or str(value) in lines[0], (name, lines[0])
    assert refused >= 10


def test_a_value_of_a_table_inside_another_is_told_with_its_whole_path() -> None:
    with pytest.raises(SpecError) as caught:
        JobSpec(job=JobSection(**TABLES[JobSection]), strategy={"replicas": [{}, {"stages": 0}]})  # type: ignore[arg-type]
    assert problems_of(caught) == ["JobSpec: strategy.replicas.1.stages: 0 is too small; write 1 or more"]


def test_each_problem_of_a_spec_has_a_line() -> None:
    with pytest.raises(SpecError) as caught:
        JobSpec(job={"entry": 3, "steps": "x"}, profile=4)  # type: ignore[arg-type]
    assert problems_of(caught) == [
        'JobSpec: job.entry: 3 is no text; write it in quotes, for example "digits.py:workload"',
        "JobSpec: job.steps: 'x' is no whole number; write one without quotes, for example 4",
        "JobSpec: job.batch_size: missing; add batch_size, for example batch_size = 100",
        "JobSpec: profile: 4 is no table; write keys and values, for example { key = 1 }",
    ]


@pytest.mark.parametrize(
    ("section", "key", "example"), [("checkpoint", "every", "500 steps"), ("stop", "max_time", "2 h")]
)
def test_a_number_for_an_interval_is_told_with_an_interval(section: str, key: str, example: str) -> None:
    """The remedy for `--checkpoint 5` was to write it in quotes, and then '5' was no interval."""
    with pytest.raises(SpecError) as caught:
        JobSpec(job=JobSection(**TABLES[JobSection]), **{section: {key: 5}})
    told = f'JobSpec: {section}.{key}: 5 is no text; write it in quotes, for example "{example}"'
    assert problems_of(caught) == [told]


def test_a_spec_that_is_wrong_all_over_is_told_in_few_lines() -> None:
    with pytest.raises(SpecError) as caught:
        Strategy(split=[0.5] * 100_000)  # type: ignore[list-item]
    lines = problems_of(caught)
    assert lines[0] == "Strategy: split.0: 0.5 is no whole number; write one without quotes, for example 4"
    assert len(lines) == weft.spec.field_errors.MAX_PROBLEMS + 1
    assert lines[-1] == "and 99980 more problems; mend these first"


def test_a_missing_table_is_told_with_what_it_needs() -> None:
    with pytest.raises(SpecError) as caught:
        JobSpec.parse({}, source="digits.toml")
    assert problems_of(caught) == ["digits.toml: job: missing; add the table [job] with entry and batch_size"]


def test_a_spec_is_not_changed_once_it_is_built() -> None:
    spec = JobSpec(**TABLES[JobSpec])
    with pytest.raises(SpecError, match=r"^JobSection: steps: frozen, cannot be changed; build another with steps ="):
        spec.job.steps = 3


@pytest.mark.parametrize("source", ["flag", "environment", "file"])
@pytest.mark.parametrize("field", Settings.model_fields)
def test_a_setting_tells_what_to_write_in_place_of_any_value(
    field: str, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    named = {"flag": f"--{field.replace('_', '-')}", "environment": f"WEFT_{field.upper()}", "file": field}
    for value in VALUES.values():
        flags, environment = ({field: value}, {}) if source == "flag" else ({}, {f"WEFT_{field.upper()}": str(value)})
        if source == "file":
            if not isinstance(value, (bool, int)):
                continue
            environment = {}
            Path("weft.toml").write_text(f"[daemon]\n{field} = {str(value).lower()}\n")
        try:
            load_settings(flags, environment, None)
        except SpecError as error:
            for line in str(error).splitlines():
                assert_told(line, named[source])


# --- the workload, which is Python

GOOD_DATA = (torch.zeros(4, 1), torch.zeros(4, 1))
WORKLOAD_VALUES = {
    name: value for name, value in VALUES.items() if name not in ("keys that are no text", "surrogate", "NUL")
} | {"none": None, "tensor": torch.zeros(3), "module": torch.nn.Linear(1, 1), "type": int}


def use(workload: Workload, tmp_path: Path) -> None:
    """As a worker does before it trains."""
    spec = JobSpec(job=JobSection(entry="job.py:workload", steps=1, batch_size=4), directory=str(tmp_path))
    (tmp_path / "job.py").write_text("import given\ndef workload():\n    return given.WORKLOAD\n")
    module = type(typing)("given")
    module.WORKLOAD = workload  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, "given", module)
        workload = load_workload(spec)
    Batches(workload, seed=0)
    optimizer = make_optimizer(workload.optimizer, workload.model.parameters())
    if optimizer is not None:
        make_scheduler(workload.scheduler, optimizer)


@pytest.mark.parametrize("field", Workload.__dataclass_fields__)
def test_a_field_of_the_workload_that_cannot_be_used_is_named_with_what_to_give(field: str, tmp_path: Path) -> None:
    good: dict[str, Any] = {
        "model": torch.nn.Linear(1, 1),
        "loss": torch.nn.MSELoss(),
        "train": GOOD_DATA,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    }
    use(Workload(**good), tmp_path)
    told = 0
    for name, value in WORKLOAD_VALUES.items():
        if field not in ("model", "train", "loss", "optimizer") and value is None:
            continue
        if callable(value) and field in ("loss", "weight", "collate", "optimizer", "scheduler"):
            continue  # what it returns is looked at when it is called
        problem = problem_of(Workload(**good | {field: value}), tmp_path)
        if problem:
            told += 1
            assert len(problem.splitlines()) == 1, (name, problem)
            assert_told(problem, f"Workload.{field}")
    assert told >= 10


def problem_of(workload: Workload, tmp_path: Path) -> str:
    try:
        use(workload, tmp_path)
    except WorkloadError as error:
        return str(error)
    return ""
