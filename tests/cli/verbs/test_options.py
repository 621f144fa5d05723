"""The flags of a job: which spec a source and they come to, and what is said where they do not say enough."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from weft.cli.verbs.options import JobOptions
from weft.spec.job_spec import SpecError

PROCESS_SECONDS = 180.0
FLAGS: dict[str, Any] = {"batch_size": 8, "epochs": 2, "seed": 7, "stages": 2, "microbatches": 4}


@pytest.fixture
def train(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text("def workload(): ...\n")
    return path


@pytest.fixture
def digits(spec: Path) -> Path:
    spec.write_text(spec.read_text() + "[strategy]\nstages = 3\n")
    return spec


@pytest.mark.parametrize("source", ["train", "digits"])
def test_flags_say_the_same_beside_a_python_file_and_beside_toml(source: str, request: pytest.FixtureRequest) -> None:
    spec = JobOptions(**FLAGS, arg=["hidden=128", "name=circle"]).load(request.getfixturevalue(source))
    wire = spec.to_wire()
    assert {name: wire["job"].get(name) for name in ("batch_size", "epochs", "steps", "seed")} == {
        "batch_size": 8,
        "epochs": 2,
        "steps": None,
        "seed": 7,
    }
    assert spec.job.args == {"hidden": 128, "name": "circle"}
    assert (spec.strategy.stages, spec.strategy.microbatches) == (2, 4)


def test_what_set_says_counts_before_a_flag(train: Path) -> None:
    options = JobOptions(**FLAGS, profile=3, set_=["job.seed=8", "strategy.recompute=true"])
    spec = options.load(train)
    assert (spec.job.seed, spec.strategy.recompute) == (8, True)
    assert spec.profile is not None
    assert spec.profile.iterations == 3


def test_a_preset_replaces_the_strategy_of_a_file_and_says_so(digits: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert JobOptions(preset="ddp").load(digits).strategy.replicas == 2
    assert "preset ddp replaces stages of" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        ({}, ["give --batch-size N, the samples in one global batch", "give --epochs N, passes over the training"]),
        ({"batch_size": 8}, ["give --epochs N, passes over the training data, or --steps N, training steps"]),
        ({"set_": ["job.steps=3"]}, ["give --batch-size N"]),
        ({"batch_size": 8, "epochs": 1, "steps": 2}, ["epochs = 1 and steps = 2 are both given; leave one of them"]),
        ({**FLAGS, "arg": ["hidden"]}, ["--arg 'hidden': write NAME=VALUE, for example hidden=128"]),
        ({**FLAGS, "arg": ["a.b=1"]}, ["--arg 'a.b=1': write NAME=VALUE"]),
        ({**FLAGS, "batch_size": 3}, ["job.batch_size = 3 is smaller than strategy.microbatches = 4"]),
        ({**FLAGS, "preset": "1f1c"}, ["'1f1c' is no preset; did you mean 1f1b?"]),
    ],
)
def test_what_flags_do_not_say_is_told_with_the_flag(train: Path, options: dict[str, Any], lines: list[str]) -> None:
    with pytest.raises(SpecError) as caught:
        JobOptions(**options).load(train)
    told = str(caught.value).splitlines()
    assert [text in line for text, line in zip(lines, told, strict=True)] == [True] * len(lines), told


def test_a_grid_that_cannot_be_is_told_with_the_source_and_its_own_file(train: Path) -> None:
    (train.parent / "dead.grid").write_text("F0 B0 F1 B1\nF0 F1 B0 B1\n")
    flags = {**FLAGS, "set_": ["strategy.stages=2", "strategy.microbatches=2", "strategy.schedule=dead.grid"]}
    with pytest.raises(SpecError, match=rf"{train.name}: strategy\.schedule: dead\.grid: line 1 stands at B0"):
        JobOptions(**flags).load(train)


def test_that_there_is_no_such_file_is_told_before_what_it_does_not_say(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no such file"):
        JobOptions().load(tmp_path / "gone.py")


WORKLOAD = """
import torch, weft

def line(slope=2.0):
    inputs = torch.arange(8.0).reshape(8, 1)
    return weft.Workload(model=torch.nn.Linear(1, 1), loss=torch.nn.functional.mse_loss, train=(inputs, slope * inputs),
                         optimizer=lambda params: torch.optim.SGD(params, lr=0.01))
"""


@pytest.mark.days(3)
@pytest.mark.slow
def test_run_needs_no_toml(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WORKLOAD)
    command = [sys.executable, "-m", "weft", "run", "train.py:line", "--batch-size", "4", "--steps", "3", "--json"]
    command += ["--arg", "slope=3", "--workers", "1", "--runs-dir", "runs"]
    told = {}
    for way in ([], ["--reference"]):
        done = subprocess.run(
            [*command, *way], cwd=tmp_path, capture_output=True, text=True, timeout=PROCESS_SECONDS, check=False
        )
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout)
        told[result["job"]] = (result["state"], result["steps"], result["loss"])
    assert set(told) == {"train-1", "train-reference-1"}
    assert told["train-1"] == told["train-reference-1"]
