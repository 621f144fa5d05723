"""Data that lie on devices give the samples that a loader gives, under every way in which a batch is divided."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from weft.spec.job_spec import JobSpec

HERE = Path(__file__).parent
agrees = runpy.run_path(str(HERE / "test_replicas.py"))["agrees"]

GPU, TWO_GPU, CPU = {"device": "gpu"}, {"device": "gpu", "stages": 2}, {"device": "cpu"}
STRATEGIES: dict[str, dict[str, Any]] = {
    "a device": {"replicas": [GPU], "microbatches": 3},
    "two stages of devices": {"replicas": [TWO_GPU], "microbatches": 2},
    "two devices": {"replicas": [GPU, GPU], "shares": [0.7, 0.3]},
    "a device beside a host": {"replicas": [GPU, CPU], "microbatches": 2},
    "whoever is free": {"replicas": [GPU, GPU], "share": "stealing", "microbatches": 4, "schedule": "gpipe"},
    "whoever is free, one of them a host": {
        "replicas": [GPU, CPU],
        "share": "stealing",
        "microbatches": 4,
        "schedule": "gpipe",
    },
    "two loaders, by the host": {"replicas": [GPU], "loaders": 2, "update": "cpu"},
}


def spec_of(kind: str, **strategy: Any) -> JobSpec:
    job = {"entry": "resident_jobs.py:workload", "args": {"kind": kind}, "batch_size": 8, "epochs": 3, "seed": 7}
    return JobSpec.parse({"job": job, "strategy": {"resident": True, **strategy}, "directory": str(HERE)})


@pytest.mark.slow
@pytest.mark.pairs(kind=("sequential", "own", "step", "weighed"), how=STRATEGIES)
def test_samples_are_those_of_a_loader(machine: Any, kind: str, how: str) -> None:
    agrees(machine, spec_of(kind, **STRATEGIES[how]), least=1.0)


@pytest.mark.slow
def test_data_that_are_collated_stay_with_the_host_and_the_log_says_so(machine: Any) -> None:
    source = (
        "import torch, weft\n"
        "def workload():\n"
        "    data = [(torch.ones(2), torch.ones(1))] * 8\n"
        "    return weft.Workload(torch.nn.Linear(2, 1), data, loss=torch.nn.functional.mse_loss,\n"
        "                         optimizer=lambda p: torch.optim.SGD(p, lr=0.1))\n"
    )
    result = machine.run(machine.spec(source, strategy={"resident": True, "replicas": [GPU]}, batch_size=4, epochs=1))
    assert result["state"] == "completed"
    log = machine.log_of(result["job"])
    assert (
        "data: not resident on GPUs, since they are no tensors, or the workload collates or samples them itself" in log
    )
