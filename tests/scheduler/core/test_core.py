"""Transcripts of the scheduler core: what happened in, exactly what to do out."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from weft.plan.plan import Plan
from weft.scheduler.core import back_off
from weft.scheduler.core.core import Core
from weft.scheduler.core.ending import CANCEL_SECONDS, RELEASE_SECONDS
from weft.scheduler.core.events import (
    CancelRequested,
    Command,
    DirectoryLost,
    DirectoryMissed,
    Dispatch,
    DrainRequested,
    DropArenas,
    Event,
    HandMemoryOn,
    HandoverBegun,
    JobFaulted,
    JobPlanned,
    JobSubmitted,
    KillWorker,
    PlanJob,
    Prepare,
    RecordIteration,
    RecordState,
    Release,
    ResultSaved,
    SaveResult,
    SetTimer,
    StartWorker,
    TasksFinished,
    Ticked,
    WorkerJoined,
    WorkerLost,
    WorkerPrepared,
    WorkerReleased,
)
from weft.scheduler.core.job import Phase
from weft.scheduler.core.outcomes import MAX_DIRECTORY_LOSSES, MAX_LOSSES, MEMORY_REMEDY, OF_SENT_SIGNAL
from weft.scheduler.core.state import IllegalMove

ACTIVE = [Phase.PLANNING, Phase.PREPARING, Phase.RUNNING, Phase.SAVING]


class Rehearsal:
    """A core with workers cpu-0, cpu-1, loader-0 and loader-1, all up, and one-stage jobs of two iterations."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.now = 100.0
        self.core = Core({f"{kind}-{number}": kind for kind in ("cpu", "loader") for number in range(2)})
        for worker in self.core.workers.values():
            self.tell(WorkerJoined(worker=worker.name))

    def tell(self, event: Event) -> list[Command]:
        return self.core.handle(event, self.now)

    def submit(self, job: str, *, priority: int = 0, stages: int = 1, attempt: int = 1) -> list[Command]:
        needs = {"cpu": stages, "loader": 1}
        return self.tell(JobSubmitted(job=job, needs=needs, priority=priority, attempt=attempt))

    def workers(self, job: str) -> tuple[str, ...]:
        return self.core.jobs[job].workers

    def finish(self, job: str) -> list[Command]:
        """Every lane does all it was sent until there is no more; the commands of the last event."""
        commands: list[Command] = []
        while job in self.core.jobs and self.core.jobs[job].phase is Phase.RUNNING:
            for lane in self.core.jobs[job].lanes.values():
                if lane.sent > lane.finished:
                    attempt = self.core.jobs[job].attempt
                    commands = self.tell(TasksFinished(job, attempt, lane.worker, lane.name, lane.sent - lane.finished))
        return commands

    def bring(self, job: str, phase: Phase) -> None:
        """Walks a job that holds its workers to a phase."""
        current = self.core.jobs[job]
        assert current.phase is Phase.PLANNING
        if phase is not Phase.PLANNING:
            self.tell(JobPlanned(job=job, attempt=current.attempt, plan=self.plan))
        if phase not in (Phase.PLANNING, Phase.PREPARING):
            for worker in current.workers:
                self.tell(WorkerPrepared(job=job, attempt=current.attempt, worker=worker))
        if phase is Phase.SAVING:
            self.finish(job)
        assert current.phase is phase

    def release(self, job: str, *, clean: bool = True) -> list[Command]:
        """Every worker that is asked to lets go; the commands of all of it."""
        current = self.core.jobs[job]
        return [
            command
            for worker in sorted(current.waiting_for)
            for command in self.tell(WorkerReleased(worker=worker, job=job, attempt=current.attempt, clean=clean))
        ]


@pytest.fixture
def plan(plan_of: Callable[..., Plan]) -> Plan:
    """Without snapshots, of which test_core_snapshots.py tells."""
    return plan_of(stages=1, microbatches=2, steps=2, window=4, recovery="off")


@pytest.fixture
def rehearsal(plan: Plan) -> Rehearsal:
    return Rehearsal(plan)


def state(job: str, state: str, attempt: int = 1, **fields: Any) -> RecordState:
    return RecordState(job=job, state=state, attempt=attempt, **fields)


def start_of(rehearsal: Rehearsal, job: str, attempt: int = 1, worker: str = "cpu-0") -> list[Command]:
    return [state(job, "planning", attempt), PlanJob(job=job, attempt=attempt, worker=worker)]


# --- a job from end to end


def test_every_worker_is_started_at_once() -> None:
    core = Core({"cpu-0": "cpu", "loader-0": "loader"})
    assert core.start() == [
        StartWorker(worker="cpu-0", delay_seconds=0.0),
        StartWorker(worker="loader-0", delay_seconds=0.0),
    ]


def test_a_job_goes_from_submission_to_completion(rehearsal: Rehearsal, plan: Plan) -> None:
    """Of the plan: the compute lane runs tasks 2 to 6, the load lane 0 and 1; the window is 4."""
    tell = rehearsal.tell
    assert rehearsal.submit("a") == [state("a", "queued"), *start_of(rehearsal, "a")]
    assert tell(JobPlanned(job="a", attempt=1, plan=plan)) == [
        Prepare(job="a", attempt=1, arenas=1, worker="cpu-0", position=0, plan=plan),
        Prepare(job="a", attempt=1, arenas=1, worker="loader-0", position=1, plan=plan),
    ]
    assert tell(WorkerPrepared(job="a", attempt=1, worker="loader-0")) == []
    assert tell(WorkerPrepared(job="a", attempt=1, worker="cpu-0")) == [
        state("a", "running"),
        Dispatch("a", 1, "loader-0", "load", ((0, (0, 1)), (1, (0, 1)))),
        Dispatch("a", 1, "cpu-0", "compute", ((0, (2, 3, 4, 5)),)),
    ]
    assert tell(TasksFinished("a", 1, "loader-0", "load", 4)) == []
    assert tell(TasksFinished("a", 1, "cpu-0", "compute", 1)) == [], "three of four are still to do"
    assert tell(TasksFinished("a", 1, "cpu-0", "compute", 1)) == [
        Dispatch("a", 1, "cpu-0", "compute", ((0, (6,)), (1, (2,)))),
    ]
    assert tell(TasksFinished("a", 1, "cpu-0", "compute", 4)) == [
        Dispatch("a", 1, "cpu-0", "compute", ((1, (3, 4, 5, 6)),)),
        RecordIteration("a", 1, 0),
    ]
    assert tell(TasksFinished("a", 1, "cpu-0", "compute", 4)) == [
        RecordIteration("a", 1, 1),
        SaveResult(job="a", attempt=1, arenas=1, worker="cpu-0"),
    ]
    assert tell(ResultSaved(job="a", attempt=1)) == [
        Release(worker="cpu-0", job="a", attempt=1),
        Release(worker="loader-0", job="a", attempt=1),
    ]
    assert tell(WorkerReleased(worker="loader-0", job="a", attempt=1, clean=True)) == []
    assert tell(WorkerReleased(worker="cpu-0", job="a", attempt=1, clean=True)) == [
        DropArenas(job="a", attempt=1),
        state("a", "completed", exit_code=0),
    ]
    assert rehearsal.core.jobs == {}
    assert rehearsal.core.free() == {"cpu": ["cpu-0", "cpu-1"], "loader": ["loader-0", "loader-1"]}


def test_before_a_handover_each_lane_is_sent_work_ahead_and_no_more_until_it_is_through(
    plan_of: Callable[..., Plan],
) -> None:
    rehearsal = Rehearsal(plan_of(stages=1, microbatches=2, steps=100, window=4, recovery="off"))
    rehearsal.submit("a")
    rehearsal.submit("b")
    rehearsal.bring("a", Phase.RUNNING)
    rehearsal.tell(HandoverBegun(windows=3))
    lanes = rehearsal.core.jobs["a"].lanes.values()
    assert [lane.sent for lane in lanes] == [12, 12]
    for lane in lanes:
        rehearsal.tell(TasksFinished("a", 1, lane.worker, lane.name, 9))
    assert [lane.sent for lane in lanes] == [12, 12]
    for lane in lanes:
        rehearsal.tell(TasksFinished("a", 1, lane.worker, lane.name, 1))
    assert [lane.sent for lane in lanes] == [14, 14]


def test_a_window_of_one_is_central_dispatch(rehearsal: Rehearsal, plan: Plan) -> None:
    rehearsal.plan = dataclasses.replace(plan, window=1)
    rehearsal.submit("a")
    rehearsal.bring("a", Phase.RUNNING)
    sent = [
        command.work
        for _ in range(6)
        for command in rehearsal.tell(TasksFinished("a", 1, "cpu-0", "compute", 1))
        if isinstance(command, Dispatch)
    ]
    assert sent == [((0, (3,)),), ((0, (4,)),), ((0, (5,)),), ((0, (6,)),), ((1, (2,)),), ((1, (3,)),)]


def test_an_iteration_is_done_when_its_slowest_lane_is(rehearsal: Rehearsal) -> None:
    rehearsal.submit("a")
    rehearsal.bring("a", Phase.RUNNING)
    tell = rehearsal.tell
    for _ in range(3):
        tell(TasksFinished("a", 1, "cpu-0", "compute", 2))
    assert [c for c in tell(TasksFinished("a", 1, "loader-0", "load", 1)) if isinstance(c, RecordIteration)] == []
    assert RecordIteration("a", 1, 0) in tell(TasksFinished("a", 1, "loader-0", "load", 1))


def test_a_job_that_was_taken_over_goes_on_counting_attempts(rehearsal: Rehearsal) -> None:
    assert rehearsal.submit("a", attempt=4) == [state("a", "queued", 4), *start_of(rehearsal, "a", 4)]


# --- who gets the workers


def test_two_jobs_that_fit_run_beside_each_other(rehearsal: Rehearsal) -> None:
    rehearsal.submit("a")
    rehearsal.submit("b")
    assert rehearsal.workers("a") == ("cpu-0", "loader-0")
    assert rehearsal.workers("b") == ("cpu-1", "loader-1")
    assert rehearsal.submit("c") == [state("c", "queued")]


def test_a_job_gets_all_its_workers_or_none(rehearsal: Rehearsal) -> None:
    rehearsal.submit("a")
    assert rehearsal.submit("wide", stages=2) == [state("wide", "queued")]
    assert rehearsal.workers("wide") == ()
    assert rehearsal.core.free() == {"cpu": ["cpu-1"], "loader": ["loader-1"]}
    rehearsal.tell(CancelRequested(job="a"))
    commands = rehearsal.release("a")
    assert all(command in commands for command in start_of(rehearsal, "wide"))
    assert rehearsal.workers("wide") == ("cpu-0", "cpu-1", "loader-1"), "it starts before the last worker of a is back"


def test_nobody_overtakes_a_job_that_waits_for_workers(rehearsal: Rehearsal) -> None:
    rehearsal.submit("a")
    rehearsal.submit("wide", stages=2)
    assert rehearsal.submit("narrow") == [state("narrow", "queued")], "a worker is free, but it is not its turn"
    assert rehearsal.tell(CancelRequested(job="wide"))[-2:] == start_of(rehearsal, "narrow", worker="cpu-1")


def test_a_job_on_its_way_to_another_attempt_is_not_overtaken_by_a_worker_that_joins(rehearsal: Rehearsal) -> None:
    """The place of a killed worker was up again before the others had let go, and the next job in line took it."""
    rehearsal.submit("wide", stages=2)
    rehearsal.submit("narrow")
    rehearsal.tell(WorkerLost(worker="cpu-0", exit_code=-9))
    assert rehearsal.tell(WorkerJoined(worker="cpu-0")) == []
    assert rehearsal.release("wide")[-2:] == start_of(rehearsal, "wide", attempt=2)
    assert rehearsal.workers("narrow") == ()


def test_jobs_start_by_priority_and_then_in_the_order_of_submission(rehearsal: Rehearsal) -> None:
    rehearsal.submit("running", stages=2)
    for job, priority in (("first", 0), ("second", 0), ("urgent", 5), ("idle", -5), ("third", 0)):
        rehearsal.submit(job, priority=priority)
    assert [job.name for job in rehearsal.core.queue()] == ["urgent", "first", "second", "third", "idle"]
    rehearsal.tell(CancelRequested(job="running"))
    rehearsal.release("running")
    assert [job.name for job in rehearsal.core.queue()] == ["second", "third", "idle"]


def test_a_job_waits_for_workers_that_are_not_up_yet() -> None:
    core = Core({"cpu-0": "cpu", "loader-0": "loader"})
    assert core.handle(JobSubmitted(job="a", needs={"cpu": 1, "loader": 1}), 0.0) == [state("a", "queued")]
    assert core.handle(WorkerJoined(worker="cpu-0"), 0.0) == []
    assert core.handle(WorkerJoined(worker="loader-0"), 0.0) == [
        state("a", "planning"),
        PlanJob(job="a", attempt=1, worker="cpu-0"),
    ]


@pytest.fixture
def of_a_device() -> Core:
    """A job of a device with a host, which has just begun."""
    names = {"cpu-0": "cpu", "gpu-0": "gpu", "loader-0": "loader"}
    core = Core(names)
    for name in names:
        core.handle(WorkerJoined(worker=name), 0.0)
    submitted = JobSubmitted(job="a", needs={"cpu": 1, "gpu": 1, "loader": 1}, inspector=1)
    assert core.handle(submitted, 0.0) == [
        state("a", "queued"),
        state("a", "planning"),
        PlanJob(job="a", attempt=1, worker="gpu-0"),
    ]
    return core


def test_a_device_s_worker_that_is_killed_while_it_inspects_is_asked_again(of_a_device: Core) -> None:
    core = of_a_device
    assert core.handle(WorkerLost(worker="gpu-0", exit_code=-9), 0.0)[-2:] == [
        Release(worker="cpu-0", job="a", attempt=1),
        Release(worker="loader-0", job="a", attempt=1),
    ]
    for worker in ("cpu-0", "loader-0"):
        core.handle(WorkerReleased(worker=worker, job="a", attempt=1, clean=True), 0.0)
    assert core.handle(WorkerJoined(worker="gpu-0"), 0.0) == [
        state("a", "planning", 2),
        PlanJob(job="a", attempt=2, worker="gpu-0"),
    ]


def test_a_host_that_dies_while_a_device_inspects_ends_the_attempt_too(of_a_device: Core) -> None:
    core = of_a_device
    core.handle(WorkerLost(worker="cpu-0", exit_code=-11), 0.0)
    assert core.jobs["a"].phase is Phase.RELEASING
    assert core.jobs["a"].waiting_for == {"gpu-0", "loader-0"}


# --- cancel and fault


def test_a_job_that_waits_fails_where_it_can_have_no_directory_and_lets_those_behind_it_pass(
    rehearsal: Rehearsal,
) -> None:
    rehearsal.submit("a")
    rehearsal.submit("wide", stages=2)
    rehearsal.submit("narrow")
    fault = {"reason": "run-directory", "message": "runs/wide is a FIFO", "exit_code": 1}
    commands = rehearsal.tell(JobFaulted(job="wide", attempt=1, **fault))  # type: ignore[arg-type]
    assert commands == [state("wide", "failed", **fault), *start_of(rehearsal, "narrow", worker="cpu-1")]


def test_a_queued_job_that_is_cancelled_is_gone_at_once(rehearsal: Rehearsal) -> None:
    rehearsal.submit("running", stages=2)
    rehearsal.submit("a")
    assert rehearsal.tell(CancelRequested(job="a")) == [
        state("a", "cancelled", reason="cancelled", message="cancelled on request", exit_code=143)
    ]
    assert rehearsal.tell(CancelRequested(job="a")) == [], "it has ended"


@pytest.mark.parametrize("phase", ACTIVE)
def test_a_job_that_is_cancelled_lets_go_of_its_workers_first(rehearsal: Rehearsal, phase: Phase) -> None:
    rehearsal.submit("a")
    rehearsal.bring("a", phase)
    assert rehearsal.tell(CancelRequested(job="a")) == [
        Release(worker="cpu-0", job="a", attempt=1),
        Release(worker="loader-0", job="a", attempt=1),
        SetTimer(seconds=CANCEL_SECONDS),
    ]
    assert rehearsal.tell(CancelRequested(job="a")) == []
    assert rehearsal.release("a") == [
        DropArenas(job="a", attempt=1),
        state("a", "cancelled", reason="cancelled", message="cancelled on request", exit_code=143),
    ]


def test_a_cancel_that_comes_after_the_result_changes_nothing(rehearsal: Rehearsal) -> None:
    rehearsal.submit("a")
    rehearsal.bring("a", Phase.SAVING)
    rehearsal.tell(ResultSaved(job="a", attempt=1))
    assert rehearsal.tell(CancelRequested(job="a")) == [SetTimer(seconds=CANCEL_SECONDS)]
    assert rehearsal.release("a")[-1] == state("a", "completed", exit_code=0)


def test_a_cancel_while_a_job_recovers_ends_it(rehearsal: Rehearsal) -> None:
    rehearsal.submit("a")
    rehearsal.bring("a", Phase.RUNNING)
    rehearsal.tell(WorkerLost(worker="cpu-0", exit_code=-9))
    assert rehearsal.tell(CancelRequested(job="a")) == [SetTimer(seconds=CANCEL_SECONDS)]
    assert rehearsal.release("a")[-1].state == "cancelled"  # type: ignore[union-attr]  # a RecordState
    assert rehearsal.core.jobs == {}


def test_a_job_that_recovers_keeps_its_place_until_it_is_cancelled(rehearsal: Rehearsal) -> None:
    rehearsal.submit("a", stages=2)
    rehearsal.submit("b")
    rehearsal.tell(WorkerLost(worker="loader-0", exit_code=-9))
    assert rehearsal.tell(WorkerReleased(worker="cpu-0", job="a", attempt=1, clean=True)) == []
    assert rehearsal.tell(CancelRequested(job="a")) == [
        SetTimer(seconds=CANCEL_SECONDS),
        *start_of(rehearsal, "b"),
    ]


@pytest.mark.parametrize("phase", ACTIVE)
def test_a_fault_fails_the_job_with_its_reason(rehearsal: Rehearsal, phase: Phase) -> None:
    rehearsal.submit("a")
    rehearsal.bring("a", phase)
    fault = JobFaulted(job="a", attempt=1, reason="user-error", message="Traceback ...", exit_code=1)
    assert rehearsal.tell(fault) == [
        Release(worker="cpu-0", job="a", attempt=1),
        Release(worker="loader-0", job="a", attempt=1),
    ]
    second = dataclasses.replace(fault, reason="out-of-memory")
    assert rehearsal.tell(second) == [], "the first fault is the one that tells"
    assert rehearsal.release("a") == [
        DropArenas(job="a", attempt=1),
        state("a", "failed", reason="user-error", message="Traceback ...", exit_code=1),
    ]


def test_a_fault_leaves_other_jobs_untouched(rehearsal: Rehearsal) -> None:
    rehearsal.submit("a")
    rehearsal.submit("b")
    rehearsal.bring("b", Phase.RUNNING)
    rehearsal.tell(JobFaulted(job="a", attempt=1, reason="user-error", message="", exit_code=1))
    rehearsal.release("a")
    rehearsal.finish("b")
    assert rehearsal.core.jobs["b"].phase is Phase.SAVING


# --- workers that are lost


@pytest.mark.parametrize("phase", ACTIVE)
def test_a_job_whose_worker_is_killed_starts_again(rehearsal: Rehearsal, phase: Phase) -> None:
    rehearsal.submit("a")
    rehearsal.bring("a", phase)
    message = "cpu-0 was killed; the job starts again (attempt 2)"
    assert rehearsal.tell(WorkerLost(worker="cpu-0", exit_code=-9)) == [
        StartWorker(worker="cpu-0", delay_seconds=0.0),
        state("a", "recovering", reason="worker-lost", message=message),
        Release(worker="loader-0", job="a", attempt=1),
    ]
    commands = rehearsal.tell(WorkerReleased(worker="loader-0", job="a", attempt=1, clean=True))
    assert commands == [
        DropArenas(job="a", attempt=1),
        state("a", "queued", 2),
        *start_of(rehearsal, "a", 2, worker="cpu-1"),
    ]
    rehearsal.bring("a", Phase.SAVING)
    rehearsal.tell(ResultSaved(job="a", attempt=2))
    assert rehearsal.release("a")[-1] == state("a", "completed", 2, exit_code=0)


def test_a_job_that_starts_again_keeps_its_place_in_the_queue(rehearsal: Rehearsal) -> None:
    rehearsal.submit("a", stages=2)
    rehearsal.submit("b")
    rehearsal.tell(WorkerLost(worker="cpu-0", exit_code=-9))
    rehearsal.release("a")
    assert [job.name for job in rehearsal.core.queue()] == ["a", "b"]
    assert rehearsal.tell(WorkerJoined(worker="cpu-0")) == start_of(rehearsal, "a", 2)


OF_NATIVE_CODE = "native code that the job calls does so; workers.log in the daemon's state directory may say more"


@pytest.mark.parametrize(
    ("exit_code", "message", "told"),
    [
        (-11, "cpu-0 died of signal 11 (SIGSEGV) while it ran this job (attempt 1); " + OF_NATIVE_CODE, 139),
        (-40, "cpu-0 died of signal 40 while it ran this job (attempt 1); " + OF_SENT_SIGNAL, 168),
        (-6, "cpu-0 died of signal 6 (SIGABRT) while it ran this job (attempt 1); " + OF_NATIVE_CODE, 134),
        (-15, "cpu-0 died of signal 15 (SIGTERM) while it ran this job (attempt 1); " + OF_SENT_SIGNAL, 143),
        (17, "the job's code ended cpu-0 with exit code 17; it must raise an exception instead", 17),
        (0, "the job's code ended cpu-0 with exit code 0; it must raise an exception instead", 1),
    ],
)
def test_a_job_whose_own_code_ends_its_worker_fails(
    rehearsal: Rehearsal, exit_code: int, message: str, told: int
) -> None:
    rehearsal.submit("a")
    rehearsal.bring("a", Phase.RUNNING)
    assert rehearsal.tell(WorkerLost(worker="cpu-0", exit_code=exit_code)) == [
        StartWorker(worker="cpu-0", delay_seconds=0.0),
        Release(worker="loader-0", job="a", attempt=1),
    ]
    assert rehearsal.release("a") == [
        DropArenas(job="a", attempt=1),
        state("a", "failed", reason="worker-lost", message=message, exit_code=told),
    ]


def test_a_job_for_which_there_is_too_little_memory_does_not_start_again(rehearsal: Rehearsal) -> None:
    """It was killed, and started again, four times."""
    rehearsal.submit("a")
    rehearsal.bring("a", Phase.RUNNING)
    rehearsal.tell(
        WorkerLost(worker="cpu-0", exit_code=-9, shortage="was killed by the kernel for lack of memory: ...")
    )
    message = f"cpu-0 was killed by the kernel for lack of memory: ... (attempt 1); {MEMORY_REMEDY}"
    assert rehearsal.release("a")[-1] == state(
        "a", "failed", reason="out-of-memory", message=message, exit_code=128 + 9
    )


def test_a_job_that_is_killed_again_and_again_is_no_accident(rehearsal: Rehearsal) -> None:
    rehearsal.submit("a")
    for loss in range(1, MAX_LOSSES + 2):
        worker = rehearsal.workers("a")[0]
        rehearsal.bring("a", Phase.RUNNING)
        rehearsal.tell(WorkerLost(worker=worker, exit_code=-9))
        rehearsal.tell(WorkerJoined(worker=worker))
        last = rehearsal.release("a")[-1]
        if loss <= MAX_LOSSES:
            assert isinstance(last, PlanJob)
    assert isinstance(last, RecordState)
    assert (last.state, last.reason, last.attempt, last.exit_code) == ("failed", "worker-lost", MAX_LOSSES + 1, 137)
    reports = (last.message or "").splitlines()[2:]
    assert [report.partition(":")[0] for report in reports] == [f"{n}. attempt {n}" for n in range(1, MAX_LOSSES + 2)]


def test_an_attempt_counts_its_iterations_from_the_beginning(rehearsal: Rehearsal) -> None:
    rehearsal.submit("a")
    rehearsal.bring("a", Phase.SAVING)
    rehearsal.tell(WorkerLost(worker="loader-0", exit_code=-9))
    rehearsal.release("a")
    rehearsal.bring("a", Phase.RUNNING)
    recorded = []
    while rehearsal.core.jobs["a"].phase is Phase.RUNNING:
        for lane in rehearsal.core.jobs["a"].lanes.values():
            done = TasksFinished("a", 2, lane.worker, lane.name, lane.sent - lane.finished)
            recorded += [command for command in rehearsal.tell(done) if isinstance(command, RecordIteration)]
    assert recorded == [RecordIteration("a", 2, 0), RecordIteration("a", 2, 1)]


def test_all_workers_of_a_job_can_be_lost_at_once(rehearsal: Rehearsal) -> None:
    rehearsal.submit("a")
    rehearsal.bring("a", Phase.RUNNING)
    rehearsal.tell(WorkerLost(worker="loader-0", exit_code=-9))
    commands = rehearsal.tell(WorkerLost(worker="cpu-0", exit_code=-9))
    assert commands[:3] == [
        StartWorker(worker="cpu-0", delay_seconds=0.0),
        DropArenas(job="a", attempt=1),
        state("a", "queued", 2),
    ]


def test_a_worker_that_keeps_failing_is_started_later_each_time(rehearsal: Rehearsal) -> None:
    def delay() -> float:
        [command] = rehearsal.tell(WorkerLost(worker="cpu-0", exit_code=None))
        assert isinstance(command, StartWorker)
        return command.delay_seconds

    delays = [delay() for _ in range(12)]
    assert delays[:4] == [0.0, 0.1, 0.2, 0.4]
    assert delays == sorted(delays)
    assert delays[-1] == back_off.MAX_SECONDS


def test_a_worker_that_did_its_job_is_forgiven_its_failures(rehearsal: Rehearsal) -> None:
    for _ in range(3):
        rehearsal.tell(WorkerLost(worker="cpu-0", exit_code=1))
    rehearsal.tell(WorkerJoined(worker="cpu-0"))
    rehearsal.submit("a")
    rehearsal.tell(CancelRequested(job="a"))
    rehearsal.release("a")
    assert rehearsal.tell(WorkerLost(worker="cpu-0", exit_code=1)) == [StartWorker(worker="cpu-0", delay_seconds=0.0)]


def test_so_is_one_that_was_prepared_for_a_job(rehearsal: Rehearsal) -> None:
    """One that was lost for the second time in a day started a tenth of a second later."""
    for _ in range(3):
        rehearsal.tell(WorkerLost(worker="cpu-0", exit_code=1))
    rehearsal.tell(WorkerJoined(worker="cpu-0"))
    rehearsal.submit("a")
    rehearsal.tell(JobPlanned(job="a", attempt=1, plan=rehearsal.plan))
    rehearsal.tell(WorkerPrepared(job="a", attempt=1, worker="cpu-0"))
    assert StartWorker(worker="cpu-0", delay_seconds=0.0) in rehearsal.tell(WorkerLost(worker="cpu-0", exit_code=1))


def test_a_worker_that_a_job_left_unclean_is_replaced(rehearsal: Rehearsal) -> None:
    rehearsal.submit("a")
    rehearsal.tell(CancelRequested(job="a"))
    assert rehearsal.tell(WorkerReleased(worker="cpu-0", job="a", attempt=1, clean=False)) == [
        KillWorker(worker="cpu-0", cause="a left it unclean")
    ]
    assert rehearsal.core.free()["cpu"] == ["cpu-1"]
    rehearsal.tell(WorkerReleased(worker="loader-0", job="a", attempt=1, clean=True))
    assert rehearsal.tell(WorkerLost(worker="cpu-0", exit_code=-9)) == [StartWorker(worker="cpu-0", delay_seconds=0.0)]


def test_a_worker_that_does_not_let_go_in_time_is_killed(rehearsal: Rehearsal) -> None:
    rehearsal.submit("a")
    rehearsal.tell(JobFaulted(job="a", attempt=1, reason="user-error", message="", exit_code=1))
    rehearsal.tell(WorkerReleased(worker="loader-0", job="a", attempt=1, clean=True))
    rehearsal.now += RELEASE_SECONDS - 0.1
    assert rehearsal.tell(Ticked()) == []
    rehearsal.now += 0.1
    assert rehearsal.tell(Ticked()) == [
        KillWorker(worker="cpu-0", cause=f"did not let go of a within {RELEASE_SECONDS:g} s")
    ]
    commands = rehearsal.tell(WorkerLost(worker="cpu-0", exit_code=-9))
    assert commands[-1].state == "failed"  # type: ignore[union-attr]  # a RecordState
    assert rehearsal.tell(Ticked()) == []


def lets_it_begin(rehearsal: Rehearsal) -> None:
    """Nothing has gone wrong before the cancel."""


def loses_a_worker(rehearsal: Rehearsal) -> None:
    rehearsal.tell(WorkerLost(worker="cpu-0", exit_code=-9))


def fails(rehearsal: Rehearsal) -> None:
    rehearsal.tell(JobFaulted(job="a", attempt=1, reason="user-error", message="", exit_code=1))


@pytest.mark.parametrize("before", [lets_it_begin, loses_a_worker, fails])
@pytest.mark.parametrize("phase", ACTIVE)
def test_a_cancelled_job_waits_a_second_for_its_workers_whatever_it_was_doing(
    rehearsal: Rehearsal, phase: Phase, before: Callable[[Rehearsal], None]
) -> None:
    """A worker that was stopped, or deep in code that never returns, held a cancel back for 10 s."""
    rehearsal.submit("a")
    rehearsal.bring("a", phase)
    before(rehearsal)
    assert rehearsal.tell(CancelRequested(job="a"))[-1] == SetTimer(seconds=CANCEL_SECONDS)
    waiting = rehearsal.core.jobs["a"].waiting_for
    rehearsal.now += CANCEL_SECONDS
    cause = f"did not let go of a within {CANCEL_SECONDS:g} s"
    assert rehearsal.tell(Ticked()) == [KillWorker(worker=worker, cause=cause) for worker in sorted(waiting)]
    for worker in sorted(waiting):
        commands = rehearsal.tell(WorkerLost(worker=worker, exit_code=-9))
    assert commands[-1].state == ("failed" if before is fails else "cancelled")  # type: ignore[union-attr]


def test_a_second_cancel_gives_no_more_time(rehearsal: Rehearsal) -> None:
    rehearsal.submit("a")
    rehearsal.tell(CancelRequested(job="a"))
    rehearsal.now += CANCEL_SECONDS / 2
    assert rehearsal.tell(CancelRequested(job="a")) == []
    rehearsal.now += CANCEL_SECONDS / 2
    assert len(rehearsal.tell(Ticked())) == 2
    assert rehearsal.tell(CancelRequested(job="a")) == []


# --- the directory, and the end of the daemon


MAPPED = (Phase.RUNNING, Phase.SAVING)


def hand_on(job: str, attempt: int) -> list[Command]:
    return [HandMemoryOn(job=job, attempt=attempt, worker=worker) for worker in ("cpu-0", "loader-0")]


def test_a_lost_directory_starts_a_job_again_that_is_being_prepared(rehearsal: Rehearsal) -> None:
    rehearsal.submit("a")
    rehearsal.submit("planned")
    rehearsal.submit("waiting")
    rehearsal.bring("a", Phase.PREPARING)
    message = "the directory process was lost; the job starts again (attempt 2)"
    assert rehearsal.tell(DirectoryLost()) == [
        state("a", "recovering", reason="directory-lost", message=message),
        Release(worker="cpu-0", job="a", attempt=1),
        Release(worker="loader-0", job="a", attempt=1),
    ]
    assert rehearsal.release("a")[-2:] == start_of(rehearsal, "a", 2)


@pytest.mark.parametrize("phase", MAPPED)
def test_a_job_that_runs_goes_on_while_its_workers_hand_its_memory_to_another_directory(
    rehearsal: Rehearsal, phase: Phase
) -> None:
    rehearsal.submit("a")
    rehearsal.submit("planned")
    rehearsal.submit("waiting")
    rehearsal.bring("a", phase)
    for _ in range(2 * MAX_DIRECTORY_LOSSES):
        assert rehearsal.tell(DirectoryLost()) == hand_on("a", 1)
        assert rehearsal.core.jobs["a"].phase is phase


@pytest.mark.parametrize("phase", ACTIVE)
def test_a_worker_that_misses_the_directory_first_starts_the_job_again_once(rehearsal: Rehearsal, phase: Phase) -> None:
    """It is heard in any order: the worker's own socket, and the fork server's word that the directory has died."""
    rehearsal.submit("a")
    rehearsal.bring("a", phase)
    missed = DirectoryMissed(job="a", attempt=1, message="state-0-0 is not there")
    message = "state-0-0 is not there; the job starts again (attempt 2)"
    assert rehearsal.tell(missed) == [
        *(hand_on("a", 1) if phase in MAPPED else ()),
        state("a", "recovering", reason="directory-lost", message=message),
        Release(worker="cpu-0", job="a", attempt=1),
        Release(worker="loader-0", job="a", attempt=1),
    ]
    assert rehearsal.tell(missed) == []
    assert rehearsal.tell(DirectoryLost()) == []
    assert rehearsal.release("a")[-2:] == start_of(rehearsal, "a", 2)
    assert rehearsal.tell(missed) == [], "of an attempt that is over"
    assert rehearsal.tell(DirectoryLost()) == [], "it is being planned: there is nothing yet that it could lose"


def test_a_job_that_loses_the_directory_again_and_again_fails(rehearsal: Rehearsal) -> None:
    """Every attempt lost it the same way, and began anew, for ever."""
    rehearsal.submit("a")
    for loss in range(1, MAX_DIRECTORY_LOSSES + 2):
        rehearsal.bring("a", Phase.PREPARING)
        rehearsal.tell(
            DirectoryLost() if loss % 2 else DirectoryMissed(job="a", attempt=loss, message="it is not there")
        )
        last = rehearsal.release("a")[-1]
    assert isinstance(last, RecordState)
    assert (last.state, last.reason, last.exit_code) == ("failed", "directory-lost", 70)
    assert "for the 11th time in this job" in (last.message or "")


def test_a_daemon_that_drains_starts_nothing_and_finishes_what_runs(rehearsal: Rehearsal) -> None:
    rehearsal.submit("a")
    assert rehearsal.tell(DrainRequested(now=False)) == []
    assert rehearsal.submit("b") == [state("b", "queued")]
    rehearsal.bring("a", Phase.SAVING)
    rehearsal.tell(ResultSaved(job="a", attempt=1))
    assert rehearsal.release("a")[-1] == state("a", "completed", exit_code=0)
    assert [job.name for job in rehearsal.core.queue()] == ["b"]


def test_a_daemon_that_drains_now_puts_what_runs_back_into_the_queue(rehearsal: Rehearsal) -> None:
    rehearsal.submit("a")
    rehearsal.bring("a", Phase.RUNNING)
    assert rehearsal.tell(DrainRequested(now=True)) == [
        state("a", "recovering", reason="shutdown", message="the daemon is shutting down"),
        Release(worker="cpu-0", job="a", attempt=1),
        Release(worker="loader-0", job="a", attempt=1),
    ]
    assert rehearsal.release("a") == [DropArenas(job="a", attempt=1), state("a", "queued", 2)]
    assert rehearsal.tell(WorkerLost(worker="cpu-1", exit_code=0)) == [], "no new workers in a daemon that ends"


# --- late reports, and bugs of ours


def late_events(plan: Plan) -> list[Event]:
    """What the first attempt's workers may still have on the way."""
    return [
        JobPlanned(job="a", attempt=1, plan=plan),
        WorkerPrepared(job="a", attempt=1, worker="cpu-1"),
        TasksFinished("a", 1, "cpu-1", "compute", 2),
        JobFaulted(job="a", attempt=1, reason="user-error", message="", exit_code=1),
        DirectoryMissed(job="a", attempt=1, message=""),
        ResultSaved(job="a", attempt=1),
        WorkerReleased(worker="cpu-1", job="a", attempt=1, clean=True),
    ]


@pytest.mark.parametrize("number", range(7))
@pytest.mark.parametrize("phase", [*ACTIVE, Phase.RELEASING])
def test_a_late_report_of_an_old_attempt_is_dropped(
    rehearsal: Rehearsal, plan: Plan, phase: Phase, number: int
) -> None:
    event = late_events(plan)[number]
    rehearsal.submit("a")
    rehearsal.tell(WorkerLost(worker="cpu-0", exit_code=-9))
    rehearsal.release("a")
    assert rehearsal.core.jobs["a"].attempt == 2
    rehearsal.bring("a", phase if phase is not Phase.RELEASING else Phase.PLANNING)
    if phase is Phase.RELEASING:
        rehearsal.tell(CancelRequested(job="a"))
    before = copy.deepcopy(rehearsal.core.jobs["a"])
    assert rehearsal.tell(event) == []
    assert rehearsal.core.jobs["a"] == before


@pytest.mark.parametrize("number", range(7))
def test_a_report_of_a_job_that_has_ended_is_dropped(rehearsal: Rehearsal, plan: Plan, number: int) -> None:
    rehearsal.submit("a")
    rehearsal.tell(CancelRequested(job="a"))
    rehearsal.release("a")
    assert rehearsal.tell(late_events(plan)[number]) == []


def test_a_lane_that_finishes_more_than_it_was_sent_is_told_with_the_jobs_story(rehearsal: Rehearsal) -> None:
    rehearsal.submit("a")
    rehearsal.bring("a", Phase.RUNNING)
    with pytest.raises(IllegalMove, match=r"a, attempt 1: .* more than it was sent; queued → planning: holds cpu-0"):
        rehearsal.tell(TasksFinished("a", 1, "cpu-0", "compute", 5))


def test_a_job_that_is_submitted_twice_is_a_bug_of_ours(rehearsal: Rehearsal) -> None:
    rehearsal.submit("a")
    with pytest.raises(AssertionError):
        rehearsal.submit("a")


# --- a plan that needs fewer workers than the job was given to choose among


def test_a_plan_lets_go_of_the_workers_that_it_has_nothing_for_and_others_start_on_them(plan: Plan) -> None:
    rehearsal = Rehearsal(plan)
    rehearsal.submit("a", stages=2)
    rehearsal.submit("b")
    assert rehearsal.core.jobs["b"].phase is Phase.QUEUED
    commands = rehearsal.tell(JobPlanned(job="a", attempt=1, plan=plan))
    assert [type(command) for command in commands if not isinstance(command, RecordState)] == [
        Prepare,
        Prepare,
        PlanJob,
    ]
    assert rehearsal.workers("a") == ("cpu-0", "loader-0")
    assert rehearsal.workers("b") == ("cpu-1", "loader-1")
    rehearsal.tell(WorkerLost(worker="cpu-0", exit_code=-9))
    rehearsal.tell(WorkerReleased(worker="loader-0", job="a", attempt=1, clean=True))
    rehearsal.tell(WorkerJoined(worker="cpu-0"))
    assert rehearsal.core.jobs["a"].needs == {"cpu": 1, "loader": 1}, "another attempt needs no more"
    assert rehearsal.workers("a") == ("cpu-0", "loader-0")


def test_a_device_that_has_only_inspected_is_replaced(plan: Plan) -> None:
    core = Core({"cpu-0": "cpu", "gpu-0": "gpu", "loader-0": "loader"})
    for worker in core.workers.values():
        core.handle(WorkerJoined(worker=worker.name), 0.0)
    core.handle(JobSubmitted(job="a", needs={"cpu": 1, "gpu": 1, "loader": 1}, inspector=1), 0.0)
    commands = core.handle(JobPlanned(job="a", attempt=1, plan=plan), 0.0)
    assert commands[0] == KillWorker(worker="gpu-0", cause="it has inspected a, which goes on without it")
    assert core.jobs["a"].workers == ("cpu-0", "loader-0")
    assert [type(command) for command in core.handle(WorkerLost(worker="gpu-0", exit_code=-9), 0.0)] == [StartWorker]
    assert core.jobs["a"].phase is Phase.PREPARING
