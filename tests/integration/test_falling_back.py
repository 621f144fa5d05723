"""Jobs that give no strategy on a machine with a device, where what was chosen fails: one CPU worker goes on with them,
from their newest checkpoint, and the result is the plain loop's."""

from __future__ import annotations

import json
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from weft.reference import loop as reference
from weft.spec.candidates import or_auto
from weft.spec.job_spec import JobSpec

_REAL = runpy.run_path(str(Path(__file__).with_name("real_daemon.py")))
RealDaemon, metrics_rows = _REAL["RealDaemon"], _REAL["metrics_rows"]
STEPS, FAILS_AT = 1500, 350

# Its model is slow on the host as long as it is inspected: the third load is the one on the device. Behind that, in an
# attempt's process, a step fails once there is a checkpoint, as long as nobody has been told.
FASTER_THERE = (
    f"AT = {FAILS_AT}\n"
    + """
import os, time
from pathlib import Path

import torch, weft

class Slow(torch.nn.Module):
    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def forward(self, x):
        time.sleep(self.seconds)
        return x

def workload(counter, fails, looked_at=""):
    with open(counter, "a") as file:
        file.write("x")
        loads = file.tell()
    calls, failed, runs = 0, Path(counter + "-failed"), Path(counter).parents[2] / "s" / "runs"
    before = len([*runs.glob("*/checkpoints/step-*")])
    if loads == 3:
        exec(looked_at)

    def loss(output, target):
        nonlocal calls
        calls += 1
        if loads > 4 and calls >= AT and fails and not failed.exists():
            if len([*runs.glob("*/checkpoints/step-*")]) > before:
                failed.touch()
                raise eval(fails)
            time.sleep(0.02)
        return torch.nn.functional.mse_loss(output, target)

    layers = [torch.nn.Linear(1, 8), torch.nn.Dropout(0.1), Slow(0.01 if loads in (1, 2, 4) else 0), torch.nn.Tanh(),
              torch.nn.Linear(8, 1)]
    inputs = torch.linspace(-1, 1, 48).reshape(48, 1)
    return weft.Workload(model=torch.nn.Sequential(*layers), loss=loss, train=(inputs, inputs.sin()),
                         optimizer=lambda params: torch.optim.Adam(params, lr=0.01))
"""
)


@pytest.fixture(scope="module")
def with_a_device() -> Iterator[RealDaemon]:
    with RealDaemon(workers=1, stand_ins=1).serving() as running:
        yield running


def run(daemon: RealDaemon, fails: str, **args: Any) -> tuple[dict[str, Any], str]:
    """The result, and the log of the job."""
    spec = daemon.spec(FASTER_THERE, steps=STEPS)
    args |= {"counter": str(Path(spec.directory, "loads")), "fails": fails}
    tables = spec.to_wire() | {"checkpoint": {"every": "100 steps"}}
    del tables["strategy"]
    spec = or_auto(JobSpec.parse(tables | {"job": tables["job"] | {"args": args}}))
    result = daemon.run(spec)
    log = daemon.log_of(result["job"])
    assert result["state"] == "completed", log
    plain = JobSpec.parse(tables | {"job": tables["job"] | {"args": args | {"fails": ""}}})
    expected = reference.train(plain)
    assert [row["loss"] for row in metrics_rows(result["run_dir"]) if "loss" in row] == expected.losses
    assert all(torch.equal(tensor, expected.state[name]) for name, tensor in load_file(result["model"]).items())
    return dict(result), log


def devices_of(result: dict[str, Any]) -> list[str]:
    """As the run directory has the strategy."""
    replicas = json.loads(Path(result["run_dir"], "strategy.json").read_text()).get("replicas", 1)
    return ["cpu"] if isinstance(replicas, int) else [replica["device"] for replica in replicas]


@pytest.mark.days(2)
@pytest.mark.slow(seconds=4)
@pytest.mark.parametrize("fails", ["torch.OutOfMemoryError('full')", "TypeError('not for devices')"])
def test_what_fails_by_the_choice_goes_on_on_one_cpu_worker(with_a_device: RealDaemon, fails: str) -> None:
    result, log = run(with_a_device, fails)
    assert "no [strategy]: auto chose one GPU" in log
    assert fails.partition("(")[2][1:-2] in log
    assert "no [strategy]: the choice has failed; the job goes on on one CPU worker (attempt 2)" in log
    assert "goes on from " in log
    assert devices_of(result) == ["cpu"]
    assert result["exception"] is None


@pytest.mark.slow(seconds=3)
def test_what_does_not_fail_stays_on_the_device(with_a_device: RealDaemon) -> None:
    result, log = run(with_a_device, "")
    assert "no [strategy]: auto chose one GPU" in log
    assert devices_of(result) == ["gpu"]
    assert "has failed" not in log


@pytest.mark.slow(seconds=3)
def test_a_model_for_the_host_alone_is_looked_at_there(with_a_device: RealDaemon) -> None:
    result, log = run(with_a_device, "", looked_at="raise TypeError('this is for the host')")
    assert "no [strategy]: GPUs are left alone, since a look at them raised TypeError: this is for the host" in log
    assert devices_of(result) == ["cpu"]


@pytest.mark.slow(seconds=3)
def test_one_that_ends_the_process_there_too(with_a_device: RealDaemon) -> None:
    result, log = run(with_a_device, "", looked_at="os.abort()")
    assert "gpu-0 died of signal 6 (SIGABRT)" in log
    assert "no [strategy]: the choice has failed; the job goes on on one CPU worker (attempt 2)" in log
    assert devices_of(result) == ["cpu"]
