"""What a job file's author is told of a workload: by values, and as the process that `weft init` starts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from weft.spec.job_spec import JobSpec
from weft.workload.description import defaults, describe
from weft.workload.workload import Workload

PROCESS_SECONDS = 180.0
PAIR = (torch.zeros(10, 2), torch.zeros(10))


def workload(**changes: Any) -> Workload:
    given = {"model": nn.Linear(2, 1), "loss": nn.MSELoss(), "train": PAIR, "optimizer": torch.optim.SGD} | changes
    return Workload(**given)


def test_a_model_is_told_by_units_and_each_parameter_counts_once() -> None:
    tied = nn.Linear(4, 4, bias=False)
    model = nn.Sequential(nn.Linear(2, 4), tied, nn.ReLU(), tied)
    model[0].weight.requires_grad = False
    told = describe(workload(model=model, validation=PAIR))
    assert told["units"] == [("0", "Linear", 12), ("1", "Linear", 16), ("2", "ReLU", 0), ("3", "Linear", 16)]
    assert told["cut_by_calls"] is False
    assert (told["model"], told["parameters"], told["frozen"], told["bytes"]) == ("Sequential", 28, 8, 112)
    assert (told["train"], told["validation"], told["batch_size"]) == (10, 10, None)


def test_a_model_that_is_cut_by_its_calls_is_told_by_the_modules_that_may_begin_a_stage() -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.letters, self.drop = nn.Embedding(3, 4), nn.Dropout()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2))

    told = describe(workload(model=Reader(), loss=None, step=lambda model, batch: model(batch)))
    assert told["units"] == [
        ("letters", "Embedding", 12),
        ("blocks.0", "Sequential", 20),
        ("blocks.1", "Sequential", 20),
    ]
    assert told["cut_by_calls"] is True
    assert describe(workload())["units"] == [("", "Linear", 3)]


def test_a_loader_tells_the_size_of_its_batches() -> None:
    told = describe(workload(train=DataLoader(TensorDataset(*PAIR), batch_size=4)))
    assert (told["train"], told["batch_size"], told["validation"]) == (10, 4, None)
    told = describe(workload(train=DataLoader(TensorDataset(*PAIR), batch_sampler=[[0, 1, 2], [3, 4, 5], [6, 7]])))
    assert (told["train"], told["batch_size"]) == (8, 3), "what they have on average"
    told = describe(workload(train=DataLoader([(PAIR[0][:4], PAIR[1][:4])] * 3, batch_size=None)))  # type: ignore[arg-type]
    assert (told["train"], told["batch_size"]) == (12, 4), "as the first one has"


def test_data_that_cannot_be_counted_are_told_by_what_is_wrong_with_them() -> None:
    assert "Workload.train is None" in describe(workload(train=None))["train"]


def test_the_defaults_of_a_function_are_those_that_toml_can_hold(tmp_path: Path) -> None:
    source = "SIZE = 3\ndef other(a=1): ...\n"
    source += (
        "def f(path, size=SIZE, hidden=-64, rate=1e-3, *, name='a', deep=False, none=None, many=(1, 2), needed): ...\n"
    )
    (tmp_path / "train.py").write_text(source)
    told = defaults(tmp_path / "train.py", "f")
    assert told == {"hidden": -64, "rate": 1e-3, "name": "a", "deep": False}
    assert defaults(tmp_path / "train.py", "gone") == {}


@pytest.mark.slow
def test_what_the_users_code_prints_is_not_in_the_answer_and_what_it_raises_is(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os\nprint('hello')\ndef workload():\n    raise ValueError(os.getcwd())\n"
    )
    spec = JobSpec(job={"entry": "train.py:workload", "batch_size": 1, "steps": 1}, directory=str(tmp_path))
    command = [sys.executable, "-P", "-m", "weft.workload.description", json.dumps(spec.to_wire())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROCESS_SECONDS, check=True)
    told = json.loads(done.stdout)
    assert told["exit_code"] == 1
    assert told["error"].endswith(f"ValueError: {tmp_path}")
    assert done.stderr == "hello\n"
