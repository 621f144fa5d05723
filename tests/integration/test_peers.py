"""Stages on devices that reach one another hand on what they lend, and what lending leaves behind is removed.

The devices are stand-ins, which lend shared memory: what is shown is who makes it, who finds it and when.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from weft.reference import loop as reference

_REAL = runpy.run_path(str(Path(__file__).with_name("real_daemon.py")))
metrics_rows, until = _REAL["metrics_rows"], _REAL["until"]

CPU, GPU = {"device": "cpu", "stages": 2}, {"device": "gpu", "stages": 2}


@pytest.mark.slow
def test_between_devices_activations_and_gradients_are_lent_and_the_result_is_the_plain_loops(machine: Any) -> None:
    """The first job's workers serve the second one, whose loans have the same names."""
    spec = machine.spec(strategy={"replicas": [GPU, CPU], "microbatches": 4, "update": "cpu"})
    expected = reference.train(spec)
    machine.until_idle()
    pids = machine.worker_pids()
    for _ in range(2):
        result = machine.run(spec)
        assert result["state"] == "completed", machine.log_of(result["job"])
        plan = json.loads((Path(result["run_dir"]) / "plan.json").read_text())
        memory = {ring["name"]: ring["memory"] for ring in plan["rings"]}
        assert {name for name, kind in memory.items() if kind == "peer"} == {"activation-0-0", "gradient-0-0"}
        assert memory["activation-1-0"] == memory["gradient-1-0"] == memory["input-0"] == "shared"
        losses = [row["loss"] for row in metrics_rows(result["run_dir"]) if "loss" in row]
        assert losses == pytest.approx(expected.losses, rel=1e-5)
        state = load_file(result["model"])
        assert all(state[name].allclose(tensor, rtol=1e-5) for name, tensor in expected.state.items())
    assert machine.worker_pids() == pids, "nobody was replaced"


@pytest.mark.slow
def test_the_counters_of_loans_go_with_a_worker_that_is_killed(machine: Any) -> None:
    """torch keeps them in a file with a name while a GPU's memory is lent: torch_PID_RANDOM_NUMBER."""
    machine.until_idle()
    pid = machine.worker_pids()["gpu-1"]
    counters = Path(f"/dev/shm/torch_{pid}_1234_0")
    counters.write_bytes(bytes(8))
    os.kill(pid, signal.SIGKILL)
    until(lambda: machine.worker_pids().get("gpu-1", pid) != pid, "the worker after it")
    assert not counters.exists()
