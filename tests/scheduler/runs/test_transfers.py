"""Bytes moved follow from the plan: samples that are fetched, gradients that come down, parameters that go up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from weft.plan.course import REFRESH_STEPS
from weft.plan.inspection import Inspection, TensorFacts, UnitFacts
from weft.plan.itinerary import Iteration
from weft.plan.kinds import Kind
from weft.plan.plan import Plan
from weft.scheduler.runs.transfers import Transfers

TRAINING = Iteration(index=0, training=True, epoch=0, step=0, start=0, size=2)
VALIDATION = replace(TRAINING, training=False, learns=False)
SAMPLE_BYTES = 3 * 4 + 8  # a row of three float32, and an int64


def parameter_bytes(plan: Plan) -> int:
    assert plan.synchronisation is not None
    return sum(part.num_bytes for part in plan.synchronisation.buckets)


def test_a_device_fetches_samples_and_moves_gradients_and_parameters(plan_of: Callable[..., Plan]) -> None:
    plan = plan_of(replicas=[{"device": "gpu"}, {"device": "cpu"}], update="cpu", batch_size=2)
    transfers = Transfers(plan)
    transfers.finish(TRAINING, [1, 1])
    moved = parameter_bytes(plan)
    assert transfers.take_bytes() == {"fetch": SAMPLE_BYTES, "down": moved, "up": moved}
    assert transfers.take_bytes() == {}


def test_validation_only_fetches(plan_of: Callable[..., Plan]) -> None:
    transfers = Transfers(plan_of(replicas=[{"device": "gpu", "stages": 2}], update="cpu", batch_size=2))
    transfers.finish(VALIDATION, [2])
    assert transfers.take_bytes() == {"fetch": 2 * SAMPLE_BYTES}


def test_a_replica_without_samples_sends_no_gradients_and_still_gets_parameters(plan_of: Callable[..., Plan]) -> None:
    plan = plan_of(replicas=[{"device": "gpu"}, {"device": "cpu"}], update="cpu", batch_size=2)
    transfers = Transfers(plan)
    transfers.finish(TRAINING, [0, 2])
    assert transfers.take_bytes() == {"up": parameter_bytes(plan)}


def test_a_device_that_updates_itself_takes_over_the_hosts_parameters_now_and_then(
    plan_of: Callable[..., Plan],
) -> None:
    plan = plan_of(replicas=[{"device": "gpu", "stages": 2}, {"device": "cpu"}], update="local", batch_size=2)
    transfers = Transfers(plan)
    moved = parameter_bytes(plan)
    for step in range(REFRESH_STEPS):
        assert "refresh" not in transfers.take_bytes(), step
        transfers.finish(replace(TRAINING, index=step, step=step), [1, 1])
    assert transfers.take_bytes() == {"fetch": SAMPLE_BYTES, "down": moved, "up": moved, "refresh": moved}


def test_what_stays_in_shared_memory_is_no_transfer(plan_of: Callable[..., Plan]) -> None:
    plan = plan_of(stages=2, microbatches=2, batch_size=2)
    assert not any(task.kind in (Kind.FETCH, Kind.DOWN, Kind.UP) for task in plan.graph.tasks)
    transfers = Transfers(plan)
    transfers.finish(TRAINING, [2])
    assert transfers.take_bytes() == {}


@pytest.mark.parametrize(
    ("dtype", "num_bytes"), [("bool", 1), ("uint8", 1), ("bfloat16", 2), ("float32", 4), ("float8_e4m3fn", 1)]
)
def test_an_item_is_as_large_as_its_type(
    plan_of: Callable[..., Plan],
    inspection_of: Callable[..., Inspection],
    unit_of: Callable[..., UnitFacts],
    dtype: str,
    num_bytes: int,
) -> None:
    facts = TensorFacts(dtype=dtype, itemsize=num_bytes, shapes={1: (1, 3), 2: (2, 3)})
    plan = plan_of(inspection_of([unit_of(0)], input=facts), replicas=[{"device": "gpu"}], update="cpu", batch_size=2)
    transfers = Transfers(plan)
    transfers.finish(VALIDATION, [1])
    assert transfers.take_bytes() == {"fetch": 3 * num_bytes + 8}
