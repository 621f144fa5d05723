"""Plans of made-up models: so many units, so long each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from weft.scheduler.inspection import Inspection, TensorFacts, UnitFacts
from weft.scheduler.plan import Plan
from weft.scheduler.planner import make_plan
from weft.spec import JobSpec

PLENTY = 1 << 40


def make_unit(number: int, forward: float = 1.0, backward: float = 2.0, **changes: Any) -> UnitFacts:
    facts: dict[str, Any] = {
        "name": f"{number}.",
        "parameter_bytes": 100,
        "buffer_bytes": 10,
        "forward_seconds": forward,
        "backward_seconds": backward,
        "dtype": "float32",
        "itemsize": 4,
        "shapes": {1: (1, 8), 2: (2, 8)},
    }
    return UnitFacts(**facts | changes)


def make_inspection(units: Sequence[UnitFacts], **changes: Any) -> Inspection:
    facts: dict[str, Any] = {
        "units": tuple(units),
        "input": TensorFacts(dtype="float32", itemsize=4, shapes={1: (1, 3), 2: (2, 3)}),
        "target": TensorFacts(dtype="int64", itemsize=8, shapes={1: (1,), 2: (2,)}),
        "num_train": 8,
        "num_validation": 0,
        "load_seconds": 0.0,
        "update_seconds": 0.0,
        "metrics": (),
    }
    return Inspection(**facts | changes)


def make_spec(*, batch_size: int = 840, steps: int = 3, priority: int = 0, **strategy: Any) -> JobSpec:
    job = {"entry": "job.py:workload", "batch_size": batch_size, "steps": steps, "priority": priority}
    return JobSpec.parse({"job": job, "strategy": strategy, "directory": "/jobs"})


@pytest.fixture(scope="session")
def unit_of() -> Callable[..., UnitFacts]:
    return make_unit


@pytest.fixture(scope="session")
def inspection_of() -> Callable[..., Inspection]:
    return make_inspection


@pytest.fixture(scope="session")
def spec_of() -> Callable[..., JobSpec]:
    return make_spec


@pytest.fixture(scope="session")
def plan_of() -> Callable[..., Plan]:
    """The plan of a spec of these settings for a model of `stages` like units, or for the inspection given."""

    def plan(inspection: Inspection | None = None, **settings: Any) -> Plan:
        units = [make_unit(number) for number in range(settings.get("stages", 1))]
        return make_plan(make_spec(**settings), inspection or make_inspection(units), shared_bytes_free=PLENTY)

    return plan
