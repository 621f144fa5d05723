"""What an inspection measures on a real GPU, and that nothing of it stays there."""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from weft.plan.inspection import Inspection
from weft.spec.job_spec import JobSpec
from weft.workers.devices.cuda import CudaDevice
from weft.workers.inspection import update_times
from weft.workers.inspection.inspection import inspect_job
from weft.workload.workload import Workload

CPU, GPU = {"device": "cpu"}, {"device": "gpu"}
WIDTH = 1024
OPTIMIZERS: dict[str, Any] = {
    "adam": lambda given: torch.optim.Adam(given, lr=0.1),
    "adamw, foreach": lambda given: torch.optim.AdamW(given, lr=0.1, foreach=True, fused=False),
    "momentum": lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9),
    "adagrad": lambda given: torch.optim.Adagrad(given, lr=0.1),
    "adafactor": lambda given: torch.optim.Adafactor(given, lr=0.1),
}


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        assert isinstance(self.scale, torch.Tensor)
        return nn.functional.mse_loss(y.float(), target) * self.scale


@pytest.fixture(scope="module")
def device() -> Iterator[CudaDevice]:
    device = CudaDevice()
    yield device
    device.end_job()


def model_of(num_layers: int) -> nn.Sequential:
    """With a parameter of two units, and buffers."""
    layers = itertools.chain.from_iterable((nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(num_layers))
    model = nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH))
    model[-1].weight = model[0].weight
    return model


def told(device: CudaDevice, optimizer: str = "adam", num_layers: int = 2, **strategy: Any) -> Inspection:
    job = {"entry": "job.py:workload", "batch_size": 64, "steps": 1}
    spec = JobSpec.parse({"job": job, "strategy": strategy, "directory": "/jobs"})

    def load() -> Workload:
        return Workload(
            model=model_of(num_layers),
            loss=Loss(),
            train=(torch.randn(64, WIDTH), torch.randn(64, WIDTH)),
            optimizer=OPTIMIZERS[optimizer],
        )

    return Inspection.from_wire(inspect_job(load, spec, device))


def is_clean(device: CudaDevice) -> bool:
    """As a worker finds out, at a job's end."""
    gc.collect()
    device.end_job()
    return device.is_clean()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_inspection_measures_a_unit_and_a_step_and_leaves_the_gpu_clean(
    device: CudaDevice, precision: str, optimizer: str
) -> None:
    inspection = told(device, optimizer, replicas=[CPU, GPU], update="balanced", precision=precision)
    for kind in ("cpu", "gpu"):
        for unit in inspection.units_on(kind):
            times = unit.forward_seconds, unit.backward_seconds, unit.small_forward_seconds, unit.small_backward_seconds
            assert all(math.isfinite(seconds) and seconds > 0 for seconds in times)
    assert inspection.values_on("gpu")[-1].shapes == inspection.values_on("cpu")[-1].shapes
    assert inspection.update_seconds > 0
    assert inspection.device_update_seconds is not None
    assert inspection.device_update_seconds > 0
    assert is_clean(device)


@pytest.mark.parametrize("update", ["local", "cpu"])
def test_of_the_model_there_is_never_more_than_a_unit_on_the_gpu(
    device: CudaDevice, update: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of 256 MiB, of which a unit with its gradient is 8; products of matrices want 32 beside them."""
    monkeypatch.setattr(update_times, "SAMPLE_BYTES", 4 << 20)
    is_clean(device)
    device.reset_peak()
    told(device, num_layers=64, replicas=[GPU], update=update)
    peak_bytes = device.peak_bytes()
    assert peak_bytes is not None
    assert peak_bytes < 128 << 20
    assert is_clean(device)


def test_a_probe_is_measured_and_leaves_the_gpu_clean(device: CudaDevice) -> None:
    took = [device.probe_seconds() for _ in range(3)]
    assert all(seconds is not None and seconds > 0 for seconds in took)
    assert device.is_clean(), "a worker that has just joined has no job that could end"


def test_what_is_timed_has_been_computed_and_not_only_launched(device: CudaDevice) -> None:
    def work() -> torch.cuda.Event:
        x = torch.randn(4096, 4096, device=device.torch)
        for _ in range(50):
            x = x @ x
        event = torch.cuda.Event()
        event.record()
        return event

    seconds, event = device.timed(work)
    assert event.query()
    assert seconds > 0
    assert is_clean(device)
