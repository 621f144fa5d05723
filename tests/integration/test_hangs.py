"""Hangs of a real daemon's jobs: a worker that is stopped, and a dataset that does not return."""

from __future__ import annotations

import os
import runpy
import signal
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

_RECOVERY = runpy.run_path(str(Path(__file__).with_name("test_recovery.py")))
PIPELINE, SOURCE, lines_of, until, SECONDS, PASS_GATE = (
    _RECOVERY[name] for name in ("PIPELINE", "SOURCE", "lines_of", "until", "SECONDS", "PASS_GATE")
)
StartDaemon = Callable[..., Any]

# Its loader stands at the gate in the third batch of ten.
BLOCKING = (
    PASS_GATE
    + """
import torch, weft

class Line(torch.utils.data.Dataset):
    calls = 0

    def __init__(self, gate):
        self.gate = gate

    def __len__(self):
        return 240

    def __getitem__(self, index):
        if "loader" in os.environ["WEFT_WORKER"]:
            Line.calls += 1
            if Line.calls == 60:
                pass_gate(self.gate, "of the data")
        x = torch.tensor([index / 240])
        return x, x.sin()

def workload(gate):
    return weft.Workload(
        model=torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)),
        loss=torch.nn.functional.mse_loss, train=Line(gate),
        optimizer=lambda parameters: torch.optim.Adam(parameters))
"""
)


def hangs(daemon: Any, cause: str) -> float:
    with urllib.request.urlopen(f"{daemon.client.status()['metrics']}/metrics", timeout=SECONDS) as answer:
        text = answer.read().decode()
    return sum(float(line.split()[-1]) for line in text.splitlines() if f'weft_hangs_total{{cause="{cause}"' in line)


@pytest.mark.slow
def test_a_worker_that_is_stopped_for_ever_is_replaced_and_the_result_is_the_same(daemon: Any) -> None:
    """It was waited for until somebody noticed."""
    before = hangs(daemon, "stopped")
    spec = daemon.spec(SOURCE, strategy=PIPELINE, steps=300, args={"seconds": 0.01}, hang_seconds=2)
    job = daemon.submit(spec)
    until(lambda: daemon.client.show(job)["snapshot_step"], "a snapshot")
    victim = next(each for each in daemon.client.status()["workers"] if each["job"] == job and each["kind"] == "cpu")
    os.kill(victim["pid"], signal.SIGSTOP)
    log = daemon.until_logged(job, "goes on after step")
    assert "the job hangs, and nothing of it has ended for" in log
    assert f"{victim['worker']} is stopped, as by SIGSTOP" in log
    assert "recovering (hung)" in log
    run = Path(daemon.client.show(job)["run_dir"])
    assert "tells no stack" in (run / f"stacks-{victim['worker']}.txt").read_text()
    assert hangs(daemon, "stopped") == before + 1

    result = daemon.client.wait(job, SECONDS)
    assert result["state"] == "completed", daemon.log_of(job)
    again = daemon.submit(daemon.spec(SOURCE, strategy=PIPELINE, steps=300))
    ours, theirs = load_file(result["model"]), load_file(daemon.client.wait(again, SECONDS)["model"])
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
    assert lines_of(daemon, job) == lines_of(daemon, again)


@pytest.mark.slow
def test_a_dataset_that_does_not_return_is_told_with_stacks_and_who_waits_for_it(daemon: Any) -> None:
    gate = daemon.gate()
    spec = daemon.spec(BLOCKING, args={"gate": str(gate)}, steps=40, on_hang="notify", hang_seconds=1)
    job = daemon.submit(spec)
    log = daemon.until_logged(job, "stacks: ")
    assert "loader-0/load has been in LOAD(0,0) of step 3" in log
    assert "cpu-0/compute waits for LOAD(0,0) of loader-0/load, for its FORWARD(0,0)" in log
    shown = daemon.client.show(job)
    assert shown["state"] == "running"
    assert shown["why"].startswith("it hangs: loader-0/load has been in LOAD(0,0)")
    until(lambda: Path(shown["run_dir"], "stacks-loader-0.txt").exists(), "the stacks of the loader")
    assert "in pass_gate" in Path(shown["run_dir"], "stacks-loader-0.txt").read_text()
    gate.open()
    assert daemon.client.wait(job, SECONDS)["state"] == "completed"
    log = daemon.log_of(job)
    assert log.count("the job hangs") == 1
    assert "attempt 2" not in log
