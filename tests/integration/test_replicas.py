"""A job of several replicas, on whatever devices, computes what the plain loop computes on whole batches.

In float64 to 1e-12: sums are made in another order, and that is all the difference there may be. The devices are
stand-ins, so what is shown is the plan and the workers, not a GPU's kernels.
"""

from __future__ import annotations

import json
import math
import os
import runpy
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from weft.reference import loop as reference
from weft.spec.job_spec import JobSpec

HERE = Path(__file__).parent
_REAL = runpy.run_path(str(HERE / "real_daemon.py"))
RealDaemon, metrics_rows, until, SECONDS = (_REAL[name] for name in ("RealDaemon", "metrics_rows", "until", "SECONDS"))
JOBS = runpy.run_path(str(HERE / "replica_jobs.py"))

FLOAT64, FLOAT32 = 1e-12, 1e-5  # relative, of a tensor to its largest element; measured are 1e-15 and 2e-7
SEED = 3
TINY = 1e-4  # MiB, of a bucket: 13 numbers of float64, so most parameters have one each
MODELS = ("mlp", "gpt", "cnn")

CPU, GPU = {"device": "cpu"}, {"device": "gpu"}
STREAMED: dict[str, Any] = {"update": "cpu", "recompute": True}
TWO_CPU, TWO_GPU = {"device": "cpu", "stages": 2}, {"device": "gpu", "stages": 2}

Strategy = dict[str, Any]

STRATEGIES: dict[str, Strategy] = {
    "two replicas": {"replicas": 2, "microbatches": 3, "bucket_mib": TINY},
    "three, coarse": {"replicas": 3, "sync": "coarse"},
    "two stages beside one, gpipe": {
        "replicas": [TWO_CPU | {"microbatches": 4}, CPU | {"microbatches": 3}],
        "schedule": "gpipe",
        "shares": [1 / 7, 0.15],
    },
    "one stage beside three, coarse": {
        "replicas": [CPU, {"stages": 3}],
        "microbatches": 4,
        "sync": "coarse",
        "shares": [0.15, 0.85],
        "bucket_mib": TINY,
    },
    "the first of three without a share": {"replicas": 3, "shares": [0, 0.5, 1 / 7], "bucket_mib": TINY},
    "the last of two without a share": {"replicas": 2, "shares": [0.5, 0], "microbatches": 2, "sync": "coarse"},
    "two stages each, recomputed, split": {
        "replicas": 2,
        "stages": 2,
        "microbatches": 3,
        "recompute": True,
        "schedule": "zero-bubble",
    },
    "one stage beside three, as they are ready": {
        "replicas": [CPU, {"stages": 3}],
        "microbatches": 3,
        "schedule": "dynamic",
        "bucket_mib": TINY,
    },
    "two stages of one replica": {"stages": 2, "microbatches": 3, "bucket_mib": TINY},
    "a device": {"replicas": [GPU]},
    "a device, updated by the host": {"replicas": [GPU], "update": "cpu", "microbatches": 2, "bucket_mib": TINY},
    "a device's two stages": {"replicas": [TWO_GPU], "microbatches": 3, "bucket_mib": TINY},
    "a device's two stages, coarse, by the host": {"replicas": [TWO_GPU], "update": "cpu", "sync": "coarse"},
    "a device's two stages, balanced": {"replicas": [TWO_GPU], "microbatches": 3, "update": "balanced"},
    "two stages on one device, split": {
        "replicas": [TWO_GPU | {"gpus": 1}],
        "microbatches": 3,
        "bucket_mib": TINY,
        "schedule": "zero-bubble",
    },
    "two stages in each of two devices": {
        "replicas": [GPU | {"stages": 4}],
        "microbatches": 3,
        "bucket_mib": TINY,
        "schedule": "zero-bubble-v",
    },
    "two stages in each of four workers": {
        "replicas": 2,
        "stages": 4,
        "microbatches": 3,
        "bucket_mib": TINY,
        "schedule": "interleaved",
    },
    "a working window": {"replicas": [GPU | {"working_window": 2}], "microbatches": 2, **STREAMED, "bucket_mib": TINY},
    "a host beside a working window": {"replicas": [CPU, GPU | {"working_window": 1}], **STREAMED},
    "two devices": {"replicas": [GPU, GPU], "microbatches": 2, "bucket_mib": TINY},
    "two devices, coarse, by the host": {"replicas": [GPU, GPU], "update": "cpu", "sync": "coarse"},
    "two devices, balanced": {"replicas": [GPU, GPU], "update": "balanced", "bucket_mib": TINY},
    "a device beside a host": {"replicas": [GPU, CPU], "microbatches": 2, "bucket_mib": TINY, "shares": [0.85, 0.15]},
    "a device beside a host, coarse, by the host": {"replicas": [GPU, CPU], "update": "cpu", "sync": "coarse"},
    "a host beside a device, balanced": {"replicas": [CPU, TWO_GPU], "update": "balanced", "bucket_mib": TINY},
    "two stages each of both, balanced, split": {
        "replicas": [TWO_GPU, TWO_CPU],
        "schedule": "zero-bubble",
        "microbatches": 3,
        "update": "balanced",
        "bucket_mib": TINY,
        "shares": [0.5, 1 / 7],
    },
}

BOUNDED: dict[str, Strategy] = {
    "two replicas, coarse": {"replicas": 2, "sync": "coarse"},
    "two replicas": {"replicas": 2, "bucket_mib": TINY},
    "two stages of one replica": {"stages": 2, "microbatches": 3},
    "two stages beside one, split": {
        "replicas": [TWO_CPU, CPU],
        "microbatches": 3,
        "bucket_mib": TINY,
        "schedule": "zero-bubble",
    },
    "a device": {"replicas": [GPU]},
    "a working window": {"replicas": [GPU | {"working_window": "auto"}], **STREAMED},
    "two devices, by the host": {"replicas": [GPU, GPU], "update": "cpu"},
    "two devices": {"replicas": [GPU, GPU]},
    "a host beside a device's two stages": {"replicas": [CPU, TWO_GPU], "microbatches": 3, "bucket_mib": TINY},
    "two stages each of both, balanced": {"replicas": [TWO_GPU, TWO_CPU], "microbatches": 3, "update": "balanced"},
}

STALE: dict[str, Strategy] = {
    "all by one": {"replicas": 2, "staleness": 1},
    "one replica's two stages": {"stages": 2, "microbatches": 2, "staleness": 1, "bucket_mib": TINY},
    "the second of two, after a warm-up": {"replicas": 2, "staleness": [0, 2], "staleness_warmup": 4},
    "all, by the host, clipped": {"replicas": [TWO_GPU, CPU], "staleness": [1, 2], "clip_norm": 1.0},
    "two devices, coarse": {"replicas": [GPU, GPU], "staleness": 2, "staleness_warmup": 1, "sync": "coarse"},
}

CLIP_NORM = {"mlp": 1.0, "gpt": 3.3, "cnn": 2.5}  # in the middle of the norms that occur


def spec_of(args: dict[str, Any], strategy: Strategy, **job: Any) -> JobSpec:
    """Three epochs of the job in replica_jobs.py."""
    table = {"entry": "replica_jobs.py:workload", "args": args, "batch_size": 8, "epochs": 3, "seed": SEED} | job
    return JobSpec.parse({"job": table, "strategy": strategy, "directory": str(HERE)})


def completed(daemon: RealDaemon, spec: JobSpec) -> dict[str, Any]:
    result: dict[str, Any] = daemon.run(spec)
    assert result["state"] == "completed", daemon.log_of(result["job"])
    return result


def steps_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in metrics_rows(result["run_dir"]) if "loss" in row]


def finite(values: Sequence[float]) -> list[float | None]:
    """As JSON has them."""
    return [value if math.isfinite(value) else None for value in values]


def agrees(
    daemon: RealDaemon, spec: JobSpec, tolerance: float = FLOAT64, least: float = 0.0
) -> reference.ReferenceResult:
    """Runs the job and the plain loop, and compares all that both tell; returns the plain loop's result. least: no
    tensor's largest element counts as less; some have no gradient but rounding (a bias of attention's keys)."""
    expected = reference.train(spec)
    check(completed(daemon, spec), expected, tolerance, least)
    return expected


def check(
    result: dict[str, Any], expected: reference.ReferenceResult, tolerance: float = FLOAT64, least: float = 0.0
) -> None:
    steps = steps_of(result)
    assert [row["loss"] for row in steps] == pytest.approx(expected.losses, rel=tolerance, abs=0)
    assert [row["lr"] for row in steps] == expected.learning_rates
    norms = finite(expected.grad_norms) or [None] * len(steps)
    assert [row["grad_norm"] for row in steps] == [n and pytest.approx(n, rel=tolerance, abs=0) for n in norms]
    assert [number for number, row in enumerate(steps) if row["skipped"]] == expected.skipped
    validations = [row["validation"] for row in metrics_rows(result["run_dir"]) if "validation" in row]
    assert validations == [pytest.approx(means, rel=tolerance, abs=0) for means in expected.validations]
    assert_same_state(load_file(result["model"]), expected.state, tolerance, least)


def assert_same_state(
    state: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float, least: float = 0.0
) -> None:
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        assert state[name].dtype is tensor.dtype, name
        greatest = max(least, float(tensor.abs().max()))
        assert float((state[name] - tensor).abs().max()) <= tolerance * greatest, name


@pytest.mark.slow
@pytest.mark.pairs(4, name=STRATEGIES, model=MODELS)
def test_replicas_compute_what_the_plain_loop_computes(machine: RealDaemon, name: str, model: str) -> None:
    agrees(machine, spec_of({"model": model}, STRATEGIES[name]))


@pytest.mark.slow
@pytest.mark.pairs(
    2,
    preset=("hybrid-coarse", "hybrid-fine"),
    num_cpus=(1, 2),
    stages=(2, 3),
    gpus=(1, 2),
    clipped=(False, True),
    batch_size=(8, 19),
    model=MODELS,
)
def test_a_pipeline_of_devices_beside_cpu_replicas_computes_what_the_plain_loop_computes(
    machine: RealDaemon,
    preset: str,
    num_cpus: int,
    stages: int,
    gpus: int,
    clipped: bool,
    batch_size: int,
    model: str,
) -> None:
    """An epoch's last batch is a part of one, in which some microbatches have no sample."""
    strategy: Strategy = {
        "preset": preset,
        "replicas": [GPU | {"stages": stages, "gpus": gpus}, *[CPU | {"microbatches": 1}] * num_cpus],
        "share": "fixed",
        "bucket_mib": TINY,
        "clip_norm": CLIP_NORM[model] if clipped else None,
    }
    agrees(machine, spec_of({"model": model}, strategy, batch_size=batch_size))


@pytest.mark.slow
@pytest.mark.pairs(
    4,
    name=("two replicas", "two stages beside one, gpipe", "two stages of one replica", "a device beside a host"),
    model=("noisy", "noisy by calls"),
    seed=(0, 1),
)
def test_what_a_model_draws_from_other_generators_is_the_plain_loops(
    machine: RealDaemon, name: str, model: str, seed: int
) -> None:
    agrees(machine, spec_of({"model": model}, STRATEGIES[name], seed=seed))


LAYERED: dict[str, Strategy] = {
    "two replicas": {"replicas": 2, "microbatches": 2},
    "two replicas, recomputed": {"replicas": 2, "recompute": True},
    "a device, by the host": {"replicas": [GPU], "update": "cpu"},
    "a host beside a device": {"replicas": [CPU, GPU]},
}


@pytest.mark.slow
@pytest.mark.pairs(2, name=LAYERED, model=("pausing", "stack"))
def test_forwards_that_wait_for_each_layers_late_update_compute_what_the_plain_loop_computes(
    machine: RealDaemon, name: str, model: str
) -> None:
    """Updates come behind the norm and are late, and a forward takes far longer than a task."""
    args = {"model": model, "optimizer": "late sgd"}
    spec = spec_of(args, LAYERED[name] | {"waits": "layer", "clip_norm": 1.0, "bucket_mib": TINY})
    result = completed(machine, spec)
    lanes = json.loads((Path(result["run_dir"]) / "plan.json").read_text())["lanes"]
    assert any(task.startswith("FORWARD(0,0,b") for lane in lanes.values() for task in lane), "no forward is in parts"
    check(result, reference.train(spec))


@pytest.mark.slow
def test_a_job_on_all_gpus_has_a_stage_on_each_from_when_it_is_taken(machine: RealDaemon) -> None:
    spec = spec_of({}, {"preset": "hybrid-fine", "microbatches": 2})
    job = machine.client.show(completed(machine, spec)["job"])
    assert job["spec"]["strategy"]["replicas"][0] == GPU | {"stages": 2}
    assert [stage["worker"] for stage in job["plan"]["stages"]] == ["gpu-0", "gpu-1", "cpu-0"]


@pytest.mark.slow
@pytest.mark.pairs(name=("two replicas", "a host beside a device, balanced"), model=MODELS, precision=("fp32", "bf16"))
def test_in_single_precision_the_difference_is_rounding(
    machine: RealDaemon, name: str, model: str, precision: str
) -> None:
    strategy = STRATEGIES[name] | {"precision": precision}
    agrees(machine, spec_of({"model": model, "dtype": "float32"}, strategy), FLOAT32)


@pytest.mark.slow
@pytest.mark.pairs(
    3,
    optimizer=("sgd", "adagrad", "decayed", "trusting"),
    name=("two replicas", "a device beside a host", "two stages each of both, balanced, split"),
)
def test_any_optimizer_with_a_scheduler_steps_as_in_the_plain_loop(
    machine: RealDaemon, optimizer: str, name: str
) -> None:
    expected = agrees(machine, spec_of({"optimizer": optimizer, "schedules": True}, STRATEGIES[name]))
    assert len(set(expected.learning_rates)) == len(expected.losses)


@pytest.mark.slow
@pytest.mark.pairs(
    2,
    model=("sometimes", "partly frozen"),
    optimizer=("adamw", "sgd"),
    name=("two replicas", "one stage beside three, coarse", "a device beside a host"),
)
def test_parameters_without_a_gradient_are_left_alone(
    machine: RealDaemon, model: str, optimizer: str, name: str
) -> None:
    """AdamW would shrink them and SGD's momentum would go on."""
    agrees(machine, spec_of({"model": model, "optimizer": optimizer}, STRATEGIES[name]))


# --- clipping and skipping


@pytest.mark.slow
@pytest.mark.pairs(4, name=BOUNDED, model=MODELS)
def test_clipping_takes_the_norm_over_all_replicas_and_stages(machine: RealDaemon, name: str, model: str) -> None:
    clip_norm = CLIP_NORM[model]
    expected = agrees(machine, spec_of({"model": model}, BOUNDED[name] | {"clip_norm": clip_norm}))
    assert min(expected.grad_norms) < clip_norm < max(expected.grad_norms)


@pytest.mark.slow
@pytest.mark.pairs(name=BOUNDED, clip_norm=(None, 1.0))
def test_a_step_whose_gradient_is_nan_is_skipped_everywhere(
    machine: RealDaemon, name: str, clip_norm: float | None
) -> None:
    strategy = BOUNDED[name] | {"clip_norm": clip_norm, "skip_nonfinite": True}
    spec = spec_of({"model": "singular", "schedules": True}, strategy)
    expected = agrees(machine, spec)
    assert len(expected.skipped) == 3  # once in an epoch
    assert len(expected.losses) == 9


# --- staleness


@pytest.mark.slow
@pytest.mark.pairs(4, name=STALE, model=(*MODELS, "sometimes"))
def test_stale_replicas_compute_with_the_parameters_of_so_many_steps_ago(
    machine: RealDaemon, name: str, model: str
) -> None:
    agrees(machine, spec_of({"model": model, "optimizer": "sgd"}, STALE[name]))


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [8, 19])
@pytest.mark.parametrize("name", ["all by one", "all, by the host, clipped"])
def test_a_stale_replica_comes_back_to_the_first_parameters_after_a_validation(
    machine: RealDaemon, name: str, batch_size: int
) -> None:
    """Validation has the newest. The first ones, which no update has made, were then read where nobody had put them,
    as zeros: with an epoch no longer than the staleness a job trained on something else, and said nothing."""
    agrees(machine, spec_of({"optimizer": "sgd"}, STALE[name], batch_size=batch_size, epochs=5))


@pytest.mark.slow
def test_a_staleness_of_one_is_gradient_descent_with_the_gradient_of_the_step_before(machine: RealDaemon) -> None:
    """Written out, without the reference: w[i + 1] = w[i] - 0.05 gradient(batch i, w[max(0, i - 1)])."""
    spec = spec_of({"model": "linear", "optimizer": "plain sgd"}, {"replicas": 2, "staleness": 1})
    inputs, targets = JOBS["columns"]()
    torch.manual_seed(SEED)
    model = JOBS["linear"]().double()
    versions = [dict(model.named_parameters())]
    for epoch in range(3):
        order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(SEED + epoch))
        for batch in torch.split(order, 8):
            seen = {name: tensor.detach().requires_grad_() for name, tensor in versions[-2:][0].items()}
            output = torch.func.functional_call(model, seen, inputs[batch])
            gradients = torch.autograd.grad((output - targets[batch]).square().mean(), list(seen.values()))
            versions.append(
                {name: versions[-1][name] - 0.05 * grad for name, grad in zip(seen, gradients, strict=True)}
            )
    state = load_file(completed(machine, spec)["model"])
    assert_same_state(state, {name: tensor.detach() for name, tensor in versions[-1].items()}, FLOAT64)


# --- races that once were lost


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [{}, {"clip_norm": 1.0}], ids=["alone", "with clipping"])
def test_a_device_leaves_the_sum_alone_until_a_slow_host_has_read_it(machine: RealDaemon, strategy: Strategy) -> None:
    """A device and a host each update their own parameters with the sum of their gradients, which stands where the
    device's gradient was. The device brought its next gradient down while the host still read."""
    hybrid = {"replicas": [GPU, CPU], "bucket_mib": TINY} | strategy
    agrees(machine, spec_of({"optimizer": "late sgd"}, hybrid))


@pytest.mark.slow
def test_what_a_microbatch_counts_stands_until_a_device_that_fetches_ahead_has_used_it(machine: RealDaemon) -> None:
    """The loader wrote the weights of a later batch over them, since the device had fetched, not yet used, its data."""
    strategy = {"replicas": [GPU], "prefetch": {"load": 1, "transfer": 16}}
    agrees(machine, spec_of({"model": "gpt"}, strategy, epochs=6))


@pytest.mark.slow
def test_parameters_without_a_gradient_are_known_to_an_owner_that_lags_behind(machine: RealDaemon) -> None:
    """A stale replica marked those of a later step where the owner had not read this one's."""
    spec = spec_of({"model": "sometimes", "optimizer": "late sgd"}, {"replicas": 2, "staleness": 2})
    agrees(machine, spec)


# --- a job that only runs forward

FORWARD: dict[str, Strategy] = {
    "two stages": {"stages": 2, "microbatches": 3},
    "a device's two stages": {"replicas": [TWO_GPU], "microbatches": 3},
    "a device beside a host": {"replicas": [GPU, CPU], "shares": [0.85, 0.15]},
}


@pytest.mark.slow
@pytest.mark.pairs(4, name=FORWARD, model=MODELS)
def test_a_job_that_only_runs_forward_measures_each_batch_and_changes_nothing(
    machine: RealDaemon, name: str, model: str
) -> None:
    spec = spec_of({"model": model}, FORWARD[name], mode="forward")
    expected = reference.train(spec)
    result = completed(machine, spec)
    measured = [row["measured"] for row in steps_of(result)]
    assert measured == [pytest.approx(means, rel=FLOAT64, abs=0) for means in expected.measured]
    assert len(measured) == len(expected.losses) > 0
    assert_same_state(load_file(result["model"]), expected.state, 0.0)


# --- the same bits


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_the_same_run_gives_the_same_bits(machine: RealDaemon, model: str) -> None:
    spec = spec_of({"model": model, "dtype": "float32"}, STRATEGIES["two replicas"])
    first, second = (completed(machine, spec) for _ in range(2))
    assert [row["loss"] for row in steps_of(first)] == [row["loss"] for row in steps_of(second)]
    assert_same_state(load_file(first["model"]), load_file(second["model"]), 0)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["cpu-0", "cpu-1"])
def test_a_worker_that_is_killed_in_the_middle_of_two_replicas_does_not_change_a_bit(
    daemon: RealDaemon, victim: str
) -> None:
    gate = daemon.gate()
    strategy = {"replicas": 2, "microbatches": 2, "bucket_mib": TINY}
    spec = daemon.spec(args={"gate": str(gate), "gate_at": 12}, strategy=strategy)  # in the second epoch of both
    job = daemon.submit(spec)
    try:
        daemon.until_logged(job, "at the gate of training")
        os.kill(daemon.worker_pids()[victim], signal.SIGKILL)
        daemon.until_logged(job, "recovering")
    finally:
        gate.open()
    result = daemon.client.wait(job, SECONDS)
    assert "starts again" in daemon.log_of(job)
    undisturbed = completed(daemon, spec)
    assert result["loss"] == undisturbed["loss"]
    assert_same_state(load_file(result["model"]), load_file(undisturbed["model"]), 0)
