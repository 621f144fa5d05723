"""Epochs of so many steps, and schedulers that are stepped once an epoch: with the bits of the plain loop."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from weft.reference.loop import ReferenceResult, train

_RECOVERY = runpy.run_path(str(Path(__file__).with_name("test_recovery.py")))
SOURCE, SECONDS, PIPELINE = (_RECOVERY[name] for name in ("SOURCE", "SECONDS", "PIPELINE"))
held_behind_a_snapshot, lines_of, kill_worker = (
    _RECOVERY[name] for name in ("held_behind_a_snapshot", "lines_of", "kill_worker")
)

SAMPLES, BATCH, EVERY = 48, 10, 7  # 70 samples in an epoch: batches reach over the ends of passes, epochs too
STEP_LR = "scheduler_every='epoch', scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9))"
BY_EPOCH = re.sub(r"scheduler=lambda optimizer.*total_steps=100_000\)\)", STEP_LR, SOURCE, flags=re.DOTALL)
STREAM = BY_EPOCH.replace(
    "def workload(",
    '''
class Stream(torch.utils.data.IterableDataset):
    """Goes on where it was, and has no end."""

    def __init__(self):
        self.place = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.place += 1
        x = torch.tensor([self.place / 1000])
        return x + 0.01 * torch.rand(()), x.sin()

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]

def workload(''',
    1,
).replace("train=(inputs, inputs.sin()), validation", "train=Stream(), validation")
STRATEGIES = [
    pytest.param({"microbatches": 2}, id="one stage"),
    pytest.param(PIPELINE, id="stages"),
    pytest.param({"microbatches": 2, "clip_norm": 1e6}, id="owner"),
]


def rates_of(daemon: Any, job: str) -> dict[int, float]:
    return {line["step"]: line["lr"] for line in lines_of(daemon, job) if "validation" not in line}


def check_is(plain: ReferenceResult, daemon: Any, result: dict[str, Any]) -> None:
    assert result["state"] == "completed", result["error"]
    ours = load_file(result["model"])
    assert [name for name in ours if not torch.equal(ours[name], plain.state[name])] == []
    rates = rates_of(daemon, result["job"])
    assert rates == {step: plain.learning_rates[step - 1] for step in rates}
    assert len(plain.losses) in rates, "the last step is told"


@pytest.mark.slow(seconds=3)
@pytest.mark.parametrize("source", [pytest.param(BY_EPOCH, id="dataset"), pytest.param(STREAM, id="endless stream")])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_job_has_the_validations_rates_and_bits_of_the_plain_loop(
    daemon: Any, source: str, strategy: dict[str, Any]
) -> None:
    assert STEP_LR in source
    spec = daemon.spec(source, strategy=strategy, batch_size=BATCH, epochs=4, steps_per_epoch=EVERY)
    result, plain = daemon.run(spec), train(spec)
    check_is(plain, daemon, result)
    assert len(plain.losses) == result["steps"] == 4 * EVERY
    assert plain.learning_rates[EVERY - 1] != plain.learning_rates[EVERY]
    assert len(set(plain.learning_rates)) == 4
    validated = [line["step"] for line in lines_of(daemon, result["job"]) if "validation" in line]
    assert validated == [EVERY, 2 * EVERY, 3 * EVERY, 4 * EVERY]


@pytest.mark.slow(seconds=3)
@pytest.mark.parametrize("preset", ["zero-offload", "ddp"])
def test_devices_step_schedulers_once_an_epoch_too(machine: Any, preset: str) -> None:
    spec = machine.spec(
        BY_EPOCH, strategy={"preset": preset, "microbatches": 2}, batch_size=BATCH, epochs=3, steps_per_epoch=EVERY
    )
    result, plain = machine.run(spec), train(spec)
    assert result["state"] == "completed", result["error"]
    assert rates_of(machine, result["job"]) == {step + 1: rate for step, rate in enumerate(plain.learning_rates)}
    assert result["validation"]["loss"] == pytest.approx(plain.validations[-1]["loss"], rel=1e-4)


@pytest.mark.days(2)
@pytest.mark.slow(seconds=6)
@pytest.mark.parametrize("source", [pytest.param(BY_EPOCH, id="dataset"), pytest.param(STREAM, id="endless stream")])
def test_a_job_that_loses_its_loader_in_an_epoch_goes_on_in_the_pass(daemon: Any, source: str) -> None:
    with held_behind_a_snapshot(daemon, PIPELINE, source=source, batch_size=BATCH, steps_per_epoch=EVERY) as (
        job,
        spec,
        gate,
    ):
        kill_worker(daemon, job, "loader")
        daemon.until_logged(job, "goes on after step")
        gate.open()
        result = daemon.client.wait(job, SECONDS)
        check_is(train(spec), daemon, result)


@pytest.mark.days(2)
@pytest.mark.slow(seconds=6)
def test_a_job_goes_on_with_other_epochs_and_the_same_samples(daemon: Any) -> None:
    """But with none that are passes: their last batches are smaller."""
    constant = BY_EPOCH.replace("(optimizer, 1, 0.9)", "(optimizer, 10**6)")
    first = daemon.spec(constant, batch_size=BATCH, steps=3 * EVERY, steps_per_epoch=EVERY, strategy=PIPELINE)
    first = type(first).parse(first.to_wire() | {"checkpoint": {"every": "1 epoch"}})
    begun = daemon.run(first)
    assert begun["state"] == "completed", begun["error"]
    run_dir = daemon.client.show(begun["job"])["run_dir"]
    job = {"batch_size": BATCH, "steps": 5 * EVERY, "resume_from": run_dir}
    result = daemon.run(daemon.spec(constant, strategy=PIPELINE, steps_per_epoch=4, **job))
    whole = train(daemon.spec(constant, batch_size=BATCH, steps=5 * EVERY, steps_per_epoch=11, strategy=PIPELINE))
    check_is(whole, daemon, result)
    refused = daemon.run(daemon.spec(constant, strategy=PIPELINE, **job))
    assert (refused["state"], refused["reason"]) == ("failed", "invalid-plan")
    assert f"was trained with num_train = '{SAMPLES}, pass after pass', and this job has {SAMPLES}" in refused["error"]


@pytest.mark.days(2)
@pytest.mark.slow(seconds=4)
def test_a_job_asks_whether_its_scheduler_is_meant_by_epochs(daemon: Any) -> None:
    asked = "if these are epochs, say so by Workload.scheduler_every = 'epoch'"
    by_step = BY_EPOCH.replace("scheduler_every='epoch', ", "").replace("(optimizer, 1, ", "(optimizer, 2, ")
    for source, is_asked in (by_step, True), (BY_EPOCH, False):
        result = daemon.run(daemon.spec(source, batch_size=BATCH))
        assert result["state"] == "completed", result["error"]
        assert (asked in daemon.log_of(result["job"])) is is_asked
