"""Hangs of a real daemon's jobs: a worker that is stopped, and a dataset that does not return."""

from __future__ import annotations

import json
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

from weft.transport.memory.board import num_words

_RECOVERY = runpy.run_path(str(Path(__file__).with_name("test_recovery.py")))
PIPELINE, SOURCE, lines_of, until, SECONDS, PASS_GATE, KnownKeyDaemon = (
    _RECOVERY[name] for name in ("PIPELINE", "SOURCE", "lines_of", "until", "SECONDS", "PASS_GATE", "KnownKeyDaemon")
)
held_behind_a_snapshot, check_is_undisturbed = (
    _RECOVERY[name] for name in ("held_behind_a_snapshot", "check_is_undisturbed")
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


@pytest.mark.days(3)
@pytest.mark.slow(seconds=20)
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


@pytest.mark.days(3)
@pytest.mark.slow(seconds=18)
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


FIRST_OF_A_STEP = 505  # of the calls of the loss: 2 steps and 2 validations of 2 microbatches each are an epoch


@pytest.mark.days(3)
@pytest.mark.slow(seconds=20)
def test_a_job_in_which_every_lane_waits_is_begun_anew_and_the_result_is_the_same() -> None:
    """What the first stage has said of its second microbatch is unsaid, while the last stage is in the first one."""
    with KnownKeyDaemon(workers=2).serving() as daemon:
        with held_behind_a_snapshot(daemon, PIPELINE, call=FIRST_OF_A_STEP, hang_seconds=1) as (job, spec, gate):
            plan = json.loads(Path(daemon.client.show(job)["run_dir"], "plan.json").read_text())
            tasks = list(plan["task_seconds"])
            board = daemon.directory().of(f"{job}@1").block("board", 4 * num_words(len(tasks))).view(torch.int32)
            unsaid, first = (1 + tasks.index(task) for task in ("FORWARD(0,1)", "FORWARD(1,0)"))
            until(lambda: board[unsaid] > board[first], "the second microbatch's forward in the first stage")
            board[unsaid] -= 1
            gate.open()
            log = daemon.until_logged(job, "recovering (hung)")
            check_is_undisturbed(daemon, job, spec)
        assert "every lane waits and none does anything" in log
        assert "cpu-1/compute waits for FORWARD(0,1) of cpu-0/compute, for its FORWARD(1,1)" in log
        assert "all lanes let go, and the job goes on after step" in daemon.log_of(job)
        assert hangs(daemon, "nobody") == 1
