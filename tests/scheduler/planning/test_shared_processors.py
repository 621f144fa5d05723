"""Shared processors: what a plan's tasks take where more threads compute than there are processors.

`weft plan --workers 4` on two processors said that 4 replicas take half of what 2 take, and chose them; they took more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.plan.inspection import Inspection, TensorFacts, Threaded, UnitFacts
from weft.plan.kinds import KINDS, Kind
from weft.plan.plan import Plan
from weft.scheduler.planning.choosing.choice import choose, predicted_seconds
from weft.scheduler.planning.choosing.corrected import corrected
from weft.scheduler.planning.costs import PlannedJob
from weft.scheduler.planning.measured_costs import MeasuredCosts
from weft.scheduler.planning.planner import make_plan
from weft.spec.job_spec import JobSpec
from weft.spec.workers_needed import Host

InspectionOf, SpecOf, UnitOf = Callable[..., Inspection], Callable[..., JobSpec], Callable[..., UnitFacts]
MAKE = partial(make_plan, shared_bytes_free=1 << 40)
CPU, GPU = {"device": "cpu"}, {"device": "gpu"}
SIZES = (1, 2, 4, 8, 16)


@pytest.fixture(scope="module")
def facts(inspection_of: InspectionOf, unit_of: UnitOf) -> Callable[..., Inspection]:
    """Of four units, on a host with so many workers."""

    def inspection(processors: float | None, workers: int = 4, **host: Any) -> Inspection:
        units = [unit_of(n, 0.01, 0.02) for n in range(4)]
        own = {
            "host": Host(workers=workers, processors=processors, **host),
            "num_train": 16,
            "input": TensorFacts(dtype="float32", itemsize=4, shapes={size: (size, 3) for size in SIZES}),
            "target": TensorFacts(dtype="int64", itemsize=8, shapes={size: (size,) for size in SIZES}),
            "values": (),
            "update_seconds": 1e-3,
        }
        return inspection_of(units, **own)

    return inspection


def slower(spec: JobSpec, plan: Plan, shared: Inspection, kind: Kind = Kind.FORWARD) -> float:
    """What a task of the plan takes there, as a multiple of what it takes where each worker has enough."""
    alone = replace(shared, host=replace(shared.host, processors=None))
    seconds = [[own for own, task in zip(MAKE(spec, each).task_seconds, plan.graph.tasks, strict=True)
                if task.kind is kind] for each in (alone, shared)]  # fmt: skip
    (found,) = {round(after / before, 9) for before, after in zip(*seconds, strict=True) if before}
    return found


@pytest.mark.parametrize(
    ("axes", "host", "expected"),
    [
        ({"replicas": 4}, {"processors": 2}, 2.0),
        ({"replicas": 4}, {"processors": 3}, 4 / 3),
        ({"replicas": 4}, {"processors": 2.5}, 1.6),
        ({"replicas": 4}, {"processors": 4}, 1.0),
        ({"replicas": 4}, {"processors": 64}, 1.0),
        ({"replicas": 3}, {"processors": 2, "threads": 2}, 3.0),
        ({}, {"processors": 2, "threads": 4}, 1.0),  # it was timed so
        ({"replicas": 2}, {"processors": 2, "threads": 4}, 2.0),
        ({"replicas": 2, "threads": "all"}, {"processors": 2}, 2.0),
        ({"stages": 4, "microbatches": 1}, {"processors": 1}, 1.0),  # they take turns
        ({"stages": 4, "microbatches": 4}, {"processors": 1}, 16 / 7),
        ({"stages": 4, "microbatches": 4, "schedule": "zero-bubble"}, {"processors": 2}, 2.0),
        ({"stages": 4, "microbatches": 1, "staleness": 1}, {"processors": 2}, 2.0),
        ({"stages": 2, "microbatches": 2, "replicas": 2}, {"processors": 2}, 4 / 3),
        ({"replicas": [GPU, GPU]}, {"processors": 1}, 1.0),
        ({"replicas": [GPU, GPU]}, {"processors": 1, "stand_ins": True}, 2.0),
    ],
)
def test_where_threads_share_processors_each_has_its_part(
    facts: Callable[..., Inspection], spec_of: SpecOf, axes: dict[str, Any], host: dict[str, Any], expected: float
) -> None:
    spec, shared = spec_of(batch_size=16, **axes), facts(gpus=2, **host)
    plan = MAKE(spec, shared)
    assert slower(spec, plan, shared) == pytest.approx(expected)
    if any(task.kind is Kind.UPDATE and plan.workers[task.lane.worker] == "cpu" for task in plan.graph.tasks):
        assert slower(spec, plan, shared, Kind.UPDATE) == pytest.approx(expected)


@given(processors=st.lists(st.floats(0.5, 8.0), min_size=2, max_size=2), replicas=st.integers(1, 4))
def test_more_processors_are_never_slower_and_no_iteration_takes_less_than_all_work_by_processors(
    facts: Callable[..., Inspection], spec_of: SpecOf, processors: list[float], replicas: int
) -> None:
    spec = spec_of(batch_size=16, replicas=replicas)
    few, many = (MAKE(spec, facts(count)).predicted_iteration_seconds for count in sorted(processors))
    assert few >= many * (1 - 1e-9)
    work = 4 * 0.03
    assert few >= work / max(1.0, *processors) * (1 - 1e-9)


def test_as_many_replicas_as_there_are_processors_are_chosen_and_not_as_there_are_workers(
    facts: Callable[..., Inspection], spec_of: SpecOf
) -> None:
    def replicas(processors: float | None) -> int:
        times = ((0.01, 0.02, 0.0, 0.0),) * 4  # no faster with all threads
        known = replace(
            facts(processors),
            timed_size=16,
            threaded=Threaded(threads=4, seconds=times, update_seconds=1e-3, copy_bytes_per_second=5e9),
        )
        chosen = choose(spec_of(batch_size=16, preset="auto", microbatches=1, stages=1), known, MAKE).spec.strategy
        return len(chosen.replica_list)

    assert replicas(None) == replicas(4.0) == 4
    assert replicas(2.0) == 2
    assert replicas(1.0) == 1


def test_what_was_measured_has_the_sharing_in_it_once(facts: Callable[..., Inspection], spec_of: SpecOf) -> None:
    """Four replicas on two processors took what was predicted: so do two, each with a processor of its own."""
    shared = facts(2.0)
    specs = [spec_of(batch_size=16, replicas=count) for count in (4, 2)]
    four, two = (PlannedJob(spec, MAKE(spec, shared)) for spec in specs)
    predicted = [predicted_seconds(spec, job.plan, shared) for spec, job in zip(specs, (four, two), strict=True)]
    costs = MeasuredCosts(four, shared, dict(enumerate(predicted[0])))
    assert costs.of(four) == pytest.approx(predicted[0])
    for task, own, other in zip(two.plan.graph.tasks, costs.of(two), predicted[1], strict=True):
        if KINDS[task.kind].computes:
            assert own == pytest.approx(other, rel=1e-6), task


def test_a_pipeline_that_takes_what_was_predicted_is_not_corrected(
    facts: Callable[..., Inspection], spec_of: SpecOf
) -> None:
    shared, spec = facts(2.0), spec_of(batch_size=16, stages=4, microbatches=8)
    job = PlannedJob(spec, MAKE(spec, shared))
    assert job.sharing("cpu", shared.host) > 1.0
    seconds = dict(enumerate(predicted_seconds(spec, job.plan, shared)))
    for before, after in zip(shared.units, corrected(job, shared, seconds).units, strict=True):
        assert after.forward_seconds == pytest.approx(before.forward_seconds)
        assert after.backward_seconds == pytest.approx(before.backward_seconds)
        assert math.isfinite(after.forward_seconds)
