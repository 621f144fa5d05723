"""`weft schedule`: the grid on stdout is a file that it takes again, and a fault in one is a sentence with its line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from weft.cli.verbs.app import app


def weft(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["schedule", *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_what_is_printed_may_be_given_as_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, grid, told = weft("last-stage", "--stages", "3", "--microbatches", "5")
    assert (code, told) == (0, "idle 29 % if every pass takes as long; microbatches in flight: 5, 3, 1\n")
    Path("my.grid").write_text(grid)
    assert weft("my.grid")[1].splitlines()[1:] == grid.splitlines()[1:]


def test_a_worker_may_have_more_stages_than_two() -> None:
    _, grid, _ = weft("interleaved", "--stages", "6", "--microbatches", "2", "--stages-per-worker", "3")
    assert [len(line.split()) - line.count(" .") for line in grid.splitlines()[1:]] == [12, 12]


def test_json_has_programs_and_what_follows_from_them() -> None:
    code, text, _ = weft("1f1b", "--stages", "2", "--microbatches", "2", "--json")
    told = json.loads(text)
    assert code == 0
    assert (told["in_flight"], told["idle"]) == ([2, 1], pytest.approx(1 / 3))
    assert told["grid"] == [["F0", "F1", ".", "B0", ".", "B1"], [".", "F0", "B0", "F1", "B1"]]
    assert told["programs"][1][1] == {"stage": 1, "kind": "backward", "microbatch": 0}


def test_what_is_wrong_is_told_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.grid").write_text("F0 B0 F1 B1\nF0 F1 B0 B1\n")
    Path("small.grid").write_text("F0 B0\n")
    for arguments, sentence in {
        ("bad.grid",): "bad.grid: line 1 stands at B0",
        ("none.grid",): "cannot be read (No such file or directory)",
        ("interleaved", "--stages", "5"): "has 2 stages in each worker, and 5 are no multiple of that; use stages = 6",
        ("gpipe", "--stages-per-worker", "2"): "stages_per_worker = 2 is of schedule = 'interleaved'",
        ("gpip",): "'gpip' is no schedule; did you mean gpipe?",
        (
            "small.grid",
            "--stages",
            "2",
        ): "the grid has strategy.stages = 1 and strategy.microbatches = 1, and 2 and 1 are asked",
    }.items():
        code, out, told = weft(*arguments)
        assert (code != 0, out) == (True, "")
        assert sentence in told
        assert len(told.splitlines()) == 1


@pytest.mark.parametrize("name", ["measured", "dynamic"])
def test_of_what_a_job_makes_it_says_so_and_prints_the_order_of_equal_stages(name: str) -> None:
    code, grid, told = weft(name, "--stages", "2", "--microbatches", "3")
    assert (code, grid.splitlines()[0]) == (0, f"# {name}, 2 stages, 3 microbatches")
    assert told.startswith(f"{name}: ")
    assert "schedule.grid\nidle " in told
    assert json.loads(weft(name, "--json")[1])["schedule"] == name
