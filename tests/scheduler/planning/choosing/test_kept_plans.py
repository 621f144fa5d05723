"""Plans that are kept: of the same spec, inspection and room for all that they ask for, and of nothing else."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.machine.free_memory import FreeMemory
from weft.plan.inspection import Inspection, UnitFacts
from weft.scheduler.planning.choosing import kept_plans
from weft.scheduler.planning.choosing.kept_plans import (
    MAX_PLANS,
    STEP_BITS,
    KeptPlans,
    key_of,
    least_of,
    plan_to_keep,
)
from weft.scheduler.planning.partition import PlanError
from weft.scheduler.planning.planner import make_plan
from weft.spec.job_spec import JobSpec

GIB = 1 << 30
PLENTY = FreeMemory(shared=9 * GIB, host=17 * GIB)
STRATEGIES: Mapping[str, Mapping[str, Any]] = {
    "one stage": {},
    "a pipeline": {"stages": 2, "microbatches": 4},
    "clipped replicas": {"replicas": 2, "clip_norm": 1.0},
    "a measured order": {"stages": 2, "microbatches": 4, "schedule": "measured"},
    "without recovery": {"recovery": "off"},
    "stale": {"replicas": 2, "staleness": 1},
}


@pytest.fixture
def inspection(inspection_of: Callable[..., Inspection], unit_of: Callable[..., UnitFacts]) -> Inspection:
    return inspection_of([unit_of(number, parameter_bytes=4 << 20) for number in range(4)], num_train=64)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_plan_that_is_kept_is_the_one_that_would_be_made(
    strategy: str, inspection: Inspection, spec_of: Callable[..., JobSpec]
) -> None:
    spec = spec_of(batch_size=16, **STRATEGIES[strategy])
    made = make_plan(spec, inspection, shared_bytes_free=PLENTY.shared, host_bytes_free=PLENTY.host)
    assert plan_to_keep(make_plan, spec, inspection, PLENTY) == made


def test_a_plan_of_scarce_memory_is_not_kept(inspection: Inspection, spec_of: Callable[..., JobSpec]) -> None:
    """Without room for snapshots, or for itself, it is another one as soon as there is more."""
    spec = spec_of(batch_size=16)
    without_snapshots = FreeMemory(shared=GIB, host=64 << 20)
    assert not make_plan(spec, inspection, shared_bytes_free=GIB, host_bytes_free=64 << 20).has_snapshots
    assert plan_to_keep(make_plan, spec, inspection, without_snapshots) is None
    with pytest.raises(PlanError):
        make_plan(spec, inspection, shared_bytes_free=10, host_bytes_free=GIB)
    assert plan_to_keep(make_plan, spec, inspection, FreeMemory(shared=10, host=GIB)) is None


def test_nor_one_that_takes_what_there_is(inspection: Inspection, spec_of: Callable[..., JobSpec]) -> None:
    spec = spec_of(batch_size=16, replicas=[{"device": "gpu", "working_window": "auto"}], update="cpu")
    assert plan_to_keep(make_plan, spec, inspection, PLENTY) is None


def test_a_key_tells_spec_facts_and_memory_apart(spec_of: Callable[..., JobSpec]) -> None:
    facts = {"units": [{"forward_seconds": 0.25, "shapes": {1: [1, 3]}}], "num_train": 64}
    keys = {
        key_of(spec_of(), facts, PLENTY),
        key_of(spec_of(steps=4), facts, PLENTY),
        key_of(spec_of(recovery="iteration"), facts, PLENTY),
        key_of(spec_of(), facts | {"num_train": 65}, PLENTY),
        key_of(spec_of(), facts, dataclasses.replace(PLENTY, shared=PLENTY.shared // 2)),
        key_of(spec_of(), facts, dataclasses.replace(PLENTY, host=PLENTY.host // 2)),
    }
    assert len(keys) == 6
    assert key_of(spec_of(), facts, dataclasses.replace(PLENTY, host=PLENTY.host + (1 << 20))) in keys, (
        "a step is larger"
    )


@given(num_bytes=st.integers(0, 1 << 50))
def test_memory_counts_as_no_more_than_there_is_and_as_most_of_it(num_bytes: int) -> None:
    least = least_of(FreeMemory(shared=num_bytes, host=0)).shared
    assert num_bytes * (1 - 2.0 ** (1 - STEP_BITS)) - 1 <= least <= num_bytes


def test_the_oldest_goes_and_a_large_one_is_never_kept(
    inspection: Inspection, spec_of: Callable[..., JobSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, kept = plan_to_keep(make_plan, spec_of(batch_size=16), inspection, PLENTY), KeptPlans()
    assert plan is not None
    for number in range(MAX_PLANS + 1):
        kept.keep(b"%d" % number, plan)
        assert kept.find(b"0") is plan, "it is asked for each time"
    assert [number for number in range(MAX_PLANS + 1) if kept.find(b"%d" % number) is None] == [1]
    monkeypatch.setattr(kept_plans, "MAX_TASKS", len(plan.graph.tasks) - 1)
    kept.keep(b"large", plan)
    assert kept.find(b"large") is None
