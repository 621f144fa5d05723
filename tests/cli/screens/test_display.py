"""What people read: tables and pages."""

from __future__ import annotations

import io
import json
import re
from typing import Any

import pytest
from rich.console import Console

from weft.cli.screens.display import jobs_table, lanes_table, result_page, show_page, state_sentence, status_page
from weft.client.console import make_console
from weft.client.result import RESULT_KEYS, result_json, to_json

NOW = 1_700_000_000.0
JOB = {
    "job": "digits-1",
    "state": "running",
    "reason": None,
    "priority": 0,
    "step": 120,
    "steps": 480,
    "loss": 0.4312,
    "submitted_at": NOW - 100.0,
    "started_at": NOW - 90.0,
    "ended_at": None,
    "why": None,
}
RESULT = {
    "job": "digits-1",
    "state": "completed",
    "reason": None,
    "steps": 480,
    "loss": 0.25,
    "validation": {"accuracy": 0.98, "loss": 0.07},
    "seconds": 12.0,
    "iteration_seconds": 0.025,
    "limit_seconds": 0.020,
    "run_dir": "/runs/digits-1",
    "model": "/runs/digits-1/model.safetensors",
}


def printed(renderable: Any) -> str:
    stream = io.StringIO()
    make_console(stream).print(renderable)
    return stream.getvalue()


def test_a_table_in_a_pipe_is_plain_and_never_cut() -> None:
    long = JOB | {"job": "x" * 128, "why": "It waits. " * 30}
    text = printed(jobs_table([long], NOW))
    assert "x" * 128 in text
    assert ("It waits. " * 30).strip() in text
    assert "\x1b" not in text
    assert len(text.splitlines()) == 2


def test_a_jobs_name_is_never_read_as_markup() -> None:
    assert "[red]x[/red] :smile:" in printed(jobs_table([JOB | {"job": "[red]x[/red] :smile:"}], NOW))


def test_the_list_of_jobs_tells_step_loss_and_time() -> None:
    header, row = printed(jobs_table([JOB], NOW)).splitlines()
    assert header.split() == ["job", "state", "priority", "step", "loss", "submitted", "took", "why"]
    assert row.split()[:5] == ["digits-1", "running", "0", "120/480", "0.4312"]
    assert row.split("0.4312")[1].split("ago") == ["  1 min 40 s ", "  1 min 30 s       "]


def test_the_time_of_a_job_that_has_ended_stands_still() -> None:
    assert "30.0 s" in printed(jobs_table([JOB | {"ended_at": NOW - 60.0}], NOW))


def test_each_lane_is_told_in_percent_of_its_own_time() -> None:
    lanes = {
        "cpu-0/compute": {"forward": 1.0, "backward": 2.0, "idle": 1.0},
        "cpu-0/update": {"update": 1.0, "stall_gradient": 4.0, "made_up": 0.0},
    }
    header, first, second = printed(lanes_table(lanes)).splitlines()
    assert header.split() == ["lane", "forward", "backward", "update", "stall", "gradient", "idle", "made", "up"]
    assert first.split() == ["cpu-0/compute", "25.0", "%", "50.0", "%", "-", "-", "25.0", "%", "-"]
    assert second.split() == ["cpu-0/update", "-", "-", "20.0", "%", "80.0", "%", "-", "0.0", "%"]


@pytest.mark.parametrize("width", [45, 80])
def test_where_a_terminal_is_too_narrow_for_the_lanes_no_word_of_them_is_cut(width: int) -> None:
    lanes = {
        "cpu-0/compute": {"forward": 1.0, "backward": 2.0, "stall_activation": 1.0, "stall_dispatch": 0.0},
        "cpu-0/update": {"update": 1.0, "stall_gradient": 3.0, "stall_slot": 1.0, "made_up": 0.0},
    }
    console = Console(file=io.StringIO(), width=width, force_terminal=True, no_color=True, soft_wrap=True)
    with console.capture() as capture:
        result_page(console, RESULT, {"lanes": lanes, "time": {"attempt": 1, "began_after_step": 0}})
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capture.get()).splitlines()
    assert max(map(len, lines)) <= width
    told = " ".join(" ".join(lines).split())
    assert "cpu-0/compute forward 25.0 %, backward 50.0 %, stall activation 25.0 %, stall dispatch 0.0 %" in told
    assert "cpu-0/update update 20.0 %, stall gradient 60.0 %, stall slot 20.0 %, made up 0.0 %" in told


def test_the_end_of_a_run_says_where_its_lanes_are_not_of_all_the_job() -> None:
    stream = io.StringIO()
    time = {"attempt": 3, "began_after_step": 120}
    result_page(make_console(stream), RESULT, {"lanes": {"cpu-0/compute": {"forward": 1.0}}, "time": time})
    said = "where the time went, of attempt 3, which began after step 120"
    assert said in [line.rstrip() for line in stream.getvalue().splitlines()]


def test_a_lane_without_any_time_is_all_zero() -> None:
    assert "0.0 %" in printed(lanes_table({"cpu-0/load": {"idle": 0.0}}))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"why": "It waits for a worker."}, "It waits for a worker."),
        ({}, "running, step 120/480"),
        ({"state": "failed", "reason": "timeout", "steps": None}, "failed (timeout), step 120/-"),
        ({"state": "planning", "step": None}, "planning"),
    ],
)
def test_a_job_is_told_in_one_sentence(changes: dict[str, Any], sentence: str) -> None:
    assert state_sentence(JOB | changes) == sentence


def test_show_tells_the_partition_the_lanes_and_the_files() -> None:
    stage = {"units": [0, 3], "worker": "cpu-0", "parameter_bytes": 2 << 20, "memory_bytes": None}
    plan = {
        "stages": [stage, stage | {"units": [3, 4], "worker": "cpu-1"}],
        "schedule": "1f1b",
        "microbatches": 4,
        "predicted_iteration_seconds": 0.025,
        "limit_seconds": 0.020,
        "windows": ["a working window of 2 of 9 layers on gpu-0"],
        "notes": ["batch statistics: 1 (BatchNorm2d) take means of each microbatch"],
    }
    shown = JOB | RESULT | {"plan": plan, "lanes": {"cpu-0/compute": {"forward": 1.0}}, "error": "what went wrong"}
    stream = io.StringIO()
    show_page(make_console(stream), shown, NOW)
    lines = [line.rstrip() for line in stream.getvalue().splitlines()]
    assert lines[0] == "digits-1: completed, step 120/480"
    assert "1f1b, 4 microbatches, 25 ms an iteration predicted" in lines
    assert "    0  0 to 2  cpu-0      2.0 MiB       -" in lines
    assert "    1  3       cpu-1      2.0 MiB       -" in lines
    assert "a working window of 2 of 9 layers on gpu-0" in lines
    assert "batch statistics: 1 (BatchNorm2d) take means of each microbatch" in lines
    assert "iteration      25 ms (1.25 × the limit of 20 ms)" in lines
    assert "model          /runs/digits-1/model.safetensors" in lines
    assert "cpu-0/compute  100.0 %" in lines
    assert lines[-1] == "what went wrong"


def test_show_tells_what_a_job_would_go_on_from() -> None:
    shown = JOB | dict.fromkeys(("iteration_seconds", "limit_seconds", "model", "run_dir", "plan", "lanes", "error"))
    shown |= {"validation": {}, "snapshot_step": 120, "checkpoint": "/runs/digits-1/checkpoints/step-00000100"}
    told = {state: io.StringIO() for state in ("running", "cancelled")}
    for state, stream in told.items():
        show_page(make_console(stream), shown | {"state": state}, NOW)
        assert "checkpoint" in stream.getvalue()
    assert "after step 120: a lost worker costs what came since" in told["running"].getvalue()
    assert "after step 120" not in told["cancelled"].getvalue()


def test_show_of_a_job_that_has_not_been_planned_is_short() -> None:
    unknown = dict.fromkeys(("iteration_seconds", "limit_seconds", "model", "run_dir", "plan", "lanes", "error"))
    stream = io.StringIO()
    show_page(make_console(stream), JOB | unknown | {"validation": None, "started_at": None}, NOW)
    assert "lane" not in stream.getvalue()
    assert "started" not in stream.getvalue()


def test_the_end_of_a_run_tells_state_metrics_lanes_and_files() -> None:
    stream = io.StringIO()
    result_page(make_console(stream), RESULT | {"error": "a sentence"}, {"lanes": {"cpu-0/compute": {"forward": 1.0}}})
    text = stream.getvalue()
    for part in ("digits-1 completed after 12.0 s", "a sentence", "accuracy 0.98, loss 0.07", "cpu-0/compute", "/runs"):
        assert part in text


def test_a_failed_run_tells_what_is_known_of_it_and_no_more() -> None:
    unknown = dict.fromkeys(("iteration_seconds", "limit_seconds", "model", "loss", "validation"))
    stream = io.StringIO()
    told = {"error": "a traceback", "error_told": True}
    failed = RESULT | unknown | told | {"state": "failed", "reason": "user-error", "run_dir": "/runs/digits-1"}
    result_page(make_console(stream), failed, {})
    assert [line.rstrip() for line in stream.getvalue().splitlines()] == [
        "digits-1 failed (user-error) after 12.0 s",
        "run directory  /runs/digits-1",
    ]


def test_the_jobs_table_names_the_exception() -> None:
    job = JOB | {"state": "failed", "reason": "user-error", "exception": "ZeroDivisionError", "why": None}
    assert printed(jobs_table([job], NOW)).splitlines()[1].rstrip().endswith("user-error ZeroDivisionError")
    assert state_sentence(job).startswith("failed (user-error ZeroDivisionError)")


def test_the_status_tells_workers_and_jobs() -> None:
    worker = {"worker": "cpu-0", "kind": "cpu", "device": "CPU", "state": "busy", "pid": 7, "job": "digits-1"}
    stream = io.StringIO()
    status = {"pid": 6, "version": "0.1.0", "workers": [worker], "jobs": {"running": 1, "failed": 0}, "metrics": None}
    status_page(make_console(stream), status)
    assert "jobs     1 running  " in stream.getvalue()
    assert "failed" not in stream.getvalue()
    assert "cpu-0   cpu   CPU     busy     7  digits-1" in stream.getvalue()


def test_a_result_line_has_the_documented_keys_in_their_order_and_no_other() -> None:
    line = result_json(RESULT | {"exit_code": 0, "error": None, "loss": float("inf")})
    assert tuple(json.loads(line)) == RESULT_KEYS
    assert json.loads(line)["loss"] is None
    assert "\n" not in line


def test_json_has_null_for_what_is_not_finite_at_any_depth() -> None:
    assert to_json({"a": [1.0, float("nan")], "b": {"c": float("-inf")}}) == '{"a": [1.0, null], "b": {"c": null}}'
