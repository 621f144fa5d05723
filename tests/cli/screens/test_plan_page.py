"""What `weft plan` prints: every part of the answer, as wide as the terminal."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from weft.cli.screens.plan_page import plan_page

PLANNED: dict[str, Any] = {
    "lines": ["auto: a pipeline of 2 workers", "auto: next are", "auto: of 3 candidates"],
    "notes": ["snapshots: none"],
    "title": "a pipeline of 2 workers",
    "predicted_iteration_seconds": 0.01,
    "samples_per_second": 6400.0,
    "bottleneck": "cpu-1/compute",
    "bottleneck_busy": 0.9,
    "limit_seconds": 0.009,
    "critical_cycle": "FORWARD(0,0) → FORWARD(1,0)",
    "critical_lanes": ["cpu-0/compute", "cpu-1/compute"],
    "stages": [
        {"worker": "cpu-0", "units": [0, 1], "parameter_bytes": 1 << 20, "memory_bytes": 2 << 20},
        {"worker": "cpu-1", "units": [1, 4], "parameter_bytes": 1 << 20, "memory_bytes": 3 << 20},
    ],
    "memory": [
        {
            "worker": f"cpu-{number}",
            "bytes": 2 << 20,
            "activation_bytes": 1 << 10,
            "optimizer_bytes": 0,
            "free_bytes": 1 << 30,
        }
        for number in range(2)
    ],
    "shared_bytes": 1 << 20,
    "shared_bytes_free": 1 << 30,
    "timeline": [
        {"lane": "loader-0/load", "tasks": []},
        {
            "lane": "cpu-0/compute",
            "tasks": [
                {"task": "FORWARD(0,0)", "mode": "forward", "label": "F0", "start": 0.0, "end": 0.004},
                {"task": "BACKWARD(0,0)", "mode": "backward", "label": "B0", "start": 0.006, "end": 0.01},
            ],
        },
        {
            "lane": "cpu-1/compute",
            "tasks": [{"task": "FORWARD(1,0)", "mode": "forward", "label": "F0", "start": 0.004, "end": 0.006}],
        },
    ],
    "roles": None,
    "candidates": [
        {"title": "a pipeline", "predicted_iteration_seconds": 0.01, "samples_per_second": 6400.0, "memory_bytes": 9},
        {"title": "one process", "predicted_iteration_seconds": 0.02, "samples_per_second": 3200.0, "memory_bytes": 9},
        {"title": "32 parts", "predicted_iteration_seconds": None, "samples_per_second": None, "memory_bytes": None},
    ],
}


def printed(**changes: Any) -> str:
    text = io.StringIO()
    plan_page(Console(file=text, width=80, no_color=True), PLANNED | changes)
    return text.getvalue()


def test_every_part_of_the_answer_is_there() -> None:
    page = printed()
    for part in (*PLANNED["lines"], *PLANNED["notes"], "6400 samples/s", "cpu-1/compute is busy 90.0 %", "1.0 GiB"):
        assert part in page
    assert "goes round through cpu-0/compute, cpu-1/compute" in page
    assert "one process" in page
    assert "32 parts" not in page, "it was not simulated"


def test_a_task_stands_in_its_lane_where_its_time_is() -> None:
    rows = {line.split()[0]: line for line in printed().splitlines() if "/compute  " in line}
    first, second = rows["cpu-0/compute"], rows["cpu-1/compute"]
    assert first.index("F0") < second.index("F0") < first.index("B0")
    assert max(map(len, rows.values())) <= 80


@pytest.mark.parametrize(
    ("lanes", "sentence"),
    [
        (["cpu-0/compute"], "cpu-0/compute sets the pace, whose own work that is"),
        (None, "what sets the pace was not sought: there are too many tasks"),
    ],
)
def test_the_critical_cycle_is_told_in_words(lanes: list[str] | None, sentence: str) -> None:
    assert sentence in printed(critical_lanes=lanes)


def test_a_plan_that_nobody_chose_has_its_title() -> None:
    page = printed(lines=[], candidates=PLANNED["candidates"][:1])
    assert page.startswith("a pipeline of 2 workers\n")
    assert "candidate" not in page


def test_what_the_host_would_bring_stands_in_a_table_with_what_is_not_known() -> None:
    known = {"role": "replica", "brings": -0.0757, "title": "both", "predicted_iteration_seconds": 0.1, "why_not": None}
    unknown = {"role": "loader", "brings": None, "title": None, "predicted_iteration_seconds": None, "why_not": "a why"}
    roles = {"title": "one GPU", "predicted_iteration_seconds": 0.09, "at_most": 0.0284, "best": "second job"}
    page = printed(roles=roles | {"roles": [known, unknown]})
    assert "the CPU beside one GPU, 90 ms an iteration: worth most for a second job" in page
    rows = {line.split()[0]: " ".join(line.split()) for line in page.splitlines() if line.strip()}
    assert rows["replica"] == "replica -7.6 %, at most 2.8 % both 100 ms"
    assert rows["loader"] == "loader - a why -"
