"""Path chart: the critical path of one iteration as rows of cells, a row for each lane that it passes through.

cpu-0/compute  F(0,0)──                                              B(0,3)──U(0)
cpu-1/compute          F(1,0)────B(1,0)───────F(1,3)────B(1,3)───────
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.text import Text

from weft.cli.screens.lane_bar import STYLES

MAX_LANES: Final = 6  # a path that passes through more is no picture any more; arbitrary


def path_chart(steps: Sequence[Mapping[str, Any]], width: int, *, colour: bool) -> dict[str, Text]:
    """By lane, in the order of the path; {} where there is no step, or too many lanes for a picture."""
    if not steps:
        return {}
    begin = steps[0]["start_seconds"]
    seconds = steps[-1]["start_seconds"] + steps[-1]["seconds"] - begin
    rows: dict[str, Text] = {}
    for step in steps:
        row = rows.setdefault(step["lane"], Text(no_wrap=True))
        first = _cell(step["start_seconds"] - begin, seconds, width)
        last = _cell(step["start_seconds"] + step["seconds"] - begin, seconds, width)
        row.append(" " * (first - row.cell_len))
        if (num_cells := last - row.cell_len) > 0:
            row.append(_drawn(step["task"], num_cells), STYLES.get(step["mode"], "") if colour else "")
    return rows if len(rows) <= MAX_LANES else {}


def short_name(task: str) -> str:
    """FORWARD(0,3) is F(0,3)."""
    kind, bracket, about = task.partition("(")
    return f"{kind[:1]}{bracket}{about}"


def _cell(at: float, of: float, width: int) -> int:
    return round(width * at / of) if of else 0


def _drawn(task: str, num_cells: int) -> str:
    return short_name(task)[:num_cells].ljust(num_cells, "─")
