"""`show --time`: one structure, what is worst first, and the page that people read of it."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console

from weft.cli.screens.time_display import MAX_STEPS, time_page
from weft.cli.screens.time_summary import time_summary, why_nothing
from weft.client.console import make_console

STEP = {
    "task": "FORWARD(0,0)",
    "iteration": 7,
    "lane": "cpu-0/compute",
    "mode": "forward",
    "start_seconds": 0.1,
    "seconds": 0.06,
    "gap_seconds": 0.0,
}
PATH = {
    "iterations": 2,
    "seconds": 0.2,
    "parts": [{"kind": "forward", "lane": "cpu-0/compute", "seconds": 0.15}],
    "gap_seconds": 0.05,
    "steps": [STEP, STEP | {"task": "UPDATE(0)", "start_seconds": 0.18, "seconds": 0.02, "gap_seconds": 0.02}],
}
TIME: dict[str, Any] = {
    "lanes": {
        "loader-0/load": {
            "wall_seconds": 10.0,
            "residual_seconds": 0.0,
            "modes": {"load": 1.0, "stall_slot": 9.0},
        },
        "cpu-1/compute": {"wall_seconds": 10.0, "residual_seconds": 0.5, "modes": {"forward": 9.5}},
        "cpu-0/compute": {
            "wall_seconds": 10.0,
            "residual_seconds": 0.0,
            "modes": {"forward": 6.0, "stall_gradient": 4.0},
        },
    },
    "stalls": [
        {"lane": "loader-0/load", "cause": "slot", "task": "BACKWARD(0,3)", "on": "cpu-0/compute", "seconds": 9.0},
        {"lane": "cpu-0/compute", "cause": "gradient", "task": "BACKWARD(1,0)", "on": "cpu-1/compute", "seconds": 3.0},
        {"lane": "cpu-0/compute", "cause": "dispatch", "task": None, "on": None, "seconds": 0.001},
    ],
    "bubble_ratio": 0.2,
    "imbalance": 0.226,
    "critical_path": PATH,
}
SHOWN: dict[str, Any] = {
    "job": "digits-1",
    "state": "completed",
    "reason": None,
    "step": 480,
    "steps": 480,
    "why": None,
    "error": None,
    "ended_at": 1.0,
    "iteration_seconds": 0.025,
    "limit_seconds": 0.020,
    "plan": {
        "predicted_iteration_seconds": 0.022,
        "microbatches": 4,
        "stages": [
            {"replica": 0, "worker": "cpu-0", "units": [0, 2]},
            {"replica": 0, "worker": "cpu-1", "units": [2, 4]},
        ],
        "strategy": {"stages": 2, "microbatches": 4},
        "batch_size": 100,
        "num_train": 1000,
    },
    "overlap": {
        "cpu-0": {"update": {"hidden": 0.0, "exposed": 0.5}, "sync": {"hidden": 3.0, "exposed": 1.0}},
        "cpu-1": {"sync": {"hidden": 0.0, "exposed": 0.0}},
    },
    "time": TIME,
}


def page_of(shown: dict[str, Any]) -> list[str]:
    stream = io.StringIO()
    time_page(make_console(stream), time_summary(shown))
    return [line.rstrip() for line in stream.getvalue().splitlines()]


def test_times_of_a_later_attempt_are_not_told_as_those_of_the_job() -> None:
    said = "All of this is of attempt 2, which began after step 81; what ran before is not in it."
    later = SHOWN | {"time": TIME | {"attempt": 2, "began_after_step": 81}}
    assert said in page_of(later)
    assert (time_summary(later)["attempt"], time_summary(later)["began_after_step"]) == (2, 81)
    first = SHOWN | {"time": TIME | {"attempt": 1, "began_after_step": 0}}
    assert not any("attempt" in line for line in [*page_of(first), *page_of(SHOWN)])


def test_lanes_and_stalls_stand_with_the_worst_first_and_those_beside_compute_last() -> None:
    summary = time_summary(SHOWN)
    assert [lane["lane"] for lane in summary["lanes"]] == ["cpu-0/compute", "cpu-1/compute", "loader-0/load"]
    assert [(stall["lane"], stall["cause"], stall["percent"]) for stall in summary["stalls"]] == [
        ("cpu-0/compute", "gradient", 30.0),
        ("cpu-0/compute", "dispatch", 0.01),
        ("loader-0/load", "slot", 90.0),
    ]
    assert [(row["worker"], row["kind"]) for row in summary["overlap"]] == [
        ("cpu-0", "sync"),
        ("cpu-0", "update"),
        ("cpu-1", "sync"),
    ]
    assert [row["hidden_percent"] for row in summary["overlap"]] == [75.0, 0.0, 0.0]


def test_percent_are_of_the_lanes_own_wall_time_and_with_the_residual_they_are_all_of_it() -> None:
    for lane in time_summary(SHOWN)["lanes"]:
        residual = 100 * lane["residual_seconds"] / lane["wall_seconds"]
        assert sum(lane["percent"].values()) + residual == pytest.approx(100)


def test_the_parts_of_the_critical_path_and_its_gaps_are_all_of_it() -> None:
    path = time_summary(SHOWN)["critical_path"]
    assert sum(each["percent"] for each in path["parts"]) + path["gap_percent"] == pytest.approx(100)


def test_the_page_begins_with_the_bottleneck_and_has_every_section() -> None:
    lines = page_of(SHOWN)
    assert lines[0] == "digits-1, completed: 25 ms an iteration, 1.25 × the limit of 20 ms; the plan predicted 22 ms"
    assert lines[1].startswith(
        "cpu-0 waits 40 % of its time for gradients, longest for BACKWARD(1,0) on cpu-1: the sec"
    )
    assert lines[2].startswith(
        "Its units take longer than when they were inspected. Give it fewer units: strategy.split = [3]"
    )
    sections = [line.partition(":")[0] for line in lines if line.startswith(("Lanes", "Bubble", "Stalls", "Overlap"))]
    assert sections == ["Lanes", "Bubble", "Stalls", "Overlap"]
    assert "cpu-0/compute  gradient  BACKWARD(1,0)  cpu-1/compute   3.00 s       30.0 %" in lines
    assert ["cpu-0", "sync", "1.00", "s", "3.00", "s", "75.0", "%"] in [line.split() for line in lines]
    assert "gaps     between tasks    50 ms  25.0 %" in lines
    assert lines[-2:] == [
        " 0 µs   0 µs  FORWARD(0,0)  cpu-0/compute    60 ms",
        "80 ms  20 ms  UPDATE(0)     cpu-0/compute    20 ms",
    ]
    assert not any("dispatch" in line for line in lines), "a wait of 0.01 % is nothing to read"


@pytest.mark.parametrize("width", [60, 75])
def test_on_a_narrow_terminal_lanes_are_told_in_words_and_no_word_is_cut(width: int) -> None:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, no_color=True, soft_wrap=True)
    with console.capture() as capture:
        time_page(console, time_summary(SHOWN))
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip() for line in capture.get().splitlines()]
    assert max(map(len, lines)) <= width
    assert any(line.startswith("cpu-0/compute  10.0 s  40.0 %  forward 60.0 %, ") for line in lines)
    whole = " ".join(" ".join(lines).split())
    assert "the second stage is the slow one, it computes 23 % longer than the mean stage." in whole


def test_a_remedy_for_a_job_whose_strategy_was_chosen_says_all_that_its_file_does_not() -> None:
    told = time_summary(SHOWN | {"spec": {"strategy": {"preset": "auto"}}})["diagnosis"]
    assert told["alternatives"] == (("strategy.stages=2", "strategy.split=[3]"),)
    assert time_summary(SHOWN)["diagnosis"]["alternatives"] == (("strategy.split=[3]",),)


def test_a_long_path_is_cut_on_the_page_and_whole_as_data() -> None:
    time = TIME | {"critical_path": PATH | {"steps": [STEP] * (MAX_STEPS + 7)}}
    assert page_of(SHOWN | {"time": time})[-1] == "and 7 more, which --json has"
    assert len(time_summary(SHOWN | {"time": time})["critical_path"]["steps"]) == MAX_STEPS + 7


def test_a_job_in_its_first_iteration_has_lanes_and_no_path_yet() -> None:
    young = {"time": TIME | {"critical_path": None}, "state": "running", "ended_at": None, "iteration_seconds": None}
    lines = page_of(SHOWN | young)
    assert lines[0] == "digits-1, running: no iteration has ended yet"
    assert lines[-1] == "Critical path: no iteration is complete yet."


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"state": "queued", "why": "it needs 2 cpu workers (0 free)", "ended_at": None, "step": None},
            "digits-1 has run nothing yet: it needs 2 cpu workers (0 free)",
        ),
        (
            {"state": "planning", "ended_at": None, "step": 0},
            "digits-1 has run nothing yet: it is planning.",
        ),
        (
            {"state": "running", "ended_at": None, "step": 199},
            "digits-1 goes on after step 199, and has run nothing since: it is running.",
        ),
        (
            {
                "state": "failed",
                "reason": "user-error",
                "error": "Traceback ...\n  line 1\nValueError: no data\n",
                "step": 0,
            },
            "digits-1 failed (user-error) before a training step was reported: ValueError: no data",
        ),
        (
            {"state": "failed", "error": "Traceback ...\nValueError: no data\nweft: in unit 2 (Linear)\n", "step": 0},
            "digits-1 failed before a training step was reported: ValueError: no data",
        ),
        (
            {"state": "failed", "error": '  File "job.py", line 1\n    def f(:\nSyntaxError: no\n', "step": 0},
            "digits-1 failed before a training step was reported: SyntaxError: no",
        ),
        (
            {"state": "cancelled", "reason": "cancelled", "step": 0},
            "digits-1 cancelled before a training step was reported.",
        ),
        ({"state": "cancelled", "step": None}, "digits-1 cancelled before a training step was reported."),
        ({"state": "completed"}, "digits-1 was recorded by an older Weft, which kept no times; run it again."),
    ],
)
@pytest.mark.parametrize("time", [None, {"lanes": {}, "stalls": [], "bubble_ratio": None, "imbalance": None}])
def test_where_there_is_nothing_to_tell_the_page_says_why(changes: dict[str, Any], sentence: str, time: Any) -> None:
    shown = SHOWN | {"time": time, "plan": None, "overlap": None} | changes
    assert why_nothing(shown) == sentence
    assert page_of(shown) == [sentence]
    summary = time_summary(shown)
    assert summary["nothing"] == sentence
    assert (summary["diagnosis"], summary["lanes"], summary["critical_path"]) == (None, [], None)
