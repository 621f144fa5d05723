"""What an inspection runs where nobody knows which microbatch sizes will occur."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from weft.spec.job_spec import JobSpec
from weft.workers.devices.host import HostDevice
from weft.workers.inspection.inspection import inspect
from weft.workload.workload import Workload


def sizes_inspected(strategy: dict[str, Any], model: nn.Module | None = None) -> list[int]:
    job = {"entry": "job.py:workload", "batch_size": 24, "epochs": 1}
    spec = JobSpec.parse({"job": job, "strategy": strategy, "directory": "/jobs"})
    workload = Workload(
        model=model or nn.Sequential(nn.Linear(3, 2), nn.ReLU()),
        loss=nn.MSELoss(),
        train=(torch.randn(48, 3), torch.randn(48, 2)),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    return sorted(size for size, _ in inspect(workload, spec, HostDevice())["values"][0]["shapes"])


@pytest.mark.parametrize(
    ("strategy", "sizes"),
    [
        ({"replicas": 2, "microbatches": 2}, [6]),
        ({"replicas": 2, "microbatches": 2, "share": "adaptive"}, [4, 6, 12]),
        ({"replicas": 2, "microbatches": 4, "share": "stealing"}, [6]),
    ],
)
def test_the_largest_microbatch_at_any_share_and_some_smaller_ones_are_run(
    strategy: dict[str, Any], sizes: list[int]
) -> None:
    assert sizes_inspected(strategy) == sizes


def test_sizes_that_may_never_occur_are_run_as_in_validation() -> None:
    """Batch norm trains on no batch of one."""
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
    assert sizes_inspected({"replicas": 2, "microbatches": 12, "share": "adaptive", "shares": [1, 0]}, model) == [1, 2]
