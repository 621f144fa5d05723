"""The time report says where worker-seconds went, and its parts add up."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from weft.metrics.accounts.accounting import JobAccount
from weft.metrics.accounts.waits import WaitAccount
from weft.metrics.recording.recording import Recording
from weft.metrics.views.time_report import MAX_STALLS, bubble_ratio, imbalance, path_report, time_report
from weft.plan.kinds import MODES, Kind
from weft.plan.plan import Plan

PipelineOf, RecordingOf = Callable[..., Plan], Callable[..., Recording]


def accounts_of(recording: Recording) -> tuple[JobAccount, WaitAccount]:
    account, waits = JobAccount(), WaitAccount()
    for lane, rows in recording.rows.items():
        account.add(lane, rows)
        waits.add(lane, rows)
    return account, waits


def report_of(recording: Recording) -> dict[str, object]:
    tasks = recording.tasks
    return time_report(*accounts_of(recording), lambda task: tasks[task].name, lambda task: tasks[task].lane)


def test_the_stalls_of_a_lane_add_up_to_its_stalled_modes(pipeline_of: PipelineOf, recording_of: RecordingOf) -> None:
    recording = recording_of(pipeline_of(stages=2, microbatches=4))
    account, waits = accounts_of(recording)
    for lane, modes in account.lane_seconds().items():
        stalled = sum(seconds for mode, seconds in modes.items() if mode.startswith("stall_"))
        assert sum(wait[3] for wait in waits.seconds() if wait[0] == lane) == pytest.approx(stalled, rel=1e-12)
    report = report_of(recording)
    lanes = report["lanes"]
    assert isinstance(lanes, dict)
    for lane in lanes.values():
        assert sum(lane["modes"].values()) + lane["residual_seconds"] == pytest.approx(lane["wall_seconds"])


def test_a_stall_names_its_cause_and_the_task_that_was_waited_for(
    pipeline_of: PipelineOf, recording_of: RecordingOf
) -> None:
    plan = pipeline_of(stages=2, microbatches=4)
    slow = {task.id: 0.02 for task in plan.graph.tasks if task.kind is Kind.BACKWARD and task.stage == 1}
    stalls = report_of(recording_of(plan, seconds=slow))["stalls"]
    assert isinstance(stalls, list)
    assert len(stalls) <= MAX_STALLS
    worst = next(stall for stall in stalls if stall["lane"] == "cpu-0/compute")
    assert (worst["cause"], worst["on"]) == ("gradient", "cpu-1/compute")
    assert worst["task"].startswith("BACKWARD(1,")
    assert [stall["seconds"] for stall in stalls] == sorted((s["seconds"] for s in stalls), reverse=True)


def test_stalls_beside_compute_never_push_out_those_of_a_compute_lane() -> None:
    account, waits = JobAccount(), WaitAccount()
    lanes = {f"cpu-{number}/sync": 1_000_000 for number in range(2 * MAX_STALLS)} | {"cpu-0/compute": 1000}
    for lane, waited in lanes.items():
        rows = [(MODES.index("stall_sync"), -1, 0, -1, 0, waited)]
        account.add(lane, rows)
        waits.add(lane, rows)
    stalls = time_report(account, waits, str, str)["stalls"]
    assert len(stalls) == MAX_STALLS
    assert stalls[-1]["lane"] == "cpu-0/compute"


def test_a_stall_that_waited_for_no_task_names_none() -> None:
    account, waits = JobAccount(), WaitAccount()
    rows = [(MODES.index("stall_dispatch"), -1, -1, -1, 0, 1000)]
    account.add("cpu-0/compute", rows)
    waits.add("cpu-0/compute", rows)
    (stall,) = time_report(account, waits, str, str)["stalls"]
    assert stall == {"lane": "cpu-0/compute", "cause": "dispatch", "task": None, "on": None, "seconds": 1e-6}


def test_bubbles_are_the_compute_lanes_waits_for_one_another() -> None:
    lanes = {
        "cpu-0/compute": {"forward": 3.0, "backward": 5.0, "stall_gradient": 2.0},
        "cpu-1/compute": {"forward": 2.0, "backward": 2.0, "stall_activation": 4.0, "stall_data": 2.0},
        "loader-0/load": {"load": 1.0, "stall_slot": 9.0},
    }
    assert bubble_ratio(lanes) == pytest.approx(6.0 / 20.0)
    assert imbalance(lanes) == pytest.approx(8.0 / 6.0 - 1)


def test_without_a_compute_lane_there_is_neither() -> None:
    assert bubble_ratio({"loader-0/load": {"load": 1.0}}) is None
    assert imbalance({"loader-0/load": {"load": 1.0}}) is None


def test_the_path_of_the_last_iterations_is_told_by_kind_and_lane(
    pipeline_of: PipelineOf, recording_of: RecordingOf
) -> None:
    recording = recording_of(pipeline_of(stages=2, microbatches=4))
    report = path_report(recording, iterations=4)
    assert report is not None
    assert report["iterations"] == 4
    parts = sum(part["seconds"] for part in report["parts"])
    assert parts + report["gap_seconds"] == pytest.approx(report["seconds"], rel=1e-9)
    assert {step["iteration"] for step in report["steps"]} <= {10, 11, 12}
    assert report["steps"][-1]["task"] == "UPDATE(0)"
    last = report["steps"][-1]
    assert last["start_seconds"] + last["seconds"] == pytest.approx(report["seconds"])


def test_there_is_no_path_before_an_iteration_is_over(pipeline_of: PipelineOf, recording_of: RecordingOf) -> None:
    assert path_report(recording_of(pipeline_of(stages=2), iterations=1)) is None
