"""Buckets that turn from device to host and back as a job runs: the result is the plain loop's.

The host takes 10 ms for an update. The workload reads from a file how long the backward of its first unit takes: while
that is long, a bucket that is born before has the time to go to the host and back. While it is short, the last unit's
forward keeps the steps from being over too soon, and gives no bucket any time. Everything is float64.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from weft.reference import loop as reference
from weft.spec.job_spec import JobSpec

_REAL = runpy.run_path(str(Path(__file__).with_name("real_daemon.py")))
RealDaemon, metrics_rows, until, SECONDS = (_REAL[name] for name in ("RealDaemon", "metrics_rows", "until", "SECONDS"))

TOLERANCE = 1e-12
CPU, GPU = {"device": "cpu"}, {"device": "gpu"}
BUCKET = 1
STEPS = 700  # more than are made while the file changes: each takes 20 ms at least until it says "over"

SOURCE = """
import os, time
import torch, weft
from pathlib import Path
from torch import nn

def compute(seconds):
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass

class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        compute(ctx.seconds)
        return gradient, None

class First(nn.Module):
    def __init__(self, pace):
        super().__init__()
        self.linear, self.pace = nn.Linear(8, 64), pace
    def forward(self, x):
        return Slow.apply(torch.tanh(self.linear(x)), 0.05 if Path(self.pace).read_text() == "long" else 0.0)

class Last(nn.Module):
    def __init__(self, pace):
        super().__init__()
        self.linear, self.pace = nn.Linear(64, 1), pace
    def forward(self, x):
        if Path(self.pace).read_text() == "short":
            compute(0.02)
        return self.linear(x)

def workload(pace, optimizer="adamw"):
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(400, 8, generator=generator, dtype=torch.float64)
    model = nn.Sequential(First(pace), nn.Linear(64, 64), nn.Tanh(), Last(pace)).double()
    data = inputs, inputs.mean(1, keepdim=True).tanh()
    build = {
        "adamw": lambda params: torch.optim.AdamW(params, lr=1e-4, eps=1e-4),
        "sgd": lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9),
    }
    def built(params):
        on_host = os.environ.get("WEFT_WORKER", "").startswith("cpu")
        made = build[optimizer](params)
        if on_host:
            made.register_step_pre_hook(lambda *_: compute(0.0 if Path(pace).read_text() == "over" else 0.01))
        return made

    return weft.Workload(model=model, loss=nn.functional.mse_loss, train=data, validation=(inputs[:8], data[1][:8]),
                         optimizer=built,
                         scheduler=lambda built: torch.optim.lr_scheduler.StepLR(built, 500, gamma=0.9))
"""

JOBS: dict[str, tuple[str, dict[str, Any]]] = {
    "a device": ("adamw", {"replicas": [GPU]}),
    "a device, clipped": ("sgd", {"replicas": [GPU], "clip_norm": 0.3}),
    "a device beside a host": ("sgd", {"replicas": [GPU, CPU]}),
    "a device's two stages": ("adamw", {"replicas": [{"device": "gpu", "stages": 2, "split": [1]}]}),
}


def goes_to(daemon: RealDaemon, job: str, where: str) -> None:
    """Waits until the bucket with the large weight, born before the first backward, is updated there."""

    def has_come() -> bool:
        parts = [part.rpartition(" by ") for part in daemon.client.show(job)["plan"]["updates"].split("; ")]
        return any(where in worker and str(BUCKET) in numbers for numbers, _, worker in parts)

    until(has_come, f"bucket {BUCKET} by {where}")


@pytest.mark.days(3)
@pytest.mark.slow(seconds=10)
@pytest.mark.pairs(name=tuple(JOBS))  # one a day
def test_buckets_that_turn_as_a_job_runs_give_the_result_of_the_plain_loop(
    own_daemon: Any, tmp_path: Path, name: str
) -> None:
    daemon = own_daemon(workers=1, stand_ins=2)
    optimizer, strategy = JOBS[name]
    pace = tmp_path / "pace"
    pace.write_text("short")
    spec: JobSpec = daemon.spec(
        SOURCE,
        strategy={"update": "balanced", "bucket_mib": 0.0316} | strategy,
        batch_size=8,
        steps=STEPS,
        args={"pace": str(pace), "optimizer": optimizer},
    )
    job = daemon.submit(spec)
    daemon.until_logged(job, "running")
    for seconds, where in (("long", "the host"), ("short", "gpu-"), ("long", "the host")):
        pace.write_text(seconds)
        goes_to(daemon, job, where)
    pace.write_text("over")
    result = daemon.client.wait(job, SECONDS)
    assert result["state"] == "completed", daemon.log_of(job)
    assert daemon.log_of(job).count("updates from ") >= 2
    expected = reference.train(spec)
    rows = [row for row in metrics_rows(result["run_dir"]) if "loss" in row]
    assert [row["loss"] for row in rows] == pytest.approx(expected.losses, rel=TOLERANCE, abs=TOLERANCE)
    assert [row["lr"] for row in rows] == expected.learning_rates
    if "clip_norm" in strategy:
        assert min(expected.grad_norms) < strategy["clip_norm"] < max(expected.grad_norms)
    state = load_file(result["model"])
    assert state.keys() == expected.state.keys()
    assert max(float((state[key] - tensor).abs().max()) for key, tensor in expected.state.items()) < TOLERANCE
