"""Workers have memory for their own stages alone, however the user's function builds the model, and the right bits."""

from __future__ import annotations

import os
import runpy
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from weft.reference import loop as reference

until = runpy.run_path(str(Path(__file__).with_name("real_daemon.py")))["until"]
MiB = 1 << 20

SOURCE = """
import torch, weft
from torch import nn

class Chain(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x

def workload(kind, width=2048, layers=6):  # then a layer has 16 MiB, a stage two of them
    layers = [nn.Linear(width, width) for _ in range(layers)]
    model = Chain(layers) if kind == "by calls" else nn.Sequential(*layers)
    if kind == "one from another":
        layers[5].load_state_dict(layers[0].state_dict())
    if kind == "in half the bytes":
        model = model.bfloat16().float()
    x = torch.randn(16, width)
    return weft.Workload(model, (x, x.flip(0)), loss=nn.functional.mse_loss,
                         optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
"""
KINDS = ("in a row", "by calls", "one from another", "in half the bytes")


def spec_of(daemon: Any, kind: str, sizes: Mapping[str, int] = MappingProxyType({}), **job: Any) -> Any:
    tables = {"entry": "line.py:workload", "args": {"kind": kind, **sizes}, "batch_size": 4, **job}
    return daemon.spec(SOURCE, strategy={"stages": 3, "microbatches": 2}, **tables)


def memory(pid: int, kind: str) -> int:
    """Bytes. kind: RssAnon, which no file or other process has; VmRSS, all that is there; VmHWM, the most of it."""
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith(f"{kind}:")]
    return int(line.split()[1]) * 1024


@pytest.mark.slow(seconds=2)
@pytest.mark.pairs(kind=tuple(KINDS))  # one a day
def test_a_worker_holds_nothing_of_other_stages(daemon: Any, kind: str) -> None:
    """Each had the whole model in free memory, until the job's end."""
    daemon.until_idle()
    before = {worker: memory(pid, "RssAnon") for worker, pid in daemon.worker_pids().items()}
    job = daemon.submit(spec_of(daemon, kind, steps=1_000_000, mode="forward"))
    try:
        until(lambda: (daemon.client.show(job)["step"] or 0) > 2, "steps")
        pids = daemon.worker_pids()
        grown = {worker: memory(pid, "RssAnon") - before[worker] for worker, pid in pids.items() if worker in before}
    finally:
        daemon.client.cancel(job)
    assert len(grown) >= 4
    megabytes = {worker: num // MiB for worker, num in grown.items()}
    assert max(megabytes.values()) < 96, f"kernels keep up to 64 MiB to themselves, the model has 96: {megabytes}"


@pytest.mark.days(3)
@pytest.mark.slow(seconds=9)
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the kernel keeps the high-water mark")
def test_a_worker_has_given_back_what_it_has_inspected_before_it_is_told_to_prepare(own_daemon: Any) -> None:
    """It had the whole model in free memory, beside what it was preparing."""
    daemon = own_daemon(workers=3)
    daemon.until_idle()
    idle = min(memory(pid, "VmRSS") for pid in daemon.worker_pids().values())
    sizes = {"width": 1024, "layers": 96}  # small enough for the heap, which keeps what is freed
    job = daemon.submit(spec_of(daemon, "in a row", sizes, steps=1_000_000, mode="forward"))
    until(lambda: (daemon.client.show(job)["step"] or 0) > 2, "steps")
    peaks = {worker: (memory(pid, "VmHWM") - idle) // MiB for worker, pid in daemon.worker_pids().items()}
    daemon.client.cancel(job)
    assert max(peaks.values()) < 256, f"a layer has 4 MiB, a stage 128, the model 384: {peaks}"


@pytest.mark.slow(seconds=2)
@pytest.mark.pairs(kind=tuple(KINDS))  # one a day
def test_stages_that_are_built_alone_train_as_the_plain_loop(daemon: Any, kind: str) -> None:
    spec = spec_of(daemon, kind, steps=2, seed=5)
    result = daemon.run(spec)
    assert result["state"] == "completed", daemon.log_of(result["job"])
    assert result["loss"] == reference.train(spec).losses[-1]
