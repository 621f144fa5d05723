"""The diagnosis names what a job's compute lanes lose most of their time to, and what helps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.cli.screens.diagnosis import Diagnosis, Times, diagnose
from weft.cli.screens.display import MODES
from weft.spec.strategy import Strategy


def stage(worker: str, replica: int = 0, units: tuple[int, int] = (0, 2)) -> dict[str, Any]:
    return {"replica": replica, "worker": worker, "units": list(units)}


def plan_of(held: list[dict[str, Any]], **strategy: Any) -> dict[str, Any]:
    resolved = Strategy.model_validate(strategy).model_dump(exclude_none=True)
    known = {"microbatches": resolved["microbatches"], "window": resolved.get("window", 20)}
    return {"stages": held, "strategy": resolved, "batch_size": 64, "num_train": 1000, **known}


TWO_STAGES = plan_of([stage("cpu-0"), stage("cpu-1", units=(2, 4))], stages=2, microbatches=4)
TWO_REPLICAS = plan_of([stage("cpu-0"), stage("cpu-1", replica=1)], replicas=2, microbatches=2)


def stall(lane: str, cause: str, task: str | None, on: str | None, seconds: float = 1.0) -> dict[str, Any]:
    return {"lane": lane, "cause": cause, "task": task, "on": on, "seconds": seconds}


def found(lanes: Mapping[str, Mapping[str, float]], *stalls: dict[str, Any], **known: Any) -> Diagnosis:
    times = Times(lanes=lanes, stalls=stalls, **{"overlap": {}, "plan": TWO_STAGES} | known)
    diagnosis = diagnose(times)
    assert diagnosis is not None
    return diagnosis


def test_before_any_lane_has_computed_there_is_none() -> None:
    assert diagnose(Times(lanes={}, overlap={}, plan={})) is None
    lanes = {"cpu-0/compute": {"stall_data": 1.0}, "loader-0/load": {"load": 1.0}}
    assert diagnose(Times(lanes=lanes, overlap={}, plan=TWO_STAGES)) is None


def test_lanes_that_compute_nearly_all_their_time_are_busy() -> None:
    lanes = {
        "cpu-0/compute": {"forward": 40.0, "backward": 57.0, "stall_gradient": 3.0},
        "loader-0/load": {"load": 1.0, "stall_slot": 99.0},
    }
    diagnosis = found(lanes)
    assert diagnosis.kind == "busy"
    assert diagnosis.sentence == "The compute lanes compute 97 % of their time: no wait is worth mending."


def test_a_job_whose_samples_come_late_is_bound_by_data() -> None:
    lanes = {
        "cpu-0/compute": {"forward": 20.0, "backward": 20.0, "stall_data": 60.0},
        "loader-0/load": {"load": 98.0, "stall_slot": 2.0},
    }
    diagnosis = found(lanes, stall("cpu-0/compute", "data", "LOAD(0,1)", "loader-0/load"))
    assert diagnosis.kind == "data"
    assert diagnosis.sentence == (
        "cpu-0 waits 60 % of its time for data, longest for LOAD(0,1) on loader-0/load: samples come slower than they "
        "are trained on, and that lane works 98 % of its time."
    )
    assert diagnosis.remedy == (
        "Make the dataset's items cheaper to get, or, where a core is free for it, have one more loader: "
        "strategy.loaders = 2."
    )
    assert diagnosis.alternatives == (("strategy.loaders=2",),)
    lanes["loader-0/load"] = {"load": 10.0, "stall_slot": 90.0}
    assert "prefetch" in found(lanes, stall("cpu-0/compute", "data", "LOAD(0,1)", "loader-0/load")).remedy


def test_where_what_brings_samples_to_a_device_waits_for_the_loader_that_is_named() -> None:
    lanes = {
        "gpu-0/compute": {"forward": 1.0, "backward": 1.0, "stall_data": 98.0},
        "gpu-0/fetch": {"transfer": 0.2, "stall_data": 99.8},
        "loader-0/load": {"load": 99.0, "stall_slot": 1.0},
    }
    fetch = stall("gpu-0/compute", "data", "FETCH(0,0)", "gpu-0/fetch")
    diagnosis = found(lanes, fetch, stall("gpu-0/fetch", "data", "LOAD(0,0)", "loader-0/load"))
    assert diagnosis.sentence == (
        "gpu-0 waits 98 % of its time for data, longest for FETCH(0,0) on gpu-0/fetch, which waits for LOAD(0,0) on "
        "loader-0/load: samples come slower than they are trained on, and that lane works 99 % of its time."
    )
    assert diagnosis.alternatives == (("strategy.loaders=2",),)
    assert "which waits for data on loader-0/load: samples" in found(lanes, fetch).sentence  # not one of the longest
    lanes["gpu-0/fetch"] = {"transfer": 99.0, "stall_data": 1.0}
    diagnosis = found(lanes, fetch, stall("gpu-0/fetch", "data", "LOAD(0,0)", "loader-0/load"))
    assert "longest for FETCH(0,0) on gpu-0/fetch: samples" in diagnosis.sentence
    assert diagnosis.remedy == "Bring less to the device, in fewer bytes."


def test_uneven_stages_name_the_slow_one() -> None:
    lanes = {
        "cpu-0/compute": {"forward": 20.0, "backward": 39.0, "stall_gradient": 41.0},
        "cpu-1/compute": {"forward": 35.0, "backward": 60.0, "stall_activation": 5.0},
    }
    short, long = (
        stall("cpu-0/compute", "gradient", f"BACKWARD(1,{microbatch})", "cpu-1/compute", seconds)
        for microbatch, seconds in ((3, 1.0), (0, 40.0))
    )
    diagnosis = found(lanes, short, long)
    assert diagnosis.kind == "slow-stage"
    assert diagnosis.sentence == (
        "cpu-0 waits 41 % of its time for gradients, longest for BACKWARD(1,0) on cpu-1: the second stage is the slow "
        "one, it computes 23 % longer than the mean stage."
    )
    assert "strategy.split" in diagnosis.remedy


def test_a_slow_stage_is_looked_for_in_the_replica_that_waits() -> None:
    stages = [stage("cpu-0"), stage("cpu-1"), stage("gpu-0", 1, (0, 1)), stage("gpu-1", 1, (1, 4))]
    plan = plan_of(stages, replicas=[{"stages": 2}, {"device": "gpu", "stages": 2}], microbatches=4)
    lanes = {
        "cpu-0/compute": {"forward": 50.0, "stall_gradient": 1.0},
        "cpu-1/compute": {"forward": 50.0},
        "gpu-0/compute": {"forward": 9.0, "stall_gradient": 42.0},
        "gpu-1/compute": {"forward": 15.0, "stall_activation": 36.0},
    }
    diagnosis = found(lanes, plan=plan)
    assert diagnosis.kind == "slow-stage"
    assert diagnosis.sentence.startswith("gpu-0 waits 82 % of its time for gradients: the second stage is the slow one")
    ((cut,),) = diagnosis.alternatives
    assert cut.endswith('{ device = "gpu", stages = 2, split = [2] }]'), "of that replica alone"


@pytest.mark.parametrize(
    ("schedule", "microbatches", "told"),
    [
        ("1f1b", 1, "1 microbatch in 2 stages (50 %"),
        ("1f1b", 4, "4 microbatches in 2 stages (20 %"),
        ("zero-bubble", 4, "4 microbatches in 2 stages."),  # how much there is has no bound from below
    ],
)
def test_even_stages_that_wait_for_one_another_have_a_bubble(schedule: str, microbatches: int, told: str) -> None:
    lanes = {
        "cpu-0/compute": {"forward": 38.0, "backward": 38.0, "stall_gradient": 24.0},
        "cpu-1/compute": {"forward": 40.0, "backward": 40.0, "stall_activation": 20.0},
    }
    stages = [stage("cpu-0"), stage("cpu-1")]
    diagnosis = found(lanes, plan=plan_of(stages, stages=2, microbatches=microbatches, schedule=schedule))
    assert diagnosis.kind == "bubble"
    assert f"the stages are even, this is the bubble of {told}" in diagnosis.sentence
    assert "strategy.microbatches" in diagnosis.remedy


@pytest.mark.parametrize(("slow", "kind"), [(80.0, "slow-stage"), (50.0, "slot")])
def test_a_lane_without_a_free_slot_is_ahead_of_a_slow_stage_or_of_its_slots(slow: float, kind: str) -> None:
    lanes = {"cpu-0/compute": {"forward": 50.0, "stall_slot": 30.0}, "cpu-1/compute": {"forward": slow}}
    diagnosis = found(lanes, stall("cpu-0/compute", "slot", "BACKWARD(1,3)", "cpu-1/compute"))
    assert diagnosis.kind == kind
    assert "for a free slot, longest for BACKWARD(1,3) on cpu-1" in diagnosis.sentence


def replicas(first: float, second: float) -> dict[str, dict[str, float]]:
    return {
        "cpu-0/compute": {"forward": first, "stall_update": 100 - first},
        "cpu-1/compute": {"forward": second, "stall_update": 100 - second},
        "cpu-0/sync": {"sync": 1.0, "stall_sync": 99.0},
    }


def test_a_replica_that_comes_last_is_named() -> None:
    diagnosis = found(replicas(60.0, 95.0), plan=TWO_REPLICAS)
    assert diagnosis.kind == "slow-replica"
    assert "cpu-0 waits 40 % of its time for updated parameters: cpu-1 comes last" in diagnosis.sentence
    assert "strategy.share" in diagnosis.remedy


def test_reducing_that_is_not_hidden_binds_by_sync() -> None:
    overlap = {"cpu-0": {"sync": {"hidden": 2.0, "exposed": 12.0}, "update": {"hidden": 0.0, "exposed": 4.0}}}
    diagnosis = found(replicas(78.0, 80.0), plan=TWO_REPLICAS, overlap=overlap)
    assert diagnosis.kind == "sync"
    assert "reducing and updating are not hidden, 73 % of that wait" in diagnosis.sentence


def test_replicas_that_wait_in_turn_are_uneven_from_iteration_to_iteration() -> None:
    overlap = {"cpu-0": {"sync": {"hidden": 2.0, "exposed": 1.0}}}
    assert found(replicas(78.0, 80.0), plan=TWO_REPLICAS, overlap=overlap).kind == "uneven-replicas"


PIPELINE_BESIDE_ONE = plan_of(
    [stage("gpu-0"), stage("gpu-1", units=(2, 4)), stage("cpu-0", replica=1, units=(0, 4))],
    replicas=[{"device": "gpu", "stages": 2, "microbatches": 2}, {"device": "cpu"}],
    share="adaptive",
)


@pytest.mark.parametrize(("shares", "kind"), [([0.0, 1.0], "sync"), ([0.2, 0.8], "bubble")])
def test_lanes_of_a_replica_that_has_no_samples_any_more_are_no_bottleneck(shares: list[float], kind: str) -> None:
    lanes = {
        "gpu-0/compute": {"forward": 5.0, "stall_gradient": 95.0},
        "gpu-1/compute": {"forward": 5.0, "stall_activation": 95.0},
        "cpu-0/compute": {"forward": 30.0, "backward": 40.0, "stall_update": 30.0},
    }
    overlap = {
        "cpu-0": {"update": {"hidden": 2.0, "exposed": 24.0}},
        "gpu-0": {"transfer": {"hidden": 0.0, "exposed": 60.0}},
    }
    diagnosis = found(lanes, plan=PIPELINE_BESIDE_ONE | {"shares": shares}, overlap=overlap)
    assert diagnosis.kind == kind
    if kind == "sync":
        assert diagnosis.sentence.startswith("cpu-0 waits 30 % of its time for updated parameters")
        assert "not hidden, 80 % of that wait" in diagnosis.sentence
        assert diagnosis.remedy.startswith("Replica 0 has no samples any more")
        assert diagnosis.alternatives == (('strategy.replicas=[{ device = "cpu", stages = 1 }]',),)


def test_who_steals_may_have_had_no_samples_just_once() -> None:
    lanes = {
        "cpu-0/compute": {"forward": 60.0, "stall_data": 40.0},
        "cpu-1/compute": {"forward": 10.0, "stall_data": 90.0},
    }
    plan = plan_of([stage("cpu-0"), stage("cpu-1", replica=1)], replicas=2, microbatches=4, share="stealing")
    assert found(lanes, plan=plan | {"shares": [1.0, 0.0]}).sentence.startswith("cpu-1 waits 90 %")


def test_short_tasks_under_central_dispatch_are_bound_by_dispatch() -> None:
    lanes = {"cpu-0/compute": {"forward": 50.0, "stall_dispatch": 50.0}}
    stalls = stall("cpu-0/compute", "dispatch", None, None)
    diagnosis = found(lanes, stalls, plan=TWO_STAGES | {"window": 1})
    assert diagnosis.kind == "dispatch"
    assert "cpu-0 waits 50 % of its time for the daemon to dispatch (1 task is sent ahead)" in diagnosis.sentence


@pytest.mark.parametrize(
    ("mode", "kind", "told"),
    [
        ("recovery", "recovery", "cpu-0 spent 50 % of its time in recoveries"),
        ("idle", "idle", "cpu-0 stood still 50 % of its time: its process was stopped"),
        ("update", "update", "cpu-0 spends 50 % of its time on update in its compute lane"),
    ],
)
def test_what_no_task_is_waited_for_in_has_its_own_sentence(mode: str, kind: str, told: str) -> None:
    diagnosis = found({"cpu-0/compute": {"backward": 50.0, mode: 50.0}})
    assert diagnosis.kind == kind
    assert diagnosis.sentence.startswith(told)


def path(task_seconds: float, gap_seconds: float) -> dict[str, Any]:
    steps = [{"mode": mode, "seconds": task_seconds} for mode in ("forward", "backward", "update")]
    return {"seconds": 3 * task_seconds + gap_seconds, "gap_seconds": gap_seconds, "steps": steps}


EVEN = {
    "cpu-0/compute": {"forward": 29.0, "backward": 29.0, "stall_gradient": 42.0},
    "cpu-1/compute": {"forward": 30.0, "backward": 30.0, "stall_activation": 40.0},
}


def test_tasks_that_are_too_small_for_their_stages_are_called_so() -> None:
    """Gaps were 42 % of the critical path, and the advice was to leave split unset, where it was."""
    diagnosis = found(EVEN, path=path(200e-6, 450e-6))
    assert diagnosis.kind == "small-tasks"
    assert diagnosis.sentence == (
        "Tasks of 200 µs are too small for 2 stages: 43 % of the critical path passes between them, with wake-ups and "
        "dispatch."
    )
    assert diagnosis.alternatives == (("strategy.stages=1",), ("strategy.microbatches=2",), ("job.batch_size=128",))
    assert diagnosis.remedy == (
        "Fewer stages (strategy.stages = 1), larger microbatches (strategy.microbatches = 2) or larger batches "
        "(job.batch_size = 128) make tasks longer."
    )
    assert "split" not in diagnosis.remedy
    assert found(EVEN, path=path(200e-6, 450e-6), plan=TWO_REPLICAS).sentence.startswith("Tasks of 200 µs are too sm")


@pytest.mark.parametrize("known", [None, path(200e-6, 50e-6), path(20e-3, 45e-3)])
def test_long_tasks_small_gaps_and_a_path_that_is_not_known_are_something_else(known: dict[str, Any] | None) -> None:
    assert found(EVEN, path=known).kind == "bubble"


def test_a_job_of_one_lane_is_not_called_divided() -> None:
    alone = plan_of([stage("cpu-0")])
    lanes = {"cpu-0/compute": {"forward": 50.0, "stall_dispatch": 50.0}}
    assert found(lanes, path=path(200e-6, 450e-6), plan=alone).kind == "dispatch"


def test_a_job_of_an_older_weft_has_a_sentence_and_no_remedy() -> None:
    """Its plan does not say by what settings it ran."""
    assert found(EVEN, plan={"stages": TWO_STAGES["stages"], "microbatches": 4}).remedy == ""


_SECONDS = st.floats(0, 1e6)
_LANES = st.dictionaries(
    st.sampled_from(["cpu-0/compute", "cpu-1/compute", "gpu-0/compute", "cpu-0/sync", "loader-0/load"]),
    st.dictionaries(st.sampled_from(MODES), _SECONDS),
)


@given(lanes=_LANES, plan=st.sampled_from([{}, TWO_STAGES, TWO_REPLICAS]))
def test_whatever_the_lanes_did_there_is_one_sentence_or_none(
    lanes: dict[str, dict[str, float]], plan: dict[str, Any]
) -> None:
    diagnosis = diagnose(Times(lanes=lanes, overlap={}, plan=plan))
    computed = any(
        modes.get("forward", 0) + modes.get("backward", 0) > 0
        for lane, modes in lanes.items()
        if lane.endswith("/compute")
    )
    assert (diagnosis is not None) == computed
    if diagnosis is not None:
        assert diagnosis.sentence.endswith(".")
        assert "nan" not in diagnosis.sentence
        assert (diagnosis.remedy != "") >= ("strategy" in plan)
