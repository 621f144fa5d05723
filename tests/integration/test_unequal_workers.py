"""Cores of two kinds: a pipeline is cut by what each of its workers computes in the same time, and no bit differs.

The daemon is told that all cores but the first are four times slower, by what it reads of the machine.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from weft.reference import loop as reference

_REAL = runpy.run_path(str(Path(__file__).with_name("real_daemon.py")))
RealDaemon, metrics_rows = _REAL["RealDaemon"], _REAL["metrics_rows"]

DAEMON = """
import dataclasses
from weft.machine import crew
from weft.cli.main import main

read_machine = crew.read_machine

def with_slow_cores():
    machine = read_machine()
    speeds = {cpu: 0.25 if number else 1.0 for number, cpu in enumerate(machine.cpus)}
    return dataclasses.replace(machine, core_speeds=speeds)

crew.read_machine = with_slow_cores
main()
"""

# Each unit takes as long as it is told, whatever else the cores do.
RESTING = """
import time, torch, weft

class Rests(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        time.sleep(0.002)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(0.002)
        return gradient.clone()

class Unit(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x):
        return torch.tanh(self.linear(Rests.apply(x)))

def workload():
    inputs = torch.linspace(-1, 1, 384).reshape(48, 8)
    return weft.Workload(model=torch.nn.Sequential(*(Unit() for _ in range(10))), loss=torch.nn.functional.mse_loss,
                         train=(inputs, inputs.sin()), optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3))
"""


class OfTwoKinds(RealDaemon):  # type: ignore[misc, valid-type]
    def command(self, **changes: object) -> list[str]:
        script = Path(self.home, "daemon.py")
        script.write_text(DAEMON)
        arguments: list[str] = super().command(**changes)
        return [sys.executable, str(script), *arguments[arguments.index("daemon") :]]


@pytest.fixture(scope="module")
def running() -> Iterator[Any]:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("two workers have one core")
    daemon = OfTwoKinds(workers=2)
    try:
        with daemon.serving():
            yield daemon
    finally:
        daemon.close()


@pytest.mark.days(3)
@pytest.mark.slow
@pytest.mark.pairs(schedule=("1f1b", "zero-bubble", "measured"))
def test_the_worker_on_slower_cores_has_fewer_units(running: Any, schedule: str) -> None:
    spec = running.spec(RESTING, strategy={"stages": 2, "microbatches": 4, "schedule": schedule})
    result = running.run(spec)
    assert result["state"] == "completed", running.log_of(result["job"])
    plan = json.loads(running.weft("plan", running.spec_file(spec), "--json").stdout)
    assert plan["stages"][0]["units"][1] in (7, 8, 9), "of ten; by equal speeds five"
    (note,) = (note for note in plan["notes"] if note.startswith("workers: unequal; "))
    assert note.endswith(" takes 4 s on CPU worker 1")
    assert note in running.log_of(result["job"])
    expected = reference.train(spec)
    assert [row["loss"] for row in metrics_rows(result["run_dir"])] == expected.losses
    trained = load_file(result["model"])
    assert [name for name, tensor in trained.items() if not torch.equal(tensor, expected.state[name])] == []
