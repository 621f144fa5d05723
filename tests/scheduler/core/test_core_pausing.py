"""Transcripts of the core with jobs that stop at an iteration's end: paused and resumed, or preempted."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from weft.plan.plan import Plan
from weft.scheduler.core.core import Core
from weft.scheduler.core.ending import SAVE_AGAIN_SECONDS
from weft.scheduler.core.events import (
    CancelRequested,
    Dispatch,
    DrainRequested,
    DropArenas,
    JobPlanned,
    JobSubmitted,
    PauseRequested,
    PlanImproved,
    Prepare,
    RecordIteration,
    RecordState,
    Release,
    ResumeRequested,
    SaveSnapshot,
    Snapshot,
    SnapshotDue,
    SnapshotMissed,
    SnapshotSaved,
    Ticked,
    WorkerJoined,
    WorkerLost,
    WorkerReleased,
)
from weft.scheduler.core.job import Phase
from weft.scheduler.core.waiting import why

Rehearsal = runpy.run_path(str(Path(__file__).with_name("test_core_snapshots.py")))["Rehearsal"]


@pytest.fixture
def plan(plan_of: Callable[..., Plan]) -> Plan:
    return plan_of(stages=1, microbatches=2, steps=16, window=4)


@pytest.fixture
def rehearsal(plan: Plan) -> Any:
    return Rehearsal(plan)


def states(rehearsal: Any, job: str = "a") -> list[str]:
    return [command.state for command in rehearsal.found(RecordState) if command.job == job]


def sent(rehearsal: Any) -> int:
    """The last iteration of which a lane has been sent more than to load its data."""
    work = [command.work for command in rehearsal.found(Dispatch) if command.lane != "load"]
    return max(iteration for runs in work for iteration, _ in runs)


def pause(rehearsal: Any) -> int:
    """The iterations that it has done by then."""
    rehearsal.tell(PauseRequested(job="a"))
    rehearsal.run_to(16)
    rehearsal.release()
    assert rehearsal.job.phase is Phase.PAUSED
    done: int = rehearsal.found(RecordIteration)[-1].iteration + 1
    return done


# --- paused


def test_a_running_job_stops_behind_a_copy_of_the_first_iteration_that_nobody_has_begun(rehearsal: Any) -> None:
    before = sent(rehearsal)
    assert pause(rehearsal) == before + 2 == sent(rehearsal) + 1, "nothing behind it was sent"
    assert states(rehearsal)[-2:] == ["running", "paused"]
    (save,) = rehearsal.found(SaveSnapshot)
    assert save.snapshot.iteration == before + 1
    assert rehearsal.core.free() == {"cpu": ["cpu-0"], "loader": ["loader-0"]}


def test_its_memory_goes_once_it_is_on_the_disk_and_stays_where_it_is_not(rehearsal: Any) -> None:
    pause(rehearsal)
    assert DropArenas(job="a", attempt=None) not in rehearsal.commands
    assert rehearsal.tell(SnapshotSaved(job="a", path=None)) == []
    assert rehearsal.job.snapshot is not None
    rehearsal.tell(ResumeRequested(job="a"))
    rehearsal.prepare()
    done = pause(rehearsal)
    assert rehearsal.found(SaveSnapshot)[-1].snapshot.iteration == done - 1
    assert rehearsal.tell(SnapshotSaved(job="a", path="there")) == [DropArenas(job="a", attempt=None)]
    assert rehearsal.job.snapshot is None


def test_what_the_disk_has_not_taken_is_told_and_tried_again_later_and_before_the_daemon_ends(rehearsal: Any) -> None:
    pause(rehearsal)
    save, drop = rehearsal.found(SaveSnapshot)[-1], DropArenas(job="a", attempt=None)
    assert "in memory alone" not in str(why(rehearsal.core, "a")), "it is on its way"
    rehearsal.tell(SnapshotSaved(job="a", path=None))
    assert "in memory alone" in str(why(rehearsal.core, "a"))
    assert rehearsal.tell(Ticked()) == []
    later = SAVE_AGAIN_SECONDS
    assert rehearsal.core.handle(Ticked(), later) == [save]
    assert rehearsal.core.handle(Ticked(), 2 * later) == [], "it is on its way"
    assert rehearsal.core.handle(SnapshotSaved(job="a", path=None), 2 * later) == []
    assert rehearsal.core.handle(Ticked(), 2 * later) == []
    assert rehearsal.core.handle(DrainRequested(now=False), 2 * later) == [save]
    assert rehearsal.tell(SnapshotSaved(job="a", path="there")) == [drop]
    assert "in memory alone" not in str(why(rehearsal.core, "a"))
    assert rehearsal.core.handle(Ticked(), 9 * later) == []


def test_resumed_it_goes_on_from_the_disk_to_its_end(rehearsal: Any, plan: Plan) -> None:
    done = pause(rehearsal)
    rehearsal.tell(SnapshotSaved(job="a", path="there"))
    assert rehearsal.tell(ResumeRequested(job="a"))[0].state == "queued"
    assert rehearsal.job.phase is Phase.PLANNING, "other workers may be there by then"
    checkpoint = Snapshot(iteration=done - 1, path="there")
    rehearsal.tell(JobPlanned(job="a", attempt=2, plan=plan, checkpoint=checkpoint))
    assert {command.snapshot for command in rehearsal.found(Prepare, attempt=2)} == {checkpoint}
    rehearsal.prepare()
    rehearsal.run_to(16)
    assert [command.iteration for command in rehearsal.found(RecordIteration)] == list(range(16))
    assert rehearsal.job.phase is Phase.SAVING


def test_before_it_runs_it_stops_at_once_and_in_the_queue_it_leaves_it(plan: Plan) -> None:
    core = Core({"cpu-0": "cpu", "loader-0": "loader"})
    for worker in core.workers.values():
        core.handle(WorkerJoined(worker=worker.name), 0.0)
    for job in ("a", "b"):
        core.handle(JobSubmitted(job=job, needs={"cpu": 1, "loader": 1}), 0.0)
    core.handle(PauseRequested(job="b"), 0.0)
    assert core.jobs["b"].phase is Phase.PAUSED
    released = core.handle(PauseRequested(job="a"), 0.0)
    assert {type(command) for command in released} == {Release}
    for worker in core.workers:
        commands = core.handle(WorkerReleased(worker=worker, job="a", attempt=1, clean=True), 0.0)
    assert commands[-1] == RecordState(job="a", state="paused", attempt=2)
    core.handle(ResumeRequested(job="b"), 0.0)
    assert core.jobs["b"].phase is Phase.PLANNING


def test_one_that_loses_a_worker_on_the_way_is_paused_all_the_same(rehearsal: Any) -> None:
    rehearsal.tell(PauseRequested(job="a"))
    rehearsal.tell(WorkerLost(worker="cpu-0", exit_code=-9))
    rehearsal.release()
    assert states(rehearsal)[-2:] == ["recovering", "paused"]
    rehearsal.tell(WorkerJoined(worker="cpu-0"))
    assert rehearsal.job.phase is Phase.PAUSED


@pytest.mark.parametrize("waits", [False, True])
def test_what_it_had_come_to_when_it_lost_a_worker_is_what_it_goes_on_from(rehearsal: Any, waits: bool) -> None:
    """It kept the plan that it was to recover with, or with which it waited in the queue, and its snapshot went to the
    disk: resumed, it prepared that plan without any, and began again with the first step."""
    rehearsal.tell(SnapshotDue(job="a", attempt=1))
    rehearsal.run_to(8)
    snapshot = rehearsal.job.snapshot
    if not waits:
        rehearsal.tell(PauseRequested(job="a"))
    rehearsal.tell(WorkerLost(worker="cpu-0", exit_code=-9))
    rehearsal.release()
    if waits:
        rehearsal.tell(PauseRequested(job="a"))
        rehearsal.release()
    assert rehearsal.job.phase is Phase.PAUSED
    rehearsal.tell(SnapshotSaved(job="a", path="there"))
    assert rehearsal.job.snapshot is None, "it is on the disk"
    rehearsal.tell(WorkerJoined(worker="cpu-0"))
    rehearsal.tell(ResumeRequested(job="a"))
    assert rehearsal.job.phase is Phase.PLANNING, "where it is looked for what is there"
    assert snapshot is not None


def test_where_a_part_of_its_copy_is_missing_it_is_paused_with_the_one_before(rehearsal: Any) -> None:
    rehearsal.tell(SnapshotDue(job="a", attempt=1))
    (before,) = rehearsal.job.copying
    rehearsal.run_to(before.iteration + 1)
    rehearsal.tell(PauseRequested(job="a"))
    (copied,) = rehearsal.job.copying
    rehearsal.tell(SnapshotMissed(job="a", attempt=1, iteration=copied.iteration))
    rehearsal.run_to(16)
    assert rehearsal.job.iterations_done == copied.iteration + 1, "it stops there all the same"
    rehearsal.release()
    assert rehearsal.job.phase is Phase.PAUSED
    assert [each.snapshot for each in rehearsal.found(SaveSnapshot)] == [before]
    rehearsal.tell(ResumeRequested(job="a"))
    rehearsal.prepare()
    assert rehearsal.job.iterations_done == before.iteration + 1


def test_it_says_why_it_stands_still(rehearsal: Any) -> None:
    rehearsal.tell(PauseRequested(job="a"))
    assert why(rehearsal.core, "a") == "paused on request: it stops at the end of an iteration"
    pause(rehearsal)
    assert why(rehearsal.core, "a") == "it is paused; `weft resume a` goes on with it"


@pytest.mark.parametrize("why", ["preempted", "for another plan"])
def test_one_that_lets_go_for_something_else_is_paused_all_the_same(rehearsal: Any, plan: Plan, why: str) -> None:
    """It went on, and who had asked for the pause waited until its end."""
    if why == "preempted":
        rehearsal.tell(JobSubmitted(job="b", needs=rehearsal.needs, priority=1))
    else:
        rehearsal.tell(PlanImproved(job="a", attempt=1, plan=plan, message="faster"))
    rehearsal.run_to(16)
    assert rehearsal.job.phase is Phase.RELEASING
    rehearsal.tell(PauseRequested(job="a"))
    rehearsal.release()
    assert rehearsal.job.phase is Phase.PAUSED
    assert rehearsal.job.improved is None
    assert rehearsal.found(SaveSnapshot)[-1].snapshot.iteration == rehearsal.found(RecordIteration)[-1].iteration


def test_one_that_is_about_to_end_ends(rehearsal: Any) -> None:
    rehearsal.run_to(14)
    rehearsal.tell(PauseRequested(job="a"))
    rehearsal.run_to(16)
    assert rehearsal.job.phase is Phase.SAVING


def test_paused_it_can_be_cancelled_and_what_was_saved_is_kept(rehearsal: Any) -> None:
    pause(rehearsal)
    rehearsal.tell(SnapshotSaved(job="a", path="there"))
    commands = rehearsal.tell(CancelRequested(job="a"))
    assert [command.state for command in commands] == ["cancelled"]
    assert not rehearsal.core.jobs


def test_where_all_places_are_taken_it_stops_behind_the_next_copy(rehearsal: Any) -> None:
    places = rehearsal.plan.snapshot_places
    for number in range(places):  # whole, being written, under way
        rehearsal.due()
        if number < places - 1:
            rehearsal.run_to(rehearsal.job.copying[0].iteration + 1)
            rehearsal.job.saving = rehearsal.job.saving or [rehearsal.job.snapshot]
    assert pause(rehearsal) < 16


# --- for one of higher priority


@pytest.fixture
def preempted(rehearsal: Any) -> Any:
    rehearsal.tell(JobSubmitted(job="b", needs=rehearsal.needs, priority=1))
    return rehearsal


def test_what_it_had_come_to_is_saved_when_the_daemon_drains_meanwhile(preempted: Any) -> None:
    """It was in memory alone. A daemon that was stopped waited for the more urgent job, and the next one began this one
    again with the first step."""
    preempted.run_to(16)
    preempted.release()
    assert preempted.found(SaveSnapshot) == []
    assert preempted.tell(DrainRequested(now=False)) == [SaveSnapshot(job="a", snapshot=preempted.job.snapshot)]


def test_one_that_makes_room_while_the_daemon_drains_is_saved_too(preempted: Any) -> None:
    preempted.tell(DrainRequested(now=False))
    preempted.run_to(16)
    preempted.release()
    assert preempted.job.phase is Phase.QUEUED
    assert preempted.found(SaveSnapshot) == [SaveSnapshot(job="a", snapshot=preempted.job.snapshot)]


def test_a_job_of_higher_priority_has_it_stop_and_it_goes_on_after_that_with_its_plan(preempted: Any) -> None:
    preempted.run_to(16)
    preempted.release()
    (told,) = [command for command in preempted.found(RecordState) if command.message]
    assert (told.job, told.state, told.reason) == ("a", "queued", "preempted")
    assert told.message == "preempted by b, whose priority is 1"
    assert preempted.core.jobs["b"].phase is Phase.PLANNING
    done = preempted.found(RecordIteration)[-1].iteration + 1
    assert 0 < done < 16
    for worker in ("cpu-0", "loader-0"):
        preempted.tell(CancelRequested(job="b"))
        preempted.tell(WorkerReleased(worker=worker, job="b", attempt=1, clean=True))
    assert preempted.job.phase is Phase.PREPARING, "it has its plan"
    assert {command.snapshot.iteration for command in preempted.found(Prepare, attempt=2)} == {done - 1}
    preempted.prepare()
    preempted.run_to(16)
    assert [command.iteration for command in preempted.found(RecordIteration)] == list(range(16))


def test_one_of_the_same_priority_waits(rehearsal: Any) -> None:
    rehearsal.tell(JobSubmitted(job="b", needs=rehearsal.needs))
    rehearsal.run_to(16)
    assert rehearsal.job.phase is Phase.SAVING


def test_nobody_stops_for_one_that_could_not_start_all_the_same(rehearsal: Any) -> None:
    rehearsal.tell(WorkerLost(worker="loader-0", exit_code=-9))
    rehearsal.release()
    rehearsal.tell(JobSubmitted(job="b", needs=rehearsal.needs | {"cpu": 2}, priority=1))
    assert rehearsal.job.stopping is None


def test_nor_one_that_keeps_no_snapshots(plan_of: Callable[..., Plan]) -> None:
    rehearsal = Rehearsal(plan_of(stages=1, microbatches=2, steps=16, window=4, recovery="off"))
    rehearsal.tell(JobSubmitted(job="b", needs=rehearsal.needs, priority=1))
    rehearsal.run_to(16)
    assert rehearsal.job.phase is Phase.SAVING
