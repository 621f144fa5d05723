"""What a Prometheus server would read from a daemon while a job runs and after it."""

from __future__ import annotations

import os
import runpy
import signal
import urllib.request
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from weft.metrics.prometheus.declared import METRICS

_REAL = runpy.run_path(str(Path(__file__).with_name("real_daemon.py")))
RealDaemon, until, SECONDS = _REAL["RealDaemon"], _REAL["until"], _REAL["SECONDS"]

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrape(daemon: RealDaemon) -> Samples:
    url = daemon.client.status()["metrics"]
    with urllib.request.urlopen(f"{url}/metrics", timeout=SECONDS) as answer:
        text = answer.read().decode()
    families = list(text_string_to_metric_families(text))
    declared = {metric.name.removesuffix("_total") for metric in METRICS}
    assert {family.name for family in families} <= declared
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def of_job(samples: Samples, job: str) -> Samples:
    return {key: value for key, value in samples.items() if ("job", job) in key[1]}


def lanes_of(samples: Samples, name: str, job: str) -> dict[tuple[str, str], float]:
    """Sums over the modes, by worker and lane."""
    sums: dict[tuple[str, str], float] = defaultdict(float)
    for (sample, labels), value in of_job(samples, job).items():
        if sample == name:
            sums[dict(labels)["worker"], dict(labels)["lane"]] += value
    return sums


def modes_of(samples: Samples, job: str) -> dict[tuple[str, str], float]:
    """Seconds by lane, as `weft show` names it, and mode."""
    found = {}
    for (name, labels), value in of_job(samples, job).items():
        if name == "weft_lane_seconds_total":
            by_name = dict(labels)
            found[f"{by_name['worker']}/{by_name['lane']}", by_name["mode"]] = value
    return found


@pytest.mark.slow(seconds=4)
def test_the_seconds_of_a_running_jobs_lanes_add_up_to_its_wall_time_and_stand_after_its_end(
    daemon: RealDaemon,
) -> None:
    job = daemon.submit(daemon.spec(strategy={"stages": 2, "microbatches": 4}, steps=100_000_000))
    progress = (event["progress"] for event in daemon.client.follow(job) if "progress" in event)
    next(progress)
    first = scrape(daemon)
    step = next(progress)["step"]
    until(lambda: scrape(daemon)["weft_job_step", (("job", job),)] >= step, "the step in the metrics")
    until(lambda: scrape(daemon)["weft_dispatch_latency_seconds_count", ()], "an answer to a report")
    last = scrape(daemon)
    assert daemon.client.cancel(job) == "cancelled"

    walls = lanes_of(last, "weft_lane_seconds_total", job)
    assert set(walls) == {("cpu-0", "compute"), ("cpu-1", "compute"), ("loader-0", "load")}
    assert last["weft_lane_residual_seconds", (("job", job),)] <= 0.01 * min(walls.values())
    for lane, seconds in walls.items():
        assert seconds > lanes_of(first, "weft_lane_seconds_total", job)[lane]
    named = {name for name, _ in of_job(last, job)}
    assert named >= {
        "weft_job_step",
        "weft_job_loss",
        "weft_job_samples_total",
        "weft_iteration_seconds_count",
        "weft_plan_predicted_iteration_seconds",
        "weft_shared_memory_bytes",
        "weft_job_learning_rate",
        "weft_job_planned_steps",
        "weft_job_attempt",
        "weft_microbatch_seconds_count",
    }
    assert last["weft_job_samples_total", (("job", job),)] > first["weft_job_samples_total", (("job", job),)]
    assert last["weft_jobs", (("state", "running"),)] == 1
    ended = scrape(daemon)
    shown = daemon.client.show(job)["lanes"]
    modes = {(lane, "idle"): 0.0 for lane in shown if lane.endswith("/compute")}  # there before it happens
    modes |= {(lane, mode): seconds for lane, parts in shown.items() for mode, seconds in parts.items()}
    assert modes_of(ended, job) == pytest.approx(modes, abs=1e-6)
    assert ended["weft_job_step", (("job", job),)] == daemon.client.show(job)["step"]
    assert ended["weft_jobs_ended_total", (("reason", "cancelled"), ("state", "cancelled"))] >= 1
    until(lambda: scrape(daemon)["weft_jobs", (("state", "running"),)] == 0, "the job's end in the metrics")


@pytest.mark.slow
def test_the_seconds_of_the_lanes_of_an_ended_job_are_kept(
    daemon: RealDaemon,
) -> None:
    result = daemon.run(daemon.spec(strategy={"stages": 3, "microbatches": 4}, steps=200))
    shown = daemon.client.show(result["job"])
    assert set(shown["lanes"]) == {"cpu-0/compute", "cpu-1/compute", "cpu-2/compute", "loader-0/load"}
    for lane, seconds in shown["lanes"].items():
        assert {"forward", "backward", "update"} <= seconds.keys() or "load" in seconds, lane
        assert 0 < sum(seconds.values()) <= result["seconds"]


@pytest.mark.slow
def test_hidden_and_exposed_seconds_of_an_ended_job_add_up_to_the_busy_seconds_of_its_lanes(daemon: RealDaemon) -> None:
    result = daemon.run(daemon.spec(strategy={"replicas": 2, "sync": "fine", "clip_norm": 1.0}, steps=100))
    shown = daemon.client.show(result["job"])
    assert set(shown["overlap"]) == {"cpu-0", "cpu-1"}
    for worker, kinds in shown["overlap"].items():
        for kind, seconds in kinds.items():
            lanes = [modes for lane, modes in shown["lanes"].items() if lane.startswith(f"{worker}/")]
            busy = sum(modes.get(kind, 0) for modes in lanes)
            assert seconds["hidden"] + seconds["exposed"] == pytest.approx(busy), (worker, kind)


@pytest.mark.slow(seconds=3)
def test_a_killed_worker_is_counted_as_a_restart_and_a_recovery_of_its_job(
    own_daemon: Callable[..., RealDaemon],
) -> None:
    daemon = own_daemon()
    job = daemon.submit(daemon.spec(steps=100_000_000))
    daemon.until_logged(job, "running")
    (worker,) = [each for each in daemon.client.status()["workers"] if each["job"] == job and each["kind"] == "cpu"]
    os.kill(worker["pid"], signal.SIGKILL)
    attempt = ("weft_job_attempt", (("job", job),))
    until(lambda: scrape(daemon).get(attempt) == 2, "the second attempt in the metrics")
    samples = scrape(daemon)
    assert samples["weft_recoveries_total", (("cause", "worker-lost"),)] == 1
    assert samples["weft_worker_restarts_total", (("reason", "signal-9"),)] == 1
    assert daemon.client.cancel(job) == "cancelled"


def test_workers_and_connections_are_shown_while_no_job_runs(daemon: RealDaemon) -> None:
    with daemon.connected():
        samples = scrape(daemon)
    assert all(samples["weft_worker_up", (("worker", name),)] == 1 for name in daemon.worker_pids())
    assert samples["weft_control_connections", ()] >= 1
    build = [dict(labels) for name, labels in samples if name == "weft_build_info"]
    assert [set(labels) for labels in build] == [{"version", "python", "torch"}]


@pytest.mark.slow
def test_a_rejected_frame_is_counted_by_its_reason(daemon: RealDaemon) -> None:
    key = "weft_control_rejected_frames_total", (("reason", "empty-frame"),)
    before = scrape(daemon).get(key, 0)
    with daemon.connected() as bad:
        bad.socket.sendall(b"\0\0\0\0")
        assert bad.is_closed()
    assert scrape(daemon)[key] == before + 1
