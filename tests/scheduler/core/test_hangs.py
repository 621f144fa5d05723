"""Whose doing a hang is, from what workers say of their lanes; and what the core does about the one that it is."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from weft.plan.graph import Lane
from weft.plan.kinds import Kind
from weft.plan.plan import Plan
from weft.scheduler.core.events import KillWorker, RecordState, Release, WorkerHung, WorkerJoined, WorkerLost
from weft.scheduler.core.hangs import FIRST, MULTIPLE, Hang, SeenLane, SeenWorker, deadline, find_hang, who_waits
from weft.scheduler.core.job import Phase
from weft.scheduler.core.outcomes import MAX_LOSSES

_CORE = runpy.run_path(str(Path(__file__).with_name("test_core.py")))
Rehearsal = _CORE["Rehearsal"]

LEAST, SLOWEST = 60.0, 0.5
WORKERS = ("cpu-0", "cpu-1", "loader-0")  # by position in the plan


@pytest.fixture
def plan(plan_of: Callable[..., Plan]) -> Plan:
    return plan_of(stages=2, microbatches=2, steps=40)


class Seen:
    """What workers say: every lane waits for the one before it, but for those that a test sets."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.states: dict[str, str] = {}
        self.lanes = {
            lane: SeenLane(
                worker=WORKERS[lane.worker],
                name=lane.name,
                task=program[0],
                iteration=7,
                seconds=100.0,
                waits_for=self.task((lane.worker - 1) % len(WORKERS)),
            )
            for lane, program in plan.graph.programs.items()
        }

    def task(self, worker: int) -> int:
        return next(program[0] for lane, program in self.plan.graph.programs.items() if lane.worker == worker)

    def runs(self, worker: str, seconds: float) -> None:
        """Its lane is in its task, and has been for so long."""
        lane = next(lane for lane in self.lanes if WORKERS[lane.worker] == worker)
        was = self.lanes[lane]
        self.lanes[lane] = SeenLane(
            worker=worker, name=was.name, task=was.task, iteration=7, seconds=seconds, waits_for=None
        )

    def workers(self) -> list[SeenWorker]:
        return [
            SeenWorker(
                name=name,
                state=self.states.get(name, "answers"),  # type: ignore[arg-type]  # of its values
                lanes=tuple(seen for lane, seen in self.lanes.items() if lane.worker == position),
            )
            for position, name in enumerate(WORKERS)
        ]

    def find(self, quiet: float = 1000.0, slowest: float | None = SLOWEST) -> Hang | None:
        return find_hang(self.workers(), self.plan, quiet, LEAST, lambda lane: slowest)


@pytest.fixture
def seen(plan: Plan) -> Seen:
    return Seen(plan)


def test_a_deadline_follows_from_the_slowest_and_where_none_is_known_it_is_far() -> None:
    assert deadline(LEAST, SLOWEST) == LEAST + MULTIPLE * SLOWEST
    assert deadline(LEAST, None) == FIRST * LEAST


@pytest.mark.parametrize("worker", WORKERS)
def test_a_stopped_worker_is_at_fault_whatever_others_are_in(seen: Seen, worker: str) -> None:
    for each in WORKERS:
        seen.runs(each, 900.0)
    seen.states[worker] = "stopped"
    assert seen.find(quiet=LEAST) == Hang(cause="stopped", worker=worker, message=f"{worker} is stopped, as by SIGSTOP")
    assert seen.find(quiet=LEAST - 1) is None


def test_a_worker_in_a_task_is_at_fault_once_that_has_taken_too_long(seen: Seen) -> None:
    late = deadline(LEAST, SLOWEST)
    seen.runs("cpu-1", late - 1)
    assert seen.find() is None, "it is slow, and those that wait are not to blame"
    seen.runs("cpu-1", late)
    hang = seen.find()
    assert hang is not None
    assert (hang.cause, hang.worker) == ("task", "cpu-1")
    assert (
        hang.message
        == "cpu-1/compute has been in FORWARD(1,0) of step 8 for 65 s, and others like it took 0.5 s at most"
    )


def test_a_data_set_that_never_returns_is_its_loader_s(seen: Seen) -> None:
    seen.runs("loader-0", 700.0)
    hang = seen.find(slowest=None)
    assert hang is not None
    assert (hang.cause, hang.worker) == ("task", "loader-0")
    assert "loader-0/load has been in LOAD(0,0) of step 8 for 700 s, and none like it is known" in hang.message


def test_a_first_call_may_take_many_times_as_long(seen: Seen) -> None:
    seen.runs("cpu-0", FIRST * LEAST - 1)
    assert seen.find(slowest=None) is None
    assert seen.find(slowest=SLOWEST) is not None


def test_of_several_that_are_late_it_is_the_one_that_has_been_longest(seen: Seen) -> None:
    seen.runs("cpu-0", 200.0)
    seen.runs("loader-0", 300.0)
    hang = seen.find()
    assert hang is not None
    assert hang.worker == "loader-0"


def test_one_that_does_not_answer_is_at_fault_after_the_longest_of_its_deadlines(seen: Seen) -> None:
    seen.states["cpu-1"] = "silent"
    late = deadline(LEAST, SLOWEST)
    assert seen.find(quiet=late - 1) is None
    hang = seen.find(quiet=late)
    assert hang is not None
    assert (hang.cause, hang.worker) == ("silent", "cpu-1")


def test_where_all_wait_no_worker_is_at_fault(seen: Seen) -> None:
    hang = seen.find()
    assert hang is not None
    assert (hang.cause, hang.worker) == ("nobody", None)
    assert "a fault of Weft's own" in hang.message


def test_who_waits_is_told_with_what_and_whose(seen: Seen) -> None:
    seen.runs("cpu-1", 100.0)
    assert who_waits(seen.workers(), seen.plan) == [
        "cpu-0/compute waits for LOAD(0,0) of loader-0/load, for its FORWARD(0,0)",
        "loader-0/load waits for FORWARD(1,0) of cpu-1/compute, for its LOAD(0,0)",
    ]


def test_the_plan_of_these_tests_has_what_they_name(plan: Plan) -> None:
    assert plan.graph.tasks[plan.graph.programs[Lane(2, "load")][0]].kind is Kind.LOAD


# --- in the core


def hung(rehearsal: Any, job: str = "a", *, attempt: int = 1, worker: str = "cpu-0") -> list[Any]:
    told: list[Any] = rehearsal.tell(
        WorkerHung(worker=worker, job=job, attempt=attempt, message=f"{worker} sleeps in FORWARD(0,0)")
    )
    return told


@pytest.fixture
def rehearsal(plan_of: Callable[..., Plan]) -> Any:
    made = Rehearsal(plan_of(stages=1, microbatches=2, steps=2))
    made.submit("a")
    return made


@pytest.mark.parametrize("phase", [Phase.PLANNING, Phase.PREPARING, Phase.RUNNING, Phase.SAVING])
def test_a_worker_that_hangs_is_killed_and_the_job_recovers(rehearsal: Any, phase: Phase) -> None:
    rehearsal.bring("a", phase)
    assert hung(rehearsal) == [KillWorker(worker="cpu-0", cause="a hangs: cpu-0 sleeps in FORWARD(0,0)")]
    (state,) = [
        each for each in rehearsal.tell(WorkerLost(worker="cpu-0", exit_code=-9)) if isinstance(each, RecordState)
    ]
    assert (state.state, state.reason) == ("recovering", "hung")
    assert state.message == "cpu-0 is replaced, and the job starts again (attempt 2)"


def test_what_is_told_of_another_attempt_or_of_another_s_worker_is_dropped(rehearsal: Any) -> None:
    rehearsal.bring("a", Phase.RUNNING)
    assert hung(rehearsal, attempt=2) == []
    assert hung(rehearsal, worker="cpu-1") == []
    assert hung(rehearsal, job="b") == []


def test_a_job_that_hangs_again_and_again_fails_with_what_it_hangs_in(rehearsal: Any) -> None:
    for attempt in range(1, MAX_LOSSES + 2):
        worker = rehearsal.workers("a")[0]
        rehearsal.bring("a", Phase.RUNNING)
        hung(rehearsal, attempt=attempt, worker=worker)
        rehearsal.tell(WorkerLost(worker=worker, exit_code=-9))
        rehearsal.tell(WorkerJoined(worker=worker))
        last = rehearsal.release("a")[-1]
    assert isinstance(last, RecordState)
    assert (last.state, last.reason, last.attempt) == ("failed", "hung", MAX_LOSSES + 1)
    assert last.message is not None
    assert last.message.startswith("cpu-0 sleeps in FORWARD(0,0); stacks-*.txt in the run directory")
    assert "job.hang_seconds" in last.message
    assert (
        last.message.count("cpu-0 sleeps in FORWARD(0,0); cpu-0 was killed for it, before any step") == MAX_LOSSES + 1
    )


CIRCLE = "every lane waits and none does anything"


def circle(rehearsal: Any, attempt: int = 1) -> list[Any]:
    told: list[Any] = rehearsal.tell(WorkerHung(worker=None, job="a", attempt=attempt, message=CIRCLE))
    return told


def test_where_all_lanes_wait_all_let_go_nobody_is_killed_and_the_job_recovers(rehearsal: Any) -> None:
    """It was told, and stood still until somebody cancelled it."""
    assert circle(rehearsal) == [], "before there are any"
    rehearsal.bring("a", Phase.RUNNING)
    assert circle(rehearsal, attempt=2) == []
    state, *released = circle(rehearsal)
    assert (state.state, state.reason) == ("recovering", "hung")
    assert state.message == "all lanes let go, and the job starts again (attempt 2)"
    assert [(type(each), each.worker) for each in released] == [(Release, "cpu-0"), (Release, "loader-0")]
    assert circle(rehearsal) == [], "it lets go"


def test_a_job_whose_lanes_wait_for_each_other_again_and_again_fails(rehearsal: Any) -> None:
    for attempt in range(1, MAX_LOSSES + 2):
        rehearsal.bring("a", Phase.RUNNING)
        circle(rehearsal, attempt)
        last = rehearsal.release("a")[-1]
    assert isinstance(last, RecordState)
    assert (last.state, last.reason, last.attempt) == ("failed", "hung", MAX_LOSSES + 1)
    assert last.message is not None
    assert last.message.startswith(f"{CIRCLE}; stacks-*.txt in the run directory")
    assert last.message.count(f". attempt {MAX_LOSSES}: {CIRCLE}") == 1


def test_a_loss_after_a_hang_is_told_as_a_loss(rehearsal: Any) -> None:
    rehearsal.bring("a", Phase.RUNNING)
    hung(rehearsal)
    rehearsal.tell(WorkerLost(worker="cpu-0", exit_code=-9))
    rehearsal.tell(WorkerJoined(worker="cpu-0"))
    rehearsal.release("a")
    rehearsal.bring("a", Phase.RUNNING)
    worker = rehearsal.workers("a")[0]
    state = next(
        each for each in rehearsal.tell(WorkerLost(worker=worker, exit_code=-9)) if isinstance(each, RecordState)
    )
    assert state.reason == "worker-lost"
