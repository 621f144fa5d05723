"""What a job's owner reads of the workers that it lost: one report for each while it comes no further."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from weft.plan.plan import Plan
from weft.scheduler.adapting.lane_state import LaneState
from weft.scheduler.core import losses
from weft.scheduler.core.events import WorkerLost
from weft.scheduler.core.job import Job, Phase


@pytest.fixture
def job(plan_of: Callable[..., Plan]) -> Job:
    """One that trains: two stages, of which each lane has come to the third task of the eleventh iteration."""
    job = Job("a", {"cpu": 2, "loader": 1}, 0, 0, 1, 1, phase=Phase.RUNNING)
    job.plan = plan_of(stages=2, microbatches=2, steps=20, window=4)
    job.workers = ("cpu-0", "cpu-1", "loader-0")
    for lane, program in job.plan.graph.programs.items():
        told = 10 * len(program) + 2
        state = LaneState(job.workers[lane.worker], lane.name, program, 20 * len(program), told + 1, told)
        job.lanes[state.worker, state.name] = state
    job.iterations_done = 10
    return job


def lose(job: Job, worker: str = "cpu-0", exit_code: int | None = -9, printed: str = "") -> None:
    losses.note(WorkerLost(worker=worker, exit_code=exit_code, printed=printed), job)


def test_one_report_has_the_worker_its_end_the_step_and_where_its_lane_was(job: Job) -> None:
    lose(job)
    assert job.losses == [
        "attempt 1: cpu-0 died of signal 9 (SIGKILL) after step 10; "
        f"its compute lane had reported all before {place_of(job, 'cpu-0')} of step 11"
    ]


def test_of_a_lane_that_begins_what_is_ready_it_is_told_how_many_tasks_had_ended(
    job: Job, plan_of: Callable[..., Plan]
) -> None:
    job.plan = plan_of(stages=2, microbatches=2, steps=20, window=4, schedule="dynamic")
    lose(job)
    assert job.losses[0].endswith("; its compute lane had reported 2 of 6 tasks of step 11")


def place_of(job: Job, worker: str) -> str:
    assert job.plan is not None
    lane = job.lanes[worker, "compute"]
    return str(job.plan.graph.tasks[lane.program[2]])


def test_what_the_jobs_code_printed_there_stands_below(job: Job) -> None:
    lose(job, "cpu-1", 17, "the last\nwords\n")
    assert job.losses[0].splitlines()[1:] == ["     | the last", "     | words"]
    assert job.losses[0].startswith("attempt 1: cpu-1 ended with exit code 17 after step 10; ")


def test_the_kernels_kill_is_told_as_what_it_was(job: Job) -> None:
    job.phase = Phase.PREPARING
    losses.note(WorkerLost(worker="cpu-0", exit_code=-9, shortage="was killed for lack of memory"), job)
    assert job.losses == ["attempt 1: cpu-0 was killed for lack of memory while it was prepared"]


@pytest.mark.parametrize(
    ("phase", "told"),
    [
        (Phase.PLANNING, "while it was inspected"),
        (Phase.PREPARING, "while it was prepared"),
        (Phase.SAVING, "while its weights were saved"),
    ],
)
def test_where_nothing_trains_the_phase_is_told(job: Job, phase: Phase, told: str) -> None:
    job.phase = phase
    lose(job)
    assert job.losses == [f"attempt 1: cpu-0 died of signal 9 (SIGKILL) {told}"]


def test_before_the_first_step_is_reported_there_is_none_to_name(job: Job) -> None:
    job.iterations_done, job.lanes = 0, {}
    lose(job)
    assert job.losses == ["attempt 1: cpu-0 died of signal 9 (SIGKILL) before any step was reported"]


def test_reports_are_numbered_once_there_are_two(job: Job) -> None:
    job.phase = Phase.PREPARING
    lose(job)
    assert losses.told(job) == "", "the message is about that one"
    job.attempt = 2
    lose(job, "loader-0", -11)
    assert losses.told(job).splitlines() == [
        "",
        "2 attempts ended so before the job came any further:",
        "1. attempt 1: cpu-0 died of signal 9 (SIGKILL) while it was prepared",
        "2. attempt 2: loader-0 died of signal 11 (SIGSEGV) while it was prepared",
    ]


def test_a_job_that_has_come_further_begins_its_reports_anew(job: Job) -> None:
    lose(job)
    lose(job)
    assert len(job.losses) == 2
    job.iterations_done = 11
    lose(job, "cpu-1")
    assert len(job.losses) == 1
    assert "cpu-1" in job.losses[0]
