"""Transcripts of the core with buckets that may go either way: the notice comes a training iteration before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from weft.plan.kinds import Kind
from weft.plan.plan import Plan
from weft.plan.tables import Adjustment
from weft.scheduler.adapting.lane_state import LaneState
from weft.scheduler.adapting.policy import AHEAD_ITERATIONS
from weft.scheduler.adapting.routes import RouteMeasurement
from weft.scheduler.core.core import Core
from weft.scheduler.core.events import (
    Adjust,
    Command,
    Dispatch,
    Event,
    JobMeasured,
    JobPlanned,
    JobSubmitted,
    SaveResult,
    TasksFinished,
    WorkerJoined,
    WorkerPrepared,
)

GPU = {"device": "gpu"}


class Rehearsal:
    """A core that runs one job of one device with a host; two buckets."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        names = {"cpu-0": "cpu", "gpu-0": "gpu", "loader-0": "loader"}
        self.core = Core(names)
        self.commands: list[Command] = []
        for name in names:
            self.tell(WorkerJoined(worker=name))
        self.tell(JobSubmitted(job="a", needs={"cpu": 1, "gpu": 1, "loader": 1}, inspector=1))
        self.tell(JobPlanned(job="a", attempt=1, plan=plan))
        for name in names:
            self.tell(WorkerPrepared(job="a", attempt=1, worker=name))

    @property
    def lanes(self) -> dict[tuple[str, str], LaneState]:
        return self.core.jobs["a"].lanes

    def tell(self, event: Event) -> list[Command]:
        commands = self.core.handle(event, 0.0)
        self.commands += commands
        return commands

    def finish(self, worker: str, lane: str) -> None:
        """All that the lane has been sent."""
        state = self.lanes[worker, lane]
        self.tell(TasksFinished("a", 1, worker, lane, state.sent - state.finished))

    def measure(self, host: float) -> list[Command]:
        """Twice, as it takes to turn a bucket. host: seconds of an update there."""
        seconds = {t.id: host for t in self.plan.graph.tasks if t.kind is Kind.UPDATE and t.way == "host"}
        seconds |= {t.id: 10.0 for t in self.plan.graph.tasks if t.kind is Kind.BACKWARD}
        seconds |= {t.id: 0.1 for t in self.plan.graph.tasks if t.kind in (Kind.DOWN, Kind.UP)}
        measured = RouteMeasurement(seconds=seconds, born={(0, (0, 0)): 5.0, (1, (0, 0)): 10.0})
        return [
            command
            for _ in range(2)
            for command in self.tell(JobMeasured(job="a", attempt=1, policy=0, measured=measured))
        ]


@pytest.fixture
def rehearse(plan_of: Any, inspection_of: Any, unit_of: Any, parameter_of: Any) -> Any:
    def build(**settings: Any) -> Rehearsal:
        parameters = tuple(parameter_of(number, num_elements=1000, state=()) for number in range(2))
        inspection = inspection_of([unit_of(number) for number in range(2)], parameters=parameters, **settings)
        table = {
            "replicas": [GPU],
            "update": "balanced",
            "bucket_mib": 0.004,
            "steps": 30,
            "batch_size": 2,
            "window": 4000,
        }
        return Rehearsal(plan_of(inspection, **table))

    return build


def dispatched(commands: list[Command]) -> int:
    """The last iteration of which any task was sent."""
    return max(index for command in commands if isinstance(command, Dispatch) for index, _ in command.work)


def test_a_bucket_turns_behind_a_training_iteration_that_nobody_was_sent_anything_of(
    rehearse: Callable[..., Rehearsal],
) -> None:
    play = rehearse()
    sent = dispatched(play.commands)
    (first,) = play.measure(host=100.0)
    assert isinstance(first, Adjust)
    assert (first.first_iteration, first.adjustment) == (sent + 2, Adjustment(local=(0, 1)))
    (second,) = play.measure(host=1.0)
    assert isinstance(second, Adjust)
    assert (second.first_iteration, second.adjustment) == (sent + 2, Adjustment(local=(1,)))


def test_validation_gives_no_notice(rehearse: Callable[..., Rehearsal]) -> None:
    """Only in a training iteration does the state move: with two of each in an epoch the notice waits for one."""
    play = rehearse(num_train=3, num_validation=4)
    sent = dispatched(play.commands)
    assert sent == AHEAD_ITERATIONS - 1
    (command,) = play.measure(host=100.0)
    assert isinstance(command, Adjust)
    learning = [index for index in range(sent + 1, 12) if play.plan.itinerary.at(index).learns]
    assert command.first_iteration == learning[0] + 1


def test_a_lane_of_a_way_that_no_bucket_goes_is_sent_no_further_than_those_that_compute(
    rehearse: Callable[..., Rehearsal],
) -> None:
    """It waits for nothing; once it ran through the whole job, and no bucket could turn any more."""
    play = rehearse()
    for _ in range(5):
        for worker, lane in play.lanes:
            if lane != "compute":
                play.finish(worker, lane)
    assert dispatched(play.commands) == AHEAD_ITERATIONS - 1
    play.finish("gpu-0", "compute")
    assert dispatched(play.commands) == 2 * AHEAD_ITERATIONS - 1
    for key, lane in play.lanes.items():
        assert lane.sent == 2 * AHEAD_ITERATIONS * len(lane.program), key


def test_nothing_turns_where_nothing_is_updated_behind_it(rehearse: Callable[..., Rehearsal]) -> None:
    play = rehearse()
    while not any(isinstance(command, SaveResult) for command in play.commands):
        if dispatched(play.commands) == 29:
            assert play.measure(host=100.0) + play.measure(host=1.0) == []
        for worker, lane in play.lanes:
            play.finish(worker, lane)
