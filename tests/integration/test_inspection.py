"""A job with devices is planned from what its device was measured to take, on a real daemon with stand-ins."""

from __future__ import annotations

import json
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from weft.metrics.recording.recording import FILE, Recording
from weft.plan.inspection import Inspection

_REAL = runpy.run_path(str(Path(__file__).parent / "real_daemon.py"))
RealDaemon = _REAL["RealDaemon"]

CPU, GPU = {"device": "cpu"}, {"device": "gpu"}
ASLEEP = 0.02  # seconds that a unit takes on a device: what is to be measured, not waited for
LITTLE = 0.2  # of an iteration: more than a busy machine adds to one time and not to another

# On a device's worker the first unit takes its time; on a CPU worker it does not run, if there is to be none.
SOURCE = f"""
import os, time
import torch, weft

class First(torch.nn.Linear):
    refuses = False
    def forward(self, x):
        if os.environ["WEFT_WORKER"].startswith("gpu"):
            time.sleep({ASLEEP})
        else:
            assert not self.refuses, "the host was to leave it alone"
        return super().forward(x)

def workload(refuses):
    print("a model for", os.environ["WEFT_WORKER"])
    torch.manual_seed(1)
    model = torch.nn.Sequential(First(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    model[0].refuses = refuses
    inputs, targets = torch.randn(16, 3), torch.randn(16, 2)
    return weft.Workload(model=model, loss=torch.nn.functional.mse_loss, train=(inputs, targets),
                         optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01))
"""


@pytest.fixture(scope="module")
def daemon() -> Iterator[Any]:
    with RealDaemon(workers=1, stand_ins=1).serving() as daemon:
        yield daemon


def run(daemon: Any, strategy: dict[str, Any], *, refuses: bool) -> Recording:
    result = daemon.run(daemon.spec(SOURCE, strategy=strategy, steps=2, batch_size=8, args={"refuses": refuses}))
    assert result["state"] == "completed", daemon.log_of(result["job"])
    return Recording.load(Path(result["run_dir"]) / FILE)


def planned(recording: Recording, replica: int) -> list[float]:
    forwards = [task.id for task in recording.tasks if (task.kind, task.replica) == ("forward", replica)]
    return [recording.task_seconds[task] for task in forwards]


def test_a_job_of_devices_is_planned_from_their_times_and_its_host_never_runs_the_model(daemon: Any) -> None:
    recording = run(daemon, {"replicas": [GPU], "update": "cpu"}, refuses=True)
    assert min(planned(recording, 0)) >= ASLEEP
    log = daemon.log_of(recording.job)
    assert log.index("a model for gpu-0") < log.index("a model for cpu-0"), "which inspected, and which is the host"


def test_a_job_of_both_kinds_has_times_of_both(daemon: Any) -> None:
    recording = run(daemon, {"replicas": [CPU, GPU], "update": "balanced"}, refuses=False)
    inspection = Inspection.from_wire(recording.inspection)
    assert len(inspection.device_units) == len(inspection.units) == 3
    assert planned(recording, 1)[0] == pytest.approx(sum(unit.forward_seconds for unit in inspection.device_units))
    assert planned(recording, 0)[0] == pytest.approx(sum(unit.forward_seconds for unit in inspection.units))
    assert inspection.device_update_seconds is not None
    assert inspection.device_update_seconds > 0


@pytest.mark.slow(seconds=3)
def test_what_the_host_would_bring_is_told_of_a_plan_and_before_a_run(daemon: Any) -> None:
    """Of the plan with all that it might be; of the run with what was measured for it."""
    spec = daemon.spec(SOURCE, strategy={"replicas": [GPU]}, steps=2, batch_size=8, args={"refuses": False})
    told = json.loads(daemon.weft("plan", daemon.spec_file(spec), "--json").stdout)["roles"]
    brings = {each["role"]: each["brings"] for each in told["roles"]}
    assert told["predicted_iteration_seconds"] >= ASLEEP
    # Which of several that bring little is best is up to the machine's other work; `test_roles.py` has the rule.
    assert brings["replica"] < LITTLE < told["at_most"] < 0.8, "a call takes as long for half of the samples, on both"
    assert brings["updater"] < LITTLE
    assert told["best"] == "second job" or brings[told["best"]] < LITTLE
    run = daemon.run(spec)
    line = next(line for line in daemon.log_of(run["job"]).splitlines() if "cpu: beside one GPU (" in line)
    assert line.endswith("as loader 0.0 %; `weft plan` measures the replica and the updater and the second job")
    assert line.partition("cpu: ")[2] in daemon.client.show(run["job"])["plan"]["notes"][-1]


def test_the_workers_serve_on(daemon: Any) -> None:
    """What was inspected has left them clean."""
    before = daemon.worker_pids()
    run(daemon, {"replicas": [CPU, GPU], "update": "balanced"}, refuses=False)
    assert daemon.worker_pids() == before
