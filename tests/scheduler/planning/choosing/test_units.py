"""Whether units are compiled where `compile = "auto"` leaves that open: by facts that are made up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from weft.plan.inspection import Inspection, TensorFacts, UnitFacts
from weft.plan.plan import Plan
from weft.scheduler.planning.choosing.choice import choose
from weft.scheduler.planning.choosing.told import told
from weft.scheduler.planning.choosing.units import WORTH_IT, choose_with_units
from weft.scheduler.planning.planner import make_plan
from weft.spec.candidates import candidates, with_units, workers_wanted
from weft.spec.job_spec import JobSpec
from weft.spec.workers_needed import Host

BATCH, PLENTY = 8, 1 << 40
make: Callable[..., Plan] = partial(make_plan, shared_bytes_free=PLENTY)


@pytest.fixture(scope="session")
def looked_at_both_ways(
    inspection_of: Callable[..., Inspection], unit_of: Callable[..., UnitFacts]
) -> Callable[..., Inspection]:
    """A unit that takes so many seconds forward, and twice as many back; and with kernels."""

    def inspection(eager: float, compiled: float | None, *, ready: float = 1.0, **changes: Any) -> Inspection:
        shapes = {size: (size, 4) for size in (1, 2, 4, 8)}
        facts: dict[str, Any] = {
            "input": TensorFacts(dtype="float32", itemsize=4, shapes=shapes),
            "target": TensorFacts(dtype="int64", itemsize=8, shapes={size: (size,) for size in shapes}),
            "num_train": BATCH,
            "update_seconds": 0.0,
            "host": Host(workers=2),
            "timed_size": BATCH,
        }
        found = inspection_of([unit_of(0, eager, 2 * eager)], **facts | changes)
        if compiled is None:
            return found
        other = inspection_of(
            [unit_of(0, compiled, 2 * compiled)], **facts | {"compiled": ("0",), "ready_seconds": ready} | changes
        )
        return replace(found, compiled_too=other)

    return inspection


@pytest.fixture(scope="session")
def open_spec(spec_of: Callable[..., JobSpec]) -> Callable[..., JobSpec]:
    def spec(steps: int = 1000, stop: dict[str, Any] | None = None, **axes: Any) -> JobSpec:
        tables = spec_of(batch_size=BATCH, compile="auto", **axes).to_wire()
        job = {name: value for name, value in tables["job"].items() if name != "epochs"}
        return JobSpec.parse(tables | {"job": job | {"steps": steps}, "stop": stop})

    return spec


Both = Callable[..., Inspection]
SpecOf = Callable[..., JobSpec]


def test_units_that_are_faster_compiled_are_compiled_and_three_lines_say_why(
    looked_at_both_ways: Both, open_spec: SpecOf
) -> None:
    """What the job keeps has a truth value, and so has all that is planned of it."""
    choice = choose_with_units(open_spec(), looked_at_both_ways(0.02, 0.01), make)
    assert choice.spec == with_units(open_spec(), compiled=True)
    assert choice.spec.strategy.compile is True
    assert choice.inspection.compiled == ("0",)
    assert choice.plan.notes[:4] == (*choice.lines, "compiled: 0")
    first, second, third = choice.lines
    assert first.startswith("auto: one process (compiled), 30")
    assert second.startswith("auto: next are one process 60")
    assert third.startswith("compile: units are compiled: 1000 steps are predicted to take 31")
    assert "(1.00 s to have kernels ready counted), and 1 min 00 s" in third


@pytest.mark.parametrize(
    ("compiled", "ready", "steps", "pays"),
    [
        (0.0098, 0.0, 1000, False),
        (0.0090, 0.0, 1000, True),
        (0.0090, 3.0, 1000, False),
        (0.0090, 3.0, 100_000, True),
        (0.0200, 0.0, 1000, False),
    ],
    ids=["within the margin", "faster", "faster, and too few steps", "faster, over many steps", "slower"],
)
def test_all_steps_have_to_be_faster_by_enough_with_the_time_until_kernels_are_ready(
    looked_at_both_ways: Both, open_spec: SpecOf, compiled: float, ready: float, steps: int, pays: bool
) -> None:
    found = looked_at_both_ways(0.01, compiled, ready=ready)
    choice = choose_with_units(open_spec(steps=steps), found, make)
    assert choice.spec.strategy.compile is pays
    way = "units are compiled" if pays else f"units stay eager: {steps} steps"
    assert choice.lines[-1].startswith(f"compile: {way}")
    assert ("it has to be 5 % faster" in choice.lines[-1]) is not pays
    assert WORTH_IT == 1.05


def test_a_job_that_ends_when_its_time_is_up_has_no_more_steps_than_fit(
    looked_at_both_ways: Both, open_spec: SpecOf
) -> None:
    """How many epochs another rule leaves nobody knows: then it is taken to have all."""
    found = looked_at_both_ways(0.01, 0.009, ready=3.0, num_validation=BATCH)
    short = choose_with_units(open_spec(steps=100_000, stop={"max_time": "30 s"}), found, make)
    assert short.spec.strategy.compile is False
    assert short.lines[-1].startswith("compile: units stay eager: 997 steps are predicted to take 30.0 s, ")
    patient = choose_with_units(open_spec(steps=100_000, stop={"metric": "loss"}), found, make)
    assert patient.spec.strategy.compile is True


def test_where_units_cannot_be_compiled_they_stay_eager_and_the_line_says_why(
    looked_at_both_ways: Both, open_spec: SpecOf
) -> None:
    none = looked_at_both_ways(0.01, None, uncompiled="'g++' is none that runs here")
    choice = choose_with_units(open_spec(), none, make)
    assert choice.spec.strategy.compile is False
    assert choice.lines[1:] == (
        "auto: there is no other that can be",
        "compile: units stay eager, since 'g++' is none that runs here",
    )


def test_under_auto_the_candidates_of_both_ways_are_compared(looked_at_both_ways: Both, open_spec: SpecOf) -> None:
    """Kernels may make another strategy the best one. What is told has the candidates of both."""
    spec, found = open_spec(preset="auto"), looked_at_both_ways(0.02, 0.01)
    choice = choose_with_units(spec, found, make)
    alone = [choose(with_units(spec, compiled=way), choice.inspection, make) for way in (True, False)]
    assert choice.spec == alone[0].spec
    assert len(choice.considered) == sum(len(each.considered) for each in alone)
    assert {each.spec.strategy.compile for each in choice.considered} == {True, False}
    first, second, third, fourth = choice.lines
    assert ", compiled" in first or "(compiled" in first
    assert third.startswith(f"auto: of {len(choice.considered)} candidates ")
    assert fourth.startswith("compile: units are compiled: ")
    plain = told(choice, None, shared_bytes_free=PLENTY, host_bytes_free=PLENTY)
    assert plain["strategy"]["compile"] is True
    assert plain["lines"] == [first, second, third, fourth]
    assert plain["notes"][0] == "compiled: 0"


def test_compiled_candidates_divide_a_batch_into_few_numbers_of_parts(spec_of: SpecOf, open_spec: SpecOf) -> None:
    """Kernels for every size that a pipeline may have took longer than what they saved. A number that is given counts;
    what only eager units can do is a candidate as long as it is open."""
    host = Host(workers=8)

    def parts(spec: JobSpec) -> set[int]:
        return {sum(each.strategy.division[1]) for each in candidates(spec, host)}

    assert parts(spec_of(batch_size=64, preset="auto", compile=True)) == {1, 2, 4, 8}
    assert {16, 32} < parts(spec_of(batch_size=64, preset="auto"))
    assert parts(spec_of(batch_size=64, preset="auto", compile=True, microbatches=16, replicas=1)) == {16}
    assert workers_wanted(open_spec(preset="auto"), host) == workers_wanted(spec_of(batch_size=8, preset="auto"), host)
