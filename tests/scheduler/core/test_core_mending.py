"""Transcripts of the core after a lost worker: the others keep what they have, and wait for one in its place."""

from __future__ import annotations

import dataclasses
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from weft.plan.plan import Plan
from weft.scheduler.core.events import (
    CancelRequested,
    DirectoryLost,
    DrainRequested,
    DropArenas,
    Event,
    JobSubmitted,
    KillWorker,
    PauseRequested,
    Prepare,
    RecordState,
    Release,
    SaveResult,
    WorkerJoined,
    WorkerLost,
    WorkerReleased,
)
from weft.scheduler.core.job import Phase

_SNAPSHOTS = runpy.run_path(str(Path(__file__).with_name("test_core_snapshots.py")))
Rehearsal, taken = _SNAPSHOTS["Rehearsal"], _SNAPSHOTS["taken"]


@pytest.fixture
def pipeline(plan_of: Callable[..., Plan]) -> Any:
    rehearsal = Rehearsal(plan_of(stages=3, microbatches=4, steps=30, window=4))
    taken(rehearsal)
    return rehearsal


def test_the_others_stop_and_wait_with_what_they_have_for_one_in_the_place_of_the_lost_one(pipeline: Any) -> None:
    told = pipeline.tell(WorkerLost(worker="cpu-1", exit_code=-9))
    kept = [each for each in told if isinstance(each, Release)]
    assert [(each.worker, each.keeps) for each in kept] == [(name, True) for name in ("cpu-0", "cpu-2", "loader-0")]
    pipeline.release()
    assert pipeline.job.phase is Phase.MENDING
    assert pipeline.job.workers == ("cpu-0", "cpu-2", "loader-0")
    assert pipeline.core.free() == {}
    told = pipeline.tell(WorkerJoined(worker="cpu-1"))
    prepared = [each for each in told if isinstance(each, Prepare)]
    assert [(each.worker, each.position, each.attempt, each.arenas) for each in prepared] == [
        ("cpu-0", 0, 2, 1),
        ("cpu-1", 1, 2, 1),
        ("cpu-2", 2, 2, 1),
        ("loader-0", 3, 2, 1),
    ]
    pipeline.prepare()
    pipeline.run_to(30)
    assert pipeline.commands[-1] == SaveResult(job="a", attempt=2, arenas=1, worker="cpu-0")


def test_another_worker_that_is_free_takes_the_place_at_once(plan_of: Callable[..., Plan]) -> None:
    rehearsal = Rehearsal(plan_of(stages=2, microbatches=4, steps=30, window=4, spares=False), others={"cpu-9": "cpu"})
    taken(rehearsal)
    rehearsal.tell(WorkerLost(worker="cpu-0", exit_code=-9))
    rehearsal.release()
    assert rehearsal.job.phase is Phase.PREPARING
    assert rehearsal.job.workers == ("cpu-9", "cpu-1", "loader-0")


def test_where_workers_have_spares_the_job_waits_for_the_lost_one_itself_unless_it_does_not_start(
    plan_of: Callable[..., Plan],
) -> None:
    rehearsal = Rehearsal(plan_of(stages=2, microbatches=4, steps=30, window=4, spares=True), others={"cpu-9": "cpu"})
    taken(rehearsal)
    rehearsal.tell(WorkerLost(worker="cpu-0", exit_code=-9))
    rehearsal.release()
    assert rehearsal.job.phase is Phase.MENDING
    rehearsal.tell(WorkerJoined(worker="cpu-0"))
    assert rehearsal.job.workers == ("cpu-0", "cpu-1", "loader-0")
    rehearsal.tell(WorkerLost(worker="cpu-0", exit_code=-9))
    rehearsal.release()
    assert rehearsal.job.workers == ("cpu-9", "cpu-1", "loader-0"), "it was lost before it was prepared"


@pytest.mark.parametrize(
    ("settings", "seconds", "has_spares"),
    [
        ({}, 0.1, False),
        ({}, 1.0, True),
        ({"spares": True}, 0.1, True),
        ({"spares": False}, 1.0, False),
        ({"recovery": "off"}, 1.0, False),
        ({"replicas": [{"device": "gpu"}, {}]}, 1.0, False),
        ({"replicas": 2, "staleness": [0, 1], "spares": True}, 1.0, False),
    ],
)
def test_spares_are_made_where_a_job_takes_more_than_ten_seconds_and_can_go_on_with_them(
    plan_of: Callable[..., Plan], settings: dict[str, Any], seconds: float, has_spares: bool
) -> None:
    plan = plan_of(steps=30, **settings)
    assert dataclasses.replace(plan, predicted_iteration_seconds=seconds).has_spares is has_spares


def test_a_loader_that_is_free_takes_the_place_of_a_lost_one_at_once(plan_of: Callable[..., Plan]) -> None:
    """Loaders have no spares."""
    plan = plan_of(stages=2, microbatches=4, steps=30, window=4, spares=True)
    rehearsal = Rehearsal(plan, others={"loader-9": "loader"})
    taken(rehearsal)
    rehearsal.tell(WorkerLost(worker="loader-0", exit_code=-9))
    rehearsal.release()
    assert rehearsal.job.workers == ("cpu-0", "cpu-1", "loader-9")


@pytest.mark.parametrize("when", [Phase.RELEASING, Phase.MENDING, Phase.PREPARING])
def test_a_second_one_that_is_lost_before_they_go_on_has_a_successor_too(pipeline: Any, when: Phase) -> None:
    pipeline.tell(WorkerLost(worker="cpu-1", exit_code=-9))
    if when is not Phase.RELEASING:
        pipeline.release()
    if when is Phase.PREPARING:
        pipeline.tell(WorkerJoined(worker="cpu-1"))
    assert pipeline.job.phase is when
    pipeline.tell(WorkerLost(worker="cpu-0", exit_code=-9))
    pipeline.release()
    if when is not Phase.PREPARING:
        assert pipeline.job.workers == ("cpu-2", "loader-0")
        pipeline.tell(WorkerJoined(worker="cpu-1"))
    assert pipeline.job.phase is Phase.MENDING
    pipeline.tell(WorkerJoined(worker="cpu-0"))
    assert pipeline.job.workers == ("cpu-0", "cpu-1", "cpu-2", "loader-0")
    assert pipeline.found(DropArenas) == []
    pipeline.prepare()
    pipeline.run_to(30)
    assert pipeline.commands[-1] == SaveResult(job="a", attempt=pipeline.job.attempt, arenas=1, worker="cpu-0")


def test_where_all_are_lost_the_next_attempt_has_blocks_of_its_own(pipeline: Any) -> None:
    workers = pipeline.job.workers
    for worker in workers:
        pipeline.tell(WorkerLost(worker=worker, exit_code=-9))
    assert pipeline.found(DropArenas) == [DropArenas(job="a", attempt=1)]
    for worker in workers:
        pipeline.tell(WorkerJoined(worker=worker))
    assert {each.arenas for each in pipeline.found(Prepare, attempt=2)} == {2}


@pytest.mark.parametrize("when", [Phase.RELEASING, Phase.MENDING])
@pytest.mark.parametrize(
    ("event", "left"),
    [
        (CancelRequested(job="a"), None),
        (PauseRequested(job="a"), Phase.PAUSED),
        (DrainRequested(now=False), Phase.QUEUED),
        (DirectoryLost(), Phase.QUEUED),
    ],
)
def test_what_is_kept_is_let_go_of_where_something_else_comes(
    pipeline: Any, when: Phase, event: Event, left: Phase | None
) -> None:
    pipeline.tell(WorkerLost(worker="cpu-1", exit_code=-9))
    if when is Phase.MENDING:
        pipeline.release()
    assert pipeline.job.phase is when
    pipeline.tell(event)
    pipeline.release()
    last = {each.worker: each.keeps for each in pipeline.found(Release)}
    assert last == {"cpu-0": False, "cpu-2": False, "loader-0": False}
    assert (pipeline.job.phase if "a" in pipeline.core.jobs else None) is left
    assert sum(map(len, pipeline.core.free().values())) == 3
    assert DropArenas(job="a", attempt=1) in pipeline.commands


def test_an_attempt_that_was_told_as_lost_is_not_the_one_that_a_paused_job_goes_on_with(pipeline: Any) -> None:
    """The shutdown has said so of the second; then somebody asks for a pause."""
    pipeline.tell(WorkerLost(worker="cpu-1", exit_code=-9))
    pipeline.release()
    assert (pipeline.job.phase, pipeline.job.attempt) == (Phase.MENDING, 2)
    pipeline.tell(DrainRequested(now=True))
    assert pipeline.found(RecordState)[-1].state == "recovering"
    pipeline.tell(PauseRequested(job="a"))
    pipeline.release()
    last = pipeline.found(RecordState)[-1]
    assert (last.state, last.attempt) == ("paused", 3)


def test_one_that_cannot_be_used_any_more_is_replaced_as_the_lost_one_is(pipeline: Any) -> None:
    pipeline.tell(WorkerLost(worker="cpu-1", exit_code=-9))
    assert KillWorker(worker="cpu-2", cause="a left it unclean") in pipeline.tell(
        WorkerReleased(worker="cpu-2", job="a", attempt=1, clean=False)
    )
    pipeline.release()
    assert pipeline.job.phase is Phase.MENDING
    assert pipeline.job.workers == ("cpu-0", "loader-0")
    pipeline.tell(WorkerLost(worker="cpu-2", exit_code=-9))
    pipeline.tell(WorkerJoined(worker="cpu-1"))
    pipeline.tell(WorkerJoined(worker="cpu-2"))
    assert pipeline.job.workers == ("cpu-0", "cpu-1", "cpu-2", "loader-0")


def test_without_a_snapshot_or_on_gpus_nothing_is_kept(plan_of: Callable[..., Plan]) -> None:
    for plan, whole in (
        (plan_of(stages=2, microbatches=4, steps=30, window=4), False),
        (plan_of(replicas=[{"device": "gpu", "stages": 2}], steps=30, window=4), True),
    ):
        rehearsal = Rehearsal(plan)
        if whole:
            taken(rehearsal)
        rehearsal.tell(WorkerLost(worker=rehearsal.job.workers[0], exit_code=-9))
        assert not any(each.keeps for each in rehearsal.found(Release))
        rehearsal.release()
        assert rehearsal.job.phase is Phase.QUEUED


def test_a_job_of_higher_priority_gets_workers_that_wait_for_another(pipeline: Any) -> None:
    pipeline.tell(WorkerLost(worker="cpu-1", exit_code=-9))
    pipeline.release()
    pipeline.tell(JobSubmitted(job="b", needs=pipeline.needs, priority=1))
    assert pipeline.job.phase is Phase.RELEASING
    pipeline.release()
    pipeline.tell(WorkerJoined(worker="cpu-1"))
    assert pipeline.core.jobs["b"].phase is Phase.PLANNING


def test_who_waits_before_it_for_what_it_holds_does_not_keep_it_from_going_on(plan_of: Callable[..., Plan]) -> None:
    """One that was paused comes back before it, and needs the worker that it keeps; it was to wait for that one, and
    both waited for ever."""
    rehearsal = Rehearsal(plan_of(steps=30, window=4), {"loader-1": "loader"})
    taken(rehearsal)
    rehearsal.job.sequence = 99
    rehearsal.tell(JobSubmitted(job="b", needs=rehearsal.needs))
    assert [job.name for job in rehearsal.core.queue()] == ["b"]
    rehearsal.tell(WorkerLost(worker="loader-0", exit_code=-9))
    rehearsal.release()
    assert rehearsal.core.jobs["b"].phase is Phase.QUEUED
    assert rehearsal.job.phase is Phase.PREPARING
    assert rehearsal.job.workers == ("cpu-0", "loader-1")
    rehearsal.prepare()
    rehearsal.run_to(30)
    assert rehearsal.job.phase is Phase.SAVING
