"""Transcripts of the core with jobs that go on with another plan, and of what may come between."""

from __future__ import annotations

import dataclasses
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from weft.plan.plan import Plan
from weft.plan.tables import Adjustment
from weft.scheduler.core.events import (
    CancelRequested,
    DirectoryLost,
    DrainRequested,
    DropArenas,
    JobPlanned,
    JobSubmitted,
    PauseRequested,
    PlanImproved,
    PlanJob,
    Prepare,
    RecordIteration,
    RecordState,
    Release,
    ReplayDue,
    ResumeRequested,
    SaveSnapshot,
    SnapshotDue,
    SnapshotMissed,
    SnapshotSaved,
    StopRequested,
    WorkerJoined,
    WorkerLost,
    WorkerPrepared,
    WorkerReleased,
)
from weft.scheduler.core.job import Phase, Worker

Rehearsal = runpy.run_path(str(Path(__file__).with_name("test_core_snapshots.py")))["Rehearsal"]
STEPS = 16


@pytest.fixture
def plan(plan_of: Callable[..., Plan]) -> Plan:
    return plan_of(stages=2, microbatches=2, steps=STEPS, window=8)


@pytest.fixture
def other(plan_of: Callable[..., Plan]) -> Plan:
    return plan_of(stages=2, schedule="gpipe", microbatches=2, steps=STEPS, window=8)


@pytest.fixture
def rehearsal(plan: Plan) -> Any:
    return Rehearsal(plan)


def improve(rehearsal: Any, other: Plan) -> list[Any]:
    told: list[Any] = rehearsal.tell(PlanImproved(job="a", attempt=rehearsal.job.attempt, plan=other, message="faster"))
    return told


def to_its_stop(rehearsal: Any) -> None:
    while rehearsal.job.phase is Phase.RUNNING:
        rehearsal.run_to(rehearsal.job.iterations_done + 1)
    assert rehearsal.job.phase is Phase.RELEASING


def made(rehearsal: Any) -> list[int]:
    return [command.iteration for command in rehearsal.found(RecordIteration)]


def test_it_stops_behind_a_copy_and_goes_on_from_there_with_the_other_plan(rehearsal: Any, other: Plan) -> None:
    adjust, halt = improve(rehearsal, other)
    assert halt == dataclasses.replace(adjust, adjustment=Adjustment(halts=True))
    to_its_stop(rehearsal)
    rehearsal.release()
    assert rehearsal.job.phase is Phase.PREPARING, "its workers are its own again, at once"
    prepared = rehearsal.found(Prepare, attempt=2)
    assert {command.worker for command in prepared} == {command.worker for command in rehearsal.found(Prepare, 1)}
    assert all(command.plan is other for command in prepared)
    assert {command.snapshot.iteration for command in prepared} == {adjust.first_iteration}
    assert {command.arenas for command in prepared} == {2}, "blocks of its own: stages have other sizes"
    assert DropArenas(job="a", attempt=1) in rehearsal.commands
    assert rehearsal.found(PlanJob, attempt=2) == rehearsal.found(SaveSnapshot) == []
    rehearsal.prepare()
    rehearsal.run_to(STEPS)
    assert made(rehearsal) == list(range(STEPS)), "each once"
    assert rehearsal.job.phase is Phase.SAVING
    assert rehearsal.job.losses == []


def test_it_says_why_it_was_in_the_queue(rehearsal: Any, other: Plan) -> None:
    improve(rehearsal, other)
    to_its_stop(rehearsal)
    rehearsal.release()
    queued, planning = rehearsal.found(RecordState)[-2:]
    assert (queued.state, queued.reason, queued.message) == ("queued", "replanned", "faster")
    assert planning.state == "planning"


def test_a_later_change_is_of_the_plan_that_it_has_by_then(rehearsal: Any, other: Plan, plan: Plan) -> None:
    for better in (other, plan):
        improve(rehearsal, better)
        to_its_stop(rehearsal)
        rehearsal.release()
        rehearsal.prepare()
        assert rehearsal.job.plan is better
    rehearsal.run_to(STEPS)
    assert made(rehearsal) == list(range(STEPS))


# --- what it does not change for


def test_a_plan_for_other_workers_is_not_taken(rehearsal: Any, plan_of: Callable[..., Plan]) -> None:
    assert improve(rehearsal, plan_of(stages=3, microbatches=2, steps=STEPS, window=8)) == []
    assert rehearsal.job.improved is None


def test_a_plan_of_an_attempt_that_is_over_is_not_taken(rehearsal: Any, other: Plan) -> None:
    rehearsal.tell(SnapshotDue(job="a", attempt=1))
    rehearsal.run_to(6)
    rehearsal.lose()
    late = PlanImproved(job="a", attempt=1, plan=other, message="")
    assert rehearsal.tell(late) == []
    assert rehearsal.job.stopping is None


def test_a_job_without_snapshots_goes_on_as_it_is(plan_of: Callable[..., Plan], other: Plan) -> None:
    rehearsal = Rehearsal(plan_of(stages=2, microbatches=2, steps=STEPS, window=8, recovery="off"))
    assert improve(rehearsal, other) == []


@pytest.mark.parametrize("event", [PauseRequested(job="a"), ReplayDue(job="a", attempt=1)])
def test_who_stops_already_or_is_compared_is_not_stopped_for_it(rehearsal: Any, other: Plan, event: Any) -> None:
    rehearsal.tell(event)
    assert improve(rehearsal, other) == []
    assert rehearsal.job.improved is None


def test_no_job_that_stands_before_it_in_the_queue_gets_its_workers(plan: Plan, other: Plan) -> None:
    """One that was paused and is resumed keeps its place: to let go of workers would be to wait until that is over."""
    rehearsal = Rehearsal(plan, {"cpu-2": "cpu"})
    rehearsal.tell(JobSubmitted(job="before", needs={"cpu": 2, "loader": 1}, priority=0))
    assert improve(rehearsal, other) != [], "that one is behind it"
    rehearsal.job.improved = rehearsal.job.stopping = None
    rehearsal.core.jobs["before"].sequence = 0
    assert improve(rehearsal, other) == []


def test_one_that_is_about_to_end_ends_as_it_is(rehearsal: Any, other: Plan) -> None:
    rehearsal.run_to(STEPS - 1)
    improve(rehearsal, other)
    rehearsal.run_to(STEPS)
    assert rehearsal.job.phase is Phase.SAVING
    assert made(rehearsal) == list(range(STEPS))


# --- what comes between


def test_where_a_part_of_its_copy_is_missing_it_goes_on_with_the_plan_that_it_has(
    rehearsal: Any, plan: Plan, other: Plan
) -> None:
    adjust, _ = improve(rehearsal, other)
    for _ in plan.workers:  # each may say so
        rehearsal.tell(SnapshotMissed(job="a", attempt=1, iteration=adjust.first_iteration))
    rehearsal.run_to(STEPS)
    assert rehearsal.job.phase is Phase.SAVING
    assert (made(rehearsal), rehearsal.job.attempt) == (list(range(STEPS)), 1)
    assert rehearsal.job.plan == plan


def test_its_time_may_be_up_before_it_goes_on_with_the_plan_that_it_has(rehearsal: Any, other: Plan) -> None:
    """It was told once, while it was about to stop for the other plan."""
    up = StopRequested(job="a", attempt=1, reason="1 h of training are over")
    adjust, _ = improve(rehearsal, other)
    assert rehearsal.tell(up) == []
    rehearsal.tell(SnapshotMissed(job="a", attempt=1, iteration=adjust.first_iteration))
    assert rehearsal.job.ends == STEPS
    (ends,) = rehearsal.tell(up)
    assert rehearsal.tell(up) == [], "it is asked for until the end"
    assert (rehearsal.job.stopped, rehearsal.job.ends) == (up.reason, ends.adjustment.ends)


def test_who_has_come_before_it_meanwhile_gets_its_workers_where_a_part_of_its_copy_is_missing(
    rehearsal: Any, other: Plan
) -> None:
    """It was about to let go of them for its other plan, so nobody had it stop."""
    adjust, _ = improve(rehearsal, other)
    rehearsal.tell(JobSubmitted(job="b", needs=rehearsal.needs, priority=1))
    rehearsal.tell(SnapshotMissed(job="a", attempt=1, iteration=adjust.first_iteration))
    assert rehearsal.job.stopping is not None
    assert rehearsal.job.stopping.reason == "preempted"


def test_a_worker_that_is_lost_on_the_way_is_mended_with_the_old_plan(rehearsal: Any, plan: Plan, other: Plan) -> None:
    rehearsal.tell(SnapshotDue(job="a", attempt=1))
    rehearsal.run_to(6)
    improve(rehearsal, other)
    rehearsal.lose()
    assert rehearsal.job.improved is None
    assert all(command.plan is plan for command in rehearsal.found(Prepare, attempt=2))
    assert any(command.keeps for command in rehearsal.found(Release)), "the others keep what they have"
    rehearsal.prepare()
    rehearsal.run_to(STEPS)
    assert sorted(set(made(rehearsal))) == list(range(STEPS))
    assert rehearsal.job.phase is Phase.SAVING


def test_a_worker_that_is_lost_while_it_lets_go_is_no_loss_of_the_job(rehearsal: Any, other: Plan) -> None:
    improve(rehearsal, other)
    to_its_stop(rehearsal)
    rehearsal.tell(WorkerLost(worker="cpu-1", exit_code=-9))
    rehearsal.release()
    assert rehearsal.job.phase is Phase.QUEUED
    assert rehearsal.job.losses == []
    rehearsal.tell(WorkerJoined(worker="cpu-1"))
    assert all(command.plan is other for command in rehearsal.found(Prepare, attempt=2))
    rehearsal.prepare()
    rehearsal.run_to(STEPS)
    assert made(rehearsal) == list(range(STEPS))


def test_a_worker_that_is_lost_while_it_prepares_is_replaced_and_the_other_plan_stays(
    rehearsal: Any, other: Plan
) -> None:
    improve(rehearsal, other)
    to_its_stop(rehearsal)
    rehearsal.release()
    rehearsal.lose("cpu-0")
    assert all(command.plan is other for command in rehearsal.found(Prepare, attempt=3))
    rehearsal.prepare()
    rehearsal.run_to(STEPS)
    assert made(rehearsal) == list(range(STEPS))


def test_who_pauses_it_meanwhile_finds_it_paused_and_it_is_planned_anew(rehearsal: Any, other: Plan) -> None:
    improve(rehearsal, other)
    rehearsal.tell(PauseRequested(job="a"))
    to_its_stop(rehearsal)
    rehearsal.release()
    assert rehearsal.job.phase is Phase.PAUSED
    (save,) = rehearsal.found(SaveSnapshot)
    assert save.snapshot.iteration == made(rehearsal)[-1]
    rehearsal.tell(SnapshotSaved(job="a", path="there"))
    rehearsal.tell(ResumeRequested(job="a"))
    assert rehearsal.job.phase is Phase.PLANNING


def test_who_cancels_it_meanwhile_finds_it_cancelled(rehearsal: Any, other: Plan) -> None:
    improve(rehearsal, other)
    rehearsal.tell(CancelRequested(job="a"))
    rehearsal.release()
    assert rehearsal.found(RecordState)[-1].state == "cancelled"
    assert "a" not in rehearsal.core.jobs


def test_cancelled_while_it_lets_go_it_ends(rehearsal: Any, other: Plan) -> None:
    improve(rehearsal, other)
    to_its_stop(rehearsal)
    rehearsal.tell(CancelRequested(job="a"))
    rehearsal.release()
    assert rehearsal.found(RecordState)[-1].state == "cancelled"


def test_a_daemon_that_drains_changes_no_plan(rehearsal: Any, other: Plan) -> None:
    rehearsal.tell(DrainRequested(now=False))
    assert improve(rehearsal, other) == []
    rehearsal.run_to(STEPS)
    assert rehearsal.job.phase is Phase.SAVING


def test_one_that_stops_for_another_plan_while_the_daemon_drains_is_saved_for_the_next_one(
    rehearsal: Any, other: Plan
) -> None:
    """Nothing runs then, so the daemon ends, and what the job has come to was in its memory alone."""
    improve(rehearsal, other)
    rehearsal.tell(DrainRequested(now=False))
    to_its_stop(rehearsal)
    rehearsal.release()
    assert rehearsal.job.phase is Phase.QUEUED
    (save,) = rehearsal.found(SaveSnapshot)
    assert save.snapshot.iteration == made(rehearsal)[-1]


def test_a_daemon_that_drains_keeps_it_for_the_next_one(rehearsal: Any, other: Plan) -> None:
    improve(rehearsal, other)
    rehearsal.run_to(1)
    rehearsal.tell(DrainRequested(now=True))
    rehearsal.release()
    assert rehearsal.job.phase is Phase.QUEUED
    assert rehearsal.job.improved is None


def test_without_its_directory_it_begins_again_and_is_planned_anew(rehearsal: Any, other: Plan) -> None:
    improve(rehearsal, other)
    to_its_stop(rehearsal)
    rehearsal.tell(DirectoryLost())
    rehearsal.release()
    assert rehearsal.job.phase is Phase.PLANNING
    assert rehearsal.job.snapshot is None
    rehearsal.prepare()
    rehearsal.run_to(STEPS)
    assert made(rehearsal)[-STEPS:] == list(range(STEPS))


def test_one_of_higher_priority_that_comes_while_it_lets_go_is_first(rehearsal: Any, other: Plan) -> None:
    improve(rehearsal, other)
    to_its_stop(rehearsal)
    rehearsal.tell(JobSubmitted(job="urgent", needs=rehearsal.needs, priority=1))
    rehearsal.release()
    assert rehearsal.core.jobs["urgent"].phase is Phase.PLANNING
    assert rehearsal.job.phase is Phase.QUEUED
    assert rehearsal.job.plan is other, "with which it goes on in its turn"


def test_what_is_copied_to_the_disk_meanwhile_is_not_lost(plan: Plan, other: Plan) -> None:
    rehearsal = Rehearsal(dataclasses.replace(plan, checkpoint_steps=2))
    rehearsal.run_to(5)
    saving = rehearsal.found(SaveSnapshot)
    assert len(saving) == 1
    improve(rehearsal, other)
    to_its_stop(rehearsal)
    rehearsal.release()
    assert rehearsal.job.phase is Phase.PREPARING
    rehearsal.tell(SnapshotSaved(job="a", path="there"))
    assert rehearsal.job.saving == []
    assert rehearsal.job.on_disk == saving[0].snapshot.iteration


def test_an_unclean_worker_is_replaced_before_it_goes_on(rehearsal: Any, other: Plan) -> None:
    improve(rehearsal, other)
    to_its_stop(rehearsal)
    rehearsal.tell(WorkerReleased(worker="cpu-0", job="a", attempt=1, clean=False))
    rehearsal.release()
    assert rehearsal.job.phase is Phase.QUEUED
    rehearsal.tell(WorkerLost(worker="cpu-0", exit_code=-9))
    rehearsal.tell(WorkerJoined(worker="cpu-0"))
    for worker in rehearsal.job.workers:
        rehearsal.tell(WorkerPrepared(job="a", attempt=2, worker=worker))
    assert rehearsal.job.phase is Phase.RUNNING


def test_losses_before_it_came_further_are_forgotten_however_that_attempt_ended(rehearsal: Any, other: Plan) -> None:
    """Two at one place, then many steps up to another plan: the next one was taken for the third at one place."""
    rehearsal.due()
    rehearsal.run_to(2)
    for _ in range(2):
        rehearsal.lose("cpu-0")
        rehearsal.prepare()
    assert len(rehearsal.job.losses) == 2
    rehearsal.run_to(6)
    improve(rehearsal, other)
    to_its_stop(rehearsal)
    rehearsal.release()
    rehearsal.prepare()
    rehearsal.tell(WorkerLost(worker="cpu-0", exit_code=-9))
    assert len(rehearsal.job.losses) == 1
    assert rehearsal.job.outcome is None or rehearsal.job.outcome.state == "recovering"


def test_who_stops_for_another_plan_makes_no_room_and_nobody_else_stops_for_half_of_it(
    rehearsal: Any, other: Plan, plan_of: Callable[..., Plan]
) -> None:
    """It has its workers again at once: another that stopped, too, would have done so for nothing."""
    for name in ("cpu-9", "loader-9"):
        kind = name.partition("-")[0]
        rehearsal.core.workers[name] = Worker(name, kind, up=True)
    rehearsal.tell(JobSubmitted(job="low", needs={"cpu": 1, "loader": 1}, priority=-1))
    low = rehearsal.core.jobs["low"]
    rehearsal.tell(JobPlanned(job="low", attempt=1, plan=plan_of(steps=STEPS, window=8)))
    for name in low.workers:
        rehearsal.tell(WorkerPrepared(job="low", attempt=1, worker=name))
    assert low.phase is Phase.RUNNING
    improve(rehearsal, other)
    rehearsal.tell(JobSubmitted(job="late", needs={"cpu": 3, "loader": 1}))
    assert low.stopping is None
    to_its_stop(rehearsal)
    rehearsal.release()
    assert rehearsal.job.phase is Phase.PREPARING
