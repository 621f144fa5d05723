"""The screen of `weft top` at any size: what is worst is never what is left out."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from weft.cli.top.state import RecentSamples, Sample, View, report
from weft.cli.top.view import screen

LANES = {
    f"{worker}/{lane}": {
        "wall_seconds": 10.0,
        "residual_seconds": 0.0,
        "modes": {"forward" if lane == "compute" else "sync": 9.0, "stall_sync": 1.0 + 0.1 * number},
    }
    for number, worker in enumerate(("cpu-0", "cpu-1", "cpu-2"))
    for lane in ("compute", "sync")
}
STALLS = [
    {"lane": "cpu-2/compute", "cause": "sync", "task": f"SYNC(o{i},b0)", "on": "cpu-0/sync", "seconds": 1.0 / (1 + i)}
    for i in range(10)
]
STEP = {"task": "FORWARD(0,0)", "iteration": 7, "lane": "cpu-0/compute", "mode": "forward", "gap_seconds": 0.0}
PATH = {
    "iterations": 1,
    "seconds": 0.1,
    "parts": [],
    "gap_seconds": 0.0,
    "steps": [STEP | {"start_seconds": 0.0, "seconds": 0.1}],
}
JOB = {"job": "digits-1", "state": "running", "reason": None, "step": 120, "steps": 480, "loss": 0.4, "why": None}
WHY = "it needs 2 cpu workers (0 free); digits-1 holds the others"
STATUS = {"pid": 6, "version": "0.1.0", "workers": [], "jobs": {"running": 1, "failed": 0}}


def drawn(width: int, height: int, *, num_queued: int = 1, view: View | None = None, trouble: str = "") -> list[str]:
    time = {"lanes": LANES, "stalls": STALLS, "bubble_ratio": 0.0, "imbalance": 0.0, "critical_path": PATH}
    shown = JOB | {"time": time, "iteration_seconds": 0.025, "limit_seconds": 0.02}
    queued = [JOB | {"job": f"digits-{2 + i}", "state": "queued", "why": WHY} for i in range(num_queued)]
    history = RecentSamples()
    history.add(Sample(at=0.0, status=STATUS, jobs=[JOB, *queued], shown=shown))
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True, no_color=True)
    with console.capture() as capture:
        layout = screen(report(history), view or View(), trouble, (width, height), colour=False)
        console.print(layout, height=height, no_wrap=False)
    return [re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip() for line in capture.get().splitlines()]


@pytest.mark.parametrize("width", [1, 20, 80, 200])
@pytest.mark.parametrize("height", [1, 3, 10, 24, 60])
def test_it_fits_any_terminal(width: int, height: int) -> None:
    lines = drawn(width, height)
    assert len(lines) <= max(height, 3)
    assert max(map(len, lines)) <= width


def test_a_usual_terminal_shows_everything_but_the_path() -> None:
    text = "\n".join(drawn(100, 24))
    for part in ("digits-2", "step 120/480", "25 ms an iteration, 1.25 × the limit", "cpu-2/compute  │", "SYNC(o0,b0)"):
        assert part in text
    assert "critical path" not in text
    assert "critical path of iteration 7, 100 ms" in "\n".join(drawn(100, 40))


def test_lanes_without_room_are_counted_and_are_not_those_that_wait_most() -> None:
    lines = drawn(100, 18)
    assert any(line.startswith("cpu-2/compute  │") for line in lines)
    assert any("lanes more" in line for line in lines)


def test_a_narrow_terminal_cuts_the_reason_and_no_jobs_name() -> None:
    (row,) = [line for line in drawn(60, 24) if "digits-2" in line]
    assert row.split()[:3] == ["digits-2", "queued", "120/480"]
    assert row.endswith("…")


def test_many_jobs_leave_room_for_the_selected_one_and_show_it() -> None:
    lines = drawn(100, 24, num_queued=100, view=View(selected="digits-50"))
    assert any(line.startswith(">  digits-50") for line in lines)
    assert sum("queued" in line for line in lines) < 10
    assert any(line.startswith("lanes, ") for line in lines)


def test_trouble_and_a_pause_are_told_in_the_first_line() -> None:
    first = drawn(100, 24, view=View(paused=True), trouble="daemon unreachable, retrying")[0]
    assert first.startswith(" daemon unreachable, retrying   paused  weft 0.1.0")


def test_the_help_names_every_key_and_every_cause() -> None:
    text = "\n".join(drawn(120, 30, view=View(help=True)))
    for part in ("q ", "↑ ↓, k j", "p, space", "?", "data", "activation", "gradient", "sync", "slot", "dispatch"):
        assert part in text
