"""What a killed worker costs a job on a GPU: no result."""

from __future__ import annotations

import os
import runpy
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_REAL = runpy.run_path(str(Path(__file__).parents[1] / "integration" / "real_daemon.py"))
_RECOVERY = runpy.run_path(str(Path(__file__).parents[1] / "integration" / "test_recovery.py"))
held_behind_a_snapshot, check_is_undisturbed = _RECOVERY["held_behind_a_snapshot"], _RECOVERY["check_is_undisturbed"]
lines_of = _RECOVERY["lines_of"]
_BY_ITERATION = runpy.run_path(str(Path(__file__).parents[1] / "integration" / "test_recovery_by_iteration.py"))
check_nothing_is_made_again = _BY_ITERATION["check_nothing_is_made_again"]

GPU = {"device": "gpu"}
STRATEGIES: dict[str, dict[str, Any]] = {
    "local": {"replicas": [GPU], "update": "local", "microbatches": 2},
    "clipped on the GPU": {"replicas": [GPU], "update": "local", "clip_norm": 0.1},
    "zero-offload": {"preset": "zero-offload", "clip_norm": 0.1},
    "stronghold": {"preset": "stronghold", "microbatches": 2},
    "hybrid-coarse, updated by the host": {"preset": "hybrid-coarse", "update": "cpu", "share": "fixed"},
    "stages on one GPU": {"replicas": [GPU | {"stages": 2, "gpus": 1}], "microbatches": 2},
}


@pytest.fixture
def own_daemon() -> Iterator[Any]:
    daemon = _REAL["RealDaemon"](workers=2, gpus=1)
    try:
        yield daemon.start(seconds=120.0)
    finally:
        daemon.close()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_job_whose_gpu_worker_is_killed_goes_on_with_the_same_bits(own_daemon: Any, strategy: str) -> None:
    with held_behind_a_snapshot(own_daemon, STRATEGIES[strategy]) as (job, spec, gate):
        os.kill(own_daemon.worker_pids()["gpu-0"], signal.SIGKILL)
        own_daemon.until_logged(job, "recovering")
        gate.open()
        check_is_undisturbed(own_daemon, job, spec)
    assert "starts again" not in own_daemon.log_of(job)


@pytest.mark.parametrize("preset", ["hybrid-coarse", "hybrid-fine"])
def test_one_whose_sides_both_update_goes_on_from_the_hosts_copy_to_the_same_losses_but_for_rounding(
    own_daemon: Any, preset: str
) -> None:
    """The GPU's copy is another by what its kernels have rounded otherwise, until the next refresh."""
    strategy = {"preset": preset, "share": "fixed", "clip_norm": 0.1}
    with held_behind_a_snapshot(own_daemon, strategy) as (job, spec, gate):
        os.kill(own_daemon.worker_pids()["gpu-0"], signal.SIGKILL)
        own_daemon.until_logged(job, "recovering")
        gate.open()
        assert own_daemon.client.wait(job)["state"] == "completed", own_daemon.log_of(job)
        again = own_daemon.run(spec)["job"]
    losses, expected = (
        [line["loss"] for line in lines_of(own_daemon, each) if "loss" in line] for each in (job, again)
    )
    assert losses == pytest.approx(expected, rel=1e-3)
    assert "starts again" not in own_daemon.log_of(job)


@pytest.mark.parametrize("strategy", ["local", "zero-offload", "stages on one GPU"])
def test_with_a_copy_of_each_iteration_only_the_one_under_way_is_made_again(own_daemon: Any, strategy: str) -> None:
    check_nothing_is_made_again(own_daemon, {"microbatches": 2} | STRATEGIES[strategy], "gpu", 31)
