"""A job whose inspection was wrong goes on with another plan, and no bit differs, whatever comes between.

From a step on half of its units sleep, as no inspection can know: it looks at the first batches alone.
"""

from __future__ import annotations

import os
import re
import runpy
import signal
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from weft.metrics.recording.recording import Recording
from weft.reference import loop as reference
from weft.scheduler.runs.recording import FILE
from weft.scheduler.whatif.answer import what_if

_REAL = runpy.run_path(str(Path(__file__).with_name("real_daemon.py")))
metrics_rows, until, SECONDS, PASS_GATE = (_REAL[name] for name in ("metrics_rows", "until", "SECONDS", "PASS_GATE"))
StartDaemon = Callable[..., Any]

# Dropout, and buffers that training changes: the count is in the snapshots, so who has grown tired stays so. Who does
# first shuts the gate, if there is one, and whoever prepares the job from then on is held there.
TIRED = (
    PASS_GATE
    + """
import contextlib
import torch, weft

class Tired(torch.nn.Module):
    def __init__(self, after, seconds, gate):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.dropout = torch.nn.Dropout(0.1)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.after, self.seconds, self.gate = after, seconds, gate

    def forward(self, x):
        if self.training:
            self.calls += 1
        time.sleep(self.seconds if self.calls > self.after else 0.001)  # alike until then, whoever has the cores
        if self.gate and self.calls == self.after:
            with contextlib.suppress(FileExistsError):
                open(self.gate + ".was", "x").close()
                open(self.gate, "x").close()
        return x + self.dropout(torch.tanh(self.linear(x)))

def workload(after=20, seconds=0.006, units=8, gate=""):
    pass_gate(gate, "of preparing")
    torch.manual_seed(5)
    inputs = torch.linspace(-1, 1, 48).reshape(48, 1).expand(48, 8).contiguous()
    times = [seconds if unit >= units // 2 else 0.0 for unit in range(units)]
    model = torch.nn.Sequential(*(Tired(after, each, gate) for each in times))
    return weft.Workload(model=model, loss=torch.nn.functional.mse_loss, train=(inputs, inputs.sin()),
                         optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))
"""
)
PIPELINE = {"stages": 2, "microbatches": 2, "window": 16}
STEPS = 230


def check_is_that_of_the_plain_loop(daemon: Any, result: dict[str, Any], spec: Any) -> None:
    assert result["state"] == "completed", daemon.log_of(result["job"])
    tables = spec.to_wire()
    awake = type(spec).parse(
        tables | {"job": tables["job"] | {"args": {"seconds": 0.0}}, "strategy": {"microbatches": 2}}
    )
    expected = reference.train(awake)
    rows = metrics_rows(result["run_dir"])
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1)), "each step once"
    assert [row["loss"] for row in rows] == expected.losses
    trained = load_file(result["model"])
    assert [name for name, tensor in trained.items() if not torch.equal(tensor, expected.state[name])] == []


def changes_of(daemon: Any, job: str) -> float:
    with urllib.request.urlopen(f"{daemon.client.status()['metrics']}/metrics", timeout=SECONDS) as answer:
        lines = answer.read().decode().splitlines()
    (line,) = [line for line in lines if line.startswith(f'weft_job_plan_changes{{job="{job}"}}')]
    return float(line.split()[-1])


STRATEGIES = {
    "fixed": PIPELINE | {"replan": True},
    "made": PIPELINE | {"replan": True, "schedule": "measured"},
    "chosen": PIPELINE | {"preset": "auto", "replicas": 1, "schedule": "gpipe"},
}


@pytest.mark.days(3)
@pytest.mark.slow(seconds=9)
@pytest.mark.pairs(strategy=tuple(STRATEGIES))  # one a day
def test_a_job_whose_units_grow_slow_is_cut_elsewhere_and_to_the_same_bits(daemon: Any, strategy: str) -> None:
    spec = daemon.spec(TIRED, strategy=STRATEGIES[strategy], steps=STEPS)
    result = daemon.run(spec)
    check_is_that_of_the_plain_loop(daemon, result, spec)
    log = daemon.log_of(result["job"])
    plan = daemon.client.show(result["job"])["plan"]
    assert len(plan["verdicts"]) >= 2, log
    expected, brought = plan["verdicts"][:2]
    cuts = re.match(r"another plan: stages of (\d) and \d units instead of (\d) and \d; ", expected)
    assert cuts is not None, expected
    assert int(cuts[1]) > int(cuts[2]), "the stage of those that are awake has more of them"
    assert plan["strategy"]["replan"] is True
    assert plan["changes"][0]["seconds"] > 0
    assert "than the one before; the change took" in brought
    assert all(line in log for line in plan["verdicts"])
    assert plan["stages"][0]["units"][1] > 4
    assert changes_of(daemon, result["job"]) == len(plan["verdicts"]) // 2
    assert "recovering" not in log
    answer = what_if(Recording.load(Path(result["run_dir"], FILE)))
    assert answer.iterations > 0, "its recording is of the plan that it had at last"


@pytest.mark.slow(seconds=5)
def test_where_its_user_has_not_asked_for_it_a_fixed_strategy_stays_as_it_is(daemon: Any) -> None:
    spec = daemon.spec(TIRED, strategy=PIPELINE, steps=STEPS, args={"seconds": 0.0005})
    result = daemon.run(spec)
    check_is_that_of_the_plain_loop(daemon, result, spec)
    assert daemon.client.show(result["job"])["plan"]["verdicts"] == []


# --- what comes between


@contextmanager
def held_on_the_way(daemon: Any) -> Iterator[tuple[str, Any, Any]]:
    """(job, its spec, the gate): its workers prepare the other plan, and stand at the gate."""
    gate = daemon.home / "gate-of-preparing"
    spec = daemon.spec(TIRED, strategy=PIPELINE | {"replan": True}, steps=STEPS, args={"gate": str(gate)})
    job = daemon.submit(spec)
    try:
        log = daemon.until_logged(job, "at the gate of preparing")
        assert "another plan: " in log
        yield job, spec, gate
    finally:
        gate.unlink(missing_ok=True)


def lose_a_worker(daemon: Any, job: str, gate: Path) -> None:
    held = [each for each in daemon.client.status()["workers"] if each["job"] == job and each["kind"] == "cpu"]
    os.kill(held[-1]["pid"], signal.SIGKILL)
    daemon.until_logged(job, "was killed; the job goes on after step")
    gate.unlink()


def lose_the_daemon(daemon: Any, job: str, gate: Path) -> None:
    """And all that it had in memory."""
    daemon.kill()
    daemon.until_nothing_lives()
    gate.unlink()
    daemon.start()


def replace_the_daemon(daemon: Any, job: str, gate: Path) -> None:
    assert daemon.client.replace()["jobs"] == 1
    gate.unlink()


def pause(daemon: Any, job: str, gate: Path) -> None:
    asking = threading.Thread(target=daemon.client.pause, args=(job,), daemon=True)
    asking.start()
    daemon.until_logged(job, "asked to pause")
    gate.unlink()
    asking.join(SECONDS)
    assert daemon.client.show(job)["state"] == "paused"
    daemon.client.resume(job)


DISTURBANCES = {each.__name__: each for each in (lose_a_worker, lose_the_daemon, replace_the_daemon, pause)}


@pytest.mark.days(3)
@pytest.mark.slow(seconds=14)
@pytest.mark.pairs(disturbance=tuple(DISTURBANCES))  # one a day
def test_what_comes_between_costs_no_bit_and_no_step(own_daemon: StartDaemon, disturbance: str) -> None:
    daemon = own_daemon()
    with held_on_the_way(daemon) as (job, spec, gate):
        DISTURBANCES[disturbance](daemon, job, gate)
        check_is_that_of_the_plain_loop(daemon, daemon.client.wait(job, SECONDS), spec)
    if disturbance in ("lose_a_worker", "replace_the_daemon"):
        assert "the other plan takes" in daemon.log_of(job), "with which it has gone on"


@pytest.mark.days(3)
@pytest.mark.slow(seconds=8)
def test_cancelled_on_the_way_it_ends_and_leaves_what_it_had_come_to(own_daemon: StartDaemon) -> None:
    daemon = own_daemon()
    with held_on_the_way(daemon) as (job, _, gate):
        assert daemon.client.cancel(job) == "cancelled"
        gate.unlink(missing_ok=True)
    assert daemon.client.show(job)["state"] == "cancelled"
    until(lambda: daemon.client.show(job)["checkpoint"], "the snapshot, on the disk")
