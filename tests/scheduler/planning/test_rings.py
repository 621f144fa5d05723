"""Slot rings: how many microbatches of each kind have room at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from weft.plan.inspection import Inspection, ParameterFacts, TensorFacts, UnitFacts, ValueFacts
from weft.plan.plan import Plan, Ring, Role
from weft.scheduler.planning.rings import shared_bytes
from weft.spec.strategy import LEAST_BATCHES, SMALL_BATCH_BYTES, SMALL_BATCHES

PlanOf = Callable[..., Plan]
InspectionOf = Callable[..., Inspection]
UnitOf = Callable[..., UnitFacts]
ValueOf = Callable[..., ValueFacts]
ParameterOf = Callable[..., ParameterFacts]

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


def test_more_loaders_have_more_batches_under_way_where_a_batch_is_too_few_for_them(plan_of: PlanOf) -> None:
    two = {"load": 2}
    assert depths(plan_of(loaders=3, prefetch=two))["input-0"] == 4
    assert depths(plan_of(loaders=2, microbatches=2, prefetch=two))["input-0"] == 4
    assert depths(plan_of(loaders=2, microbatches=2, replicas=2, prefetch=two))["input-1"] == 4


def test_small_batches_are_loaded_further_ahead_unless_the_job_says_how_far(
    plan_of: PlanOf, inspection_of: InspectionOf, unit_of: UnitOf
) -> None:
    """Both tensors of a batch count, and all its microbatches."""
    numbers = SMALL_BATCH_BYTES // 4 // 8  # of each sample, in one of eight

    def of_size(numbers: int) -> Inspection:
        shapes = {1: (1, numbers)}
        return inspection_of([unit_of(0)], input=TensorFacts(dtype="float32", itemsize=4, shapes=shapes))

    def batches(inspection: Inspection, **settings: Any) -> float:
        plan = plan_of(inspection, batch_size=8, microbatches=8, **settings)
        assert depths(plan)["input-0"] == depths(plan)["target-0"]
        return depths(plan)["input-0"] / 8

    assert (batches(of_size(numbers - 32)), batches(of_size(numbers))) == (SMALL_BATCHES, LEAST_BATCHES)
    assert batches(of_size(numbers), prefetch={"load": 3}) == batches(of_size(3), prefetch={"load": 3}) == 3


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


# --- gradients of parameters that several stages use


@pytest.fixture
def tied(inspection_of: InspectionOf, unit_of: UnitOf, parameter_of: ParameterOf) -> Callable[..., Inspection]:
    """Three units, which all use the first parameter; the second one is the first's and the last's."""

    def inspection(**changes: Any) -> Inspection:
        parameters = (parameter_of(0, 1, 2), parameter_of(0, 2, dtype="float64", itemsize=8), parameter_of(1))
        return inspection_of([unit_of(number) for number in range(3)], parameters=parameters, **changes)

    return inspection


def tied_rings(plan: Plan) -> dict[str, Ring]:
    return {ring.name: ring for ring in plan.rings if ring.role is Role.TIED}


def test_gradients_of_tied_parameters_have_a_ring_for_each_two_stages_that_they_go_between(
    plan_of: PlanOf, tied: Callable[..., Inspection]
) -> None:
    rings = tied_rings(plan_of(tied(), stages=3, microbatches=2))
    places = {
        name: [(value.parameter, value.dtype, value.offset, value.num_bytes) for value in ring.values]
        for name, ring in rings.items()
    }
    assert places == {
        "tied-0-0-1": [(0, "float32", 0, 128)],
        "tied-0-0-2": [(1, "float64", 0, 256)],
        "tied-0-1-2": [(0, "float32", 0, 128)],
    }
    assert [(ring.writer, ring.stages) for ring in rings.values()] == [(1, (0,)), (2, (0,)), (2, (1,))]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_they_are_as_deep_as_there_are_backwards_on_the_way_and_no_deeper_than_a_batch(
    plan_of: PlanOf, tied: Callable[..., Inspection], schedule: str
) -> None:
    """Each takes as much as the parameters, whatever the microbatches' size."""

    def found(microbatches: int) -> list[int]:
        plan = plan_of(tied(), stages=3, microbatches=microbatches, schedule=schedule)
        return [ring.depth for ring in tied_rings(plan).values()]

    assert found(8) == ([3, 4, 3] if schedule == "gpipe" else [3, 3, 2])
    assert found(1) == [1, 1, 1]


@pytest.mark.parametrize(
    ("replica", "memory"),
    [
        ({"stages": 3}, "shared"),
        ({"device": "gpu", "stages": 3, "gpus": 1}, "device"),
        ({"device": "gpu", "stages": 3}, "peer"),
        ({"device": "gpu", "working_window": 1}, "shared"),
    ],
)
def test_they_stand_where_the_stages_are_and_of_a_working_window_in_the_hosts_memory(
    plan_of: PlanOf, tied: Callable[..., Inspection], replica: dict[str, Any], memory: str
) -> None:
    plan = plan_of(tied(peer_access=True), replicas=[replica, {"device": "cpu"}], microbatches=6, update="cpu")
    rings = tied_rings(plan).values()
    assert [ring.memory for ring in rings] == [memory] * 3
    assert {ring.replica for ring in rings} == {0}, "the other replica has all of its users in one stage"
    if "working_window" in replica:
        assert [ring.depth for ring in rings] == [6] * 3, "all of a batch goes through a layer before the next"


def test_they_are_shared_memory_and_the_later_stages_have_no_other_place_for_them(
    plan_of: PlanOf, tied: Callable[..., Inspection], unit_of: UnitOf
) -> None:
    plan = plan_of(tied(), stages=3, microbatches=2)
    assert plan.synchronisation is not None
    slots = sum(ring.depth * ring.slot_bytes for ring in plan.rings)
    gradients = sum(bucket.num_bytes for bucket in plan.synchronisation.buckets)
    state = 3 * (unit_of(0).parameter_bytes + unit_of(0).buffer_bytes)
    assert plan.shared_bytes == state + slots + gradients + 4 * (len(plan.graph.tasks) + 1)


def test_a_job_without_updates_and_one_whose_users_are_in_one_stage_have_none(
    plan_of: PlanOf, tied: Callable[..., Inspection]
) -> None:
    assert not tied_rings(plan_of(tied(), stages=3, mode="forward"))
    assert not tied_rings(plan_of(tied(), clip_norm=1.0))


def test_they_have_one_size_where_shares_adapt(plan_of: PlanOf, tied: Callable[..., Inspection]) -> None:
    plan = plan_of(tied(), replicas=[{"stages": 3}, {"device": "cpu"}], share="adaptive", microbatches=2)
    assert len(tied_rings(plan)) == 3
