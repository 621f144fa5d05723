"""Shares that change as a job runs, and microbatches that whoever is free takes: the result is the reference's.

The second worker's replica does useless work beside what counts, so that it is slower. Everything is float64: sums in
another order differ by rounding alone.
"""

from __future__ import annotations

import runpy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from weft.metrics.recording.recording import Recording
from weft.plan.kinds import MODE_INDEX
from weft.reference import loop as reference
from weft.spec.job_spec import JobSpec

_REAL = runpy.run_path(str(Path(__file__).with_name("real_daemon.py")))
RealDaemon, metrics_rows = _REAL["RealDaemon"], _REAL["metrics_rows"]

TOLERANCE = 1e-12

UNEVEN = """
import os
import torch, weft
from torch import nn

class Work(nn.Module):
    def __init__(self, extra):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.extra = extra
    def forward(self, x):
        with torch.no_grad():
            for _ in range(self.extra * len(x)):
                self.linear(x)
        return torch.tanh(self.linear(x))

def workload(extra=0, slow="cpu-1", weighted=False, normalised=False):
    extra = extra * (10 if os.environ.get("WEFT_WORKER") == slow else 1)
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(50, 16, generator=generator, dtype=torch.float64)
    middle = nn.BatchNorm1d(16) if normalised else Work(0)
    model = nn.Sequential(Work(extra), nn.Dropout(0.1), middle, nn.Linear(16, 1)).double()
    data = inputs, inputs.mean(1, keepdim=True)
    return weft.Workload(model=model, loss=nn.functional.mse_loss, train=data, validation=data,
                         weight=(lambda target: target.abs().sum()) if weighted else None,
                         optimizer=lambda params: torch.optim.Adam(params, lr=1e-3))
"""


def spec_of(daemon: RealDaemon, strategy: dict[str, Any], job: dict[str, Any], **args: Any) -> JobSpec:
    return daemon.spec(UNEVEN, strategy={"replicas": 2} | strategy, **({"batch_size": 20, "args": args} | job))


def shares_of_a_run_like_the_reference(daemon: RealDaemon, spec: JobSpec) -> list[list[int]]:
    """The samples of each replica, by step."""
    return run_like_the_reference(daemon, spec)[0]


def run_like_the_reference(daemon: RealDaemon, spec: JobSpec) -> tuple[list[list[int]], Path]:
    """Runs it and compares; the samples of each replica, by step, and the run directory."""
    result = daemon.run(spec)
    assert result["state"] == "completed", daemon.log_of(result["job"])
    rows = [row for row in metrics_rows(result["run_dir"]) if "loss" in row]
    shares: list[list[int]] = [row["shares"] for row in rows]
    assert [sum(each) for each in shares] == [row["samples"] for row in rows]
    adapts = spec.strategy.share == "adaptive"
    expected = reference.train(spec, shares=shares.__getitem__ if adapts else None)
    assert [row["loss"] for row in rows] == pytest.approx(expected.losses, abs=TOLERANCE)
    assert result["validation"] == pytest.approx(expected.validations[-1], abs=TOLERANCE)
    state = load_file(result["model"])
    assert state.keys() == expected.state.keys()
    assert max(float((state[name] - tensor).abs().max()) for name, tensor in expected.state.items()) < TOLERANCE
    return shares, Path(result["run_dir"])


def forwards_by_step(run_dir: Path) -> list[int]:
    """That have a row."""
    recording = Recording.load(run_dir / "recording.msgpack")
    forward = MODE_INDEX["forward"]
    found = Counter(row[2] for rows in recording.rows.values() for row in rows if row[0] == forward)
    return [found[iteration] for iteration in sorted(recording.training)]


@pytest.mark.days(2)
@pytest.mark.slow(seconds=6)
def test_shares_that_follow_the_measured_speed_give_the_result_of_the_reference(daemon: RealDaemon) -> None:
    spec = spec_of(daemon, {"share": "adaptive", "microbatches": 2}, {"steps": 200}, extra=20)
    shares = shares_of_a_run_like_the_reference(daemon, spec)
    assert shares[0] == [10, 10]
    assert shares[-1][1] < 10, "the slow one has less"
    assert len({tuple(each) for each in shares if sum(each) == 20}) > 1


@pytest.mark.slow
def test_the_slowest_replica_has_microbatches_that_batch_normalisation_can_train_on(daemon: RealDaemon) -> None:
    """By its speed it would have one sample of twenty in each of two: torch refuses to train on that."""
    strategy = {"share": "adaptive", "microbatches": 2, "shares": [19, 1]}
    spec = spec_of(daemon, strategy, {"steps": 60}, extra=20, normalised=True)
    shares = shares_of_a_run_like_the_reference(daemon, spec)
    assert shares[0] == [18, 2]
    assert 1 not in {size for each in shares for size in each}


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        {},
        {"schedule": "gpipe", "window": 1},
        {"sync": "coarse", "clip_norm": 0.05, "recompute": True},
        {"microbatches": 20},
        {"staleness": 1},
    ],
    ids=str,
)
def test_stolen_microbatches_give_the_result_of_one_replica(daemon: RealDaemon, strategy: dict[str, Any]) -> None:
    spec = spec_of(daemon, {"share": "stealing", "microbatches": 7} | strategy, {"epochs": 4}, extra=1)
    shares, run_dir = run_like_the_reference(daemon, spec)
    assert len(shares) == 12
    of_first_and_last = 2 * len(spec.strategy.replica_list)
    for step, num_forwards in enumerate(forwards_by_step(run_dir)):
        with_samples = min(spec.strategy.microbatches, sum(shares[step]))
        assert with_samples <= num_forwards <= with_samples + of_first_and_last, "positions without any pass"


@pytest.mark.slow
def test_stolen_microbatches_that_weigh_differently_give_the_result_of_one_replica(daemon: RealDaemon) -> None:
    spec = spec_of(daemon, {"share": "stealing", "microbatches": 5}, {"epochs": 2}, weighted=True)
    shares_of_a_run_like_the_reference(daemon, spec)


@pytest.mark.slow
@pytest.mark.parametrize("gpus", [1, 2])
def test_devices_and_pipelines_steal_too(machine: Any, gpus: int) -> None:
    replicas = [{"device": "gpu", "stages": 2, "gpus": gpus}, {"stages": 2}]
    spec = spec_of(machine, {"share": "stealing", "microbatches": 5, "replicas": replicas}, {"epochs": 3}, extra=1)
    shares_of_a_run_like_the_reference(machine, spec)


@pytest.mark.slow
def test_a_replica_that_would_always_be_last_gets_nothing_and_the_job_says_so(daemon: RealDaemon) -> None:
    """Its microbatch takes longer than all of the batch takes the other one."""
    spec = spec_of(daemon, {"share": "stealing", "microbatches": 2}, {"steps": 60}, extra=20)
    result = daemon.run(spec)
    rows = [row for row in metrics_rows(result["run_dir"]) if "loss" in row]
    assert rows[-1]["shares"] == [rows[-1]["samples"], 0]
    assert "replica 1 does not pay" in daemon.log_of(result["job"])
    assert "its share is 0 from " in daemon.client.show(result["job"])["plan"]["verdicts"][0]
