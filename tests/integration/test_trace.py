"""`weft trace` and `weft plot` of real jobs: one that runs, one that has ended."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

_REAL = runpy.run_path(str(Path(__file__).with_name("real_daemon.py")))
RealDaemon = _REAL["RealDaemon"]
_CHECKS = runpy.run_path(str(Path(__file__).parents[1] / "metrics" / "views" / "trace_format.py"))
check_format = _CHECKS["check_format"]

PIPELINE = {"stages": 2, "microbatches": 4}


def events_of(trace: dict[str, Any], phase: str, category: str | None = None) -> list[dict[str, Any]]:
    return [e for e in trace["traceEvents"] if e["ph"] == phase and category in (None, e.get("cat"))]


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        PIPELINE,
        {"replicas": 2, "sync": "fine", "clip_norm": 1.0},
        {"schedule": "gpipe", "stages": 3, "microbatches": 2},
    ],
    ids=["1f1b", "ddp", "gpipe"],
)
def test_the_trace_of_an_ended_job_keeps_the_rules_and_has_every_step_with_its_loss(
    daemon: RealDaemon, tmp_path: Path, strategy: dict[str, Any]
) -> None:
    job = daemon.run(daemon.spec(strategy=strategy, steps=20))["job"]
    done = daemon.weft("trace", job, "-o", tmp_path / "trace.json", "--svg", tmp_path / "trace.svg")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    trace = json.loads((tmp_path / "trace.json").read_text())
    check_format(trace)
    lines = Path(daemon.client.show(job)["run_dir"], "metrics.jsonl").read_text().splitlines()
    losses = [line["loss"] for line in map(json.loads, lines) if "loss" in line]
    assert len(losses) == 20
    assert [event["args"]["loss"] for event in events_of(trace, "i")] == losses
    tasks = {e["args"]["iteration"] for e in events_of(trace, "X", "forward") if e["name"] == "FORWARD(0,0)"}
    assert tasks == {e["args"]["iteration"] for e in events_of(trace, "X", "iteration")}
    assert events_of(trace, "X", "critical path")
    assert events_of(trace, "X", "planned")
    assert events_of(trace, "f", "waited")
    ElementTree.parse(tmp_path / "trace.svg")


@pytest.mark.slow
def test_slots_of_a_real_job_are_never_more_than_their_rings_have(daemon: RealDaemon, tmp_path: Path) -> None:
    job = daemon.run(daemon.spec(strategy=PIPELINE, steps=30))["job"]
    assert daemon.weft("trace", job, "-o", tmp_path / "trace.json").returncode == 0
    counters = events_of(json.loads((tmp_path / "trace.json").read_text()), "C")
    rings = [event for event in counters if event["name"].startswith("slots of ")]
    assert {event["name"] for event in rings} == {
        *("slots of input-0 (of 32)", "slots of target-0 (of 32)"),
        *("slots of activation-0-0 (of 2)", "slots of gradient-0-0 (of 2)"),
    }
    for event in rings:
        depth = int(event["name"].rpartition("of ")[2].rstrip(")"))
        assert 0 <= event["args"]["occupied"] <= depth, event


@pytest.mark.slow
def test_a_job_can_be_traced_and_plotted_while_it_runs(daemon: RealDaemon, tmp_path: Path) -> None:
    job = daemon.submit(daemon.spec(strategy=PIPELINE, steps=100_000_000))
    progress = (event["progress"] for event in daemon.client.follow(job) if "progress" in event)
    next(progress)
    traced = daemon.weft("trace", job, "-o", "-", "--iterations", "5")
    assert daemon.client.show(job)["state"] == "running"
    assert daemon.client.cancel(job) == "cancelled"
    assert traced.returncode == 0, traced.stderr
    trace = json.loads(traced.stdout)
    check_format(trace)
    iterations = events_of(trace, "X", "iteration")
    assert len(iterations) == 5
    trained = [each["args"]["step"] for each in iterations if each["args"]["trains"]]
    assert [event["args"]["step"] for event in events_of(trace, "i")] == trained
    assert len(trained) >= 2, "two of an epoch's four iterations train"


@pytest.mark.slow
def test_a_plot_of_a_job_is_a_picture(daemon: RealDaemon, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    job = daemon.run(daemon.spec(strategy=PIPELINE, steps=20))["job"]
    done = daemon.weft("plot", job, "-o", tmp_path / "job.png", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["picture"] == str(tmp_path / "job.png")
    assert (tmp_path / "job.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_job_that_is_not_there_has_no_trace(daemon: RealDaemon, tmp_path: Path) -> None:
    for verb in ("trace", "plot"):
        done = daemon.weft(verb, "gone-7", "-o", tmp_path / "file.png")
        assert (done.returncode, done.stdout) == (4, "")
        assert "gone-7" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_job_that_is_not_planned_yet_has_no_trace(daemon: RealDaemon, tmp_path: Path) -> None:
    gate = daemon.gate()
    job = daemon.submit(daemon.spec(args={"planning_gate": str(gate)}))
    daemon.until_logged(job, "at the gate of planning")
    done = daemon.weft("trace", job, "-o", tmp_path / "trace.json")
    gate.open()
    assert daemon.client.wait(job, timeout=60)["state"] == "completed"
    assert (done.returncode, done.stdout) == (4, "")
    assert "has run no iteration" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_verbs_of_recordings_import_no_torch(daemon: RealDaemon, tmp_path: Path) -> None:
    job = daemon.run(daemon.spec(steps=5))["job"]
    imports = runpy.run_path(str(Path(__file__).with_name("test_imports.py")))
    done = subprocess.run(
        [sys.executable, "-c", imports["VERB"], "trace", job, "-o", str(tmp_path / "trace.json")],
        env=daemon.environment,
        capture_output=True,
        text=True,
        check=True,
    )
    modules = set(done.stderr.splitlines()[-1].split())
    assert "weft.metrics.views.trace" in modules
    assert not {module for module in modules if module.partition(".")[0] in ("torch", "numpy")}
