"""recovery = "iteration": no iteration that was over is made again, whoever is killed.

Which one a job stands in is told by a buffer of its model, which counts forwards: what it must go on behind is known.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

_RECOVERY = runpy.run_path(str(Path(__file__).with_name("test_recovery.py")))
STRATEGIES, ON_STAND_INS, PASS_GATE = (_RECOVERY[name] for name in ("STRATEGIES", "ON_STAND_INS", "PASS_GATE"))
until, kill_worker, check_is_undisturbed = (
    _RECOVERY[name] for name in ("until", "kill_worker", "check_is_undisturbed")
)
StartDaemon = Callable[..., Any]

SOURCE = (
    PASS_GATE
    + """
import torch, weft

class Counting(torch.nn.Module):
    def __init__(self, gate, at):
        super().__init__()
        self.gate, self.at = gate, at
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if self.training:
            self.seen += 1
            if int(self.seen) == self.at:
                pass_gate(self.gate, f"of pass {self.at}")
        return x * 1.0

def workload(gate="", at=0):
    torch.manual_seed(5)
    inputs = torch.linspace(-1, 1, 48).reshape(48, 1)
    model = torch.nn.Sequential(
        torch.nn.Linear(1, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Dropout(0.1),
        torch.nn.Linear(8, 8), torch.nn.Tanh(), Counting(gate, at), torch.nn.Linear(8, 1))
    return weft.Workload(
        model=model, loss=torch.nn.MSELoss(), train=(inputs, inputs.sin()), validation=(inputs, inputs.sin()),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=1000))
"""
)
STEPS = 60


def passes_a_step(strategy: dict[str, Any]) -> int:
    """Of the replica that counts most."""
    replicas = strategy.get("replicas")
    own = [each.get("microbatches", 0) for each in replicas] if isinstance(replicas, list) else []
    return max(strategy["microbatches"], *own, 0)


def check_nothing_is_made_again(daemon: Any, strategy: dict[str, Any], victim: str, done: int) -> None:
    """A job that stands in the step after so many."""
    gate = daemon.gate()
    at = done * passes_a_step(strategy) + 1  # more than an inspection makes
    fields = {"window": 16} | strategy | {"recovery": "iteration"}
    spec = daemon.spec(SOURCE, strategy=fields, steps=STEPS, args={"gate": str(gate), "at": at})
    job = daemon.submit(spec)
    daemon.until_logged(job, f"at the gate of pass {at}")
    until(lambda: daemon.client.show(job)["snapshot_step"] == done, f"the copy of step {done}")
    kill_worker(daemon, job, victim)
    daemon.until_logged(job, "(attempt 2)")
    assert f"goes on after step {done} " in daemon.log_of(job)
    gate.open()
    check_is_undisturbed(daemon, job, spec)


@pytest.mark.slow(seconds=5)
@pytest.mark.pairs(3, strategy=tuple(STRATEGIES), victim=("cpu", "loader"), done=(23, 24, 41))  # an epoch has 2
def test_after_a_killed_worker_only_the_iteration_that_was_under_way_is_made_again(
    daemon: Any, strategy: str, victim: str, done: int
) -> None:
    check_nothing_is_made_again(daemon, STRATEGIES[strategy], victim, done)


@pytest.mark.slow(seconds=7)
@pytest.mark.pairs(strategy=tuple(ON_STAND_INS))
def test_so_it_is_on_devices(own_daemon: StartDaemon, strategy: str) -> None:
    check_nothing_is_made_again(own_daemon(workers=2, stand_ins=2), ON_STAND_INS[strategy], "gpu", 31)
