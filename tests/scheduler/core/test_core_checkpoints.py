"""Checkpoints in the core: of which iterations, one at a time, from a place that nobody writes to meanwhile; and what a
job that ends or waits leaves on the disk."""

from __future__ import annotations

import dataclasses
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from weft.plan.plan import Plan
from weft.scheduler.core.events import (
    Adjust,
    CancelRequested,
    CheckpointDue,
    DirectoryLost,
    DrainRequested,
    DropArenas,
    JobFaulted,
    RecordState,
    SaveSnapshot,
    Snapshot,
    SnapshotSaved,
    WorkerLost,
)

_SNAPSHOTS = runpy.run_path(str(Path(__file__).with_name("test_core_snapshots.py")))
Rehearsal, taken = _SNAPSHOTS["Rehearsal"], _SNAPSHOTS["taken"]
SAVED = SnapshotSaved(job="a", path="/runs/a/checkpoints/step-00000001")


@pytest.fixture
def plan(plan_of: Callable[..., Plan]) -> Plan:
    return dataclasses.replace(plan_of(stages=1, microbatches=2, steps=40, window=4), checkpoint_steps=5)


@pytest.fixture
def rehearsal(plan: Plan) -> Any:
    return Rehearsal(plan)


def told(rehearsal: Any) -> list[int]:
    """The iterations of which lanes were told to copy what they came to."""
    return [each.first_iteration for each in rehearsal.found(Adjust)]


def test_the_steps_that_the_interval_names_have_one(rehearsal: Any) -> None:
    saved = []
    for iteration in range(1, 41):
        rehearsal.run_to(iteration)
        if len(rehearsal.found(SaveSnapshot)) > len(saved):
            saved = rehearsal.found(SaveSnapshot)
            rehearsal.tell(SAVED)
    assert [each.snapshot.iteration + 1 for each in saved] == [5, 10, 15, 20, 25, 30, 35], "the last has the result"


def test_while_one_is_being_written_there_is_no_other_and_recovery_goes_on(rehearsal: Any) -> None:
    rehearsal.run_to(6)
    (save,) = rehearsal.found(SaveSnapshot)
    places = set()
    for _ in range(4):
        places.add(taken(rehearsal, 0).place)
    assert save.snapshot.place not in places
    assert len(places) == 2
    assert len(rehearsal.found(SaveSnapshot)) == 1
    rehearsal.tell(SAVED)
    (copying,) = rehearsal.job.copying
    assert copying.to_disk
    assert (copying.iteration + 1) % 5 == 0
    assert copying.iteration >= rehearsal.job.iterations_done


def test_one_that_is_whole_while_another_is_written_waits_and_nobody_writes_over_that(plan: Plan) -> None:
    """The best by a validation may have gone to the disk after this one was told."""
    rehearsal = Rehearsal(dataclasses.replace(plan, checkpoint_steps=None, checkpoint_seconds=1e-3))
    (adjust,) = rehearsal.tell(CheckpointDue(job="a", attempt=1))
    written = Snapshot(iteration=0, place=2, tasks=("stage-0-0",), best=True)
    rehearsal.job.saving = [written]
    assert adjust.adjustment.snapshot != written.place
    rehearsal.run_to(adjust.first_iteration + 2)
    assert rehearsal.job.snapshot.iteration == adjust.first_iteration
    assert (rehearsal.found(SaveSnapshot), rehearsal.job.saving) == ([], [written])
    rehearsal.due()
    assert {each.adjustment.snapshot for each in rehearsal.found(Adjust)}.isdisjoint({written.place})
    commands = rehearsal.tell(SnapshotSaved(job="a", path="there"))
    (save,) = [command for command in commands if isinstance(command, SaveSnapshot)]
    assert save.snapshot.iteration == adjust.first_iteration


def test_one_copy_serves_recovery_and_the_disk(rehearsal: Any) -> None:
    rehearsal.run_to(6)
    rehearsal.tell(SAVED)
    first = told(rehearsal)
    while rehearsal.due() == [] and rehearsal.job.iterations_done < 20:
        rehearsal.run_to(rehearsal.job.iterations_done + 1)
    rehearsal.run_to(30)
    assert len(set(told(rehearsal))) == len(told(rehearsal)), "no iteration is told twice"
    assert told(rehearsal)[: len(first)] == first


def test_by_the_clock_the_next_iteration_that_nobody_was_sent_has_one(plan: Plan) -> None:
    rehearsal = Rehearsal(dataclasses.replace(plan, checkpoint_steps=None, checkpoint_seconds=60.0))
    assert told(rehearsal) == []
    (adjust,) = rehearsal.tell(CheckpointDue(job="a", attempt=1))
    assert rehearsal.tell(CheckpointDue(job="a", attempt=1)) == []
    rehearsal.run_to(adjust.first_iteration + 1)
    assert [each.snapshot.iteration for each in rehearsal.found(SaveSnapshot)] == [adjust.first_iteration]
    assert rehearsal.tell(CheckpointDue(job="a", attempt=1)) == [], "it is being written"
    rehearsal.tell(SAVED)
    assert len(rehearsal.tell(CheckpointDue(job="a", attempt=1))) == 1


def cancel(rehearsal: Any) -> None:
    rehearsal.tell(CancelRequested(job="a"))
    rehearsal.release()


def discard(rehearsal: Any) -> None:
    rehearsal.tell(CancelRequested(job="a", discard=True))
    rehearsal.release()


def fail(rehearsal: Any) -> None:
    rehearsal.tell(JobFaulted(job="a", attempt=1, reason="user-error", message="no", exit_code=1))
    rehearsal.release()


def crash(rehearsal: Any) -> None:
    rehearsal.tell(WorkerLost(worker="cpu-0", exit_code=-11))
    rehearsal.release()


def cancel_while_it_waits(rehearsal: Any) -> None:
    rehearsal.tell(WorkerLost(worker="cpu-0", exit_code=-9))
    rehearsal.release()
    rehearsal.tell(CancelRequested(job="a"))
    rehearsal.release()


def stop_the_daemon(rehearsal: Any) -> None:
    rehearsal.tell(DrainRequested(now=True))
    rehearsal.release()


@pytest.mark.parametrize(
    ("end", "leaves"),
    [(cancel, 1), (discard, 0), (fail, 1), (crash, 1), (cancel_while_it_waits, 1), (stop_the_daemon, 1)],
)
def test_a_job_that_ends_before_its_time_leaves_what_it_had_come_to(
    plan_of: Callable[..., Plan], end: Callable[[Any], None], leaves: int
) -> None:
    rehearsal = Rehearsal(plan_of(stages=1, microbatches=2, steps=40, window=4))
    whole = taken(rehearsal)
    assert rehearsal.found(SaveSnapshot) == []
    end(rehearsal)
    assert rehearsal.found(SaveSnapshot) == [SaveSnapshot(job="a", snapshot=whole)] * leaves
    drops = [each for each in rehearsal.found(DropArenas) if each.attempt is None]
    assert len(drops) == (0 if end is stop_the_daemon else 1)
    if leaves and drops:
        order = [each for each in rehearsal.commands if isinstance(each, (SaveSnapshot, DropArenas))]
        assert order.index(rehearsal.found(SaveSnapshot)[0]) < order.index(drops[0]), "what is written is not dropped"


def test_what_is_on_the_disk_is_not_written_again_and_what_could_not_be_is(rehearsal: Any) -> None:
    rehearsal.run_to(6)
    (save,) = rehearsal.found(SaveSnapshot)
    rehearsal.tell(SAVED)
    cancel(rehearsal)
    assert rehearsal.found(SaveSnapshot) == [save]


def test_what_could_not_be_written_is_tried_again_at_the_end(rehearsal: Any) -> None:
    rehearsal.run_to(6)
    (save,) = rehearsal.found(SaveSnapshot)
    rehearsal.tell(SnapshotSaved(job="a", path=None))
    cancel(rehearsal)
    assert rehearsal.found(SaveSnapshot) == [save, save]


def test_a_completed_job_leaves_its_result_alone(plan_of: Callable[..., Plan]) -> None:
    rehearsal = Rehearsal(plan_of(stages=1, microbatches=2, steps=16, window=4))
    taken(rehearsal)
    rehearsal.run_to(16)
    assert rehearsal.found(SaveSnapshot) == []


def test_an_answer_for_a_job_that_has_ended_is_late(rehearsal: Any) -> None:
    rehearsal.run_to(6)
    discard(rehearsal)
    assert rehearsal.tell(SAVED) == []
    assert [each.state for each in rehearsal.found(RecordState)][-1] == "cancelled"


def test_a_lost_directory_leaves_the_disk(rehearsal: Any) -> None:
    rehearsal.run_to(6)
    rehearsal.tell(SAVED)
    rehearsal.tell(WorkerLost(worker="cpu-0", exit_code=-9))
    rehearsal.tell(DirectoryLost())
    assert rehearsal.job.snapshot is None
    assert rehearsal.job.on_disk == 4
