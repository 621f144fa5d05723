"""An error of the job's code says where it was: unit, stage, microbatch, step; of data the data set and the sample.

Every place where the user's code is called, as a job of two stages in a real daemon, and by the plain loop.
"""

from __future__ import annotations

import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from weft.reference import loop as reference
from weft.workload.faults import fault_of

_REAL = runpy.run_path(str(Path(__file__).with_name("real_daemon.py")))
RealDaemon, SECONDS = _REAL["RealDaemon"], _REAL["SECONDS"]

SEED, NUM_SAMPLES, BATCH, LATE = 3, 48, 8, 40
ORDER = torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(SEED)).tolist()
ODD = ORDER[LATE]  # first met in step 5, by when nobody inspects any more
LATE_CALL = 60  # of whatever is called for each microbatch; an inspection makes fewer

SOURCE = """
import torch, weft
from torch import nn

calls = 0

def late():
    global calls
    calls += 1
    if calls == {late_call}:
        raise KeyError("lost")

class Breaks(nn.Module):
    def forward(self, x):
        {forward}
        return x

class BreaksBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        late()
        return gradient

class BreaksStep(torch.optim.SGD):
    def step(self, closure=None):
        late()
        return super().step(closure)

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return {num_samples}

    def __getitem__(self, index):
        value = torch.full((1,), index / {num_samples})
        if index == {odd}:
            {item}
        return value, value

def loss(output, target):
    {loss}
    return nn.functional.mse_loss(output, target)

def accuracy(output, target):
    {metric}
    return output.mean()

def weight(target):
    {weight}
    return len(target)

def workload():
    layers = [nn.Linear(1, 4), nn.Tanh(), Breaks(), nn.Linear(4, 1)]
    return weft.Workload(model=nn.Sequential(*layers), loss=loss, train=Data(), validation=Data(), weight=weight,
                         metrics={{"accuracy": accuracy}},
                         optimizer=lambda params: {optimizer}(params, lr=0.01),
                         scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, {schedule}))
"""
SOUND = {
    "forward": "pass",
    "item": "pass",
    "loss": "pass",
    "metric": "pass",
    "weight": "pass",
    "optimizer": "torch.optim.SGD",
    "schedule": "lambda step: 1.0",
    "late_call": str(LATE_CALL),
}
TRAINED = "of stage 1, microbatch "
# what breaks → what the error says, of the plain loop as well; what a lane adds
CASES: Mapping[str, tuple[dict[str, str], list[str], list[str]]] = {
    "a unit": ({"forward": "late()"}, ["in unit 2 (Breaks)"], [f"in forward {TRAINED}", ", step "]),
    "a unit from the start": ({"forward": "late()", "late_call": "1"}, ["in unit 2 (Breaks)"], ["before training"]),
    "a backward": ({"forward": "x = BreaksBackward.apply(x)"}, [], [f"in backward {TRAINED}", ", step "]),
    "the loss": ({"loss": "late()"}, ["in Workload.loss"], [f"in forward {TRAINED}"]),
    "a metric": (
        {"metric": "late()", "late_call": "3"},
        ["in Workload.metrics['accuracy']"],
        [f"in forward {TRAINED}", "validation after step 6 (iteration "],
    ),
    "the weight": ({"weight": "late()", "late_call": "30"}, ["in Workload.weight"], ["in load, microbatch "]),
    "the optimizer": (
        {"optimizer": "BreaksStep", "late_call": "9"},
        ["in the step of BreaksStep"],
        ["update of stage"],
    ),
    "the scheduler": (
        {"schedule": "lambda step: late() if step > 3 else 1.0", "late_call": "1"},
        ["in the step of LambdaLR"],
        ["in update of stage", ", step 3 (iteration 3)"],
    ),
    "a sample": (
        {"item": "late()", "late_call": "1"},
        [f"in sample {ODD} of Workload."],
        ["in load, microbatch 0, step 5"],
    ),
    "a sample of another shape": (
        {"item": "value = torch.zeros(2)"},
        [f"{ODD}", "of Workload.train"],
        [
            "shape (2,) float32",
            "every sample must have the same shape and dtype",
            "in load, microbatch 0, step 5 (iteration 5)",
        ],
    ),
    "a sample that is no pair": (
        {"item": "return 7"},
        [f"{ODD}", "of Workload.train"],
        ["in load, microbatch 0, step 5"],
    ),
    "a loss that is nan": (
        {"loss": "output = output * (float('nan') if (target == ODD).any() else 1)"},
        [f"loss is nan at step 5 (microbatch 0: samples {str(ORDER[LATE : LATE + BATCH // 2]).strip('[]')} of"],
        [],
    ),
}


def source_of(broken: Mapping[str, str]) -> str:
    parts = SOUND | broken
    parts["loss"] = parts["loss"].replace("ODD", f"torch.tensor({ODD} / {NUM_SAMPLES})")
    return SOURCE.format(**parts, num_samples=NUM_SAMPLES, odd=ODD)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "loaders"), [*((name, 1) for name in CASES), ("a sample", 2), ("a sample of another shape", 3)]
)
def test_an_error_of_the_jobs_code_says_where_it_was(daemon: Any, name: str, loaders: int) -> None:
    broken, told, told_by_lane = CASES[name]
    strategy = {"stages": 2, "split": [2], "microbatches": 2, "loaders": loaders}
    spec = daemon.spec(source_of(broken), batch_size=BATCH, epochs=20, seed=SEED, strategy=strategy)
    result = daemon.run(spec)
    assert result["state"] == "failed"
    for part in [*told, *told_by_lane]:
        assert part in result["error"], result["error"]
    job = daemon.client.jobs()[0]
    named = "KeyError" if "late()" in str(broken) or "Breaks" in str(broken) else None
    assert (job["reason"], job["exception"]) == (result["reason"], named)
    with pytest.raises(Exception) as caught:  # noqa: PT011  # each case has its own
        reference.train(spec)
    message = fault_of(caught.value).message
    for part in told:
        assert part in message, message


@pytest.mark.slow
def test_an_error_on_a_device_says_where_it_was_and_of_which_replica(machine: Any) -> None:
    strategy = {"replicas": [{"device": "gpu"}, {"device": "cpu"}], "microbatches": 2}
    broken = {"forward": "late() if 'gpu' in __import__('os').environ['WEFT_WORKER'] else None"}
    spec = machine.spec(source_of(broken), batch_size=BATCH, epochs=20, seed=SEED, strategy=strategy)
    error = machine.run(spec)["error"]
    for part in ("in unit 2 (Breaks)", "in forward of stage 0, replica 0, microbatch ", "(iteration "):
        assert part in error, error
    spec = machine.spec(
        source_of(CASES["a loss that is nan"][0]), batch_size=BATCH, epochs=20, seed=SEED, strategy=strategy
    )
    result = machine.run(spec)
    assert result["reason"] == "non-finite-loss"
    assert f"{ODD}" in result["error"].partition("samples ")[2].partition(" of Workload.train")[0].split(", ")


@pytest.mark.days(2)
@pytest.mark.slow(seconds=5)
def test_a_traceback_is_printed_once_and_a_failed_run_has_no_empty_rows(daemon: Any) -> None:
    spec = daemon.spec("def workload():\n    raise ZeroDivisionError('by nobody')\n")
    for arguments in (["submit", "-f"], ["run", "--workers", "1", "--runs-dir", "runs"], ["run", "--reference"]):
        done = daemon.weft(*arguments, daemon.spec_file(spec))
        told = done.stdout + done.stderr
        assert done.returncode == 1
        assert told.count("ZeroDivisionError: by nobody") == 1, told
        assert "run directory" in told
        assert not [line for line in told.splitlines() if line.rstrip().endswith(" -")], told
    listed = daemon.weft("ps", "--all").stdout.splitlines()[1]
    assert "user-error ZeroDivisionError" in listed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("forward", "told"),
    [
        ("x = BreaksBackward.apply(x)", "in the first part of backward of stage 1, microbatch "),
        (
            "x = x + checkpoint(torch.tanh, x, use_reentrant=True)",
            'give it use_reentrant=False, or use strategy.schedule = "1f1b"',
        ),
    ],
    ids=["an error", "a backward that cannot be split"],
)
def test_where_backwards_are_split_it_says_in_which_part(daemon: Any, forward: str, told: str) -> None:
    source = "from torch.utils.checkpoint import checkpoint\n" + source_of({"forward": forward})
    strategy = {"stages": 2, "split": [2], "microbatches": 2, "schedule": "zero-bubble"}
    result = daemon.run(daemon.spec(source, batch_size=BATCH, epochs=20, seed=SEED, strategy=strategy))
    assert result["state"] == "failed"
    assert told in result["error"], result["error"]


@pytest.mark.slow(seconds=4)
@pytest.mark.parametrize(
    "strategy",
    [
        {},
        {"stages": 2, "split": [2], "microbatches": 2},
        {"stages": 2, "split": [2], "microbatches": 2, "schedule": "zero-bubble", "threads": 1},
        {"replicas": 2, "clip_norm": 0.1},
        {"preset": "zero-offload"},
        {"preset": "parameter-server", "replicas": 2},
    ],
    ids=lambda strategy: strategy.get("preset", strategy.get("schedule", str(len(strategy)))),
)
def test_the_steps_before_an_error_are_told(machine: Any, strategy: Mapping[str, Any]) -> None:
    """A lane reported twice a second, and a quick job that failed had no line of its steps at all."""
    source = source_of(CASES["a loss that is nan"][0])
    result = machine.run(machine.spec(source, batch_size=BATCH, epochs=20, seed=SEED, strategy=strategy))
    assert "loss is nan at step 5" in result["error"]
    steps = [line["step"] for line in _REAL["metrics_rows"](result["run_dir"])]
    ahead = strategy.get("preset") == "parameter-server"  # a stale replica may be in the next one by then
    assert steps in ([1, 2, 3, 4, 5], [1, 2, 3, 4][: 4 * ahead])
    assert machine.client.jobs()[0]["step"] == steps[-1]
