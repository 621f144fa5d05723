"""All boards, and the files under observability/ that are made from them and from the rules."""

from __future__ import annotations

import json
from typing import Final

from weft.metrics.grafana.board import Dashboard, board_json, check_board
from weft.metrics.grafana.jobs import JOB_BOARD, OVERVIEW
from weft.metrics.grafana.node import NODE
from weft.metrics.grafana.pipeline import PIPELINE
from weft.metrics.grafana.rules import alert_rules, check_rules, families, recording_rules

BOARDS: Final[tuple[Dashboard, ...]] = (OVERVIEW, JOB_BOARD, PIPELINE, NODE)


def files() -> dict[str, str]:
    """Texts by path. Errors: QueryError where a board or a rule asks for what is not declared."""
    check_rules()
    known = families()
    for board in BOARDS:
        check_board(board, known)
    boards = {
        f"grafana/dashboards/{board.uid}.json": json.dumps(board_json(board), indent=2) + "\n" for board in BOARDS
    }
    return {"prometheus/rules.yml": recording_rules(), "prometheus/alerts.yml": alert_rules(), **boards}
