"""The cut: the best one where a model can be cut at all, or the user's own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.plan.inspection import Inspection, ParameterFacts, StateFacts, UnitFacts, ValueFacts
from weft.plan.placement import Cuts
from weft.scheduler.planning.partition import PlanError, Room, cut_for, even_workers, partition
from weft.scheduler.planning.placing import scheduled
from weft.spec.job_spec import JobSpec

UnitOf = Callable[..., UnitFacts]
SpecOf = Callable[..., JobSpec]


@st.composite
def models(draw: st.DrawFn) -> list[tuple[int, bool, int | None]]:
    """Of each unit: its seconds, whether its output is one tensor, and the earlier unit that it is tied to."""
    count = draw(st.integers(1, 8))
    return [
        (draw(st.integers(0, 9)), draw(st.integers(0, 5)) > 0, draw(st.none() | st.integers(0, n)) if n else None)
        for n in range(count)
    ]


def units_of(model: Sequence[tuple[int, bool, int | None]], unit_of: UnitOf) -> list[UnitFacts]:
    return [
        unit_of(
            number,
            forward=seconds / 4,
            backward=3 * seconds / 4,
            tied_to=() if tied is None or tied == number else (tied,),
        )
        for number, (seconds, _, tied) in enumerate(model)
    ]


def problems_of(model: Sequence[tuple[int, bool, int | None]]) -> dict[int, str]:
    return {number + 1: "no tensor" for number, (_, tensor, _) in enumerate(model) if not tensor}


def allowed_cuts(units: Sequence[UnitFacts], problems: Mapping[int, str]) -> list[int]:
    ties = [(tied, number) for number, unit in enumerate(units) for tied in unit.tied_to]
    return [
        cut
        for cut in range(1, len(units))
        if cut not in problems and not any(first < cut <= second for first, second in ties)
    ]


def slowest(units: Sequence[UnitFacts], cuts: Sequence[tuple[int, int]]) -> float:
    return max(sum(unit.forward_seconds + unit.backward_seconds for unit in units[a:b]) for a, b in cuts)


@given(model=models(), num_stages=st.integers(1, 5))
def test_the_slowest_stage_is_as_fast_as_any_cut_allows(
    unit_of: UnitOf, model: list[tuple[int, bool, int | None]], num_stages: int
) -> None:
    units, problems = units_of(model, unit_of), problems_of(model)
    allowed = allowed_cuts(units, problems)
    every = [
        list(itertools.pairwise([0, *chosen, len(units)])) for chosen in itertools.combinations(allowed, num_stages - 1)
    ]
    if not every:
        with pytest.raises(PlanError, match=f"can be cut into at most {len(allowed) + 1} stage"):
            partition(units, num_stages, problems=problems)
        return
    cuts = partition(units, num_stages, problems=problems)
    assert list(cuts) in every
    assert slowest(units, cuts) == min(slowest(units, other) for other in every)


def test_units_that_share_a_parameter_stay_together(unit_of: UnitOf) -> None:
    units = [unit_of(0), unit_of(1), unit_of(2), unit_of(3, tied_to=(1,), tied_by=("table",))]
    assert partition(units, 2) == ((0, 1), (1, 4))
    with pytest.raises(
        PlanError,
        match=r"strategy\.stages = 3, but .* at most 2 stages .* '1' and '3' keep 'table' between them, .* give ",
    ):
        partition(units, 3)


def test_no_cut_falls_where_there_is_a_problem_with_it(unit_of: UnitOf) -> None:
    problems = {2: "unit 1 passes on a dict", 3: "unit 2 passes on a dict"}
    assert partition([unit_of(number) for number in range(4)], 2, problems=problems) == ((0, 1), (1, 4))


def test_the_users_own_split_is_taken_where_the_model_can_be_cut(unit_of: UnitOf) -> None:
    units = [unit_of(0), unit_of(1), unit_of(2), unit_of(3, tied_to=(2,))]
    units += [unit_of(4), unit_of(5)]
    problems = {5: "unit 4 (Pair) passes on a dict"}
    assert partition(units, 2, [1], problems) == ((0, 1), (1, 6))
    assert partition(units, 3, [1, 2], problems) == ((0, 1), (1, 2), (2, 6))
    for split, why in {
        3: "3: '2' and '3' have a buffer in common, .*",
        5: r"5: unit 4 \(Pair\) passes on a dict",
        9: "9, of 6",
    }.items():
        text = rf"strategy\.split: the model cannot be cut before unit {why}; it can be before \[1, 2, 4\]"
        with pytest.raises(PlanError, match=text):
            partition(units, 2, [split], problems)


def test_more_stages_than_the_model_has_places_for_are_refused_with_what_is_in_the_way(unit_of: UnitOf) -> None:
    """It advised an nn.Sequential, whatever the model was."""
    units = [unit_of(number, name=f"h.{number}") for number in range(7)]
    problems = {1: "a mask is made before it", 2: "a mask is made before it"}
    problems |= {number: f"a sum is asked for at line {number}" for number in (3, 4, 5)}
    with pytest.raises(PlanError) as caught:
        partition(units, 3, problems=problems)
    assert str(caught.value) == (
        "strategy.stages = 3, but the model can be cut into at most 2 stages (units: h.0, h.1, h.2, h.3, h.4, h.5, "
        "h.6); use fewer stages, or change what stands in the way of more: before 'h.1': a mask is made before it; "
        "before 'h.3': a sum is asked for at line 3; before 'h.4': a sum is asked for at line 4"
    )
    with pytest.raises(PlanError, match=r"at most 1 stage \(units: the whole model\); use fewer stages$"):
        partition([unit_of(0, name="")], 2)


def test_modules_that_are_called_several_times_are_named_as_what_no_stage_begins_with(unit_of: UnitOf) -> None:
    """A cell in a loop, a network for two inputs: the units were few, and nothing said why."""
    units = [replace(unit_of(0, name="embed"), repeated=("cell",)), unit_of(1, name="head")]
    told = r"change what stands in the way of more: no stage begins with a module that the step calls several times"
    with pytest.raises(PlanError, match=rf"at most 2 stages .*{told} \(cell\): call it once$"):
        partition(units, 3)
    told = r"'cell' is called several times in a step, .* called once; give some of head$"
    with pytest.raises(PlanError, match=rf"^strategy\.split: {told}"):
        partition(units, 2, ["cell"])


# --- units by name


NAMES = ("stem", "layer1.0", "layer1.1", "layer2.0", "layer2.1", "head.fc")


@pytest.fixture
def named(unit_of: UnitOf) -> list[UnitFacts]:
    return [unit_of(number, name=name) for number, name in enumerate(NAMES)]


@pytest.mark.parametrize(
    ("split", "numbers"),
    [
        (["layer1.1", "head.fc"], [2, 5]),
        (["layer2", "layer2.1"], [3, 4]),
        (["layer1", "head"], [1, 5]),
    ],
)
def test_a_split_may_name_units_and_modules_that_contain_them(
    named: list[UnitFacts], split: list[str], numbers: list[int]
) -> None:
    assert partition(named, 3, split) == partition(named, 3, numbers)


def test_the_children_of_a_sequential_are_names_as_well(unit_of: UnitOf) -> None:
    units = [unit_of(0, name="encoder."), unit_of(1, name="4."), unit_of(2, name="decoder.")]
    assert partition(units, 3, ["4", "decoder"]) == ((0, 1), (1, 2), (2, 3))


@pytest.mark.parametrize(
    ("split", "text"),
    [
        (["layer2.7"], "no unit is called 'layer2.7'; did you mean 'layer2.1' or 'layer2.0' or 'layer2'?"),
        (["fc"], "no unit is called 'fc'; did you mean 'head.fc'?"),
        (["model.layer2.1"], "no unit is called 'model.layer2.1'; did you mean 'layer2.1'?"),
        (["attention"], "no unit is called 'attention'; give some of layer1.0, layer1.1, layer2.0, layer2.1, head.fc"),
        ([""], "no unit is called ''; give some of layer1.0, layer1.1, layer2.0, layer2.1, head.fc"),
        (
            ["layer1.1.conv1"],
            "'layer1.1.conv1' would be inside the unit 'layer1.1', which is not cut; give a whole unit, for example "
            '"layer1.1"',
        ),
        (
            ["stem.conv"],
            "'stem.conv' would be inside the unit 'stem', which is not cut; give a whole unit, for example "
            '"layer1.0"',
        ),
        (
            ["stem"],
            "'stem' begins with the model's first unit, and nothing is before it to be cut off; give units after it, "
            'for example ["layer1.0"]',
        ),
        (
            ["head", "layer1.1", "layer2"],
            "'layer1.1' runs before 'head'; give them in the order in which they run: "
            '["layer1.1", "layer2", "head"]',
        ),
        (["layer2", "layer2.0"], "'layer2' and 'layer2.0' both begin with the unit 'layer2.0'; give one of them"),
        (
            ["layer2"],
            "the model cannot be cut before unit 'layer2': a mask is made before it; it can be before "
            '["layer1.0", "layer1.1", "layer2.1", "head.fc"]',
        ),
    ],
)
def test_a_split_by_names_that_cannot_be_is_refused_with_names_that_can(
    named: list[UnitFacts], split: list[str], text: str
) -> None:
    with pytest.raises(PlanError) as caught:
        partition(named, len(split) + 1, split, {3: "a mask is made before it"} if split == ["layer2"] else {})
    assert str(caught.value) == f"strategy.split: {text}"


# --- memory


@pytest.mark.parametrize(
    ("axes", "cuts"),
    [
        ({"stages": 2}, ((0, 3), (3, 4))),
        ({"stages": 2, "gpus": 1}, ((0, 3), (3, 4))),
        ({"stages": 2, "device": "cpu"}, ((0, 1), (1, 4))),
        ({"stages": 2, "split": [1]}, ((0, 1), (1, 4))),
    ],
)
def test_a_stage_whose_parameters_no_gpu_holds_gives_units_away(
    inspection_of: Callable[..., Inspection], unit_of: UnitOf, spec_of: SpecOf, axes: dict[str, Any], cuts: Cuts
) -> None:
    """By times alone the second one had three units, and 6 MiB of them, on a GPU with room for 4.5."""
    sizes = [(6.0, 1), (2.0, 1), (2.0, 1), (2.0, 4)]
    units = [unit_of(n, own, own, parameter_bytes=size << 20) for n, (own, size) in enumerate(sizes)]
    spec = spec_of(replicas=[{"device": "gpu", "microbatches": 2} | axes])
    assert cut_of(spec, inspection_of(units, device_bytes=18 << 20)) == cuts
    assert cut_of(spec, inspection_of(units, device_bytes=1 << 30)) == ((0, 1), (1, 4))


@pytest.mark.parametrize(
    ("mib", "axes", "cuts"),
    [
        (100, {}, ((0, 3), (3, 6))),
        (20, {}, ((0, 2), (2, 6))),  # by 1f1b the first stage has two microbatches in flight, of 4 MiB a unit
        (20, {"schedule": "gpipe"}, ((0, 3), (3, 6))),  # four in both: no cut fits, and halves take least
        (20, {"recompute": True}, ((0, 3), (3, 6))),
        # The second has one beside that whose backward waits for its second part.
        (20, {"recompute": True, "schedule": "zero-bubble"}, ((0, 4), (4, 6))),
        (40, {}, ((0, 3), (3, 6))),
        (40, {"update": "cpu"}, ((0, 3), (3, 6))),
    ],
)
def test_a_stage_whose_activations_no_gpu_holds_gives_units_away(
    inspection_of: Callable[..., Inspection],
    unit_of: UnitOf,
    spec_of: SpecOf,
    mib: int,
    axes: dict[str, Any],
    cuts: Cuts,
) -> None:
    units = [unit_of(n, 1.0, 1.0, parameter_bytes=1 << 10, kept_bytes=4 << 20) for n in range(6)]
    spec = spec_of(replicas=[{"device": "gpu", "microbatches": 4, "stages": 2}], **axes)
    assert cut_of(spec, inspection_of(units, device_bytes=mib << 20)) == cuts


def test_a_stage_has_its_optimizers_state_where_it_updates(
    inspection_of: Callable[..., Inspection], unit_of: UnitOf, spec_of: SpecOf
) -> None:
    """That of the last two units is as large as all else; nothing is known of the parameters' own bytes here."""
    units = [unit_of(n, 1.0, 1.0, kept_bytes=1) for n in range(6)]
    entry = StateFacts(name="exp_avg", kind="elements", dtype="float32", itemsize=4)
    parameters = tuple(
        ParameterFacts(units=(n,), num_elements=n // 4 << 20, dtype="float32", itemsize=4, trained=True, group=0)
        for n in range(6)
    )
    parameters = tuple(replace(each, state=(entry, entry)) for each in parameters)
    inspection = inspection_of(units, device_bytes=10 << 20, parameters=parameters)
    on_device = spec_of(replicas=[{"device": "gpu", "stages": 2, "microbatches": 2}])
    assert cut_of(on_device, inspection) == ((0, 5), (5, 6))
    by_host = spec_of(replicas=[{"device": "gpu", "stages": 2, "microbatches": 2}], update="cpu")
    assert cut_of(by_host, inspection) == ((0, 3), (3, 6))


def test_a_model_is_cut_where_little_crosses(
    inspection_of: Callable[..., Inspection], unit_of: UnitOf, value_of: Callable[..., ValueFacts], spec_of: SpecOf
) -> None:
    """Unless both halves are of one memory."""
    units = [unit_of(n, 1.0, 1.0) for n in range(4)]
    values = tuple(value_of(n, shapes={1: (1 if n == 2 else 1 << 20,)}) for n in range(3))
    inspection = inspection_of(units, values=values, copy_bytes_per_second=1 << 20, link_bytes_per_second=1 << 20)
    halves, apart = ((0, 2), (2, 4)), ((0, 3), (3, 4))
    assert cut_of(spec_of(stages=2), inspection) == apart
    assert cut_of(spec_of(replicas=[{"device": "gpu", "stages": 2}]), inspection) == apart
    assert cut_of(spec_of(replicas=[{"device": "gpu", "stages": 2, "gpus": 1}]), inspection) == halves


UNEQUAL = {"cpu": (1.0, 3.0), "gpu": (1.0, 3.0)}


@pytest.mark.parametrize(
    ("axes", "cuts"),
    [
        ({"device": "cpu", "stages": 2}, ((0, 6), (6, 8))),
        ({"device": "gpu", "stages": 2}, ((0, 6), (6, 8))),
        ({"device": "gpu", "stages": 2, "gpus": 1}, ((0, 4), (4, 8))),
        ({"device": "gpu", "stages": 3, "gpus": 2}, ((0, 4), (4, 6), (6, 8))),
    ],
)
def test_the_slower_of_unequal_workers_has_fewer_units(
    inspection_of: Callable[..., Inspection], unit_of: UnitOf, spec_of: SpecOf, axes: dict[str, Any], cuts: Cuts
) -> None:
    inspection = inspection_of([unit_of(n, 1.0, 1.0) for n in range(8)], slowness=UNEQUAL)
    assert cut_of(spec_of(replicas=[axes]), inspection) == cuts


def test_each_replica_is_cut_by_the_speeds_of_its_own_workers(
    inspection_of: Callable[..., Inspection], unit_of: UnitOf, spec_of: SpecOf
) -> None:
    slowness = {"cpu": (1.0, 1.0, 3.0, 1.0)}
    inspection = inspection_of([unit_of(n, 1.0, 1.0) for n in range(8)], slowness=slowness)
    spec = spec_of(replicas=[{"device": "cpu", "stages": 2}] * 2)
    schedules = [scheduled(spec.strategy, replica) for replica in spec.strategy.replica_list]
    cuts = [cut_for(spec, inspection, r, schedule) for r, schedule in enumerate(schedules)]
    assert cuts == [((0, 4), (4, 8)), ((0, 2), (2, 8))]


def test_workers_with_several_stages_are_evened_by_their_speeds(unit_of: UnitOf) -> None:
    units = [unit_of(n, forward=1.0, backward=0.0) for n in range(12)]
    worker_of, slowness = {0: 0, 1: 1, 2: 0, 3: 1}, [1.0, 2.0, 1.0, 2.0]
    cuts = even_workers(units, partition(units, 4), worker_of, slowness=slowness)
    sizes = [last - first for first, last in cuts]
    assert (sizes[0] + sizes[2], sizes[1] + sizes[3]) == (8, 4)


def test_the_larger_of_unequal_gpus_has_what_the_smaller_has_no_room_for(
    inspection_of: Callable[..., Inspection], unit_of: UnitOf, spec_of: SpecOf
) -> None:
    """By the smallest one's memory alone, neither had room for half of it."""
    units = [unit_of(n, 1.0, 1.0, parameter_bytes=1 << 20) for n in range(8)]
    spec = spec_of(replicas=[{"device": "gpu", "stages": 2}])
    for sizes, cuts in ((8, 64), ((0, 2), (2, 8))), ((64, 8), ((0, 6), (6, 8))), ((64, 64), ((0, 4), (4, 8))):
        inspection = inspection_of(units, device_bytes=min(sizes) << 20, gpu_bytes=tuple(mib << 20 for mib in sizes))
        assert cut_of(spec, inspection) == cuts


def cut_of(spec: JobSpec, inspection: Inspection) -> Cuts:
    return cut_for(spec, inspection, 0, scheduled(spec.strategy, spec.strategy.replica_list[0]))


@given(
    units=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)), min_size=3, max_size=8),
    in_flight=st.lists(st.integers(1, 4), min_size=3, max_size=3),
    most=st.integers(5, 120),
)
def test_no_cut_that_fits_is_faster_whatever_is_in_flight(
    unit_of: UnitOf, units: list[tuple[int, int, int]], in_flight: list[int], most: int
) -> None:
    """By looking at all; where none fits the largest stage is as small as can be."""
    room = Room([most] * 3, [own for _, own, _ in units], [kept for _, _, kept in units], in_flight)
    cuts = partition([unit_of(n, seconds, 0.0) for n, (seconds, *_) in enumerate(units)], 3, room=room)

    def needed(cuts: Cuts) -> float:
        stages = zip(cuts, in_flight, strict=True)
        return max(sum(own + count * kept for _, own, kept in units[a:b]) for (a, b), count in stages)

    def seconds(cuts: Cuts) -> float:
        return max(sum(own for own, *_ in units[a:b]) for a, b in cuts)

    every = [((0, a), (a, b), (b, len(units))) for a, b in itertools.combinations(range(1, len(units)), 2)]
    limit = max(most, min(map(needed, every)))
    assert needed(cuts) <= limit
    assert seconds(cuts) == min(seconds(each) for each in every if needed(each) <= limit)


# --- several stages in a worker


def slowness(units: Sequence[UnitFacts], cuts: Cuts, worker_of: Sequence[int]) -> tuple[float, float]:
    """Of the busiest worker and of the slowest stage."""
    stages = [sum(unit.forward_seconds for unit in units[first:last]) for first, last in cuts]
    workers = [sum(own for own, of in zip(stages, worker_of, strict=True) if of == worker) for worker in set(worker_of)]
    return max(workers), max(stages)


def test_cuts_move_for_the_busiest_worker(unit_of: UnitOf) -> None:
    """By the slowest stage alone the second worker had 3 and 2, and the first one 1 and 1."""
    units = [unit_of(n, forward=seconds, backward=0.0) for n, seconds in enumerate([1, 3, 1, 1, 1])]
    before = ((0, 1), (1, 2), (2, 3), (3, 5))
    cuts = even_workers(units, before, {0: 0, 1: 1, 2: 0, 3: 1})
    assert cuts == ((0, 1), (1, 2), (2, 4), (4, 5))
    heavy = [replace(unit, parameter_bytes=9 if number in (2, 3) else 1) for number, unit in enumerate(units)]
    room = Room([12] * 4, [unit.parameter_bytes for unit in heavy])
    assert even_workers(heavy, before, {0: 0, 1: 1, 2: 0, 3: 1}, room=room) == before


@given(
    seconds=st.lists(st.integers(0, 9), min_size=4, max_size=12),
    worker_of=st.sampled_from([(0, 1, 0, 1), (0, 1, 1, 0)]),
)
def test_no_worker_becomes_slower_by_it(unit_of: UnitOf, seconds: list[int], worker_of: tuple[int, ...]) -> None:
    units = [unit_of(n, forward=each, backward=0.0) for n, each in enumerate(seconds)]
    before = partition(units, 4)
    after = even_workers(units, before, dict(enumerate(worker_of)))
    assert [first for first, _ in after[1:]] == [last for _, last in after[:-1]]
    assert all(first < last for first, last in after)
    assert slowness(units, after, worker_of) <= slowness(units, before, worker_of)
