"""Models of any class, cut by their own forward, give the result of the plain loop: bit for bit with one replica."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from weft.spec.job_spec import JobSpec

_SAME = runpy.run_path(str(Path(__file__).with_name("test_same_result.py")))
RealDaemon, same_as_the_plain_loop = _SAME["RealDaemon"], _SAME["same_as_the_plain_loop"]
TESTS = Path(__file__).resolve().parents[1]
MODELS = runpy.run_path(str(TESTS / "any_models.py"))


def any_spec(name: str, **strategy: Any) -> JobSpec:
    """Of 20 samples: batches of 8, 8 and 4, in microbatches of other sizes."""
    job = {"entry": "any_models.py:workload", "args": {"name": name}, "batch_size": 8, "epochs": 2, "seed": 11}
    return JobSpec.parse({"job": job, "strategy": strategy, "directory": str(TESTS)})


@pytest.mark.slow
@pytest.mark.pairs(
    name=MODELS["NAMES"],
    stages=(1, 2, 3),
    microbatches=(1, 3, 4),
    schedule=("gpipe", "1f1b"),
    recompute=(False, True),
)
def test_a_model_of_any_class_gives_the_result_of_the_plain_loop(
    daemon: RealDaemon, name: str, stages: int, microbatches: int, schedule: str, recompute: bool
) -> None:
    spec = any_spec(name, stages=stages, microbatches=microbatches, schedule=schedule, recompute=recompute)
    assert same_as_the_plain_loop(daemon, spec)
