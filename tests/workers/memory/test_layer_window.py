"""The places of a streamed model's layers on its device."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import torch

from weft.workers.devices.host import HostDevice
from weft.workers.devices.stand_in import StandIn
from weft.workers.lanes.attempt import Attempt
from weft.workload.entry import load_workload

_ATTEMPT = runpy.run_path(str(Path(__file__).parents[1] / "lanes" / "test_attempt.py"))

WIDTH, NUM_LAYERS = 32, 6
SOURCE = f"""
import torch
from torch import nn

import weft


def workload():
    torch.manual_seed(0)
    return weft.Workload(
        model=nn.Sequential(*[nn.Linear({WIDTH}, {WIDTH}) for _ in range({NUM_LAYERS})]),
        loss=nn.functional.mse_loss,
        train=(torch.randn(8, {WIDTH}), torch.randn(8, {WIDTH})),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
"""
LAYER_BYTES = 4 * (WIDTH * WIDTH + WIDTH)


class Counting(StandIn):
    """num_bytes: of what the job keeps on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def zeros(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        self.num_bytes += num_elements * dtype.itemsize
        return super().zeros(num_elements, dtype)


def prepared(planned: Any, directory: Path, replica: dict[str, Any]) -> tuple[Counting, Attempt]:
    """The device's worker of a job with these layers, set up."""
    (directory / "job.py").write_text(SOURCE)
    workload = _ATTEMPT["planned_workload"](directory)
    table = {"steps": 2, "directory": str(directory), "batch_size": 4, "update": "cpu", "recompute": True}
    job = planned(workload, replicas=[{"device": "gpu"} | replica], **table)
    opened, devices = job.new_directory(), {"cpu": HostDevice(), "loader": HostDevice(), "gpu": Counting()}
    attempts = {
        kind: Attempt(job.spec, view, load_workload(job.spec), opened, 0.0, devices[kind])
        for kind, view in zip(job.plan.workers, job.views, strict=True)
    }
    device = devices["gpu"]
    assert isinstance(device, Counting)
    return device, attempts["gpu"]


def test_a_window_holds_as_many_layers_and_gradients_as_it_says(planned: Any, tmp_path: Path) -> None:
    all_layers, _ = prepared(planned, tmp_path, {})
    kept, _ = prepared(planned, tmp_path, {"working_window": NUM_LAYERS})
    two, _ = prepared(planned, tmp_path, {"working_window": 2})
    assert kept.num_bytes - two.num_bytes == 2 * (NUM_LAYERS - 2) * LAYER_BYTES
    assert two.num_bytes < all_layers.num_bytes


def test_layers_whose_numbers_differ_by_the_window_have_the_same_place(planned: Any, tmp_path: Path) -> None:
    _, attempt = prepared(planned, tmp_path, {"working_window": 2})
    memories = attempt._parts.memories  # where a parameter lies is nothing that a worker tells

    def place_of(layer: int) -> set[int]:
        return {flat.untyped_storage().data_ptr() for flat in memories[0, layer].values.values()}

    assert place_of(0) == place_of(2) == place_of(4)
    assert place_of(1) == place_of(3) == place_of(5)
    assert place_of(0).isdisjoint(place_of(1))
