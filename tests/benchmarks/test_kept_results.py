"""What `benchmarks/run.py` keeps of reports: rows of one kind of machine together, those of others in columns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import run

pytestmark = pytest.mark.quick
EPYC, XEON = "AMD EPYC", "Intel Xeon"


def report(cpu: str, values: dict[str, float], *, torch: str = "2.13") -> dict[str, Any]:
    return {
        "benchmark": "pipeline",
        "machine": {"cpu": cpu, "cores": 2, "memory_gib": 23.5, "gpus": [], "kernel": "6.18"},
        "versions": {"torch": torch},
        "results": [
            {
                "name": name,
                "value": value,
                "unit": "x",
                "low": value,
                "high": value,
                "runs": 3,
                "goal": "<= 2",
                "how": "",
            }
            for name, value in values.items()
        ],
    }


@pytest.fixture
def keep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(run, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(run, "README", tmp_path / "README.md")
    (tmp_path / "README.md").write_text(f"# Benchmarks\n\n{run.END}\n", encoding="utf-8")

    def kept(new: dict[str, Any]) -> list[list[str]]:
        (tmp_path / "report.json").write_text(json.dumps(new), encoding="utf-8")
        run._keep_from(tmp_path / "report.json")
        lines = (tmp_path / "README.md").read_text(encoding="utf-8").splitlines()
        return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]

    return kept


def test_parts_of_one_machine_are_one_table(keep: Any) -> None:
    keep(report(EPYC, {"a": 1, "b": 3}))
    table = keep(report(EPYC, {"b": 1.5}))
    assert [(row[0], row[1], row[-1]) for row in table[2:]] == [("`a`", "1", "yes"), ("`b`", "1.5", "yes")]


def test_another_machine_has_a_column_that_stays(keep: Any) -> None:
    keep(report(XEON, {"a": 7}))
    table = keep(report(EPYC, {"a": 1, "b": 2}))
    assert XEON in table[0][-1]
    assert [(row[1], row[-1]) for row in table[2:]] == [("1", "7"), ("2", "")]
    table = keep(report(EPYC, {"b": 9}))
    assert [(row[1], row[-2], row[-1]) for row in table[2:]] == [("1", "yes", "7"), ("9", "**no**", "")]
    table = keep(report(XEON, {"b": 4}))
    assert EPYC in table[0][-1]
    assert [(row[0], row[1], row[-1]) for row in table[2:]] == [("`a`", "7", "1"), ("`b`", "4", "9")]


def test_other_versions_on_the_same_machine_take_the_place_of_the_old_ones(keep: Any) -> None:
    keep(report(XEON, {"a": 7}))
    keep(report(EPYC, {"a": 1, "b": 2}))
    table = keep(report(EPYC, {"a": 3}, torch="3.0"))
    assert [(row[0], row[1], row[-1]) for row in table[2:]] == [("`a`", "3", "7")]


def test_what_was_measured_elsewhere_alone_has_a_row_too(keep: Any) -> None:
    keep(report(XEON, {"a": 7, "c": 5}))
    table = keep(report(EPYC, {"a": 1}))
    assert [(row[0], row[1], row[6], row[-1]) for row in table[2:]] == [
        ("`a`", "1", "<= 2", "7"),
        ("`c`", "", "<= 2", "5"),
    ]


@pytest.mark.parametrize("text", [None, "no json", "{}", "[]", '{"benchmark": "pipeline", "results": [{"nam": 1}]}'])
def test_what_is_no_report_is_told_with_a_remedy_and_nothing_is_written(
    keep: Any, tmp_path: Path, text: str | None
) -> None:
    keep(report(EPYC, {"a": 1}))
    before = run.README.read_bytes(), (run.RESULTS / "pipeline.json").read_bytes()
    path = tmp_path / "other.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(SystemExit, match=r"other.json is no report .*; give what a benchmark has printed with --json"):
        run._keep_from(path)
    assert (run.README.read_bytes(), (run.RESULTS / "pipeline.json").read_bytes()) == before
