"""What `preset = "auto"` comes to: by the simulator the fastest candidate, and none is left out that could be it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.plan.division import divide
from weft.plan.inspection import Inspection, TensorFacts, Threaded, UnitFacts, ValueFacts
from weft.plan.plan import Plan
from weft.scheduler.planning.choosing.choice import AS_GOOD, best_of, choose, consider
from weft.scheduler.planning.choosing.told import told
from weft.scheduler.planning.partition import PlanError
from weft.scheduler.planning.planner import make_plan
from weft.spec.candidates import is_undecided, on_one_worker, or_auto, workers_wanted
from weft.spec.job_spec import JobSpec
from weft.spec.workers_needed import Host, workers_needed

BATCH = 64
SIZES = (1, 2, 4, 8, 16, 32, 64)  # of microbatches that candidates have
PLENTY = 1 << 40

InspectionOf = Callable[..., Inspection]
UnitOf = Callable[..., UnitFacts]
ValueOf = Callable[..., ValueFacts]
SpecOf = Callable[..., JobSpec]
make: Callable[..., Plan] = partial(make_plan, shared_bytes_free=PLENTY)


@pytest.fixture(scope="session")
def measured(inspection_of: InspectionOf, unit_of: UnitOf, value_of: ValueOf) -> Callable[..., Inspection]:
    """Of a model of so many units: seconds of each forward for a whole batch, half as much for each sample as for the
    call; with all threads they take `speedup` times less."""

    def inspection(
        seconds: list[float], *, workers: int = 2, speedup: float = 1.5, gpus: int = 0, **changes: Any
    ) -> Inspection:
        units = [
            unit_of(
                number,
                own,
                2 * own,
                parameter_bytes=4000,
                small_forward_seconds=own * 0.3,
                small_backward_seconds=own * 0.6,
            )
            for number, own in enumerate(seconds)
        ]
        shapes = {size: (size, 8) for size in SIZES}
        facts: dict[str, Any] = {
            "values": tuple(value_of(number, shapes=shapes) for number in range(len(units) - 1)),
            "input": TensorFacts(dtype="float32", itemsize=4, shapes=shapes),
            "target": TensorFacts(dtype="int64", itemsize=8, shapes={size: (size,) for size in SIZES}),
            "num_train": BATCH,
            "update_seconds": 0.002,
            "small_size": BATCH // 4,
            "timed_size": BATCH,
            "host": Host(workers=workers, gpus=gpus),
        }
        if workers > 1:
            faster = [tuple(part / speedup for part in (own, 2 * own, own * 0.3, own * 0.6)) for own in seconds]
            facts["threaded"] = Threaded(
                threads=workers, seconds=tuple(faster), update_seconds=0.001, copy_bytes_per_second=8e9
            )
        return inspection_of(units, **facts | changes)

    return inspection


@pytest.fixture(scope="session")
def auto(spec_of: SpecOf) -> Callable[..., JobSpec]:
    return lambda **axes: spec_of(batch_size=BATCH, preset="auto", **axes)


@settings(max_examples=4)
@given(
    seconds=st.lists(st.floats(1e-4, 0.05), min_size=2, max_size=5),
    speedup=st.floats(0.7, 4.0),
    workers=st.integers(1, 2),
    recompute=st.booleans(),
    slowness=st.sampled_from([1.0, 0.5, 2.5]),
)
def test_the_choice_is_the_fastest_of_all_and_pruning_loses_nothing(
    measured: Callable[..., Inspection],
    auto: Callable[..., JobSpec],
    seconds: list[float],
    speedup: float,
    workers: int,
    recompute: bool,
    slowness: float,
) -> None:
    """slowness: of the second worker."""
    unequal = {} if slowness == 1.0 else {"cpu": (1.0, slowness)[:workers]}
    inspection = measured(seconds, workers=workers, speedup=speedup, slowness=unequal)
    spec = auto(recompute=recompute)
    everyone = consider(spec, inspection, make, prunes=False)
    simulated = [each.seconds for each in everyone if each.seconds is not None]
    assert len(simulated) == len([each for each in everyone if each.why_not is None])
    for each in everyone:
        assert each.seconds is None or each.least_seconds <= each.seconds * (1 + 1e-9), each.title
    choice = choose(spec, inspection, make)
    best = best_of(everyone)
    assert best is not None
    assert choice.spec == best.spec
    assert choice.plan.predicted_iteration_seconds == pytest.approx(best.seconds)
    assert choice.plan.predicted_iteration_seconds <= AS_GOOD * min(simulated)


def test_the_plan_of_a_job_that_only_runs_forward_has_no_pass_back(
    measured: Callable[..., Inspection], spec_of: SpecOf
) -> None:
    """The picture and the longest cycle had a BACKWARD behind each FORWARD: they are in the graph, and do nothing."""
    spec = spec_of(batch_size=BATCH, mode="forward", stages=2, microbatches=2)
    plain = told(choose(spec, measured([0.01, 0.03]), make), None, shared_bytes_free=PLENTY, host_bytes_free=PLENTY)
    assert {task["mode"] for lane in plain["timeline"] for task in lane["tasks"]} == {"forward", "load"}
    assert "FORWARD" in plain["critical_cycle"]
    assert "BACKWARD" not in plain["critical_cycle"]


def test_what_a_candidate_cannot_be_is_told_without_advice_to_who_has_not_asked_for_it(
    measured: Callable[..., Inspection], auto: Callable[..., JobSpec]
) -> None:
    [line] = [each for each in choose(auto(), measured([0.01]), make).lines if "cannot be" in each]
    assert line.endswith(
        "cannot be, the first since strategy.stages = 2, but the model can be cut into at most 1 stage (units: 0)"
    )


def test_a_batch_is_as_many_samples_as_there_are(
    measured: Callable[..., Inspection], auto: Callable[..., JobSpec], spec_of: SpecOf
) -> None:
    """With batch_size = 5000 of 1438 samples a plan told 3.5 times the samples/s that there are, and what a candidate
    takes at least was that of 5000, so that faster ones were left out."""
    inspection = measured([0.01, 0.03, 0.02], workers=2)
    whole, larger = (choose(spec, inspection, make) for spec in (auto(), spec_of(batch_size=10 * BATCH, preset="auto")))
    assert larger.lines == whole.lines
    assert [each.least_seconds for each in larger.considered] == [each.least_seconds for each in whole.considered]
    plain, other = (told(each, None, shared_bytes_free=PLENTY, host_bytes_free=PLENTY) for each in (whole, larger))
    assert other["samples_per_second"] == plain["samples_per_second"]
    assert [each["samples_per_second"] for each in other["candidates"]] == [
        each["samples_per_second"] for each in plain["candidates"]
    ]


def test_one_process_with_all_threads_is_chosen_where_it_is_as_good(
    measured: Callable[..., Inspection], auto: Callable[..., JobSpec]
) -> None:
    """And the three lines say so, which stand first among the plan's notes."""
    choice = choose(auto(), measured([0.01] * 4, speedup=2.0), make)
    assert choice.spec.strategy.threads == "all"
    assert choice.plan.threads == 2
    assert choice.plan.workers == ("cpu", "cpu", "loader")
    first, second, third = choice.lines
    assert choice.plan.notes[:3] == choice.lines
    assert first.startswith("auto: one process (2 threads), ")
    assert second.startswith("auto: next are ")
    assert third.startswith(f"auto: of {len(choice.considered)} candidates ")
    slower = choose(auto(), measured([0.01] * 4, speedup=1.1), make)
    assert slower.plan.predicted_iteration_seconds < choice.plan.predicted_iteration_seconds * 2 / 1.1
    assert slower.spec.strategy.threads is None


@pytest.mark.parametrize(
    "axes",
    [
        {"microbatches": 4},
        {"schedule": "gpipe"},
        {"stages": 2},
        {"stages": 2, "split": [1]},
        {"replicas": 2},
        {"replicas": [{"device": "cpu", "stages": 2}]},
        {"threads": 2},
        {"threads": "all"},
        {"recompute": True, "clip_norm": 1.0, "sync": "coarse", "bucket_mib": 0.001},
        {"window": 3, "prefetch": {"load": 3}, "staleness": 1, "update": "cpu", "precision": "bf16"},
        {"share": "adaptive", "replicas": 2},
        {"share": "stealing", "microbatches": 4},
    ],
)
def test_an_axis_that_is_given_stays(
    measured: Callable[..., Inspection], auto: Callable[..., JobSpec], axes: dict[str, Any]
) -> None:
    spec = JobSpec.parse(auto(**axes).to_wire())
    chosen = choose(spec, measured([0.01, 0.02, 0.01]), make).spec.strategy
    assert chosen.preset is None
    assert {axis: getattr(chosen, axis) for axis in axes} == {axis: getattr(spec.strategy, axis) for axis in axes}
    assert workers_needed(chosen, Host(workers=2))["cpu"] <= 2


def test_a_batch_that_modules_look_at_is_divided_as_the_user_has_it(
    measured: Callable[..., Inspection], auto: Callable[..., JobSpec]
) -> None:
    """As in a pipeline with one microbatch, where nobody gave another number."""
    inspection = measured([0.01] * 4, speedup=0.5, batch_modules=("1 (BatchNorm1d)",))
    assert {each.spec.strategy.division[1][0] for each in consider(auto(), inspection, make)} == {1}
    assert {len(each.spec.strategy.replica_list) for each in consider(auto(), inspection, make)} == {1}
    given = consider(auto(microbatches=8), inspection, make)
    assert {each.spec.strategy.microbatches for each in given} == {8}


def test_a_loss_that_is_no_mean_leaves_the_batch_as_the_user_divides_it(
    measured: Callable[..., Inspection], auto: Callable[..., JobSpec]
) -> None:
    """A sum was trained by two replicas with half of its gradient, and nobody said so."""
    inspection = measured([0.01] * 4, speedup=0.5, loss_in_parts=(13.744, 9.28))
    assert {each.spec.strategy.division[1] == [1] for each in consider(auto(), inspection, make)} == {True}
    choice = choose(auto(), inspection, make)
    assert choice.lines[-1].startswith(
        "auto: a batch is divided as you have it, since its loss is 13.74 of some samples together, and 9.28 as"
    )
    given = consider(auto(replicas=2), inspection, make)
    assert {len(each.spec.strategy.replica_list) for each in given} == {2}


def test_what_on_epoch_may_set_of_a_loss_leaves_the_batch_as_the_user_divides_it(
    measured: Callable[..., Inspection], auto: Callable[..., JobSpec]
) -> None:
    """Weights of classes that it sets make a mean over samples one over weights, after the look."""
    inspection = measured([0.01] * 4, speedup=0.5, lost_beside={"on_epoch_sets": ("weights",)})
    assert {each.spec.strategy.division[1] == [1] for each in consider(auto(), inspection, make)} == {True}
    choice = choose(auto(), inspection, make)
    assert choice.lines[-1] == (
        "auto: a batch is divided as you have it, since on_epoch may set weights, by which the loss goes"
    )


def test_devices_bring_the_candidates_of_their_presets(
    measured: Callable[..., Inspection], auto: Callable[..., JobSpec]
) -> None:
    inspection = measured([0.01] * 3, gpus=2)
    inspection = replace(inspection, device_units=tuple(_times_faster(unit, 50) for unit in inspection.units))
    titles = [each.title for each in consider(auto(microbatches=1), inspection, make)]
    for title in ("one GPU", "one GPU (updates on the CPU)", "one GPU (updates on both)", "2 replicas of one GPU"):
        assert title in titles
    assert "GPU" in choose(auto(microbatches=1), inspection, make).considered[0].title
    assert workers_wanted(auto(), Host(workers=2, gpus=2)) == {"cpu": 2, "gpu": 2, "loader": 1}


def test_candidates_have_titles_of_their_own(measured: Callable[..., Inspection], auto: Callable[..., JobSpec]) -> None:
    """Those whose synchronisation is coarse were called as those with fine one: "next are" named the same twice."""
    titles = [each.title for each in consider(auto(), measured([0.01] * 3, gpus=2), make, prunes=False)]
    assert len(titles) == len(set(titles)) > 20
    assert any("coarse sync" in title for title in titles)


def _times_faster(unit: UnitFacts, factor: float) -> UnitFacts:
    times = ("forward_seconds", "backward_seconds", "small_forward_seconds", "small_backward_seconds")
    return replace(unit, **{name: getattr(unit, name) / factor for name in times})


def test_a_chosen_plan_has_the_limit_that_goes_with_its_prediction(
    unit_of: UnitOf, inspection_of: InspectionOf, spec_of: SpecOf
) -> None:
    """Of units without parameters before the one that has some, gradients are complete long before a backward ends."""
    units = [unit_of(number, 1e-3, 2e-3, parameter_bytes=4000 * (number == 3)) for number in range(4)]
    inspection = inspection_of(units, update_seconds=4e-3)
    choice = choose(spec_of(replicas=2, batch_size=BATCH), inspection, make)
    assert choice.plan.limit_seconds == choice.outlook.limit_seconds
    assert choice.plan.limit_seconds <= choice.plan.predicted_iteration_seconds


def test_what_no_candidate_can_is_refused_with_the_sum(
    measured: Callable[..., Inspection], auto: Callable[..., JobSpec]
) -> None:
    def small(*arguments: Any, **options: Any) -> Plan:
        return make_plan(*arguments, **options, shared_bytes_free=100)

    with pytest.raises(
        PlanError, match=r"the plan needs 0\.03 MiB of shared memory .* and /dev/shm has 0\.00 MiB free"
    ):
        choose(auto(), measured([0.01] * 2), small)
    with pytest.raises(PlanError, match="no candidate has the axes that are given"):
        choose(auto(stages=3), measured([0.01] * 3), make)


def test_for_memory_the_plan_is_chosen_whose_largest_worker_is_smallest(
    measured: Callable[..., Inspection], auto: Callable[..., JobSpec]
) -> None:
    spec = auto().model_copy(update={"plan_for": "memory"})
    choice = choose(spec, measured([0.01] * 4), make)
    known = [each.memory_bytes for each in choice.considered if each.memory_bytes is not None]
    assert len(known) == len(choice.considered)
    assert choice.considered[0].memory_bytes == min(known)
    assert choice.plan.stages[0].worker != choice.plan.stages[-1].worker
    assert "KiB in its fullest worker" in choice.lines[0]


@pytest.mark.days(3)
def test_workers_may_have_several_cores_each(measured: Callable[..., Inspection], auto: Callable[..., JobSpec]) -> None:
    """Two replicas on four cores have two each, where threads bring nearly what they cost."""
    inspection = measured([0.01] * 4, workers=4, speedup=3.4)
    titles = [each.title for each in consider(auto(), inspection, make, prunes=False) if each.why_not is None]
    for title in ("2 replicas (2 threads each)", "a pipeline of 2 workers (1f1b, 4 microbatches, 2 threads)"):
        assert title in titles
    assert not any("1 thread" in title for title in titles)
    chosen = choose(auto(replicas=2, threads="all"), inspection, make)
    assert chosen.spec.strategy.replica_list[0].num_stages == 1
    assert chosen.plan.threads == 2
    with_one_each = choose(auto(replicas=2, stages=1), inspection, make)
    assert with_one_each.considered[0].title == "2 replicas (2 threads each)"


def test_what_there_is_no_room_for_is_considered_with_recompute(
    measured: Callable[..., Inspection], auto: Callable[..., JobSpec]
) -> None:
    """Unless the user says whether: then what fits is chosen, or nothing."""
    inspection = measured([0.01] * 3, workers=1)
    inspection = replace(inspection, units=tuple(replace(unit, kept_bytes=8 << 20) for unit in inspection.units))
    room = make(auto(), inspection).shared_bytes + (24 << 20)

    def in_room(num_bytes: int) -> Callable[..., Plan]:
        return partial(make_plan, shared_bytes_free=PLENTY, host_bytes_free=num_bytes)

    assert not choose(auto(), inspection, in_room(room)).spec.strategy.recompute
    with pytest.raises(PlanError, match="activations 24"):
        choose(auto(microbatches=1), inspection, in_room(room - 1))
    in_parts = choose(auto(), inspection, in_room(room - 1)).spec.strategy
    assert (in_parts.microbatches, in_parts.recompute) == (2, False)
    assert choose(auto(), inspection, in_room(room - (20 << 20))).spec.strategy.microbatches == 8
    pipelines = replace(inspection, host=Host(workers=2))
    less = choose(auto(stages=2, microbatches=8, schedule="gpipe"), pipelines, in_room(room - (3 << 20)))
    assert less.spec.strategy.recompute
    assert "recompute" in less.lines[0]
    with pytest.raises(PlanError, match="of the host's memory at the least"):
        choose(auto(stages=2, microbatches=8, schedule="gpipe", recompute=False), pipelines, in_room(room - (3 << 20)))
    for_memory = auto(stages=2, microbatches=8, schedule="gpipe").model_copy(update={"plan_for": "memory"})
    assert choose(for_memory, pipelines, make).spec.strategy.recompute


@pytest.mark.parametrize("workers", [1, 2])
def test_a_batch_that_could_not_be_looked_at_whole_is_chosen_in_parts(
    measured: Callable[..., Inspection], auto: Callable[..., JobSpec], workers: int
) -> None:
    """Whatever is as fast; where it may not be divided the reason is told."""
    shapes = {size: (size, 8) for size in SIZES[:-2]}
    given = TensorFacts(dtype="float32", itemsize=4, shapes=shapes)
    found = measured([0.03, 0.03], workers=workers, speedup=4.0, input=given, timed_size=16, small_size=4)
    found = replace(found, most_samples=16, crowded="to try it takes 40 MiB, and 20 are free")
    chosen = choose(auto(), found, make)
    strategy = chosen.spec.strategy
    assert (strategy.microbatches, strategy.threads, len(strategy.replica_list)) == (
        4,
        "all" if workers > 1 else None,
        1,
    )
    assert "the first since to try it takes 40 MiB" in chosen.lines[2]
    assert choose(auto(microbatches=8), found, make).spec.strategy.microbatches == 8
    for undivided in ({"batch_modules": ("norm (BatchNorm1d)",)}, {"undivided": "a batch is another in parts"}):
        with pytest.raises(PlanError, match="to try it takes 40 MiB"):
            choose(auto(), replace(found, **undivided), make)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_only_parts_whose_shapes_are_known_are_chosen(
    measured: Callable[..., Inspection], auto: Callable[..., JobSpec], workers: int
) -> None:
    """Three replicas with two microbatches each have ten samples in some."""
    inspection = measured([0.01] * 3, workers=workers)
    inspection = replace(inspection, units=tuple(replace(unit, kept_bytes=8 << 20) for unit in inspection.units))
    sizes = inspection.input.shapes.keys() | {22, 21}
    given = replace(inspection.input, shapes={size: (size, 8) for size in sizes})
    inspection = replace(inspection, input=given)
    in_room = partial(make_plan, shared_bytes_free=PLENTY, host_bytes_free=20 << 20)
    for each in consider(auto(), inspection, in_room):
        if each.seconds is not None:
            parts = divide(BATCH, *each.spec.strategy.division)
            assert {part.size for own in parts for part in own} <= sizes, each.title


@pytest.fixture(scope="session")
def nobodys(spec_of: SpecOf) -> JobSpec:
    """That gives no strategy, as `weft run` has it."""
    job = spec_of(batch_size=BATCH).to_wire()
    del job["strategy"]
    return or_auto(JobSpec.parse(job))


@pytest.mark.parametrize("gpus", [0, 1, 2])
def test_where_nobody_gives_a_strategy_whole_models_are_the_choice(
    measured: Callable[..., Inspection], nobodys: JobSpec, gpus: int
) -> None:
    """GPUs that are no faster than a CPU worker change nothing."""
    chosen = choose(nobodys, measured([0.01, 0.01], workers=4, gpus=gpus), make)
    assert chosen.lines[0].startswith("no [strategy]: auto chose 4 replicas, ")
    assert set(chosen.lines) <= set(chosen.plan.notes)
    strategies = [each.spec.strategy for each in chosen.considered]
    devices = {tuple({replica.device for replica in each.replica_list}) for each in strategies}
    assert devices == ({("cpu",), ("gpu",)} if gpus else {("cpu",)}), "none on both"
    assert {replica.num_stages for each in strategies for replica in each.replica_list} == {1}
    assert {count for each in strategies for count in each.microbatch_counts} == {1}
    wanted = {"cpu": 4, "gpu": gpus, "loader": 1}
    assert workers_wanted(nobodys, Host(workers=4, gpus=gpus)) == {kind: most for kind, most in wanted.items() if most}


def test_where_nobody_gives_a_strategy_a_gpu_is_used_that_is_faster(
    measured: Callable[..., Inspection], nobodys: JobSpec
) -> None:
    """Also where other programs have the cores; not where the model is for the host alone."""
    inspection = measured([0.01] * 3, gpus=1)
    inspection = replace(inspection, device_units=tuple(_times_faster(unit, 50) for unit in inspection.units))
    chosen = choose(nobodys, inspection, make)
    assert [replica.device for replica in chosen.spec.strategy.replica_list] == ["gpu"]
    assert chosen.lines[0].startswith("no [strategy]: auto chose one GPU, ")
    busy = measured([0.01] * 3, gpus=1, speedup=0.01, device_units=inspection.device_units)
    beside_others = choose(nobodys, busy, make)
    assert beside_others.spec.strategy == chosen.spec.strategy
    assert beside_others.lines[-1].startswith("no [strategy]: no more than one CPU worker, since other programs seem ")
    assert beside_others.inspection == busy
    alone = choose(nobodys, replace(inspection, without_gpus="a look at them raised TypeError: cpu"), make)
    assert alone.spec.strategy.replica_list[0].device == "cpu"
    assert alone.lines[-1] == "no [strategy]: GPUs are left alone, since a look at them raised TypeError: cpu"
    unchosen = choose(nobodys, replace(busy, unchosen="some 0.2 s are too few"), make)
    assert unchosen.lines == ("no [strategy]: one worker, since some 0.2 s are too few",)


def test_what_is_little_faster_than_one_worker_is_not_worth_it(
    measured: Callable[..., Inspection], nobodys: JobSpec
) -> None:
    for speedup, threads in ((1.05, None), (1.5, "all")):
        found = measured([0.01, 0.01], speedup=speedup, undivided="the loss is another in parts")
        chosen = choose(nobodys, found, make)
        assert chosen.spec.strategy.threads == threads
        assert chosen.spec.strategy.division == nobodys.strategy.division
        assert chosen.lines[-1] == "auto: batches stay whole, since the loss is another in parts"


def test_where_none_is_chosen_the_plan_is_that_of_one_worker_and_says_why(
    measured: Callable[..., Inspection], nobodys: JobSpec, spec_of: SpecOf
) -> None:
    inspection = measured([0.01, 0.01], unchosen="some 0.2 s are too few")
    chosen = choose(nobodys, inspection, make)
    alone = spec_of(batch_size=BATCH)
    assert chosen.spec.strategy == alone.strategy
    line, *notes = chosen.plan.notes
    assert line == "no [strategy]: one worker, since some 0.2 s are too few"
    assert replace(chosen.plan, notes=tuple(notes)) == choose(alone, inspection, make).plan


def test_on_cores_that_others_use_nothing_is_chosen_that_waits_for_all_of_them(
    measured: Callable[..., Inspection], nobodys: JobSpec, auto: Callable[..., JobSpec]
) -> None:
    """With another program on one of two cores digits took 1 ms a step on one worker, and 31 ms on the two replicas
    that were predicted to take 0.6 ms; all threads had been measured to take 98 ms."""
    busy = measured([0.01, 0.01], speedup=0.01)
    asked_for = choose(auto(), busy, make).spec.strategy
    assert workers_needed(asked_for)["cpu"] == 2, "who asks for a choice is told what cores can do"
    chosen = choose(nobodys, busy, make)
    assert chosen.spec.strategy == on_one_worker(nobodys).strategy
    assert chosen.lines[0].startswith(
        "no [strategy]: one worker, since other programs seem to have some of its cores: "
    )


def test_where_no_candidate_can_be_planned_the_job_is_one_workers_and_not_refused(
    measured: Callable[..., Inspection], nobodys: JobSpec
) -> None:
    """Nobody has asked for the choice, so nothing that comes of it may refuse a job that would have run without."""
    asked = 0

    def picky(spec: JobSpec, inspection: Inspection, **options: Any) -> Plan:
        nonlocal asked
        asked += 1
        if spec.by_default:
            raise PlanError("no room")
        return make(spec, inspection, **options)

    chosen = choose(nobodys, measured([0.01, 0.01]), picky)
    assert chosen.lines == ("no [strategy]: one worker, since no room",)
    assert asked > 1


def test_only_a_spec_without_a_strategy_is_one_that_nobody_gives(spec_of: SpecOf) -> None:
    tables = spec_of(batch_size=BATCH).to_wire()
    for table in ({}, {"precision": "bf16"}, {"preset": "auto"}):
        spec = JobSpec.parse(tables | {"strategy": table})
        assert or_auto(spec) is spec
    del tables["strategy"]
    nobodys = or_auto(JobSpec.parse(tables))
    assert is_undecided(nobodys)
    assert is_undecided(JobSpec.parse(nobodys.to_wire())), "on the other side, and in the ledger, too"
    assert on_one_worker(nobodys) == JobSpec.parse(tables)
