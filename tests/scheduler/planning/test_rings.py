"""Slot rings: how many microbatches of each kind have room at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from weft.plan.inspection import Inspection, UnitFacts, ValueFacts
from weft.plan.plan import Plan
from weft.scheduler.planning.rings import shared_bytes

PlanOf = Callable[..., Plan]
InspectionOf = Callable[..., Inspection]
UnitOf = Callable[..., UnitFacts]
ValueOf = Callable[..., ValueFacts]

CPU = {"device": "cpu", "stages": 2, "microbatches": 4}
GPU = {"device": "gpu", "stages": 2, "microbatches": 3}


def depths(plan: Plan) -> dict[str, int]:
    return {ring.name: ring.depth for ring in plan.rings}


@pytest.mark.parametrize(("schedule", "first", "last"), [("gpipe", 3, 3), ("1f1b", 2, 1)])
def test_each_replica_has_its_own_rings_as_deep_as_its_own_schedule_needs(
    plan_of: PlanOf, schedule: str, first: int, last: int
) -> None:
    """A device has its own input and target too: those in flight in the stage, and those that are fetched ahead."""
    plan = plan_of(replicas=[CPU, GPU], schedule=schedule, prefetch={"load": 3, "transfer": 5})
    own = {"input-1": 9, "target-1": 9, "device-input-1": first + 5, "device-target-1": last + 5}
    assert {name: depth for name, depth in depths(plan).items() if name.endswith("-1") or "-1-" in name} == {
        **own,
        "activation-1-0": first,
        "gradient-1-0": first,
    }
    assert depths(plan)["input-0"] == depths(plan)["target-0"] == 12
    assert depths(plan)["activation-0-0"] == (4 if schedule == "gpipe" else 2)


def test_a_device_of_one_stage_has_no_ring_between_stages(plan_of: PlanOf) -> None:
    plan = plan_of(replicas=[{"device": "gpu"}])
    assert sorted(depths(plan)) == ["device-input-0", "device-target-0", "input-0", "target-0"]


def between_stages(plan: Plan) -> dict[str, tuple[str, int | None]]:
    rings = [ring for ring in plan.rings if ring.name.startswith(("activation", "gradient"))]
    return {ring.name: (ring.memory, ring.lender) for ring in rings}


def test_only_a_devices_own_rings_take_no_shared_memory(plan_of: PlanOf) -> None:
    plan = plan_of(replicas=[GPU, CPU])
    assert {ring.name for ring in plan.rings if ring.memory == "device"} == {"device-input-0", "device-target-0"}
    assert shared_bytes(plan.rings) == sum(
        ring.depth * ring.slot_bytes for ring in plan.rings if not ring.name.startswith("device")
    )


def test_between_gpus_that_reach_one_another_a_ring_is_on_the_gpu_that_writes_it(
    plan_of: PlanOf, inspection_of: InspectionOf, unit_of: UnitOf
) -> None:
    """The workers are those of the CPU replica's stages, 0 and 1, then the GPUs'."""
    units = [unit_of(number) for number in range(3)]
    replicas = [CPU, GPU | {"stages": 3}]
    plan = plan_of(inspection_of(units, peer_access=True), replicas=replicas)
    assert between_stages(plan) == {
        "activation-0-0": ("shared", None),
        "gradient-0-0": ("shared", None),
        "activation-1-0": ("peer", 2),
        "gradient-1-0": ("peer", 3),
        "activation-1-1": ("peer", 3),
        "gradient-1-1": ("peer", 4),
    }
    without = plan_of(inspection_of(units), replicas=replicas)
    assert set(between_stages(without).values()) == {("shared", None)}
    lent = sum(ring.depth * ring.slot_bytes for ring in plan.rings if ring.memory == "peer")
    assert without.shared_bytes - plan.shared_bytes == lent > 0
    assert [stage.memory_bytes for stage in plan.stages] == [stage.memory_bytes for stage in without.stages]


def test_between_stages_of_one_gpu_nothing_is_lent(
    plan_of: PlanOf, inspection_of: InspectionOf, unit_of: UnitOf
) -> None:
    units = [unit_of(number) for number in range(3)]
    plan = plan_of(inspection_of(units, peer_access=True), replicas=[GPU | {"stages": 3, "gpus": 2}])
    assert between_stages(plan) == {
        "activation-0-0": ("device", None),
        "gradient-0-0": ("device", None),
        "activation-0-1": ("peer", 0),
        "gradient-0-1": ("peer", 1),
    }


def test_a_slot_between_stages_holds_what_the_unit_before_the_replicas_own_cut_puts_out(
    plan_of: PlanOf, inspection_of: InspectionOf, unit_of: UnitOf, value_of: ValueOf
) -> None:
    units = [unit_of(number) for number in range(3)]
    values = tuple(value_of(number, shapes={1: (1, 16 * (number + 1))}) for number in range(2))
    split: list[dict[str, Any]] = [{"stages": 2, "split": [1]}, {"stages": 2, "split": [2]}]
    plan = plan_of(inspection_of(units, values=values), replicas=split)
    sizes = {ring.name: ring.slot_bytes for ring in plan.rings}
    assert (sizes["activation-0-0"], sizes["activation-1-0"]) == (64, 128)
    assert (sizes["gradient-0-0"], sizes["gradient-1-0"]) == (64, 128)
