"""The boards ask for what is declared, hang together, and the files made from them are current."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from weft.metrics.grafana.__main__ import main
from weft.metrics.grafana.board import Dashboard, Panel, Query, board_json, check_board
from weft.metrics.grafana.boards import BOARDS, files
from weft.metrics.grafana.queries import QueryError
from weft.metrics.grafana.rules import families

FOLDER = Path(__file__).parents[3] / "observability"
EACH_BOARD = pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)


def board_with(*queries: Query, **changes: Any) -> Dashboard:
    panel = Panel(title="Panel", text="", unit="none", queries=queries)
    rows = (("Row", (replace(panel, **changes),)),)
    return Dashboard(uid="weft-test", title="Test", text="", variables=("instance", "job"), rows=rows)


def test_there_are_four_boards() -> None:
    assert [board.title for board in BOARDS] == ["Overview", "Job", "Pipeline", "Node and daemon"]


@EACH_BOARD
def test_a_board_asks_for_what_is_declared(board: Dashboard) -> None:
    check_board(board, families())


@EACH_BOARD
def test_jobs_of_two_daemons_that_have_the_same_id_are_not_added_up(board: Dashboard) -> None:
    for panel in board.panels():
        for query in panel.queries:
            for by in re.findall(r"by \(([^)]*)\)", query.expression):
                labels = set(by.split(", "))
                assert "job" not in labels or "instance" in labels, (panel.title, query.expression)


@EACH_BOARD
def test_panels_have_a_text_and_do_not_overlap(board: Dashboard) -> None:
    cells: set[tuple[int, int]] = set()
    for panel in board.panels():
        assert panel.text.endswith("."), panel.title
    for placed in board_json(board)["panels"]:
        box = placed["gridPos"]
        assert box["x"] + box["w"] <= 24
        own = {(x, y) for x in range(box["x"], box["x"] + box["w"]) for y in range(box["y"], box["y"] + box["h"])}
        assert not own & cells, placed["title"]
        cells |= own


@EACH_BOARD
def test_a_board_has_its_variables_and_leads_to_the_others(board: Dashboard) -> None:
    made = board_json(board)
    assert [each["name"] for each in made["templating"]["list"]] == ["datasource", *board.variables]
    (links,) = made["links"]
    assert set(links["tags"]) <= set(made["tags"])
    assert links["includeVars"]
    assert all(panel["datasource"]["uid"] == "${datasource}" for panel in made["panels"] if panel["type"] != "row")
    queries = "".join(query.expression for panel in board.panels() for query in panel.queries)
    assert all(f"${name}" in queries for name in board.variables)


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        (Query(expression="weft_mood", legend=""), "Test, 'Panel': .*asks for weft_mood"),
        (Query(expression='weft_job_step{stage="1"}', legend=""), "matches stage"),
        (Query(expression="weft_job_step", legend="{{worker}}"), "the legend shows worker, which no series has"),
        (Query(expression='weft_worker_up{worker=~"$worker"}', legend=""), "the board has no variable worker"),
    ],
)
def test_a_panel_that_asks_for_what_does_not_exist_fails_the_generation(query: Query, problem: str) -> None:
    with pytest.raises(QueryError, match=problem):
        check_board(board_with(query), families())


def test_a_unit_that_grafana_does_not_have_fails_the_generation() -> None:
    with pytest.raises(QueryError, match="unit 'furlongs' is none of"):
        check_board(board_with(Query(expression="weft_job_step", legend=""), unit="furlongs"), families())


def test_the_files_made_from_the_declared_metrics_are_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main("--check", str(FOLDER)) == 0, capsys.readouterr().err


def test_files_that_are_not_current_are_named_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main("--write", str(tmp_path)) == 0
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")} == set(files())
    (tmp_path / "prometheus" / "alerts.yml").write_text("groups: []\n")
    assert run_main("--check", str(tmp_path)) == 1
    assert "not current: prometheus/alerts.yml; run" in capsys.readouterr().err
    assert run_main("--write", str(tmp_path)) == run_main("--check", str(tmp_path)) == 0


def run_main(*arguments: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["grafana", *arguments])
        return main()
