"""What roles say against real runs: as replica, as loader, for a second job.

A stand-in whose units sleep is a device that leaves the host alone, and as fast as it; a loader that sleeps waits for a
disk. So nothing here measures kernels: only whether what is predicted to hide hides. Each role is asked of `weft plan`,
and then its strategy runs beside the devices alone, on the same daemon, turn by turn.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from measure import Result, main, value_result

import weft.client.embedded
from weft.client.client import Client
from weft.spec.job_spec import JobSpec
from weft.transport.wire.frames import Message

HERE = Path(__file__).resolve().parent
TURNS, STEPS, QUICK_STEPS = 5, 40, 10
BATCH_SIZE = 32
ALONE: Mapping[str, Any] = {"replicas": [{"device": "gpu"}]}
COMPUTING: Mapping[str, Any] = {"sample_seconds": 1e-3}  # 96 ms of an iteration
LOADING: Mapping[str, Any] = {"sample_seconds": 1e-3, "load_seconds": 6e-3}  # twice as much to load


def collect(quick: bool) -> list[Result]:
    turns, steps = (1, QUICK_STEPS) if quick else (TURNS, STEPS)
    said: dict[str, list[float]] = {}
    brought: dict[str, list[float]] = {}
    daemon = weft.client.embedded.Daemon(
        workers=1, threads=1, stand_ins=1, loaders=4, runs_dir=tempfile.mkdtemp(prefix="weft-bench-")
    )
    with daemon as client:
        for _ in range(turns):
            for role, args in (("replica", COMPUTING), ("loader", LOADING), ("second job", COMPUTING)):
                told = _role(client, _spec(args, ALONE, steps), role)
                measure = _meanwhile if role == "second job" else _saved
                said.setdefault(role, []).append(told["brings"])
                brought.setdefault(role, []).append(measure(client, args, told["strategy"], steps))
    return [row for role in said for row in _rows(role, brought[role], said[role])]


def _rows(role: str, brought: list[float], said: list[float]) -> list[Result]:
    name = role.replace(" ", "_")
    errors = [abs(ours - theirs) for ours, theirs in zip(brought, said, strict=True)]
    how = "of an iteration of a stand-in alone whose units sleep 96 ms; sleeping_job.py, batch 32"
    return [
        value_result(f"{name}_brings", brought, "%", scale=100, how=f"measured; {how}"),
        value_result(f"{name}_said", said, "%", scale=100, how="predicted of the row above"),
        value_result(f"{name}_error", errors, "%", scale=100, goal="<= 5", how="their difference, of that iteration"),
    ]


def _saved(client: Client, args: Mapping[str, Any], strategy: Mapping[str, Any], steps: int) -> float:
    alone = client.wait(client.submit(_spec(args, ALONE, steps))["job"], timeout=600)
    ours = client.wait(client.submit(_spec(args, strategy, steps))["job"], timeout=600)
    return 1 - _seconds(ours) / _seconds(alone)


def _meanwhile(client: Client, args: Mapping[str, Any], strategy: Mapping[str, Any], steps: int) -> float:
    """Iterations of a job on the host in one of the job on the device, while both run."""
    jobs = [client.submit(_spec(args, axes, steps))["job"] for axes in (ALONE, strategy)]
    on_device, on_host = (_seconds(client.wait(job, timeout=600)) for job in jobs)
    return on_device / on_host


def _seconds(result: Message) -> float:
    assert result["state"] == "completed", result
    seconds: float = result["iteration_seconds"]
    return seconds


def _role(client: Client, spec: JobSpec, role: str) -> Message:
    job = client.submit(spec.model_copy(update={"plan_for": "time"}))["job"]
    client.wait(job, timeout=600)
    planned = client.show(job)["planned"]
    assert planned is not None, client.show(job)
    told: Message = next(each for each in planned["roles"]["roles"] if each["role"] == role)
    return told


def _spec(args: Mapping[str, Any], strategy: Mapping[str, Any], steps: int) -> JobSpec:
    job = {"entry": "sleeping_job.py:workload", "args": dict(args), "batch_size": BATCH_SIZE, "steps": steps}
    return JobSpec.parse({"job": job, "strategy": dict(strategy), "directory": str(HERE)})


if __name__ == "__main__":
    main("cpu_roles", collect)
