"""Models of any class on a GPU, cut by their own forward, under every schedule, by several streams of one GPU: they
train what the plain loop trains on the same GPU."""

from __future__ import annotations

import json
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from weft.reference import loop as reference
from weft.spec.job_spec import JobSpec
from weft.spec.schedule_text import DYNAMIC, MEASURED, SCHEDULE_NAMES, STAGES_PER_WORKER
from weft.workers.process.torch_settings import TorchSettings

TESTS = Path(__file__).resolve().parents[1]
_REAL = runpy.run_path(str(TESTS / "integration" / "real_daemon.py"))
_ANY = runpy.run_path(str(TESTS / "integration" / "test_any_model.py"))
metrics_rows, any_spec, IN_FLOAT64 = _REAL["metrics_rows"], _ANY["any_spec"], _ANY["IN_FLOAT64"]
TOLERANCE = 1e-9  # in float64: kernels of two streams may add in another order than those of one

SCHEDULED = ("unet", "gpt2", "resnet18")
SCHEDULES = tuple(name for name in SCHEDULE_NAMES if name != DYNAMIC)  # which a GPU is refused
STEPS = 6  # of two epochs of 20 samples by 8

# Deterministic kernels alone, in the plain loop and in the workers.
DETERMINISTIC = """
import runpy, torch

def workload(name):
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    return runpy.run_path({models!r})["workload"](name)
"""


@pytest.fixture(autouse=True)
def _settings_of_torch() -> Iterator[None]:
    before = TorchSettings.now()
    yield
    before.restore()


def on_one_gpu(stages: int, microbatches: int = 3, **others: Any) -> dict[str, Any]:
    replica = {"device": "gpu", "stages": stages, "gpus": 1, "microbatches": microbatches}
    return {"replicas": [replica], "update": "local", **others}


def trained(daemon: Any, spec: JobSpec) -> tuple[list[float], dict[str, torch.Tensor], dict[str, Any]]:
    result = daemon.run(spec)
    assert result["state"] == "completed", daemon.log_of(result["job"])
    losses = [row["loss"] for row in metrics_rows(result["run_dir"]) if "loss" in row]
    assert len(losses) == STEPS
    return losses, load_file(result["model"]), dict(result)


def agrees(daemon: Any, spec: JobSpec) -> dict[str, Any]:
    losses, state, result = trained(daemon, spec)
    expected = reference.train(spec, device="cuda:0")
    assert losses == pytest.approx(expected.losses, rel=TOLERANCE)
    for name, tensor in expected.state.items():
        torch.testing.assert_close(state[name], tensor, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)
    return result


@pytest.mark.parametrize("name", IN_FLOAT64)
@pytest.mark.parametrize("stages", [1, 3])
def test_a_model_of_any_class_trains_on_a_gpu_what_the_plain_loop_trains_there(
    daemon: Any, name: str, stages: int
) -> None:
    agrees(daemon, any_spec(name, double=True, **on_one_gpu(stages)))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", SCHEDULED)
def test_so_it_does_under_every_schedule_with_the_plain_loops_bits(
    daemon: Any, tmp_path: Path, name: str, schedule: str
) -> None:
    """In float32, with deterministic kernels; every other one recomputed. An order that came out is a schedule, too."""
    (tmp_path / "job.py").write_text(DETERMINISTIC.format(models=str(TESTS / "any_models.py")))
    recompute = (SCHEDULED.index(name) + SCHEDULES.index(schedule)) % 2 == 1
    stages = 4 if schedule in STAGES_PER_WORKER else 3
    job = {"entry": "job.py:workload", "args": {"name": name}, "batch_size": 8, "epochs": 2, "seed": 11}

    def spec(schedule: str) -> JobSpec:
        strategy = on_one_gpu(stages, 6, recompute=recompute, schedule=schedule)
        return JobSpec.parse({"job": job, "strategy": strategy, "directory": str(tmp_path)})

    losses, state, result = trained(daemon, spec(schedule))
    expected = reference.train(spec("gpipe"), device="cuda:0")
    assert losses == expected.losses
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.state.items())
    if schedule == MEASURED:
        again, _, _ = trained(daemon, spec(Path(result["run_dir"], "schedule.grid").read_text()))
        assert again == losses


WAITING: dict[str, dict[str, Any]] = {
    "zero-offload": {"preset": "zero-offload"},
    "zero-offload, clipped": {"preset": "zero-offload", "clip_norm": 0.1},
    "cotrain": {"preset": "cotrain"},
    "cotrain, clipped": {"preset": "cotrain", "clip_norm": 0.1},
    "hybrid-fine, clipped": {"preset": "hybrid-fine", "clip_norm": 0.1},
}


@pytest.mark.parametrize("waits", ["layer", "stage", None])
@pytest.mark.parametrize("how", WAITING)
def test_wherever_a_forward_waits_for_updates_the_result_is_the_plain_loops(
    daemon: Any, how: str, waits: str | None
) -> None:
    """Its buckets are so small that there are many. What a host's replica drops out is not what a GPU drops out."""
    strategy = WAITING[how] | {"bucket_mib": 1e-3} | ({} if waits is None else {"waits": waits})
    agrees(daemon, any_spec("gated" if how.startswith("hybrid") else "filled", double=True, **strategy))


@pytest.mark.parametrize("clip", [{}, {"clip_norm": 0.1}], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("preset", ["hybrid-coarse", "hybrid-fine"])
@pytest.mark.parametrize(("stages", "replicas"), [(2, 1), (3, 1), (2, 2)])
def test_cpu_replicas_beside_a_pipeline_by_streams_of_one_gpu_train_it_too(
    daemon: Any, stages: int, replicas: int, preset: str, clip: dict[str, Any]
) -> None:
    """Both sides update, each its own copy."""
    pipeline = {"device": "gpu", "stages": stages, "gpus": 1, "microbatches": 3}
    beside = [{"device": "cpu", "microbatches": 1}] * replicas
    strategy = {"preset": preset, "replicas": [pipeline, *beside], "share": "fixed", **clip}
    result = agrees(daemon, any_spec("gated", double=True, **strategy))
    assert result["steps"] == STEPS


@pytest.mark.filterwarnings("ignore")  # torch's own, where it compiles
@pytest.mark.parametrize("compiled", [True, "auto"])
def test_compiled_units_train_on_a_gpu_what_the_plain_loop_trains_that_compiles_them(
    daemon: Any, tmp_path: Path, compiled: Any
) -> None:
    job = {"entry": "compiled_models.py:workload", "args": {"name": "attends"}, "batch_size": 8, "epochs": 2, "seed": 5}
    strategy = on_one_gpu(1, 2, compile=compiled)
    spec = JobSpec.parse({"job": job, "strategy": strategy, "directory": str(TESTS)})
    result = daemon.run(spec)
    assert result["state"] == "completed", daemon.log_of(result["job"])
    expected = reference.train(spec, device="cuda:0", compiled=tmp_path)
    losses = [row["loss"] for row in metrics_rows(result["run_dir"]) if "loss" in row]
    assert losses == pytest.approx(expected.losses, rel=1e-4)


@pytest.mark.parametrize("name", ["gated", "resnet18"])  # which drop nothing out, so that devices agree
def test_auto_chooses_among_the_gpu_and_the_host_and_the_result_is_the_plain_loops(daemon: Any, name: str) -> None:
    spec = any_spec(name, double=True, preset="auto")
    losses, _, result = trained(daemon, spec)
    chosen = json.loads(Path(result["run_dir"], "strategy.json").read_text())
    plain = JobSpec.parse(spec.to_wire() | {"strategy": chosen})
    device = "cuda:0" if any(replica.device == "gpu" for replica in plain.strategy.replica_list) else "cpu"
    assert losses == pytest.approx(reference.train(plain, device=device).losses, rel=1e-7)


def test_what_the_host_brings_beside_the_gpu_is_told_with_the_plan(daemon: Any) -> None:
    told = daemon.weft("plan", daemon.spec_file(any_spec("resnet18", **on_one_gpu(1))), "--json")
    assert told.returncode == 0, told.stderr
    for role in ("replica", "updater", "loader", "second job"):
        assert role in told.stdout
