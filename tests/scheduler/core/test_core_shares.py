"""Transcripts of the core with replicas: new shares before the work that has them, grants before the work that needs
them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from weft.plan.plan import Plan
from weft.plan.tables import NO_MORE, Adjustment
from weft.scheduler.adapting.policy import AHEAD_ITERATIONS
from weft.scheduler.adapting.replica_pace import ReplicaMeasurement
from weft.scheduler.core.core import Core
from weft.scheduler.core.events import (
    Adjust,
    Command,
    Dispatch,
    Event,
    JobMeasured,
    JobPlanned,
    JobSubmitted,
    RecordIteration,
    RecordVerdict,
    SaveResult,
    TasksFinished,
    WorkerJoined,
    WorkerPrepared,
)
from weft.scheduler.core.job import Job


class Rehearsal:
    """A core that runs one job of two replicas on the workers cpu-0 and cpu-1."""

    def __init__(self, plan_of: Callable[..., Plan], **settings: Any) -> None:
        settings = {"replicas": 2, "microbatches": 4, "steps": 30} | settings
        self.plan = plan_of(**settings)
        self.core = Core({"cpu-0": "cpu", "cpu-1": "cpu", "loader-0": "loader"})
        self.commands: list[Command] = []
        for worker in self.core.workers.values():
            self.tell(WorkerJoined(worker=worker.name))
        self.tell(JobSubmitted(job="a", needs={"cpu": 2, "loader": 1}))
        self.tell(JobPlanned(job="a", attempt=1, plan=self.plan))
        for name in self.core.workers:
            self.tell(WorkerPrepared(job="a", attempt=1, worker=name))

    @property
    def job(self) -> Job:
        return self.core.jobs["a"]

    def tell(self, event: Event) -> list[Command]:
        commands = self.core.handle(event, 0.0)
        self.commands += commands
        return commands

    def finish(self, worker: str, lane: str, count: int) -> list[Command]:
        return self.tell(TasksFinished("a", 1, worker, lane, count))

    def measure(self, *seconds: float | None, iteration_seconds: float = 1.0) -> list[Command]:
        measured = ReplicaMeasurement(unit_seconds=seconds, iteration_seconds=iteration_seconds, fixed_seconds=0.0)
        return self.tell(JobMeasured(job="a", attempt=1, policy=0, measured=measured))

    def to_end(self) -> None:
        while not any(isinstance(command, SaveResult) for command in self.commands):
            lanes = [lane for lane in self.job.lanes.values() if lane.sent > lane.finished]
            assert lanes, "no lane has work and the job is not done"
            for lane in lanes:
                self.finish(lane.worker, lane.name, 1)


Rehearse = Callable[..., Rehearsal]


@pytest.fixture
def rehearse(plan_of: Callable[..., Plan]) -> Rehearse:
    return lambda **settings: Rehearsal(plan_of, **settings)


def test_new_shares_hold_from_the_first_iteration_that_nobody_was_sent_anything_of(rehearse: Rehearse) -> None:
    play = rehearse(share="adaptive", window=4000)
    (command,) = play.measure(1.0, 4.0)
    assert isinstance(command, Adjust)
    assert command.first_iteration == AHEAD_ITERATIONS
    assert command.adjustment.shares == pytest.approx((0.65, 0.35))
    before = len(play.commands)
    play.to_end()
    dispatched = [command for command in play.commands[:before] if isinstance(command, Dispatch)]
    assert max(iteration for command in dispatched for iteration, _ in command.work) == AHEAD_ITERATIONS - 1


def test_a_lane_of_a_job_whose_shares_adapt_is_sent_few_iterations_ahead(rehearse: Rehearse) -> None:
    for share, ahead in (("adaptive", AHEAD_ITERATIONS), ("fixed", 30)):
        play = rehearse(share=share, window=4000)
        assert {-(-lane.sent // len(lane.program)) for lane in play.job.lanes.values()} == {ahead}


def test_a_measurement_that_changes_nobodys_samples_says_nothing(rehearse: Rehearse) -> None:
    assert rehearse(share="adaptive").measure(1.0, 1.0001) == []


def test_shares_do_not_change_once_the_last_iteration_has_begun(rehearse: Rehearse) -> None:
    assert rehearse(share="adaptive", steps=2).measure(1.0, 4.0) == []


def test_a_replica_that_does_not_pay_gets_the_share_0_and_a_verdict(rehearse: Rehearse) -> None:
    play = rehearse(share="adaptive", shares=[0.8, 0.2])
    commands = play.measure(1.0, 4.0, iteration_seconds=900) + play.measure(1.0, 4.0, iteration_seconds=900)
    shares, verdict = commands
    assert isinstance(shares, Adjust)
    assert shares.adjustment == Adjustment(shares=(1.0, 0.0))
    assert isinstance(verdict, RecordVerdict)
    assert (verdict.verdict.replica, verdict.first_iteration) == (1, shares.first_iteration)
    assert (verdict.verdict.with_seconds, verdict.verdict.without_seconds) == (900, 8), "8 samples are a whole epoch"
    assert play.measure(1.0, None, iteration_seconds=900) == [], "nobody is left to leave out"


def test_measurements_of_an_old_attempt_are_dropped(rehearse: Rehearse) -> None:
    play = rehearse(share="adaptive")
    measured = ReplicaMeasurement(unit_seconds=(1.0, 4.0), iteration_seconds=1.0, fixed_seconds=0.0)
    assert play.tell(JobMeasured(job="a", attempt=2, policy=0, measured=measured)) == []


# --- stealing


def tasks_of(play: Rehearsal, command: Dispatch) -> list[str]:
    return [str(play.plan.graph.tasks[task]) for _, tasks in command.work for task in tasks]


def granted(replica: int, *grants: tuple[int, int, int]) -> Adjust:
    """What the replica's worker is told. grants: (iteration, position, number)."""
    return Adjust("a", 1, (f"cpu-{replica}",), 0, Adjustment(grants=[(replica, *grant) for grant in grants]))


def test_microbatches_are_granted_before_their_tasks_are_sent(rehearse: Rehearse) -> None:
    play = rehearse(share="stealing", microbatches=6)
    started = [command for command in play.commands if isinstance(command, (Adjust, Dispatch))]
    first = [command for command in started if isinstance(command, Adjust) or command.lane == "compute"]
    assert [type(command) for command in first] == [Adjust, Dispatch, Adjust, Dispatch]
    assert first[0] == granted(0, (0, 0, 0), (0, 1, 1))
    assert first[2] == granted(1, (0, 0, 2), (0, 1, 3))
    assert isinstance(first[1], Dispatch)
    assert tasks_of(play, first[1]) == ["FORWARD(0,0)", "BACKWARD(0,0)", "FORWARD(0,1)", "BACKWARD(0,1)"]


def test_the_end_of_a_microbatch_brings_what_comes_next(rehearse: Rehearse) -> None:
    play = rehearse(share="stealing", microbatches=6)
    assert play.finish("cpu-0", "compute", 1) == [], "a forward is no end"
    grant, dispatch = play.finish("cpu-0", "compute", 1)
    assert grant == granted(0, (0, 2, 4))
    assert isinstance(dispatch, Dispatch)
    assert tasks_of(play, dispatch) == ["FORWARD(0,2)", "BACKWARD(0,2)"]


def test_when_all_are_taken_the_rest_of_the_iteration_is_sent_and_the_next_one_begins(rehearse: Rehearse) -> None:
    play = rehearse(share="stealing", microbatches=5)
    grant, dispatch = play.finish("cpu-0", "compute", 2)
    assert grant == granted(0, (0, 2, 4), (0, 3, NO_MORE))
    assert isinstance(dispatch, Dispatch)
    assert tasks_of(play, dispatch)[-3:] == ["BACKWARD(0,4)", "GRAD(0,b0)", "SNAPSHOT(0)"]
    grant, dispatch = play.finish("cpu-0", "compute", 2)
    assert grant == granted(0, (1, 0, 0))
    assert isinstance(dispatch, Dispatch)
    assert [iteration for iteration, _ in dispatch.work] == [1]


def test_the_loader_and_the_owners_wait_for_no_grants(rehearse: Rehearse) -> None:
    play = rehearse(share="stealing", window=4000)
    sent = {(lane.worker, lane.name): lane.sent == lane.total for lane in play.job.lanes.values()}
    assert sent.pop(("loader-0", "load"))
    assert {all_sent for (_, lane), all_sent in sent.items() if lane == "sync"} == {True}
    assert {all_sent for (_, lane), all_sent in sent.items() if lane == "compute"} == {False}


@pytest.mark.parametrize("settings", [{}, {"schedule": "gpipe"}, {"window": 1}, {"sync": "coarse"}], ids=str)
@pytest.mark.parametrize("share", ["adaptive", "stealing"])
def test_every_iteration_comes_to_its_end(rehearse: Rehearse, share: str, settings: dict[str, Any]) -> None:
    play = rehearse(share=share, **settings)
    play.to_end()
    recorded = [command.iteration for command in play.commands if isinstance(command, RecordIteration)]
    assert recorded == list(range(30))
    adjusted = [command.adjustment for command in play.commands if isinstance(command, Adjust)]
    numbers = [number for adjustment in adjusted for *_, number in adjustment.grants]
    assert sorted(number for number in numbers if number >= 0) == (
        sorted([0, 1, 2, 3] * 30) if share == "stealing" else []
    )
