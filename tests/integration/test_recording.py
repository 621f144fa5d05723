"""Recordings of real runs hold the same nanoseconds as the accounts, and the time of a stopped worker is told apart."""

from __future__ import annotations

import json
import os
import runpy
import signal
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from weft.client.client import RequestRefused
from weft.metrics.accounts.accounting import JobAccount
from weft.metrics.recording.recording import Recording
from weft.metrics.recording.window import last_iterations
from weft.plan.kinds import MODES

_REAL = runpy.run_path(str(Path(__file__).with_name("real_daemon.py")))
RealDaemon, until, SECONDS = _REAL["RealDaemon"], _REAL["until"], _REAL["SECONDS"]

TWO_STAGES = {"stages": 2, "microbatches": 4}


def worker_up(daemon: RealDaemon, worker: str) -> float:
    url = daemon.client.status()["metrics"]
    with urllib.request.urlopen(f"{url}/metrics", timeout=SECONDS) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        samples = [sample for family in families for sample in family.samples]
    (value,) = [s.value for s in samples if s.name == "weft_worker_up" and s.labels["worker"] == worker]
    return float(value)


@pytest.mark.slow
def test_an_ended_jobs_recording_has_the_same_time_as_its_accounts(daemon: RealDaemon) -> None:
    result = daemon.run(daemon.spec(strategy=TWO_STAGES))
    recording = Recording.load(daemon.client.record(result["job"]))
    shown = daemon.client.show(result["job"])
    account = JobAccount()
    for lane, rows in recording.rows.items():
        account.add(lane, rows)
    assert account.lane_seconds() == shown["lanes"]
    assert list(recording.iteration_ends) == list(range(8))  # 4 that train, 4 that validate
    assert recording.training == {0, 1, 4, 5}
    for lane in shown["time"]["lanes"].values():
        assert lane["residual_seconds"] <= 0.01 * lane["wall_seconds"]
    path = shown["time"]["critical_path"]
    assert path["iterations"] == 2
    assert sum(part["seconds"] for part in path["parts"]) + path["gap_seconds"] == pytest.approx(path["seconds"])
    assert recording.planned
    assert not list(Path(result["run_dir"]).glob("*.partial"))


@pytest.mark.slow
def test_no_iteration_is_lost_where_loaders_take_turns(daemon: RealDaemon) -> None:
    result = daemon.run(daemon.spec(strategy={"loaders": 2}))
    recording = Recording.load(daemon.client.record(result["job"]))
    first = {rows[0][2] for lane, rows in recording.rows.items() if lane.endswith("/load")}
    assert first == {0, 1}
    assert list(recording.iteration_ends) == list(range(8))


@pytest.mark.slow
def test_terminal_page_trace_and_metrics_tell_the_same_time(daemon: RealDaemon) -> None:
    strategy = {"replicas": 2, "microbatches": 2, "clip_norm": 1.0}
    job = daemon.run(daemon.spec(strategy=strategy))["job"]
    expected = {
        (lane, mode): seconds
        for lane, modes in daemon.client.show(job)["lanes"].items()
        for mode, seconds in modes.items()
    }
    assert {mode for _, mode in expected} >= {"forward", "backward", "sync", "update", "load", "stall_sync"}
    summary = json.loads(daemon.weft("show", job, "--time", "--json").stdout)
    assert {(told["lane"], m): s for told in summary["lanes"] for m, s in told["seconds"].items()} == expected
    url = daemon.client.status()["metrics"]
    with urllib.request.urlopen(f"{url}/api/jobs/{job}", timeout=SECONDS) as answer:
        lanes = json.load(answer)["time"]["lanes"]
    assert {(lane, m): s for lane, told in lanes.items() for m, s in told["modes"].items()} == expected
    with urllib.request.urlopen(f"{url}/metrics", timeout=SECONDS) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        samples = [s for f in families for s in f.samples if s.name == "weft_lane_seconds_total"]
    counted = {
        (f"{s.labels['worker']}/{s.labels['lane']}", s.labels["mode"]): s.value
        for s in samples
        if s.labels["job"] == job and s.value
    }
    assert counted == pytest.approx(expected, abs=1e-6)
    events = json.loads(daemon.weft("trace", job, "-o", "-").stdout)["traceEvents"]
    assert _seconds_of_trace(events, within=expected) == pytest.approx(_of_window(daemon, job), abs=1e-6)


def _seconds_of_trace(events: list[dict[str, Any]], within: Iterable[tuple[str, str]]) -> dict[tuple[str, str], float]:
    """By lane and mode, of the slices of lanes."""
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    sums: dict[tuple[str, str], float] = defaultdict(float)
    for event in events:
        if event["ph"] == "X":
            lane = f"{processes[event['pid']]}/{threads[event['pid'], event['tid']]}"
            mode = f"stall_{event['args']['cause']}" if event["cat"] == "stall" else event["cat"]
            if (lane, mode) in within:
                sums[lane, mode] += event["dur"] / 1e6
    return dict(sums)


def _of_window(daemon: RealDaemon, job: str) -> dict[tuple[str, str], float]:
    """What the recording has of its complete iterations, which is what a trace shows."""
    recording = Recording.load(daemon.client.record(job))
    window = last_iterations(recording)
    assert window is not None
    sums: dict[tuple[str, str], float] = defaultdict(float)
    for lane, rows in recording.rows_within(window.start_ns, window.end_ns).items():
        for mode, _, _, _, start, end in rows:
            sums[lane, MODES[mode]] += (min(end, window.end_ns) - max(start, window.start_ns)) / 1e9
    return dict(sums)


@pytest.mark.slow
def test_a_running_jobs_recording_is_written_when_it_is_asked_for(daemon: RealDaemon) -> None:
    job = daemon.submit(daemon.spec(strategy=TWO_STAGES, epochs=100_000))
    try:
        recording = until(lambda: _with_iterations(daemon, job), "a recorded iteration")
        assert recording.facts["ended"] is False
        assert daemon.client.show(job, path=True)["time"]["critical_path"]["iterations"] >= 1
    finally:
        daemon.client.cancel(job)


def _with_iterations(daemon: RealDaemon, job: str) -> Recording | None:
    try:
        recording = Recording.load(daemon.client.record(job))
    except RequestRefused as refusal:
        if refusal.code != "nothing-recorded":  # it is planned just now
            raise
        return None
    return recording if recording.window(8) is not None else None


@pytest.mark.slow
def test_a_job_that_has_run_nothing_has_no_recording(daemon: RealDaemon) -> None:
    failed = daemon.run(daemon.spec("raise RuntimeError('no workload')", strategy={"stages": 1}))
    assert failed["state"] == "failed"
    with pytest.raises(RequestRefused, match="nothing to look at") as refusal:
        daemon.client.record(failed["job"])
    assert refusal.value.code == "nothing-recorded"
    with pytest.raises(RequestRefused, match="no job 'nobody-1'"):
        daemon.client.record("nobody-1")


@pytest.mark.slow
def test_the_time_in_which_a_worker_was_stopped_is_its_lanes_idle_time(daemon: RealDaemon) -> None:
    job = daemon.submit(daemon.spec(strategy=TWO_STAGES, epochs=100_000))
    try:
        until(lambda: (daemon.client.show(job)["step"] or 0) > 5, "a few steps")
        pid = daemon.worker_pids()["cpu-1"]
        before = time.monotonic()
        os.kill(pid, signal.SIGSTOP)
        try:
            until(lambda: worker_up(daemon, "cpu-1") == 0, "the daemon to know of the stop")
            stopped = time.monotonic()
            until(lambda: time.monotonic() > stopped + 0.2, "a while")
            resuming = time.monotonic()
        finally:
            os.kill(pid, signal.SIGCONT)
        until(lambda: worker_up(daemon, "cpu-1") == 1, "the daemon to know that it goes on")
        resumed = time.monotonic()
        step = daemon.client.show(job)["step"]
        until(lambda: daemon.client.show(job)["step"] > step, "more steps")
    finally:
        daemon.client.cancel(job)
    lanes = daemon.client.show(job)["time"]["lanes"]
    idle = {lane: told["modes"].get("idle", 0.0) for lane, told in lanes.items()}
    assert resuming - stopped <= idle["cpu-1/compute"] <= resumed - before
    assert idle["cpu-0/compute"] == 0
    for told in lanes.values():
        assert told["residual_seconds"] <= 0.01 * told["wall_seconds"]
