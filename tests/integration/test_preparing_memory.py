"""Workers have memory for their own stages alone, however the user's function builds the model, and the right bits."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from weft.reference import loop as reference

until = runpy.run_path(str(Path(__file__).with_name("real_daemon.py")))["until"]
MiB = 1 << 20
WIDTH = 2048  # a layer has 16 MiB, a stage two of them

SOURCE = """
import torch, weft
from torch import nn

WIDTH = 2048  # a layer has 16 MiB, a stage two of them

class Chain(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x

def workload(kind):
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(6)]
    model = Chain(layers) if kind == "by calls" else nn.Sequential(*layers)
    if kind == "one from another":
        layers[5].load_state_dict(layers[0].state_dict())
    if kind == "in half the bytes":
        model = model.bfloat16().float()
    x = torch.randn(16, WIDTH)
    return weft.Workload(model, (x, x.flip(0)), loss=nn.functional.mse_loss,
                         optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
"""
KINDS = ("in a row", "by calls", "one from another", "in half the bytes")


def spec_of(daemon: Any, kind: str, **job: Any) -> Any:
    tables = {"entry": "line.py:workload", "args": {"kind": kind}, "batch_size": 4, **job}
    return daemon.spec(SOURCE, strategy={"stages": 3, "microbatches": 2}, **tables)


def anonymous(pid: int) -> int:
    """Bytes of its own in memory, which no file or other process has."""
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("RssAnon:")]
    return int(line.split()[1]) * 1024


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_holds_nothing_of_other_stages(daemon: Any, kind: str) -> None:
    """Each had the whole model in free memory, until the job's end."""
    daemon.until_idle()
    before = {worker: anonymous(pid) for worker, pid in daemon.worker_pids().items()}
    job = daemon.submit(spec_of(daemon, kind, steps=1_000_000, mode="forward"))
    try:
        until(lambda: (daemon.client.show(job)["step"] or 0) > 2, "steps")
        pids = daemon.worker_pids()
        grown = {worker: anonymous(pid) - before[worker] for worker, pid in pids.items() if worker in before}
    finally:
        daemon.client.cancel(job)
    assert len(grown) >= 4
    megabytes = {worker: num // MiB for worker, num in grown.items()}
    assert max(megabytes.values()) < 96, f"kernels keep up to 64 MiB to themselves, the model has 96: {megabytes}"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_stages_that_are_built_alone_train_as_the_plain_loop(daemon: Any, kind: str) -> None:
    spec = spec_of(daemon, kind, steps=2, seed=5)
    result = daemon.run(spec)
    assert result["state"] == "completed", daemon.log_of(result["job"])
    assert result["loss"] == reference.train(spec).losses[-1]
