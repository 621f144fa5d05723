"""What is kept of a run that goes on with another plan: its spec, what was measured, and that it was told."""

from __future__ import annotations

import dataclasses
import json
import pickle
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from weft.plan.inspection import Inspection, UnitFacts
from weft.plan.plan import Plan
from weft.scheduler.adapting.switching import Gain
from weft.scheduler.planning.choosing.better import Better
from weft.scheduler.planning.planner import make_plan
from weft.scheduler.runs.run import CHOSEN, Run
from weft.scheduler.runs.run_directory import RunDirectory
from weft.spec.job_spec import JobSpec

WriteAtOnce = runpy.run_path(str(Path(__file__).parents[2] / "write_at_once.py"))["WriteAtOnce"]
WORKERS = ("cpu-0", "cpu-1", "loader-0")
PLENTY = 1 << 40


@pytest.fixture
def inspection(inspection_of: Callable[..., Inspection], unit_of: Callable[..., UnitFacts]) -> Inspection:
    return inspection_of([unit_of(number) for number in range(4)])


def plan_for(spec: JobSpec, inspection: Inspection) -> Plan:
    return make_plan(spec, inspection, shared_bytes_free=PLENTY)


@pytest.fixture
def run(tmp_path: Path, spec_of: Callable[..., JobSpec], inspection: Inspection) -> Iterator[Run]:
    spec = spec_of(batch_size=8, stages=2, replan=True)
    run = Run(job="a", spec=spec, files=RunDirectory("a", tmp_path / "a", WriteAtOnce()))
    run.inspection = {"units": "as inspected", "streams": []}
    run.begin(plan_for(spec, inspection), WORKERS)
    yield run
    run.files.close()


@pytest.fixture
def better(run: Run, inspection: Inspection) -> Better:
    spec = run.spec.model_copy(update={"strategy": run.spec.strategy.model_copy(update={"schedule": "gpipe"})})
    slower = tuple(dataclasses.replace(unit, forward_seconds=7.0) for unit in inspection.units)
    known = dataclasses.replace(inspection, units=slower)
    gain = Gain(before_seconds=2.0, expected_seconds=1.0)
    return Better(spec=spec, plan=plan_for(spec, known), inspection=known, gain=gain, told="another plan: gpipe")


def test_it_goes_on_with_what_was_measured(run: Run, better: Better) -> None:
    """By which its recording is planned again, and the next correction begins."""
    run.better = better
    run.begin(better.plan, WORKERS, 2, begins=1)
    assert [unit["forward_seconds"] for unit in run.inspection["units"]] == [7.0] * 4
    assert run.inspection["streams"] == [], "what is no time is as it was"
    assert run.switching.told() == ["another plan: gpipe"]
    assert run.better is None
    assert not (run.files.path / CHOSEN).exists(), "nothing was chosen"


def test_of_a_strategy_that_was_chosen_the_new_one_is_kept(run: Run, better: Better) -> None:
    run.given, run.better = run.spec, better
    run.begin(better.plan, WORKERS, 2, begins=1)
    assert run.spec is better.spec
    run.files.flush()
    assert json.loads((run.files.path / CHOSEN).read_text())["schedule"] == "gpipe"


def test_an_attempt_with_another_plan_leaves_all_as_it_was(run: Run, better: Better, inspection: Inspection) -> None:
    """A worker was lost before it could change."""
    run.better, before = better, run.spec
    run.begin(plan_for(run.spec, inspection), WORKERS, 2, begins=1)
    assert (run.spec, run.switching.told(), run.inspection["units"]) == (before, [], "as inspected")
    run.begin(better.plan, WORKERS, 3, begins=1)
    assert run.switching.told() == [], "it is not thought of any more"


def test_the_next_daemon_knows_that_it_is_the_better_one(run: Run, better: Better) -> None:
    """Core and run are left to it at once, and each has the plan."""
    kept: tuple[Plan, Any] = pickle.loads(pickle.dumps((better.plan, better)))
    assert kept[0] is kept[1].plan


def test_a_plan_to_which_there_are_no_others_is_not_looked_at_again(
    run: Run, spec_of: Callable[..., JobSpec], inspection: Inspection
) -> None:
    assert run.switching.may_change
    run.spec = spec_of(batch_size=8, stages=2)
    run.begin(plan_for(run.spec, inspection), WORKERS, 2)
    assert not run.switching.may_change
