"""What is found out of a model is the same however many replicas a job has, or may come to have."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from weft.spec.job_spec import JobSpec
from weft.workers.devices.host import HostDevice
from weft.workers.inspection.inspection import inspect

TESTS = Path(__file__).resolve().parents[2]
ANY = runpy.run_path(str(TESTS / "any_models.py"))
BATCH = 4
OF_JOB = ("cut_problems", "draws", "lost_attributes", "metrics", "seeds_others", "unsaved")
OF_UNIT = ("ends", "given", "in_place", "instead", "late", "name", "repeated", "state", "tied_by", "tied_to")


def facts_of(name: str, seed: int, batch_size: int = BATCH, **strategy: Any) -> dict[str, Any]:
    job = {"entry": "any_models.py:workload", "args": {"name": name}, "batch_size": batch_size, "steps": 1}
    spec = JobSpec.parse({"job": job | {"seed": seed}, "strategy": strategy, "directory": str(TESTS)})
    torch.manual_seed(0)
    facts = inspect(ANY["workload"](name), spec, HostDevice())
    of_units = [{key: unit[key] for key in OF_UNIT} for unit in facts["units"]]
    return {key: facts[key] for key in OF_JOB} | {"units": of_units}


@pytest.mark.days(2)
@pytest.mark.slow(seconds=3)
@pytest.mark.pairs(6, name=tuple(ANY["NAMES"]), seed=(0, 1))
def test_what_is_found_out_of_any_model_does_not_depend_on_the_number_of_replicas(name: str, seed: int) -> None:
    """Microbatches are as large."""
    one = facts_of(name, seed, stages=2, microbatches=1)
    assert facts_of(name, seed, 2 * BATCH, stages=2, replicas=2, microbatches=1) == one
    assert facts_of(name, seed, preset="auto") == one
