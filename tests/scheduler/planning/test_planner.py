"""Plans: the depth of the rings, what it all takes, and the jobs that cannot be planned."""

from __future__ import annotations

import json
import random
import runpy
import tomllib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.plan.inspection import Inspection, ParameterFacts, StateFacts, TensorFacts, UnitFacts, ValueFacts, slot_bytes
from weft.plan.kinds import Kind
from weft.plan.plan import Plan
from weft.plan.schedules.planned import planned_schedule
from weft.plan.worker_view import WorkerView
from weft.scheduler.planning.memory import SPECULATION_SHARE
from weft.scheduler.planning.partition import PlanError
from weft.scheduler.planning.planner import make_plan
from weft.spec.job_spec import JobSpec
from weft.spec.schedule_text import SCHEDULE_NAMES, why_not_stages
from weft.spec.strategy import Strategy

race = runpy.run_path(str(Path(__file__).with_name("racing_lanes.py")))["race"]

PlanOf = Callable[..., Plan]
UnitOf = Callable[..., UnitFacts]
InspectionOf = Callable[..., Inspection]
SpecOf = Callable[..., JobSpec]


def test_a_stage_that_begins_with_a_unit_that_works_in_place_copies_its_input(
    plan_of: PlanOf, inspection_of: InspectionOf, unit_of: UnitOf
) -> None:
    plan = plan_of(inspection_of([unit_of(0), unit_of(1, in_place=True), unit_of(2)]), stages=3)
    assert [stage.copies_input for stage in plan.stages] == [False, True, False]


# --- jobs that cannot be planned


def test_more_stages_than_the_model_has_units_are_refused_with_the_units(
    unit_of: UnitOf, inspection_of: InspectionOf, spec_of: SpecOf
) -> None:
    units = [unit_of(number, name=name) for number, name in enumerate(("embed.", "head."))]
    with pytest.raises(PlanError, match=r"strategy\.stages = 3, .* at most 2 stages \(units: embed, head\); use fewer"):
        make_plan(spec_of(stages=3), inspection_of(units), shared_bytes_free=1 << 40)
    whole = [unit_of(0, name="")]
    with pytest.raises(PlanError, match=r"at most 1 stage \(units: the whole model\); use fewer stages$"):
        make_plan(spec_of(stages=2), inspection_of(whole), shared_bytes_free=1 << 40)


@pytest.mark.parametrize("preset", ["hybrid-coarse", "hybrid-fine"])
def test_more_stages_than_units_in_a_presets_list_are_refused_with_the_list_that_can_be(
    plan_of: PlanOf, inspection_of: InspectionOf, unit_of: UnitOf, preset: str
) -> None:
    """It advised `strategy.stages`, which is refused beside a list."""
    inspection = inspection_of([unit_of(0)])
    with pytest.raises(PlanError) as caught:
        plan_of(inspection, preset=preset)
    assert str(caught.value).startswith("strategy.replicas: stages = 2, but the model can be cut into at most 1 stage")
    _, _, advised = str(caught.value).partition("; use fewer in the list: strategy.")
    axes = tomllib.loads(advised)
    assert [replica["device"] for replica in axes["replicas"]] == ["gpu", "cpu"]
    assert [replica.num_stages for replica in plan_of(inspection, preset=preset, **axes).replicas] == [1, 1]


def test_a_batch_smaller_than_its_microbatches_is_refused(plan_of: PlanOf) -> None:
    plan_of(batch_size=4, microbatches=4)
    with pytest.raises(
        PlanError, match=r"job\.batch_size = 3 is smaller than strategy\.microbatches = 4; a microbatch"
    ):
        plan_of(batch_size=3, microbatches=4)


def test_a_job_without_data_is_refused(plan_of: PlanOf, inspection_of: InspectionOf, unit_of: UnitOf) -> None:
    with pytest.raises(PlanError, match=r"Workload\.train has length 0; give at least one sample"):
        plan_of(inspection_of([unit_of(0)], num_train=0))


def test_a_job_whose_scheduler_takes_a_value_of_validations_is_judged_after_each_epoch_or_refused(
    plan_of: PlanOf, inspection_of: InspectionOf, unit_of: UnitOf
) -> None:
    def plan(**facts: Any) -> Plan:
        return plan_of(inspection_of([unit_of(0)], **facts))

    assert not plan(num_validation=4).judged
    planned = plan(num_validation=4, scheduler_metric="loss")
    assert (planned.judged, planned.scheduler_metric) == (True, "loss")
    with pytest.raises(PlanError, match=r"^Workload\.scheduler_metric, .* = 'loss': the job has no validation; give"):
        plan(scheduler_metric="loss")
    with pytest.raises(PlanError, match=r"= 'f1': validations report loss; use one of these"):
        plan(num_validation=4, scheduler_metric="f1")


def test_several_loaders_for_data_that_one_process_draws_are_refused(
    plan_of: PlanOf, inspection_of: InspectionOf, unit_of: UnitOf
) -> None:
    inspection = inspection_of([unit_of(0)], streams=("validation",))
    assert plan_of(inspection).streams
    told = (
        r"^strategy.loaders = 2: Workload.validation is an IterableDataset, and one process draws its items one after "
        r"another; use loaders = 1, or give a map-style dataset$"
    )
    with pytest.raises(PlanError, match=told):
        plan_of(inspection, loaders=2)


def test_more_iterations_than_a_board_counts_are_refused(
    plan_of: PlanOf, inspection_of: InspectionOf, unit_of: UnitOf
) -> None:
    plan_of(steps=2**31 - 1)
    validated = inspection_of([unit_of(0)], num_validation=8)  # one more iteration for each epoch of one step
    with pytest.raises(PlanError, match=r"job\.steps makes 4294967294 iterations, a board counts to 2147483647"):
        plan_of(validated, steps=2**31 - 1)


def test_a_plan_that_shared_memory_cannot_hold_is_refused_with_the_sum(
    inspection_of: InspectionOf, unit_of: UnitOf, spec_of: SpecOf
) -> None:
    inspection = inspection_of([unit_of(0, parameter_bytes=3 << 20), unit_of(1, buffer_bytes=1 << 20)])
    spec = spec_of(stages=2, microbatches=2, recovery="off")
    need = make_plan(spec, inspection, shared_bytes_free=1 << 40).shared_bytes
    make_plan(spec, inspection, shared_bytes_free=need)
    told = r"needs (4\.\d+) MiB of shared memory .* /dev/shm has (?!\1)4\.\d+ MiB free; use fewer"
    with pytest.raises(PlanError, match=told):
        make_plan(spec, inspection, shared_bytes_free=need - 1)


def test_updates_do_not_speculate_where_the_host_has_no_memory_for_what_they_keep(
    inspection_of: InspectionOf, unit_of: UnitOf, spec_of: SpecOf
) -> None:
    """Adam on the host: values, gradient and two averages, and to undo a step the values and both averages again."""
    size = 1 << 20
    adam = tuple(StateFacts(name, "elements", "float32", 4) for name in ("exp_avg", "exp_avg_sq"))
    adam = (*adam, StateFacts("step", "tensor", "float32", 4))
    facts = ParameterFacts(
        units=(0,), num_elements=size // 4, dtype="float32", itemsize=4, trained=True, group=0, state=adam
    )
    inspection = inspection_of([unit_of(0, parameter_bytes=size)], parameters=(facts,))
    spec = spec_of(replicas=[{"device": "gpu"}], update="cpu", clip_norm=1.0)
    plan = make_plan(spec, inspection, shared_bytes_free=1 << 40)
    need = plan.shared_bytes + 5 * size

    def speculates(host_bytes_free: int) -> bool:
        made = make_plan(spec, inspection, shared_bytes_free=1 << 40, host_bytes_free=host_bytes_free)
        assert made.synchronisation is not None
        return made.synchronisation.speculative

    assert speculates(need)
    assert not speculates(need - size // 2)


def test_a_device_does_not_speculate_where_it_has_no_memory_for_what_it_keeps(
    inspection_of: InspectionOf, unit_of: UnitOf, spec_of: SpecOf
) -> None:
    """Owners on the host do all the same."""
    size = 1 << 20
    average = StateFacts("momentum_buffer", "elements", "float32", 4)
    facts = ParameterFacts(
        units=(0,), num_elements=size // 4, dtype="float32", itemsize=4, trained=True, group=0, state=(average,)
    )
    units = [unit_of(0, parameter_bytes=size), unit_of(1)]
    spec = spec_of(replicas=[{"device": "gpu", "stages": 2}, {"device": "cpu"}], clip_norm=1.0)
    need = int(2 * size / SPECULATION_SHARE)
    for free, speculates in ((need, True), (need - 1, False), (None, True)):
        inspection = inspection_of(units, parameters=(facts,), device_bytes=free)
        sync = make_plan(spec, inspection, shared_bytes_free=1 << 40).synchronisation
        assert sync is not None
        assert (sync.speculative, sync.devices_speculate) == (True, speculates)


# --- plans


pipelines = st.tuples(st.sampled_from(SCHEDULE_NAMES), st.integers(1, 4)).filter(
    lambda pipeline: why_not_stages(*pipeline, None) is None
)


@settings(max_examples=60)
@given(
    pipeline=pipelines,
    microbatches=st.integers(1, 6),
    recompute=st.booleans(),
    window=st.none() | st.integers(1, 9),
)
def test_every_plan_checks_has_the_depth_of_its_schedule_and_can_be_sent(
    plan_of: PlanOf, pipeline: tuple[str, int], microbatches: int, recompute: bool, window: int | None
) -> None:
    schedule, stages = pipeline
    plan = plan_of(stages=stages, microbatches=microbatches, schedule=schedule, recompute=recompute, window=window)
    plan.graph.check()
    depths = {ring.name: ring.depth for ring in plan.rings}
    assert depths.pop("input-0") == depths.pop("target-0") == 8 * microbatches  # small batches
    made = planned_schedule(plan)
    expected = {
        name: depth
        for stage in range(stages - 1)
        for name, depth in (
            (f"activation-0-{stage}", made.activation_slots(stage, [stage + 1])),
            (f"gradient-0-{stage}", made.gradient_slots(stage + 1, stage)),
        )
    }
    assert depths == expected
    assert plan.workers == ("cpu",) * len(made.programs) + ("loader",)
    assert 0 < plan.limit_seconds <= plan.predicted_iteration_seconds * (1 + 1e-9)
    assert plan.window == window or window is None
    json.dumps(plan.describe())


def slots_of(kind: Kind, stage: int, last: int, *, training: bool) -> tuple[list[str], list[str]]:
    """(rings that a task reads, rings that it writes) as a worker does it."""
    source = f"activation-0-{stage - 1}" if stage else "input-0"
    target = ["target-0"] if stage == last else []
    match kind:
        case Kind.LOAD:
            return [], ["input-0", "target-0"]
        case Kind.FORWARD:
            return [source, *target], [] if stage == last else [f"activation-0-{stage}"]
        case Kind.BACKWARD | Kind.INPUT | Kind.WEIGHT if training:
            gradient = [] if stage == last else [f"gradient-0-{stage}"]
            written = [f"gradient-0-{stage - 1}"] if stage and kind is not Kind.WEIGHT else []
            return [source, *target, *gradient], written
    return [], []


@settings(max_examples=150, deadline=None)
@given(
    pipeline=pipelines,
    microbatches=st.integers(1, 4),
    phases=st.lists(st.booleans(), min_size=3, max_size=7),
    rng=st.randoms(use_true_random=False),
)
def test_every_reader_finds_its_own_microbatch_in_the_slot_however_the_lanes_race(
    plan_of: PlanOf, pipeline: tuple[str, int], microbatches: int, phases: list[bool], rng: random.Random
) -> None:
    schedule, stages = pipeline
    plan = plan_of(stages=stages, microbatches=microbatches, schedule=schedule)
    race(plan, phases, rng, lambda task, training: slots_of(task.kind, task.stage, stages - 1, training=training))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_strategy_has_a_plan_that_runs_within_its_limit_and_can_be_sent(
    inspection_of: InspectionOf,
    unit_of: UnitOf,
    spec_of: SpecOf,
    strategies_of: Callable[[int], st.SearchStrategy[Strategy]],
    data: st.DataObject,
) -> None:
    """make_plan checks the graph and simulates it; every task is in the view of one worker, and travels as it is."""
    inspection = inspection_of(
        [unit_of(number, parameter_bytes=4 * size) for number, size in enumerate([300, 20, 1, 90])]
    )
    strategy = data.draw(strategies_of(4))
    spec = spec_of(**strategy.model_dump(exclude_none=True))
    plan = make_plan(spec, inspection, shared_bytes_free=1 << 40)
    assert plan.limit_seconds > 0
    if not strategy.steals:  # or the limit goes by what each gets on average, and few microbatches do not divide so
        assert plan.limit_seconds <= plan.predicted_iteration_seconds * (1 + 1e-6)  # tasks of 1e-7 s may run ahead yet
    views = [WorkerView.of(plan, position) for position in range(len(plan.workers))]
    sent = [msgpack.unpackb(msgpack.packb(view.to_wire())) for view in views]
    assert [WorkerView.from_wire(data) for data in sent] == views
    tasks = [task for view in views for program in view.programs.values() for task in program]
    assert sorted(tasks, key=lambda task: task.id) == list(plan.graph.tasks)
    assert {view.reporter is None for view in views} == {plan.synchronisation is None}
    json.dumps(plan.describe())


def test_gradients_of_every_holder_and_the_versions_that_stale_replicas_read_are_shared_memory(
    plan_of: PlanOf, inspection_of: InspectionOf, unit_of: UnitOf
) -> None:
    inspection = inspection_of([unit_of(0, parameter_bytes=1024)])

    def num_bytes(**settings: Any) -> int:
        plan = plan_of(inspection, **settings)
        return plan.shared_bytes - 4 * len(plan.graph.tasks)

    one, two = num_bytes(clip_norm=1.0), num_bytes(replicas=2)
    slots = num_bytes() - 1024 - inspection.units[0].buffer_bytes - 4
    assert one == num_bytes() + 1024
    assert two - one == slots + 1024
    assert num_bytes(replicas=2, staleness=[0, 2]) >= two + (2 + 3) * 1024


def test_recompute_adds_the_forward_to_each_backward(plan_of: PlanOf) -> None:
    for recompute, expected in ((False, 2.0), (True, 3.0)):
        plan = plan_of(recompute=recompute)
        seconds = {task.kind: plan.task_seconds[task.id] for task in plan.graph.tasks}
        assert (seconds[Kind.FORWARD], seconds[Kind.BACKWARD]) == (1.0, expected)


def test_the_update_is_shared_out_by_parameters(plan_of: PlanOf, inspection_of: InspectionOf, unit_of: UnitOf) -> None:
    units = [unit_of(0, parameter_bytes=100), unit_of(1, parameter_bytes=300)]
    plan = plan_of(inspection_of(units, update_seconds=8.0), stages=2)
    updates = [plan.task_seconds[task.id] for task in plan.graph.tasks if task.kind is Kind.UPDATE]
    assert updates == [2.0, 6.0]


def test_a_model_without_parameters_has_an_update_that_costs_nothing(
    plan_of: PlanOf, inspection_of: InspectionOf, unit_of: UnitOf
) -> None:
    plan = plan_of(inspection_of([unit_of(0, parameter_bytes=0)], update_seconds=8.0))
    assert [plan.task_seconds[task.id] for task in plan.graph.tasks if task.kind is Kind.UPDATE] == [0.0]


def test_fast_tasks_are_sent_further_ahead_within_bounds(
    plan_of: PlanOf, inspection_of: InspectionOf, unit_of: UnitOf
) -> None:
    def window(seconds: float) -> int:
        return plan_of(inspection_of([unit_of(0, forward=seconds, backward=seconds)])).window

    longest = 4  # tasks of the compute lane: forward, backward, update, snapshot
    assert window(1.0) == 2 * longest
    assert 2 * longest < window(0.01) < window(0.002) <= 4096
    assert window(0.0) == 4096


def test_a_job_that_is_adjusted_as_it_runs_is_sent_less_ahead(
    plan_of: PlanOf, inspection_of: InspectionOf, unit_of: UnitOf
) -> None:
    """Since an adjustment begins behind what was sent."""

    def window(share: str) -> int:
        fast = inspection_of([unit_of(0, forward=0.01, backward=0.01)])
        return plan_of(fast, replicas=2, share=share, microbatches=2).window

    assert 2 * window("stealing") < window("fixed") > 2 * window("adaptive")


@pytest.mark.parametrize(
    ("shapes", "itemsize", "size"),
    [({1: (1, 3), 2: (2, 3)}, 4, 64), ({2: (2, 9)}, 4, 128), ({1: ()}, 8, 64), ({}, 4, 0)],
)
def test_a_slot_holds_the_largest_microbatch_in_whole_vectors(
    shapes: dict[int, tuple[int, ...]], itemsize: int, size: int
) -> None:
    assert slot_bytes(shapes, itemsize) == size
    facts = TensorFacts(dtype="float32", itemsize=itemsize, shapes=shapes)
    assert facts.max_bytes() <= size


def test_an_inspection_is_the_same_on_the_other_side_of_the_wire(
    inspection_of: InspectionOf, unit_of: UnitOf, value_of: Callable[..., ValueFacts]
) -> None:
    unit, value, why = asdict(unit_of(0)), asdict(value_of(0, 1, 2)), "unit 0 (Pair) passes on a tuple"
    told = {
        "units": [unit],
        "values": [value | {"shapes": [[1, [1, 8]], [2, [2, 8]]]}],
        "cut_problems": [[1, why]],
        "input": {"dtype": "float32", "itemsize": 4, "shapes": [[1, [1, 3]], [2, [2, 3]]]},
        "target": {"dtype": "int64", "itemsize": 8, "shapes": [[1, [1]], [2, [2]]]},
        "num_train": 8,
        "num_validation": 0,
        "load_seconds": 0.0,
        "update_seconds": 0.0,
        "metrics": [],
        "parameters": [
            {"units": [0], "num_elements": 25, "dtype": "float32", "itemsize": 4, "trained": True, "group": 0}
        ],
        "elementwise": True,
        "weighted": False,
        "copy_bytes_per_second": 5e9,
    }
    found = {"values": (value_of(0, 1, 2),), "cut_problems": {1: why}}
    assert Inspection.from_wire(msgpack.unpackb(msgpack.packb(told))) == inspection_of([unit_of(0)], **found)
    of_device = {"device_units": told["units"], "device_values": told["values"], "device_update_seconds": 3.0}
    with_device = told | of_device
    found |= {"device_units": (unit_of(0),), "device_values": found["values"], "device_update_seconds": 3.0}
    expected = inspection_of([unit_of(0)], **found)
    assert Inspection.from_wire(msgpack.unpackb(msgpack.packb(with_device))) == expected


def test_each_replica_is_cut_by_the_times_of_its_own_kind_of_device(
    plan_of: PlanOf, inspection_of: InspectionOf, unit_of: UnitOf, value_of: Callable[..., ValueFacts]
) -> None:
    """The host takes longest for the first unit, the device for the last; under autocast they differ in dtype too."""
    host = [unit_of(number, forward) for number, forward in enumerate((9.0, 1.0, 1.0, 1.0))]
    device = [unit_of(number, forward, in_place=number == 3) for number, forward in enumerate((1.0, 1.0, 1.0, 9.0))]
    device_values = tuple(value_of(number, dtype="bfloat16", itemsize=2) for number in range(3))
    replicas = [{"device": kind, "stages": 2} for kind in ("cpu", "gpu")]
    plan = plan_of(inspection_of(host, device_units=tuple(device), device_values=device_values), replicas=replicas)
    assert [(stage.replica, stage.first, stage.last) for stage in plan.stages] == [
        (0, 0, 1),
        (0, 1, 4),
        (1, 0, 3),
        (1, 3, 4),
    ]
    assert [stage.copies_input for stage in plan.stages] == [False, False, False, True]
    dtypes = {ring.name: ring.values[0].dtype for ring in plan.rings}
    assert (dtypes["activation-0-0"], dtypes["activation-1-0"]) == ("float32", "bfloat16")
