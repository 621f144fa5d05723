"""Which layers a streamed model is cut into, and how many of them its GPU holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from weft.plan.inspection import Inspection, UnitFacts
from weft.plan.plan import Plan
from weft.scheduler.planning.partition import PlanError
from weft.scheduler.planning.working_window import MEMORY_SHARE, layer_cuts

PlanOf = Callable[..., Plan]
InspectionOf = Callable[..., Inspection]
UnitOf = Callable[..., UnitFacts]

LAYER_BYTES = 1 << 20
STREAMED: dict[str, Any] = {"update": "cpu", "recompute": True}


def streamed(window: int | str) -> dict[str, Any]:
    return {"replicas": [{"device": "gpu", "working_window": window}], **STREAMED}


@pytest.fixture
def layers_of(inspection_of: InspectionOf, unit_of: UnitOf) -> Callable[..., Inspection]:
    """By the seconds that a layer takes on the link; it computes for 1 ms forward, and 2 ms backward."""

    def build(link_seconds: float, num_layers: int = 8, **changes: Any) -> Inspection:
        times = {"forward_seconds": 1e-3, "backward_seconds": 2e-3}
        units = [unit_of(number, parameter_bytes=LAYER_BYTES, **times) for number in range(num_layers)]
        return inspection_of(units, link_bytes_per_second=LAYER_BYTES / link_seconds, **changes)

    return build


def window_of(plan: Plan) -> int | None:
    return plan.replicas[0].working_window


def test_a_layer_that_comes_up_while_another_one_computes_needs_a_window_of_two(
    plan_of: PlanOf, layers_of: Callable[..., Inspection]
) -> None:
    assert window_of(plan_of(layers_of(0.9e-3), **streamed("auto"))) == 2


def test_a_link_that_takes_no_time_needs_a_window_of_one(plan_of: PlanOf, layers_of: Callable[..., Inspection]) -> None:
    assert window_of(plan_of(layers_of(1e-6), **streamed("auto"))) == 1


def test_a_smaller_window_than_the_one_found_takes_longer_and_a_larger_one_hardly_less(
    plan_of: PlanOf, layers_of: Callable[..., Inspection]
) -> None:
    """The link is slower than forwards and faster than backwards: while these run it may get ahead."""
    inspection = layers_of(1.5e-3)
    found = plan_of(inspection, **streamed("auto"))
    window = window_of(found)
    assert window is not None
    assert 1 < window < 8
    smaller, largest = (plan_of(inspection, **streamed(number)) for number in (window - 1, 8))
    assert smaller.predicted_iteration_seconds > 1.01 * largest.predicted_iteration_seconds
    assert found.predicted_iteration_seconds <= 1.01 * largest.predicted_iteration_seconds


def test_a_window_found_takes_no_more_of_the_gpus_memory_than_its_share(
    plan_of: PlanOf, layers_of: Callable[..., Inspection]
) -> None:
    """Three layers with their gradients fit; a slow link would like to have more."""
    memory = int(3.5 * 2 * LAYER_BYTES / MEMORY_SHARE)
    slow = layers_of(1.5e-3, device_bytes=memory)
    assert window_of(plan_of(layers_of(1.5e-3), **streamed("auto"))) == 4
    assert window_of(plan_of(slow, **streamed("auto"))) == 3
    assert window_of(plan_of(layers_of(1.5e-3, device_bytes=LAYER_BYTES), **streamed("auto"))) == 1


def test_a_window_is_no_larger_than_the_model(plan_of: PlanOf, layers_of: Callable[..., Inspection]) -> None:
    assert window_of(plan_of(layers_of(1e-3, num_layers=3), **streamed(64))) == 3
    assert window_of(plan_of(layers_of(1e-3, num_layers=1), **streamed("auto"))) == 1


def test_a_layer_ends_where_the_model_can_be_cut_behind_parameters(unit_of: UnitOf) -> None:
    sizes = [0, 4, 0, 4, 4, 0]
    units = [unit_of(number, parameter_bytes=size) for number, size in enumerate(sizes)]
    assert layer_cuts(units, range(1, 6)) == [2, 4]
    assert layer_cuts(units, [1, 3, 5]) == [3]
    assert layer_cuts(units[:1], []) == []


def test_the_users_own_cuts_are_where_layers_begin(plan_of: PlanOf, layers_of: Callable[..., Inspection]) -> None:
    replica = {"device": "gpu", "working_window": 2, "split": [2, 3, 7]}
    plan = plan_of(layers_of(1e-3), replicas=[replica], **STREAMED)
    assert [(stage.first, stage.last) for stage in plan.stages] == [(0, 2), (2, 3), (3, 7), (7, 8)]


def test_layers_come_up_twice_but_for_those_of_the_last_window(
    plan_of: PlanOf, layers_of: Callable[..., Inspection]
) -> None:
    plan = plan_of(layers_of(1e-3, num_layers=5), **streamed(2), bucket_mib=0.5)
    tasks = {lane.name: plan.graph.describe(program) for lane, program in plan.graph.programs.items()}
    assert tasks["h2d"] == ("UP(1,b3) UP(0,b4) UP(2,b2) UP(3,b1) UP(4,b0) RELOAD(2,b2) RELOAD(1,b3) RELOAD(0,b4)")
    assert tasks["d2h"] == "DOWN(4,b0) DOWN(3,b1) DOWN(2,b2) DOWN(1,b3) DOWN(0,b4)"
    assert tasks["compute"].startswith("FORWARD(0,0) FORWARD(1,0)")
    assert tasks["compute"].endswith(
        "BACKWARD(1,0) GRAD(1,b3) BACKWARD(0,0) GRAD(0,b4) SNAPSHOT(0) SNAPSHOT(1) SNAPSHOT(2) SNAPSHOT(3) SNAPSHOT(4)"
    )


def test_a_plan_says_in_a_line_where_the_model_is(plan_of: PlanOf, layers_of: Callable[..., Inspection]) -> None:
    plan = plan_of(layers_of(1e-3), **streamed(2) | {"replicas": [{}, {"device": "gpu", "working_window": 2}]})
    assert (
        plan.summary(("cpu-3", "gpu-1", "loader-0")) == "units 0-7 on cpu-3, a working window of 2 of 8 layers on gpu-1"
    )
    assert plan_of(layers_of(1e-3, num_layers=1)).summary(("cpu-3", "loader-0")) == "unit 0 on cpu-3"


def test_what_layers_hand_on_stays_on_the_gpu(plan_of: PlanOf, layers_of: Callable[..., Inspection]) -> None:
    plan = plan_of(layers_of(1e-3), **streamed(2), microbatches=2)
    between = [ring for ring in plan.rings if ring.name.startswith(("activation", "gradient"))]
    assert len(between) == 2 * 7
    assert {ring.memory for ring in between} == {"device"}
    assert {ring.depth for ring in between} == {2}


def test_a_job_without_updates_has_nothing_to_stream(plan_of: PlanOf, layers_of: Callable[..., Inspection]) -> None:
    with pytest.raises(PlanError, match="working_window"):
        plan_of(layers_of(1e-3), mode="forward", **streamed(2))
