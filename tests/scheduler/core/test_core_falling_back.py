"""Transcripts of the core with jobs whose strategy nobody has asked for, where that fails."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from weft.plan.plan import Plan
from weft.scheduler.core.events import (
    CancelRequested,
    DropArenas,
    FallBack,
    JobFaulted,
    JobPlanned,
    JobSubmitted,
    PauseRequested,
    PlanJob,
    Prepare,
    RecordState,
    ResumeRequested,
    SaveSnapshot,
    Snapshot,
    SnapshotSaved,
    WorkerLost,
    WorkerReleased,
)
from weft.scheduler.core.job import Phase

Rehearsal = runpy.run_path(str(Path(__file__).with_name("test_core_snapshots.py")))["Rehearsal"]
ALONE = {"cpu": 1, "loader": 1}


@pytest.fixture
def alone(plan_of: Callable[..., Plan]) -> Plan:
    return plan_of(steps=16, window=4)


@pytest.fixture
def rehearsal(plan_of: Callable[..., Plan]) -> Any:
    """On a GPU, behind a snapshot."""
    rehearsal = Rehearsal(plan_of(replicas=[{"device": "gpu"}], update="local", steps=16, window=4), {"cpu-0": "cpu"})
    rehearsal.job.instead = ALONE
    rehearsal.due()
    rehearsal.run_to(8)
    assert rehearsal.job.snapshot is not None
    return rehearsal


def fault(rehearsal: Any, reason: str, told: str = "it failed") -> list[Any]:
    return list(
        rehearsal.tell(JobFaulted(job="a", attempt=rehearsal.job.attempt, reason=reason, message=told, exit_code=1))
    )


@pytest.mark.parametrize("reason", ["out-of-memory", "shared-memory", "user-error", "invalid-workload", "internal"])
def test_it_is_planned_for_one_worker_from_what_it_has_come_to(rehearsal: Any, alone: Plan, reason: str) -> None:
    recorded = fault(rehearsal, reason)[0]
    assert (recorded.state, recorded.reason) == ("recovering", reason)
    assert recorded.message == (
        "it failed\nno [strategy]: the choice has failed; the job goes on on one CPU worker (attempt 2)"
    )
    newest = rehearsal.job.snapshot
    commands = rehearsal.release()
    assert [each for each in commands if not isinstance(each, RecordState)] == [
        DropArenas(job="a", attempt=1),
        SaveSnapshot(job="a", snapshot=newest),
        DropArenas(job="a", attempt=None),
        FallBack(job="a"),
        PlanJob(job="a", attempt=2, worker="cpu-0"),
    ]
    rehearsal.tell(SnapshotSaved(job="a", path="checkpoint"))
    on_disk = Snapshot(iteration=newest.iteration, path="checkpoint")
    prepares = rehearsal.tell(JobPlanned(job="a", attempt=2, plan=alone, checkpoint=on_disk))
    assert [(each.worker, each.snapshot) for each in prepares if isinstance(each, Prepare)] == [
        ("cpu-0", on_disk),
        ("loader-0", on_disk),
    ]
    rehearsal.plan = alone
    rehearsal.prepare()
    assert fault(rehearsal, reason)[0].worker in ("cpu-0", "loader-0"), "told to let go, and nothing is recovering"
    assert rehearsal.release()[-1].state == "failed", "on one worker it is the job's own"


@pytest.mark.parametrize("reason", ["non-finite-loss", "run-directory"])
def test_what_no_strategy_changes_ends_the_job(rehearsal: Any, reason: str) -> None:
    fault(rehearsal, reason)
    assert [each.state for each in rehearsal.release() if isinstance(each, RecordState)] == ["failed"]


def test_on_cpu_workers_only_memory_is_the_strategys(plan_of: Callable[..., Plan]) -> None:
    for reason, states in (("user-error", ["failed"]), ("out-of-memory", ["queued", "planning"])):
        rehearsal = Rehearsal(plan_of(replicas=2, steps=16, window=4))
        rehearsal.job.instead = ALONE
        fault(rehearsal, reason)
        assert [each.state for each in rehearsal.release() if isinstance(each, RecordState)] == states


def test_a_worker_that_the_kernel_kills_for_memory_is_not_the_jobs_end_either(plan_of: Callable[..., Plan]) -> None:
    rehearsal = Rehearsal(plan_of(replicas=2, steps=16, window=4))
    rehearsal.job.instead = ALONE
    rehearsal.due()
    rehearsal.run_to(8)
    rehearsal.tell(WorkerLost(worker="cpu-1", exit_code=-9, shortage="was killed by the kernel for lack of memory"))
    assert rehearsal.job.keeps == frozenset(), "nobody keeps what is of another plan"
    assert rehearsal.release()[-1] == PlanJob(job="a", attempt=2, worker="cpu-0")


def test_a_look_at_devices_that_ends_the_worker_does_not_end_the_job(plan_of: Callable[..., Plan]) -> None:
    """An error of the job's code does: the inspection begins with what the job needs on one worker."""
    plan = plan_of(replicas=[{"device": "gpu"}], update="local", steps=16, window=4)
    for event, states in (
        (WorkerLost(worker="gpu-0", exit_code=-6), ["recovering", "queued", "planning"]),
        (JobFaulted(job="b", attempt=1, reason="user-error", message="it failed", exit_code=1), ["failed"]),
    ):
        rehearsal = Rehearsal(plan, {"cpu-0": "cpu"})
        rehearsal.tell(CancelRequested(job="a"))
        rehearsal.release()
        rehearsal.tell(JobSubmitted(job="b", needs=rehearsal.needs, inspector=0, instead=ALONE))
        assert rehearsal.core.jobs["b"].phase is Phase.PLANNING
        commands = rehearsal.tell(event)
        for worker in sorted(rehearsal.core.jobs["b"].waiting_for):
            commands += rehearsal.tell(WorkerReleased(worker=worker, job="b", attempt=1, clean=True))
        assert [each.state for each in commands if isinstance(each, RecordState)] == states
        assert [each.worker for each in commands if isinstance(each, PlanJob)] == ["cpu-0"] * (len(states) > 1)


def test_what_comes_between_is_dealt_with_first(rehearsal: Any) -> None:
    fault(rehearsal, "out-of-memory")
    rehearsal.tell(PauseRequested(job="a"))
    rehearsal.release()
    assert rehearsal.job.phase is Phase.PAUSED
    assert rehearsal.job.instead == ALONE, "it has not come to that yet"
    rehearsal.tell(ResumeRequested(job="a"))
    assert rehearsal.job.phase is Phase.PLANNING
    rehearsal.tell(JobPlanned(job="a", attempt=2, plan=rehearsal.plan, instead=ALONE))
    rehearsal.prepare()
    fault(rehearsal, "out-of-memory")
    rehearsal.tell(CancelRequested(job="a"))
    assert rehearsal.release()[-1].state == "cancelled"
    assert rehearsal.found(FallBack) == []
