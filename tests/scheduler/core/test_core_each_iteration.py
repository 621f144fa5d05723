"""Transcripts of the core where each iteration is copied (recovery = "iteration"): nothing that was over is lost."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from weft.plan.inspection import Inspection, UnitFacts
from weft.plan.plan import Plan
from weft.scheduler.core.events import (
    Adjust,
    Dispatch,
    HandoverBegun,
    PauseRequested,
    Prepare,
    RecordSnapshot,
    ReplayDue,
    SaveSnapshot,
    SnapshotDue,
    SnapshotMissed,
)
from weft.scheduler.core.job import Phase

Rehearsal = runpy.run_path(str(Path(__file__).with_name("test_core_snapshots.py")))["Rehearsal"]
STEPS = 12

PLANS: Mapping[str, Mapping[str, Any]] = {
    "one stage": {"stages": 1, "microbatches": 2, "window": 4},
    "a window of one": {"stages": 1, "window": 1},
    "a window of many iterations": {"stages": 3, "microbatches": 2, "window": 200},
    "replicas": {"replicas": 2, "microbatches": 2, "window": 16},
    "replicas that steal": {"replicas": 2, "microbatches": 2, "window": 16, "share": "stealing"},
    "a device and its host": {"replicas": [{"device": "gpu", "stages": 2}], "update": "cpu", "window": 16},
}


@pytest.fixture(params=PLANS)
def rehearsal(request: pytest.FixtureRequest, plan_of: Callable[..., Plan]) -> Any:
    return Rehearsal(plan_of(**PLANS[request.param], recovery="iteration", steps=STEPS))


def step(rehearsal: Any) -> None:
    """One more iteration."""
    rehearsal.run_to(rehearsal.job.iterations_done + 1)


def test_each_iteration_is_copied_and_whole_as_soon_as_it_is_over(rehearsal: Any) -> None:
    for done in range(1, STEPS):  # behind the last one is the result
        step(rehearsal)
        assert rehearsal.job.iterations_done == done
        assert rehearsal.job.snapshot.iteration == done - 1
    step(rehearsal)
    assert rehearsal.job.phase is Phase.SAVING
    assert [each.snapshot.iteration for each in rehearsal.found(RecordSnapshot)] == list(range(STEPS - 1))


def test_no_lane_is_sent_an_iteration_before_it_is_told_where_that_is_copied(rehearsal: Any) -> None:
    rehearsal.run_to(STEPS)
    told, places = set(), {}
    for command in rehearsal.commands:
        if isinstance(command, Adjust) and command.adjustment.snapshot is not None:
            told.add(command.first_iteration)
            places[command.first_iteration] = command.adjustment.snapshot
        elif isinstance(command, Dispatch):
            assert {iteration for iteration, _ in command.work} <= told | {STEPS - 1}
    for iteration, place in places.items():  # the newest that is whole, the one that is made and the next one
        assert place not in {places.get(iteration - 1), places.get(iteration - 2)}


@pytest.mark.parametrize("kills", [1, 3])
def test_a_killed_worker_costs_the_iteration_that_was_under_way(rehearsal: Any, kills: int) -> None:
    for _ in range(kills):
        step(rehearsal)
        step(rehearsal)
        done = rehearsal.job.iterations_done
        assert "cpu-0" in rehearsal.job.workers
        rehearsal.lose()
        if rehearsal.job.phase is not Phase.RUNNING:
            rehearsal.prepare()
        assert rehearsal.job.iterations_done == done
    last = rehearsal.found(Prepare, attempt=kills + 1)[0]
    assert last.snapshot.iteration == 2 * kills - 1
    rehearsal.run_to(STEPS)
    assert rehearsal.job.phase is Phase.SAVING


def test_one_whose_part_is_missing_holds_nobody_up(rehearsal: Any) -> None:
    rehearsal.run_to(3)
    missed = min(each.iteration for each in rehearsal.job.copying)
    rehearsal.tell(SnapshotMissed(job="a", attempt=1, iteration=missed))
    step(rehearsal)
    assert rehearsal.job.snapshot.iteration == missed - 1
    step(rehearsal)
    assert rehearsal.job.snapshot.iteration == missed + 1


def test_one_that_is_due_after_a_time_is_there_already(rehearsal: Any) -> None:
    rehearsal.run_to(3)
    assert rehearsal.tell(SnapshotDue(job="a", attempt=1)) == []


def test_a_pause_takes_the_copy_that_there_is(rehearsal: Any) -> None:
    rehearsal.run_to(3)
    rehearsal.tell(PauseRequested(job="a"))
    step(rehearsal)
    assert rehearsal.job.phase is Phase.RELEASING
    rehearsal.release()
    saved = rehearsal.found(SaveSnapshot)
    assert [each.snapshot.iteration for each in saved] == [rehearsal.job.snapshot.iteration] == [3]


def test_while_another_daemon_takes_over_lanes_go_on_without_copies(rehearsal: Any) -> None:
    rehearsal.run_to(3)
    before = len(rehearsal.commands)
    rehearsal.tell(HandoverBegun(windows=1000))
    told = [each.first_iteration for each in rehearsal.commands[before:] if isinstance(each, Adjust)]
    assert all(lane.sent == lane.total for lane in rehearsal.job.lanes.values() if lane.allowed is None)
    assert len(told) <= 1
    rehearsal.run_to(STEPS)
    assert rehearsal.job.phase is Phase.SAVING


def test_iterations_that_only_validate_have_none(
    plan_of: Callable[..., Plan], inspection_of: Callable[..., Inspection], unit_of: Callable[..., UnitFacts]
) -> None:
    """T V V T V V ..."""
    inspection = inspection_of([unit_of(0)], num_train=8, num_validation=10)
    rehearsal = Rehearsal(plan_of(inspection, batch_size=8, steps=4, window=7, recovery="iteration"))
    rehearsal.run_to(12)
    assert [each.snapshot.iteration for each in rehearsal.found(RecordSnapshot)] == [0, 3, 6, 9]
    assert rehearsal.job.phase is Phase.SAVING


def test_one_that_is_run_again_is_compared_as_ever(plan_of: Callable[..., Plan]) -> None:
    plan = plan_of(stages=1, microbatches=2, window=4, steps=STEPS, recovery="iteration", verify="replay")
    rehearsal = Rehearsal(plan)
    rehearsal.run_to(2)
    rehearsal.tell(ReplayDue(job="a", attempt=1))
    assert rehearsal.job.replay is not None
    rehearsal.run_to(rehearsal.job.replay.iteration)
    assert rehearsal.job.snapshot.iteration == rehearsal.job.replay.iteration - 1
