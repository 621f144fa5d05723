"""The plain loop as a run of its own: what it leaves, and what it says where it cannot."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from weft.reference import loop, run
from weft.reference.loop import ReferenceResult
from weft.reference.run import _write_lines, _write_weights, run_reference
from weft.spec.job_spec import JobSpec


@pytest.mark.parametrize("name", ["metrics.jsonl", "model.safetensors", "best.safetensors"])
def test_a_disk_that_takes_no_more_is_told_with_the_file_and_the_remedy(tmp_path: Path, name: str) -> None:
    """Of the weights it was an error of safetensors, with its traceback; of the numbers one that named no file."""
    weights = {"weight": torch.zeros(4)}
    trained = ReferenceResult(
        losses=[0.5],
        validations=[],
        measured=[],
        learning_rates=[],
        grad_norms=[],
        skipped=[],
        state=weights,
        best=weights,
    )
    if name == "metrics.jsonl":
        (tmp_path / name).symlink_to("/dev/full")
    else:
        (tmp_path / name).mkdir()
    with pytest.raises(OSError, match=r"cannot be written: .*; make room, or give another --runs-dir") as told:
        _write_lines(tmp_path, [{"step": 1}]) if name == "metrics.jsonl" else _write_weights(tmp_path, trained)
    assert str(told.value).startswith(str(tmp_path / name))
    assert told.value.strerror is None


def test_what_a_job_puts_in_the_place_of_the_streams_is_not_there_when_it_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result was printed there: into the job's file, or with an AttributeError where it is no whole stream."""
    streams = sys.stdout, sys.stderr

    def train(spec: JobSpec, **_: object) -> ReferenceResult:
        sys.stdout = sys.stderr = io.StringIO()
        raise ZeroDivisionError

    monkeypatch.setattr(loop, "train", train)
    job = {"entry": "a.py:workload", "steps": 1, "batch_size": 1}
    run_reference(JobSpec.parse({"job": job, "directory": str(tmp_path)}), threads=1, runs_dir=tmp_path)
    assert (sys.stdout, sys.stderr) == streams


@pytest.mark.parametrize(("ends", "told"), [((100.0, 101.0, 102.0, 152.0, 153.0), 1.0), ((100.0,), None)])
def test_an_iteration_is_a_step_and_no_part_of_imports_and_validations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: tuple[float, ...], told: float | None
) -> None:
    """It was all of the run's time by the number of steps: 189 ms of a loop whose steps took one, and so compared."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(run, "time", SimpleNamespace(monotonic=lambda: clock.now))

    def train(spec: JobSpec, *, on_step: Callable[[int, float], None], **_: object) -> ReferenceResult:
        for step, end in enumerate(ends):
            clock.now = end
            on_step(step, 0.5)
        nothing = {"validations": [], "measured": [], "learning_rates": [], "grad_norms": [], "skipped": []}
        return ReferenceResult(losses=[0.5] * len(ends), state={"weight": torch.zeros(4)}, **nothing)

    monkeypatch.setattr(loop, "train", train)
    job = {"entry": "a.py:workload", "steps": len(ends), "batch_size": 1}
    result = run_reference(JobSpec.parse({"job": job, "directory": str(tmp_path)}), threads=1, runs_dir=tmp_path)
    assert (result["iteration_seconds"], result["seconds"]) == (told, ends[-1])
