"""Who takes which microbatch, with lanes that come along at will."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.plan.graph import Lane
from weft.plan.inspection import Inspection, UnitFacts
from weft.plan.kinds import Kind
from weft.plan.plan import Plan
from weft.plan.tables import NO_MORE
from weft.scheduler.adapting.lane_state import LaneState
from weft.scheduler.adapting.replica_pace import ReplicaMeasurement
from weft.scheduler.adapting.stealing import IDLE_ITERATIONS, Stealing, grant
from weft.scheduler.planning.simulator import simulate

PlanOf = Callable[..., Plan]
Granted = tuple[int, int, int]  # iteration, position, number
IDLE = (0.0, 0.0)  # neither has worked on what it has


class Play:
    """The grants of a plan, and lanes that run whatever they may."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        iterations = plan.itinerary.num_iterations
        self.lanes = {
            lane: LaneState(str(lane.worker), lane.name, program, iterations * len(program))
            for lane, program in plan.graph.programs.items()
        }
        self.stealing = Stealing(plan)
        self.stealing.begin(self.lanes)
        self.granted: list[list[Granted]] = [[] for _ in plan.replicas]

    def ask(self, replica: int) -> list[Granted]:
        grants = self.stealing.grant_more(replica)
        assert {taker for taker, *_ in grants} <= {replica}
        made = [(iteration, position, number) for _, iteration, position, number in grants]
        self.granted[replica] += made
        return made

    def run(self, replica: int, positions: int) -> None:
        """Every lane of the replica runs the tasks of so many more positions, or of as many as it may."""
        for lane in self.stealing.lanes_of(replica):
            assert lane.allowed is not None
            lane.finished = min(lane.finished + 2 * positions, lane.allowed)

    def numbers(self, iteration: int) -> list[list[int]]:
        """Of each replica's microbatches."""
        return [[n for i, _, n in granted if i == iteration and n != NO_MORE] for granted in self.granted]


@pytest.fixture
def play(plan_of: PlanOf) -> Play:
    return Play(plan_of(replicas=2, microbatches=6, share="stealing", steps=3))


def measurement(*seconds: float | None) -> ReplicaMeasurement:
    return ReplicaMeasurement(unit_seconds=seconds, iteration_seconds=1.0, fixed_seconds=0.0)


def test_everybody_has_one_microbatch_to_work_on_and_one_more_at_first(play: Play) -> None:
    assert play.ask(0) == [(0, 0, 0), (0, 1, 1)]
    assert play.ask(1) == [(0, 0, 2), (0, 1, 3)]
    assert play.ask(0) == play.ask(1) == []


def test_a_lane_may_be_sent_no_task_of_a_position_that_is_not_decided(play: Play) -> None:
    """The program of one stage is FORWARD, BACKWARD of each position, then GRAD."""
    (lane,) = play.stealing.lanes_of(0)
    assert lane.allowed == 0
    play.ask(0)
    assert lane.allowed == 4
    assert [play.plan.graph.tasks[task].microbatch for task in lane.program[:4]] == [0, 0, 1, 1]


@pytest.mark.parametrize("schedule", ["model-parallel", "gpipe", "1f1b", "last-stage", "zero-bubble"])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_a_replica_has_as_many_at_once_as_its_schedule_begins_before_it_ends_one(
    plan_of: PlanOf, schedule: str, stages: int
) -> None:
    """By the number of its stages the plan stood still under last-stage, which begins more, and was refused."""
    replicas = [{"stages": stages}, {"stages": 1}]
    plan = plan_of(replicas=replicas, microbatches=9, share="stealing", schedule=schedule, steps=2)
    begun = {"model-parallel": 1, "last-stage": 2 * stages - 1}.get(schedule, stages)
    assert len(Play(plan).ask(0)) == begun + 1


ON_ONE_GPU = {"device": "gpu", "stages": 3, "gpus": 1}  # which fetch for two of them in one lane


@pytest.mark.parametrize("replica", [ON_ONE_GPU, {"stages": 2}, {"device": "gpu", "stages": 2, "gpus": 2}], ids=str)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
def test_every_lane_is_sent_the_tasks_of_the_positions_that_are_decided_and_no_others(
    plan_of: PlanOf, replica: dict[str, Any], schedule: str
) -> None:
    """Up to the first one that is not. A lane that fetches for several stages has more tasks than positions."""
    play = Play(plan_of(replicas=[replica, {}], microbatches=9, share="stealing", schedule=schedule, steps=2))
    tasks, decided = play.plan.graph.tasks, len(play.ask(0))
    for lane in play.stealing.lanes_of(0):
        assert lane.allowed is not None
        sent = [tasks[task].microbatch for task in lane.program[: lane.allowed]]
        assert set(sent) - {None} == set(range(decided))
        assert tasks[lane.program[lane.allowed]].microbatch == decided


class Race:
    """Lanes that run what they are sent once what it waits for is over, in any order among them."""

    def __init__(self, plan: Plan, rng: random.Random) -> None:
        self.graph, self.play, self.rng = plan.graph, Play(plan), rng
        self.over = dict.fromkeys(range(len(plan.graph.tasks)), -1)
        self.favourite = rng.choice(list(self.play.lanes))

    def start(self) -> None:
        for lane in self.play.lanes.values():
            self.play.stealing.come(lane)

    def ready(self) -> list[Lane]:
        return [lane for lane, state in self.play.lanes.items() if self._may_run(state)]

    def run(self, lane: Lane) -> None:
        """One task."""
        state = self.play.lanes[lane]
        iteration, index = divmod(state.finished, len(state.program))
        self.over[state.program[index]] = iteration
        state.finished += 1
        self.play.stealing.come(state)

    def _may_run(self, state: LaneState) -> bool:
        if state.finished >= (state.total if state.allowed is None else state.allowed):
            return False
        iteration, index = divmod(state.finished, len(state.program))
        inputs = self.graph.inputs(state.program[index])
        return all(self.over[edge.source] >= iteration - edge.distance for edge in inputs)


@settings(max_examples=60, deadline=None)
@given(
    st.data(),
    st.lists(st.tuples(st.sampled_from(["cpu", "gpu"]), st.integers(1, 4)), min_size=1, max_size=2),
    st.integers(1, 9),
    st.sampled_from(["model-parallel", "gpipe", "1f1b", "last-stage", "zero-bubble"]),
    st.integers(1, 3),
    st.randoms(use_true_random=False),
)
def test_whoever_comes_first_and_however_many_stages_fetch_in_a_lane_nobody_waits_for_ever(
    plan_of: PlanOf,
    data: st.DataObject,
    pipelines: list[tuple[str, int]],
    microbatches: int,
    schedule: str,
    transfer: int,
    rng: random.Random,
) -> None:
    """A job of three stages on one GPU hung: so few of what they fetch was sent that none was whole."""
    replicas: list[dict[str, Any]] = [
        {"device": device, "stages": stages} | ({"gpus": data.draw(st.integers(1, stages))} if device == "gpu" else {})
        for device, stages in pipelines
    ]
    how = {"microbatches": microbatches, "share": "stealing", "schedule": schedule, "prefetch": {"transfer": transfer}}
    race = Race(plan_of(replicas=[*replicas, {}], steps=4, **how), rng)
    for _ in range(data.draw(st.sampled_from([0, 2]))):  # whether speeds are known
        race.play.stealing.decide(measurement(*(rng.choice([1e-3, 0.01, 1.0]) for _ in [*replicas, {}])), 0)
    race.start()
    while ready := race.ready():
        race.run(race.favourite if race.favourite in ready and rng.random() < 0.8 else rng.choice(ready))
    assert [lane for lane, state in race.play.lanes.items() if state.finished < state.total] == []


def test_whoever_ends_one_gets_the_next(play: Play) -> None:
    play.ask(0)
    play.ask(1)
    play.run(1, positions=1)
    assert play.ask(1) == [(0, 2, 4)]
    assert play.ask(0) == []


def test_who_gets_no_more_goes_on_to_the_next_iteration_at_once(play: Play) -> None:
    play.ask(0)
    play.ask(1)
    play.run(0, positions=2)
    assert play.ask(0) == [(0, 2, 4), (0, 3, 5), (0, 4, NO_MORE)]
    play.run(0, positions=1)
    assert play.ask(0) == [(1, 0, 0)]
    (lane,) = play.stealing.lanes_of(0)
    assert lane.allowed == len(lane.program) + 2


@pytest.mark.parametrize(
    ("seconds", "held"), [((4e-3, 12e-3), [30, 7]), ((8e-3, 24e-3), [26, 7]), ((1.0, 3.0), [2, 2])]
)
def test_at_a_batchs_begin_a_replica_holds_most_of_its_part_but_no_more_than_takes_a_fifth_of_a_second(
    plan_of: PlanOf, seconds: tuple[float, float], held: list[int]
) -> None:
    """Each grant wakes the daemon on a core that computes; and nobody takes back what has been granted."""
    play = Play(plan_of(replicas=2, microbatches=64, share="stealing", steps=3))
    for _ in range(2):
        play.stealing.decide(measurement(*seconds), 0)
    assert [len(play.ask(replica)) for replica in (0, 1)] == held


def test_nobody_is_more_than_an_iteration_ahead_of_what_it_works_on(play: Play) -> None:
    for _ in range(2):
        play.stealing.decide(measurement(1.0, 50.0), 0)
    assert play.ask(1) == [(0, 0, NO_MORE), (1, 0, NO_MORE)]
    (lane,) = play.stealing.lanes_of(1)
    lane.finished = len(lane.program)
    assert play.ask(1) == [(2, 0, NO_MORE)]


def test_a_replica_that_would_always_be_last_gets_nothing_for_good(play: Play, plan_of: PlanOf) -> None:
    play = Play(plan_of(replicas=2, microbatches=4, share="stealing", steps=40))
    verdicts = []
    for _ in range(40):
        for replica in (0, 1):
            play.ask(replica)
            play.run(replica, positions=10)
            play.ask(replica)
        decision = play.stealing.decide(measurement(1.0, 50.0), 0)
        verdicts += [decision.verdict] if decision else []
    (verdict,) = verdicts
    assert verdict is not None
    assert (verdict.replica, verdict.with_seconds, verdict.without_seconds) == (1, 50.0, 4.0)
    iterations = [iteration for iteration, _, number in play.granted[1] if number != NO_MORE]
    assert max(iterations, default=0) < 40 - IDLE_ITERATIONS


def test_who_gets_nothing_stays_while_nobody_else_has_been_measured(plan_of: PlanOf) -> None:
    """It was judged by the speed of others of whom none was known: a division by zero, and the job failed. Of four with
    one microbatch to take, all idle, the last one that is known stays as well."""
    play = Play(plan_of(replicas=4, microbatches=1, share="stealing", steps=100))
    for taker in play.stealing._takers:
        taker.idle = IDLE_ITERATIONS
    told = []
    for measured in ((None, 1.0, None, None), (None, None, 2.0, None), (None, None, None, 3.0), (None,) * 4):
        decisions = [play.stealing.decide(measurement(*measured), 0) for _ in range(4)]
        told.append([each.verdict.replica for each in decisions if each is not None and each.verdict is not None])
    assert told == [[], [1], [2], []]


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    replicas=st.integers(1, 4),
    microbatches=st.integers(1, 9),
    schedule=st.sampled_from(["1f1b", "gpipe", "zero-bubble"]),
)
def test_every_microbatch_of_every_iteration_is_taken_once(
    plan_of: PlanOf, data: st.DataObject, replicas: int, microbatches: int, schedule: str
) -> None:
    steps = 4
    plan = plan_of(
        replicas=max(2, replicas), microbatches=microbatches, share="stealing", steps=steps, schedule=schedule
    )
    play = Play(plan)
    for replica in range(len(plan.replicas)):
        play.ask(replica)
    for _ in range(2000):
        able = [
            r
            for r in range(len(plan.replicas))
            if any(lane.finished < (lane.allowed or 0) for lane in play.stealing.lanes_of(r))
        ]
        if not able:
            break
        replica = data.draw(st.sampled_from(able))
        play.run(replica, data.draw(st.integers(1, 4)))
        play.ask(replica)
        if data.draw(st.booleans()):
            play.stealing.decide(measurement(*(data.draw(st.none() | st.floats(1e-3, 1.0)) for _ in plan.replicas)), 0)
    assert all(lane.finished == lane.total for r in range(len(plan.replicas)) for lane in play.stealing.lanes_of(r))
    for iteration in range(steps):
        taken = play.numbers(iteration)
        assert Counter(n for numbers in taken for n in numbers) == Counter(range(microbatches))
        assert all(numbers == sorted(numbers) for numbers in taken)


@pytest.mark.parametrize("ratio", [1, 2, 4, 30])
def test_replicas_of_unequal_speed_reach_nearly_their_throughput_together(
    plan_of: PlanOf, inspection_of: Callable[..., Inspection], unit_of: Callable[..., UnitFacts], ratio: float
) -> None:
    """In virtual time, with a batch of 40 microbatches."""
    inspection = inspection_of([unit_of(0)], num_train=840)
    plan = plan_of(inspection, replicas=2, microbatches=40, share="stealing")
    work = {Kind.FORWARD, Kind.BACKWARD}
    seconds = [
        plan.task_seconds[task.id] * (ratio if task.replica == 1 and task.kind in work else 1)
        for task in plan.graph.tasks
    ]
    alone = sum(seconds[task.id] for task in plan.graph.tasks if task.replica == 0 and task.kind in work)
    simulated = simulate(plan, seconds, iterations=16).iteration_seconds
    assert simulated <= alone / (1 + 1 / ratio) / 0.95


def test_the_last_microbatch_is_withheld_from_who_would_have_it_last() -> None:
    """Replica 1 would be done with it after 8 ms, replica 0 after 3."""
    seconds = (1e-3, 4e-3)
    assert not grant(1, (2, 1), 1, seconds, IDLE)
    assert grant(0, (2, 1), 1, seconds, IDLE)


def test_a_slow_replica_takes_microbatches_while_the_others_have_enough_of_them() -> None:
    seconds = (1e-3, 4e-3)
    assert grant(1, (2, 1), 6, seconds, IDLE), "together with this one they would take as long without it"
    assert not grant(1, (2, 1), 5, seconds, IDLE)


def test_what_the_others_have_worked_since_they_told_counts() -> None:
    """They tell of several at once: replica 0 may have had the two that it is known to have for a while."""
    seconds = (1e-3, 4e-3)
    assert grant(1, (2, 1), 6, seconds, (0.0, 0.0))
    assert not grant(1, (2, 1), 6, seconds, (1e-3, 0.0))
    assert grant(1, (2, 1), 8, seconds, (1.0, 0.0)), "it has done no more than it had, for all that is known"


@pytest.mark.parametrize(("since", "second"), [(0.0, 3), (1.0, NO_MORE)])
def test_the_others_are_judged_by_when_they_told(plan_of: PlanOf, since: float, second: int) -> None:
    play = Play(plan_of(replicas=2, microbatches=6, share="stealing", steps=3))
    for _ in range(2):
        play.stealing.decide(measurement(1.0, 2.5), 0)
    assert [number for _, _, number in play.ask(0)] == [0, 1]
    for lane in play.stealing.lanes_of(1):
        lane.heard = since
    assert [number for _, _, number in play.ask(1)][:2] == [2, second]


def test_what_a_replica_has_done_of_its_own_counts() -> None:
    seconds = (1e-3, 4e-3)
    assert not grant(1, (2, 1), 5, seconds, (0.0, 0.0))
    assert grant(1, (2, 1), 5, seconds, (0.0, 1.5e-3))


def test_replicas_of_unknown_speed_are_refused_nothing() -> None:
    assert grant(1, (2, 1), 1, (1e-3, None), IDLE)


def test_who_is_left_alone_takes_what_is_left() -> None:
    assert grant(1, (None, 1), 1, (1e-3, 1.0), IDLE)


@given(
    replicas=st.lists(
        st.tuples(st.integers(0, 3), st.none() | st.floats(1e-4, 1.0), st.floats(0.0, 5.0)), min_size=1, max_size=6
    ),
    remaining=st.integers(1, 50),
)
def test_whoever_would_be_first_is_never_refused(
    replicas: list[tuple[int, float | None, float]], remaining: int
) -> None:
    outstanding, seconds, worked = zip(*replicas, strict=True)
    finish = [math.inf if s is None else (held + 1) * s - min(done, held * s) for held, s, done in replicas]
    first = finish.index(min(finish))
    assert grant(first, outstanding, remaining, seconds, worked)
