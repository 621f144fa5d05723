"""Which jobs are inspected once more, and which are not, with real files and models."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from weft.spec.job_spec import JobSection, JobSpec, Strategy
from weft.workers.devices.host import HostDevice
from weft.workers.inspection import known as module
from weft.workers.inspection.inspection import inspect_job
from weft.workers.inspection.kept_inspections import MAX_SECONDS, KeptInspections
from weft.workers.inspection.known import Known
from weft.workload.entry import load_workload, unload
from weft.workload.workload import WorkloadError

JOB = """
import torch
from torch import nn
import weft

class Counting(nn.Linear):
    def forward(self, x):
        import late
        with open("calls", "a") as file:
            file.write(".")
        return super().forward(x) * late.FACTOR

def workload(width=2):
    data = torch.randn(12, 3), torch.randn(12, 2)
    model = {model}
    return weft.Workload(model, data, loss=nn.functional.mse_loss, optimizer=torch.optim.SGD)
"""
SEQUENTIAL = "nn.Sequential(Counting(3, width), nn.Linear(width, 2))"


class Job:
    def __init__(self, folder: Path) -> None:
        self.folder, self.cache = folder / "job", folder / "cache"
        self.folder.mkdir()
        self.write("late.py", "FACTOR = 1.0")
        self.write("train.py", JOB.replace("{model}", SEQUENTIAL))
        self.told: list[str] = []

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def spec(self, **changes: Any) -> JobSpec:
        strategy = Strategy(**changes.pop("strategy", {"stages": 2, "microbatches": 2}))
        section = {"entry": "train.py:workload", "steps": 3, "batch_size": 4} | changes
        return JobSpec(job=JobSection(**section), strategy=strategy, directory=str(self.folder))

    def inspect(self, **changes: Any) -> tuple[dict[str, Any], int]:
        """(what was found, how often the model was called)"""
        spec, before = self.spec(**changes), set(sys.modules)
        calls = self.folder / "calls"
        calls.write_text("")
        os.chdir(self.folder)

        def load() -> Any:
            unload(spec, before)
            return load_workload(spec)

        try:
            found = inspect_job(load, spec, HostDevice(), known=Known(self.cache, before, self.told.append))
        finally:
            unload(spec, before)
        return found, len(calls.read_text())

    def files(self) -> list[Path]:
        return list(self.cache.rglob("*.json"))


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "job")  # for an import in a forward
    monkeypatch.setattr(module, "_waited_seconds", lambda: 0.0)  # whatever else runs here
    return Job(tmp_path)


def test_a_job_that_has_not_changed_is_not_run_again(job: Job) -> None:
    first, calls = job.inspect()
    assert calls > 0
    assert not job.told
    again, calls = job.inspect()
    assert (again, calls) == (json.loads(json.dumps(first)), 0)
    assert job.told == ["the job has not changed since it was inspected; what was found out then stands"]


CHANGES: dict[str, dict[str, Any]] = {
    "an argument": {"args": {"width": 3}},
    "a batch": {"batch_size": 6},
    "a seed": {"seed": 1},
    "its length": {"steps": 4},
    "a strategy": {"strategy": {"stages": 2, "microbatches": 4}},
}


@pytest.mark.parametrize("what", CHANGES)
def test_another_spec_is_another_job(job: Job, what: str) -> None:
    job.inspect()
    assert job.inspect(**CHANGES[what])[1] > 0
    assert job.inspect()[1] == 0, "and the first is known still"


def test_what_does_not_concern_training_is_no_other_job(job: Job) -> None:
    job.inspect()
    assert job.inspect(priority=3, on_hang="notify")[1] == 0


def test_changed_code_is_inspected_also_where_it_is_only_imported_as_the_model_runs(job: Job) -> None:
    job.inspect()
    job.write("late.py", "FACTOR = 2.0")
    assert job.inspect()[1] > 0
    assert job.inspect()[1] == 0
    job.write("train.py", JOB.replace("{model}", SEQUENTIAL) + "# changed\n")
    assert job.inspect()[1] > 0


def test_other_threads_and_other_data_are_inspected(job: Job) -> None:
    job.inspect()
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        assert job.inspect()[1] > 0
    finally:
        torch.set_num_threads(before)
    job.write("data.txt", "12")
    length = "int(Path('data.txt').read_text())"
    text = "from pathlib import Path\n" + JOB.replace("{model}", SEQUENTIAL).replace("randn(12,", f"randn({length},")
    job.write("train.py", text)
    assert job.inspect()[1] > 0
    assert job.inspect()[1] == 0
    job.write("data.txt", "16")
    found, calls = job.inspect()
    assert calls > 0
    assert found["num_train"] == 16


def test_times_that_were_taken_beside_others_are_not_kept(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_waited_seconds", time.perf_counter)
    job.inspect()
    assert job.files() == []
    assert job.inspect()[1] > 0


def test_the_kernel_says_how_long_a_thread_has_waited() -> None:
    before = module._waited_seconds()
    assert 0.0 <= before <= module._waited_seconds()


def test_what_is_old_damaged_or_forgotten_is_inspected(job: Job) -> None:
    job.inspect()
    (file,) = job.files()
    kept = file.read_text()
    for text in ("", "{", "[]", '{"files": {}}', '{"files": {"/nowhere": ""}, "found": {}}'):
        file.write_text(text)
        assert job.inspect()[1] > 0, text
        assert json.loads(file.read_text()).keys() == json.loads(kept).keys()
    os.utime(file, (0, time.time() - MAX_SECONDS - 60))
    assert job.inspect()[1] > 0
    assert job.inspect()[1] == 0
    KeptInspections(job.cache).forget(job.spec().entry_file)
    assert job.files() == []
    assert job.inspect()[1] > 0


def test_a_cache_that_cannot_be_written_only_costs_the_time(job: Job) -> None:
    job.cache.write_text("a file")
    assert job.inspect()[1] > 0
    assert job.inspect()[1] > 0


def test_what_the_users_code_raises_is_told_as_ever(job: Job) -> None:
    job.write("train.py", JOB.replace("{model}", SEQUENTIAL).replace("torch.randn(12, 3)", "torch.randn(12, 5)"))
    with pytest.raises(RuntimeError):
        job.inspect()
    job.write("train.py", JOB.replace("{model}", SEQUENTIAL).replace("torch.randn(12, 3)", "torch.randn(0, 3)"))
    with pytest.raises(WorkloadError):
        job.inspect()
    assert job.files() == []
