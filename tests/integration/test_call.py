"""A job as a call, in a daemon that runs already: what it returns is what the plain loop trains, bit for bit."""

from __future__ import annotations

import importlib.util
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from weft.reference import loop as reference
from weft.spec.job_spec import JobSpec

_REAL = runpy.run_path(str(Path(__file__).with_name("real_daemon.py")))
RealDaemon, LINE = _REAL["RealDaemon"], _REAL["LINE"]


@pytest.fixture
def line(tmp_path: Path) -> Any:
    """A module of the user's, imported as a script would."""
    file = tmp_path / "line.py"
    file.write_text(LINE)
    spec = importlib.util.spec_from_file_location("line", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [{}, {"stages": 3, "microbatches": 4, "recompute": True}], ids=["whole", "cut"])
def test_a_call_returns_what_the_plain_loop_trains(
    daemon: RealDaemon, line: Any, strategy: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    trained = weft.run(
        line.workload, batch_size=16, epochs=2, seed=3, args={"width": 4}, socket=daemon.socket, **strategy
    )
    job = {"entry": "line.py:workload", "epochs": 2, "batch_size": 16, "seed": 3, "args": {"width": 4}}
    spec = JobSpec(job=job, strategy=strategy, directory=str(Path(line.__file__).parent))
    plain = reference.train(spec)
    assert trained.losses == plain.losses
    assert trained.validations == plain.validations
    state = trained.load_into(line.workload(width=4).model).state_dict()
    assert all(torch.equal(tensor, plain.state[name]) for name, tensor in state.items())
    assert trained.job.startswith("line-")
    assert "completed" in capsys.readouterr().err


@pytest.mark.slow
def test_a_call_that_fails_says_what_the_log_of_the_job_says(daemon: RealDaemon, line: Any) -> None:
    with pytest.raises(weft.JobFailed) as failed:
        weft.run(line.workload, batch_size=16, epochs=1, args={"width": "wide"}, socket=daemon.socket)
    sentence, *_, last = str(failed.value).splitlines()
    job = failed.value.result["job"]
    assert sentence.startswith(f"{job} failed (user-error TypeError) after ")
    assert last in daemon.log_of(job)
