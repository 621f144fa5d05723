"""Transcripts of the core with snapshots: when one is begun, when it counts, and what goes on from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from random import Random
from types import MappingProxyType
from typing import Any

import pytest

from weft.plan.course import Course
from weft.plan.inspection import Inspection, UnitFacts
from weft.plan.plan import Plan
from weft.plan.tables import NO_MORE, Adjustment
from weft.scheduler.adapting.policy import AHEAD_ITERATIONS
from weft.scheduler.adapting.replica_pace import ReplicaMeasurement
from weft.scheduler.core.core import Core
from weft.scheduler.core.events import (
    Adjust,
    CancelRequested,
    Command,
    DirectoryLost,
    DirectoryMissed,
    Dispatch,
    DropArenas,
    Event,
    HandMemoryOn,
    HandoverBegun,
    JobFaulted,
    JobMeasured,
    JobPlanned,
    JobSubmitted,
    PauseRequested,
    PlanImproved,
    PlanJob,
    Prepare,
    RecordIteration,
    RecordSnapshot,
    RecordState,
    ResultSaved,
    SaveResult,
    Snapshot,
    SnapshotDue,
    SnapshotGoesOn,
    SnapshotMissed,
    TasksFinished,
    WorkerJoined,
    WorkerLost,
    WorkerPrepared,
    WorkerReleased,
)
from weft.scheduler.core.job import Job, Phase
from weft.scheduler.core.outcomes import MAX_LOSSES

STAGE = ("stage-0-0",)


class Rehearsal:
    """A core that runs job "a" on workers that all come back at once; `commands` are all of it."""

    def __init__(self, plan: Plan, others: Mapping[str, str] = MappingProxyType({})) -> None:
        """others: workers that the job does not need, by name."""
        self.plan = plan
        self.needs: dict[str, int] = {}
        for kind in plan.workers:
            self.needs[kind] = self.needs.get(kind, 0) + 1
        self.core = Core({f"{kind}-{n}": kind for kind, count in self.needs.items() for n in range(count)} | others)
        self.commands: list[Command] = []
        for worker in self.core.workers.values():
            self.tell(WorkerJoined(worker=worker.name))
        self.tell(JobSubmitted(job="a", needs=self.needs))
        self.prepare()

    @property
    def job(self) -> Job:
        return self.core.jobs["a"]

    def tell(self, event: Event) -> list[Command]:
        commands = self.core.handle(event, 0.0)
        self.commands += commands
        return commands

    def prepare(self) -> None:
        """From planning, where the job is planned, to running."""
        if self.job.phase is Phase.PLANNING:
            self.tell(JobPlanned(job="a", attempt=self.job.attempt, plan=self.plan))
        for worker in self.job.workers:
            self.tell(WorkerPrepared(job="a", attempt=self.job.attempt, worker=worker))
        assert self.job.phase is Phase.RUNNING

    def due(self) -> list[Command]:
        return self.tell(SnapshotDue(job="a", attempt=self.job.attempt))

    def run_to(self, iterations: int) -> None:
        """Every lane, a task at a time, until as many iterations of the job are done."""
        while self.job.phase is Phase.RUNNING and self.job.iterations_done < iterations:
            lanes = [lane for lane in self.job.lanes.values() if lane.finished < iterations * len(lane.program)]
            for lane in [lane for lane in lanes if lane.sent > lane.finished]:
                if self.job.phase is Phase.RUNNING:
                    self.tell(TasksFinished("a", self.job.attempt, lane.worker, lane.name, 1))

    def lose(self, worker: str = "cpu-0", exit_code: int = -9) -> list[Command]:
        """The others let go, and it comes back; commands from then on."""
        self.tell(WorkerLost(worker=worker, exit_code=exit_code))
        return self.release() + self.tell(WorkerJoined(worker=worker))

    def release(self) -> list[Command]:
        commands = []
        while "a" in self.core.jobs and self.job.phase is Phase.RELEASING:
            worker = min(self.job.waiting_for)
            commands += self.tell(WorkerReleased(worker=worker, job="a", attempt=self.job.attempt, clean=True))
        return commands

    def found(self, kind: type, attempt: int | None = None) -> list[Any]:
        found = [command for command in self.commands if isinstance(command, kind)]
        return [each for each in found if attempt is None or each.attempt == attempt]  # type: ignore[attr-defined]


@pytest.fixture
def plan(plan_of: Callable[..., Plan]) -> Plan:
    return plan_of(stages=1, microbatches=2, steps=16, window=4)


@pytest.fixture
def rehearsal(plan: Plan) -> Rehearsal:
    return Rehearsal(plan)


def snapshot(iteration: int, place: int = 0, tasks: tuple[str, ...] = STAGE) -> Snapshot:
    return Snapshot(iteration=iteration, place=place, tasks=tasks)


# --- taking one


def sent(commands: Iterable[Command]) -> int:
    """The last iteration of which a lane has been sent more than to load its data."""
    work = [each.work for each in commands if isinstance(each, Dispatch) and each.lane != "load"]
    return max(iteration for runs in work for iteration, _ in runs)


def test_a_snapshot_is_of_the_first_iteration_of_which_nobody_has_been_sent_more_than_data(
    rehearsal: Rehearsal,
) -> None:
    sent_before = sent(rehearsal.commands)
    assert rehearsal.due() == [Adjust("a", 1, ("cpu-0", "loader-0"), sent_before + 1, Adjustment(snapshot=0))]
    rehearsal.run_to(sent_before + 1)
    assert rehearsal.found(RecordSnapshot) == [], "it is of the iteration after"
    rehearsal.run_to(sent_before + 2)
    assert rehearsal.found(RecordSnapshot) == [RecordSnapshot(job="a", attempt=1, snapshot=snapshot(sent_before + 1))]
    assert rehearsal.job.copying == []


def test_no_lane_is_sent_work_of_it_before_it_is_told(rehearsal: Rehearsal) -> None:
    rehearsal.run_to(3)
    rehearsal.due()
    (told,) = rehearsal.found(Adjust)
    earlier = rehearsal.commands[: rehearsal.commands.index(told)]
    assert sent(earlier) < told.first_iteration


@pytest.mark.parametrize("loads", [1, 8])
def test_what_begins_with_an_iteration_waits_for_what_was_sent_to_compute_and_not_for_all_that_is_loaded(
    plan: Plan, loads: int
) -> None:
    """One microbatch, of which a batch is loaded as fast as there is room; a copy began by so many iterations later."""
    longest = max(len(program) for program in plan.graph.programs.values())
    rehearsal = Rehearsal(dataclasses.replace(plan, window=2 * longest))
    (loading,) = (lane for lane in rehearsal.job.lanes.values() if lane.name == "load")
    for _ in range(loads * len(loading.program)):
        rehearsal.tell(TasksFinished("a", 1, loading.worker, "load", 1))
    assert loading.sent <= loading.finished + 2 * len(loading.program), "no more iterations ahead than others"
    (told,) = rehearsal.due()
    assert told.first_iteration == 2  # type: ignore[union-attr]
    rehearsal.run_to(3)
    assert rehearsal.job.snapshot == snapshot(2)


def test_only_one_is_on_its_way(rehearsal: Rehearsal) -> None:
    rehearsal.due()
    assert rehearsal.due() == []


def test_two_places_take_turns(rehearsal: Rehearsal) -> None:
    for _ in range(4):
        taken(rehearsal, 0)
    assert [each.snapshot.place for each in rehearsal.found(RecordSnapshot)] == [0, 1, 0, 1]
    assert rehearsal.found(RecordSnapshot)[-1].snapshot == rehearsal.job.snapshot


def test_one_of_the_last_iteration_would_be_for_nothing(rehearsal: Rehearsal) -> None:
    rehearsal.run_to(15)
    assert rehearsal.due() == []


def test_one_that_comes_due_late_or_of_an_attempt_that_is_over_is_none(rehearsal: Rehearsal) -> None:
    assert rehearsal.tell(SnapshotDue(job="a", attempt=2)) == []
    assert rehearsal.tell(SnapshotDue(job="b", attempt=1)) == []
    rehearsal.run_to(16)
    assert rehearsal.job.phase is Phase.SAVING
    assert rehearsal.due() == []


def test_a_plan_without_snapshots_takes_none(plan_of: Callable[..., Plan]) -> None:
    rehearsal = Rehearsal(plan_of(stages=1, steps=16, recovery="off"))
    assert rehearsal.due() == []
    assert rehearsal.job.copying == []


def test_an_iteration_that_only_validates_comes_to_nothing_new(
    plan_of: Callable[..., Plan], inspection_of: Callable[..., Inspection], unit_of: Callable[..., UnitFacts]
) -> None:
    """T V V T V V ...: the next that learns is taken."""
    inspection = inspection_of([unit_of(0)], num_train=8, num_validation=10)
    rehearsal = Rehearsal(plan_of(inspection, batch_size=8, steps=4, window=1))
    rehearsal.run_to(2)
    (told,) = rehearsal.due()
    assert isinstance(told, Adjust)
    assert told.first_iteration == 3
    rehearsal.run_to(9)
    assert rehearsal.due() == [], "behind the last step nothing learns"


# --- going on


def taken(rehearsal: Rehearsal, iteration: int = 5) -> Snapshot:
    """One after the iteration, or a later one, that is whole."""
    rehearsal.run_to(iteration - 1)
    rehearsal.due()
    assert rehearsal.job.copying
    rehearsal.run_to(rehearsal.job.copying[-1].iteration + 2)
    assert rehearsal.job.snapshot is not None
    return rehearsal.job.snapshot


def test_a_killed_workers_job_goes_on_with_the_same_plan(rehearsal: Rehearsal, plan: Plan) -> None:
    whole = taken(rehearsal)
    message = f"cpu-0 was killed; the job goes on after step {whole.iteration + 1} (attempt 2)"
    assert RecordState(job="a", state="recovering", attempt=1, reason="worker-lost", message=message) in rehearsal.tell(
        WorkerLost(worker="cpu-0", exit_code=-9)
    )
    assert rehearsal.release() == [RecordState(job="a", state="queued", attempt=2)], "the loader keeps what it has"
    assert rehearsal.tell(WorkerJoined(worker="cpu-0")) == [
        RecordState(job="a", state="planning", attempt=2),
        *(
            Prepare(job="a", attempt=2, arenas=1, worker=worker, position=position, plan=plan, snapshot=whole)
            for position, worker in enumerate(("cpu-0", "loader-0"))
        ),
    ]
    assert rehearsal.job.phase is Phase.PREPARING


def test_it_begins_with_the_iteration_behind_the_snapshot_and_ends_as_any_other(rehearsal: Rehearsal) -> None:
    whole = taken(rehearsal)
    rehearsal.lose()
    rehearsal.prepare()
    assert rehearsal.job.iterations_done == whole.iteration + 1
    work = [each.work[0] for each in rehearsal.found(Dispatch, attempt=2)]
    assert {iteration for iteration, _ in work} == {whole.iteration + 1}
    programs = rehearsal.plan.graph.programs.values()
    assert all(any(program[: len(tasks)] == tasks for program in programs) for _, tasks in work)
    rehearsal.run_to(16)
    done = [each.iteration for each in rehearsal.found(RecordIteration, attempt=2)]
    assert done == list(range(whole.iteration + 1, 16))
    assert isinstance(rehearsal.commands[-1], SaveResult)


def test_the_next_snapshot_of_a_job_that_went_on_spares_the_one_that_it_went_on_from(rehearsal: Rehearsal) -> None:
    whole = taken(rehearsal)
    rehearsal.lose()
    rehearsal.prepare()
    rehearsal.due()
    assert rehearsal.job.copying
    assert rehearsal.job.copying[-1].place == 1 - whole.place
    rehearsal.lose()
    assert rehearsal.found(Prepare, attempt=3)[0].snapshot == whole, "the newer one was not whole"


def test_one_that_was_still_being_copied_is_not_gone_on_from(rehearsal: Rehearsal) -> None:
    whole = taken(rehearsal)
    rehearsal.due()
    assert rehearsal.job.copying
    rehearsal.run_to(rehearsal.job.copying[-1].iteration)
    assert rehearsal.job.copying
    rehearsal.lose()
    assert rehearsal.job.copying == []
    assert rehearsal.found(Prepare, attempt=2)[0].snapshot == whole


def test_one_of_which_a_part_is_missing_is_none(rehearsal: Rehearsal) -> None:
    """One worker found no shared memory for its part. It counted as whole all the same, since every lane was through
    its iteration: the one before was given up, and a job that went on did not find what it was to go on from."""
    whole = taken(rehearsal)
    rehearsal.due()
    missed = rehearsal.job.copying[-1].iteration
    assert rehearsal.tell(SnapshotMissed(job="a", attempt=1, iteration=missed)) == []
    rehearsal.run_to(missed + 1)
    assert [each.snapshot for each in rehearsal.found(RecordSnapshot)] == [whole]
    assert rehearsal.due(), "the next one has its place"
    rehearsal.lose()
    assert rehearsal.found(Prepare, attempt=2)[0].snapshot == whole


def goes_on(rehearsal: Rehearsal) -> int:
    """A snapshot is told, and a worker says that it copies its part beside the next iteration; which one it is of."""
    rehearsal.due()
    iteration: int = rehearsal.job.copying[-1].iteration
    assert rehearsal.tell(SnapshotGoesOn(job="a", attempt=1, iteration=iteration)) == []
    return iteration


def test_one_that_goes_on_beside_the_next_iteration_is_whole_behind_that(rehearsal: Rehearsal) -> None:
    iteration = goes_on(rehearsal)
    rehearsal.run_to(iteration + 1)
    assert rehearsal.found(RecordSnapshot) == []
    assert rehearsal.due() == [], "it is under way"
    rehearsal.run_to(iteration + 2)
    assert rehearsal.found(RecordSnapshot) == [RecordSnapshot(job="a", attempt=1, snapshot=snapshot(iteration))]
    rehearsal.lose()
    assert rehearsal.found(Prepare, attempt=2)[0].snapshot == snapshot(iteration)


def test_until_then_it_is_not_gone_on_from(rehearsal: Rehearsal) -> None:
    whole = taken(rehearsal)
    rehearsal.run_to(goes_on(rehearsal) + 1)
    rehearsal.lose()
    assert rehearsal.found(Prepare, attempt=2)[0].snapshot == whole


def test_and_it_may_turn_out_not_to_be_used(rehearsal: Rehearsal) -> None:
    whole = taken(rehearsal)
    iteration = goes_on(rehearsal)
    rehearsal.run_to(iteration + 1)
    rehearsal.tell(SnapshotMissed(job="a", attempt=1, iteration=iteration))
    rehearsal.run_to(iteration + 2)
    assert [each.snapshot for each in rehearsal.found(RecordSnapshot)] == [whole]


@pytest.mark.parametrize("is_told", [False, True])
@pytest.mark.parametrize("why", ["pause", "preemption", "another plan"])
def test_workers_know_which_one_nothing_comes_behind(rehearsal: Rehearsal, why: str, is_told: bool) -> None:
    """None would be whole behind an iteration that never comes. is_told: the iteration has a snapshot already."""
    if is_told:
        rehearsal.due()
    match why:
        case "pause":
            rehearsal.tell(PauseRequested(job="a"))
        case "preemption":
            rehearsal.tell(JobSubmitted(job="b", needs=rehearsal.needs, priority=1))
        case _:
            rehearsal.tell(PlanImproved(job="a", attempt=1, plan=rehearsal.plan, message="faster"))
    (stopping,) = rehearsal.job.copying
    course = Course(rehearsal.plan)
    told = rehearsal.found(Adjust)
    for each in told:
        assert each.workers == rehearsal.job.workers
        course.adjust(each.first_iteration, each.adjustment)
    dispatched = rehearsal.commands.index(told[-1])
    rehearsal.run_to(stopping.iteration + 1)
    assert rehearsal.job.phase is Phase.RELEASING
    assert any(isinstance(each, Dispatch) for each in rehearsal.commands[dispatched:]), "they are told ahead"
    ends = [index for index in range(16) if course.ends_attempt(course.iteration(index))]
    assert ends == [stopping.iteration, 15]


def test_without_a_whole_one_the_job_begins_again(rehearsal: Rehearsal) -> None:
    rehearsal.due()
    commands = rehearsal.lose()
    assert commands[-1] == PlanJob(job="a", attempt=2, worker="cpu-0")
    assert "starts again" in rehearsal.found(RecordState)[-3].message
    rehearsal.prepare()
    assert rehearsal.job.iterations_done == 0
    assert rehearsal.found(Prepare, attempt=2)[0].snapshot is None


def test_a_job_that_is_lost_again_and_again_comes_further_each_time(plan_of: Callable[..., Plan]) -> None:
    """Nobody asks for a snapshot: an attempt after a loss begins with one."""
    rehearsal = Rehearsal(plan_of(steps=40))
    rehearsal.run_to(3)
    begins = []
    while rehearsal.job.phase is Phase.RUNNING:
        rehearsal.lose("cpu-0")
        rehearsal.prepare()
        begins.append(rehearsal.job.iterations_done)
        rehearsal.run_to(min(begins[-1] + 4, 40))
    assert rehearsal.job.phase is Phase.SAVING
    assert begins == sorted(set(begins))
    assert begins[:3] == [0, 1, 2]


def test_where_iterations_are_short_the_first_snapshot_after_a_loss_is_of_the_second(
    plan_of: Callable[..., Plan],
) -> None:
    """Its room is made beside the first, whose end people wait for."""
    plan = plan_of(steps=40)
    for seconds, first in ((0.1, 1), (0.6, 0)):
        rehearsal = Rehearsal(dataclasses.replace(plan, predicted_iteration_seconds=seconds))
        rehearsal.run_to(3)
        rehearsal.lose("cpu-0")
        rehearsal.prepare()
        assert [each.first_iteration for each in rehearsal.found(Adjust, attempt=2)] == [first]


def test_a_job_goes_on_with_the_shares_that_it_has_come_to(plan_of: Callable[..., Plan]) -> None:
    rehearsal = Rehearsal(plan_of(replicas=2, microbatches=4, steps=30, share="adaptive"))
    rehearsal.run_to(2 * AHEAD_ITERATIONS)
    measured = ReplicaMeasurement(unit_seconds=(1.0, 3.0), iteration_seconds=1.0, fixed_seconds=0.0)
    rehearsal.tell(JobMeasured(job="a", attempt=1, policy=0, measured=measured))
    (adjusted,) = rehearsal.found(Adjust)
    assert adjusted.adjustment.shares
    taken(rehearsal, 10)
    rehearsal.lose("cpu-1")
    again = rehearsal.found(Prepare, attempt=2)[0].plan
    assert again.shares == tuple(adjusted.adjustment.shares)
    assert again.graph is rehearsal.plan.graph
    rehearsal.prepare()
    rehearsal.run_to(30)
    assert rehearsal.job.phase is Phase.SAVING


def measure(rehearsal: Rehearsal, *unit_seconds: float) -> list[Adjust]:
    """What it is adjusted to, where one replica takes so much longer than the other."""
    measured = ReplicaMeasurement(unit_seconds=unit_seconds, iteration_seconds=1.0, fixed_seconds=0.0)
    commands = rehearsal.tell(JobMeasured(job="a", attempt=rehearsal.job.attempt, policy=0, measured=measured))
    return [command for command in commands if isinstance(command, Adjust)]


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_iterations_that_are_made_again_have_the_shares_that_they_had(
    plan_of: Callable[..., Plan], device: str
) -> None:
    """And nobody is adjusted in them: what has been told of them stays so. On GPUs the job is planned anew."""
    replicas = [{"device": device}, {"device": "cpu"}]
    rehearsal = Rehearsal(plan_of(replicas=replicas, update="cpu", microbatches=4, steps=60, share="adaptive"))
    rehearsal.run_to(2 * AHEAD_ITERATIONS)
    (before,) = measure(rehearsal, 1.0, 3.0)
    whole = taken(rehearsal)
    rehearsal.run_to(whole.iteration + 2 * AHEAD_ITERATIONS)
    (behind,) = measure(rehearsal, 3.0, 1.0)
    done = behind.first_iteration + 2
    rehearsal.run_to(done)
    measure(rehearsal, 1.0, 9.0)  # of iterations that nobody has made
    assert before.first_iteration <= whole.iteration + 1 < behind.first_iteration
    rehearsal.lose("cpu-0")
    rehearsal.prepare()
    assert rehearsal.found(Prepare, attempt=2)[0].plan.shares == before.adjustment.shares
    again = [each for each in rehearsal.found(Adjust, attempt=2) if each.adjustment.snapshot is None]
    assert [(each.first_iteration, each.adjustment) for each in again] == [(behind.first_iteration, behind.adjustment)]
    assert measure(rehearsal, 1.0, 9.0) == []
    rehearsal.run_to(done + 2 * AHEAD_ITERATIONS)
    (later,) = measure(rehearsal, 1.0, 9.0)
    assert later.first_iteration >= done


def test_a_job_that_another_daemon_has_left_goes_on_with_the_shares_of_its_checkpoint(
    plan_of: Callable[..., Plan],
) -> None:
    plan = plan_of(replicas=2, microbatches=4, steps=60, share="adaptive")
    told = ((9, Adjustment(shares=(3.0, 1.0))),)

    def goes_on_from(checkpoint: Snapshot) -> Rehearsal:
        rehearsal = Rehearsal(plan)
        job = rehearsal.job
        rehearsal.tell(WorkerLost(worker="cpu-0", exit_code=-9))  # before there was a snapshot
        rehearsal.release()
        rehearsal.tell(WorkerJoined(worker="cpu-0"))
        rehearsal.tell(JobPlanned(job="a", attempt=2, plan=plan, checkpoint=checkpoint))
        for worker in job.workers:
            rehearsal.tell(WorkerPrepared(job="a", attempt=2, worker=worker))
        return rehearsal

    rehearsal = goes_on_from(Snapshot(iteration=9, path="there", adjusted=told))
    assert {each.plan.shares for each in rehearsal.found(Prepare, attempt=2)} == {(3.0, 1.0)}
    assert [each for each in rehearsal.found(Adjust, attempt=2) if each.adjustment.shares] == []
    assert rehearsal.job.iterations_done == 10
    (later,) = measure(rehearsal, 1.0, 9.0)
    assert later.first_iteration >= 10, "it adapts on"
    other = goes_on_from(Snapshot(iteration=9, path="there", adjusted=((9, Adjustment(shares=(1.0, 1.0, 1.0))),)))
    assert {each.plan.shares for each in other.found(Prepare, attempt=2)} == {plan.shares}, "it has other replicas"


def test_a_job_that_goes_on_while_replicas_steal_is_granted_what_is_left(plan_of: Callable[..., Plan]) -> None:
    rehearsal = Rehearsal(plan_of(replicas=2, microbatches=4, steps=16, share="stealing", window=4))
    whole = taken(rehearsal)
    rehearsal.lose("cpu-1")
    rehearsal.prepare()
    granted = [each for each in rehearsal.found(Adjust, attempt=2) if each.adjustment.grants]
    assert min(each.first_iteration for each in granted) == whole.iteration + 1
    rehearsal.run_to(16)
    assert rehearsal.job.phase is Phase.SAVING


def stolen(rehearsal: Rehearsal, attempt: int) -> dict[int, set[tuple[int, int, int]]]:
    """By iteration, which microbatch stands at which position of which replica."""
    found: dict[int, set[tuple[int, int, int]]] = {}
    for each in rehearsal.found(Adjust, attempt=attempt):
        for replica, iteration, position, number in each.adjustment.grants:
            if number != NO_MORE:
                found.setdefault(iteration, set()).add((replica, position, number))
    return found


@pytest.mark.parametrize("seed", range(8))
def test_iterations_that_are_made_again_have_the_microbatches_that_were_stolen_in_them(
    plan_of: Callable[..., Plan], seed: int
) -> None:
    """Whoever is fast this time, and once more where the second attempt is lost in the midst of them."""
    rehearsal, dice = Rehearsal(plan_of(replicas=3, microbatches=5, steps=40, share="stealing", window=4)), Random(seed)

    def run_to(iterations: int, *weights: int) -> None:
        """Lanes of a replica come along as often as it weighs."""
        job = rehearsal.job
        weight = {worker: weights[number % len(weights)] for number, worker in enumerate(sorted(job.workers))}
        while job.phase is Phase.RUNNING and job.iterations_done < iterations:
            lanes = [lane for lane in job.lanes.values() if lane.finished < iterations * len(lane.program)]
            able = [lane for lane in lanes if lane.sent > lane.finished]
            (lane,) = dice.choices(able, [weight[each.worker] for each in able])
            rehearsal.tell(TasksFinished("a", job.attempt, lane.worker, lane.name, 1))

    run_to(3, 1, 4, 9, 30)
    whole = taken(rehearsal)
    done = whole.iteration + 7
    run_to(done, 9, 1, 3, 30)
    first = stolen(rehearsal, 1)
    rehearsal.lose("cpu-1")
    rehearsal.prepare()
    run_to(whole.iteration + 3, 1, 1, 1, 30)
    rehearsal.lose("cpu-0")
    rehearsal.prepare()
    begun = rehearsal.found(Prepare, attempt=3)[0].snapshot.iteration
    run_to(40, 1, 9, 2, 30)
    assert rehearsal.job.phase is Phase.SAVING
    last = stolen(rehearsal, 3)
    assert whole.iteration < begun < done - 1, "the second attempt has been copied at once"
    again = range(begun + 1, done)
    assert [last[iteration] for iteration in again] == [first[iteration] for iteration in again]
    for iteration in range(begun + 1, 40):
        assert sorted(number for _, _, number in last[iteration]) == [0, 1, 2, 3, 4]


def test_a_job_of_gpus_is_planned_again_and_goes_on_all_the_same(plan_of: Callable[..., Plan]) -> None:
    """Others may be free by then; a snapshot knows no plan."""
    rehearsal = Rehearsal(plan_of(replicas=[{"device": "gpu"}], steps=16, window=4))
    whole = taken(rehearsal)
    commands = rehearsal.lose("gpu-0")
    assert isinstance(commands[-1], PlanJob)
    rehearsal.prepare()
    assert {each.snapshot for each in rehearsal.found(Prepare, attempt=2)} == {whole}
    assert rehearsal.job.iterations_done == whole.iteration + 1


# --- when snapshots are gone


def test_snapshots_are_handed_on_with_what_else_workers_map(rehearsal: Rehearsal) -> None:
    """By all of them, also where one of them then misses something, or is lost."""
    whole = taken(rehearsal)
    rehearsal.tell(DirectoryLost())
    assert rehearsal.tell(DirectoryMissed(job="a", attempt=1, message="it is not there"))[:2] == [
        HandMemoryOn(job="a", attempt=1, worker="cpu-0"),
        HandMemoryOn(job="a", attempt=1, worker="loader-0"),
    ]
    assert "goes on after" in rehearsal.found(RecordState)[-1].message
    rehearsal.release()
    rehearsal.prepare()
    assert {each.snapshot for each in rehearsal.found(Prepare, attempt=2)} == {whole}
    rehearsal.tell(DirectoryLost())
    rehearsal.lose()
    assert {each.snapshot for each in rehearsal.found(Prepare, attempt=3)} == {whole}


def test_a_worker_that_does_not_find_one(rehearsal: Rehearsal) -> None:
    taken(rehearsal)
    rehearsal.lose()
    assert rehearsal.job.phase is Phase.PREPARING
    rehearsal.tell(DirectoryMissed(job="a", attempt=2, message="snapshot-0-stage-0-0 is not there"))
    assert rehearsal.release()[-1] == PlanJob(job="a", attempt=3, worker="cpu-0")
    assert rehearsal.job.snapshot is None


def lose_the_directory_while_it_lets_go(rehearsal: Rehearsal) -> None:
    rehearsal.tell(WorkerLost(worker="cpu-0", exit_code=-9))
    rehearsal.tell(DirectoryLost())
    rehearsal.release()


def lose_the_directory_while_it_waits(rehearsal: Rehearsal) -> None:
    rehearsal.tell(WorkerLost(worker="cpu-0", exit_code=-9))
    rehearsal.release()
    assert rehearsal.job.phase is Phase.MENDING
    rehearsal.tell(DirectoryLost())
    rehearsal.release()


@pytest.mark.parametrize("lose", [lose_the_directory_while_it_lets_go, lose_the_directory_while_it_waits])
def test_a_directory_that_is_lost_between_two_attempts_takes_them_too(
    rehearsal: Rehearsal, lose: Callable[[Rehearsal], None]
) -> None:
    """The job was prepared with a snapshot that was gone, and lost an attempt to that."""
    taken(rehearsal)
    lose(rehearsal)
    rehearsal.tell(WorkerJoined(worker="cpu-0"))
    assert rehearsal.commands[-1] == PlanJob(job="a", attempt=rehearsal.job.attempt, worker="cpu-0")
    rehearsal.prepare()
    assert rehearsal.found(Prepare)[-1].snapshot is None
    assert rehearsal.job.directory_losses == 0
    assert rehearsal.job.iterations_done == 0


def test_a_directory_that_is_lost_while_a_job_of_gpus_is_planned_again_takes_them_too(
    plan_of: Callable[..., Plan],
) -> None:
    rehearsal = Rehearsal(plan_of(replicas=[{"device": "gpu"}], steps=16, window=4))
    taken(rehearsal)
    rehearsal.lose("gpu-0")
    assert rehearsal.tell(DirectoryLost()) == []
    rehearsal.prepare()
    assert rehearsal.found(Prepare, attempt=2)[0].snapshot is None


def complete(rehearsal: Rehearsal) -> None:
    rehearsal.run_to(16)
    rehearsal.tell(ResultSaved(job="a", attempt=1))
    rehearsal.release()


def cancel(rehearsal: Rehearsal) -> None:
    rehearsal.tell(CancelRequested(job="a"))
    rehearsal.release()


def cancel_while_it_waits(rehearsal: Rehearsal) -> None:
    rehearsal.tell(WorkerLost(worker="cpu-0", exit_code=-9))
    rehearsal.release()
    rehearsal.tell(CancelRequested(job="a"))
    rehearsal.release()


def fail_while_it_waits(rehearsal: Rehearsal) -> None:
    rehearsal.tell(WorkerLost(worker="cpu-0", exit_code=-9))
    rehearsal.release()
    rehearsal.tell(JobFaulted(job="a", attempt=2, reason="run-directory", message="", exit_code=1))
    rehearsal.release()


def fail(rehearsal: Rehearsal) -> None:
    rehearsal.tell(WorkerLost(worker="cpu-0", exit_code=-11))
    rehearsal.release()


@pytest.mark.parametrize("end", [complete, cancel, cancel_while_it_waits, fail_while_it_waits, fail])
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "still being copied"])
def test_a_jobs_snapshots_go_with_its_end_and_not_before(
    rehearsal: Rehearsal, end: Callable[[Rehearsal], None], whole: bool
) -> None:
    """Those of a job that ended while it waited for another attempt stayed for as long as the directory did."""
    if whole:
        taken(rehearsal)
    else:
        rehearsal.due()
    of_snapshots = DropArenas(job="a", attempt=None)
    assert of_snapshots not in rehearsal.commands
    end(rehearsal)
    assert rehearsal.core.jobs == {}
    assert rehearsal.commands.count(of_snapshots) == 1


def test_a_job_that_never_took_one_has_none_to_drop(rehearsal: Rehearsal) -> None:
    complete(rehearsal)
    assert rehearsal.found(DropArenas) == [DropArenas(job="a", attempt=1)]


def test_snapshots_stay_from_attempt_to_attempt(rehearsal: Rehearsal) -> None:
    taken(rehearsal)
    rehearsal.lose()
    assert rehearsal.found(DropArenas) == []
    cancel(rehearsal)
    assert rehearsal.found(DropArenas) == [DropArenas(job="a", attempt=1), DropArenas(job="a", attempt=None)]


# --- how often


def test_losses_are_counted_anew_where_the_job_has_come_further(rehearsal: Rehearsal) -> None:
    for done in range(1, 9):
        rehearsal.run_to(done)
        rehearsal.due()
        rehearsal.run_to(done + 1)
        rehearsal.lose()
        assert len(rehearsal.job.losses) == 1
        rehearsal.prepare()
    rehearsal.run_to(16)
    assert rehearsal.job.phase is Phase.SAVING


def test_a_job_that_is_killed_again_and_again_at_the_same_iteration_fails(rehearsal: Rehearsal) -> None:
    taken(rehearsal)
    done = rehearsal.job.iterations_done
    for _ in range(MAX_LOSSES):
        rehearsal.run_to(done)
        rehearsal.lose()
        rehearsal.prepare()
    rehearsal.run_to(done)
    rehearsal.lose()
    (failed,) = [each for each in rehearsal.found(RecordState) if each.state == "failed"]
    assert failed.reason == "worker-lost"
    assert failed.message.count("\n") == MAX_LOSSES + 2
    recovering = [each for each in rehearsal.found(RecordState) if each.state == "recovering"]
    assert not any("\n" in each.message for each in recovering), "reports are for the end"


def corrupted(rehearsal: Rehearsal) -> JobFaulted:
    attempt = rehearsal.job.attempt
    message = "cpu-0: bits of the values of 0.weight have changed"
    return JobFaulted(job="a", attempt=attempt, reason="corrupted", message=message, exit_code=70)


def test_memory_that_has_changed_costs_the_way_from_the_newest_snapshot(rehearsal: Rehearsal) -> None:
    whole = taken(rehearsal)
    commands = rehearsal.tell(corrupted(rehearsal))
    message = f"cpu-0: bits of the values of 0.weight have changed; the job goes on after step {whole.iteration + 1} "
    state = RecordState(
        job="a", state="recovering", attempt=1, reason="corrupted", message=message + "(attempt 2)", exit_code=None
    )
    assert state in commands
    rehearsal.release()
    assert (rehearsal.job.phase, rehearsal.job.snapshot) == (Phase.PREPARING, whole)


def test_memory_that_changes_each_time_is_given_up_with_all_reports(rehearsal: Rehearsal) -> None:
    """So is a job whose code sets parameters outside of its optimizer."""
    taken(rehearsal)
    for _ in range(MAX_LOSSES):
        rehearsal.tell(corrupted(rehearsal))
        rehearsal.release()
        rehearsal.prepare()
    rehearsal.tell(corrupted(rehearsal))
    rehearsal.release()
    (failed,) = [each for each in rehearsal.found(RecordState) if each.state == "failed"]
    assert (failed.reason, failed.exit_code) == ("corrupted", 70)
    assert failed.message.count("attempt ") == MAX_LOSSES + 1


@pytest.mark.parametrize("mode", ["train", "forward"])
def test_a_job_of_two_thousand_million_iterations_is_answered_at_once(plan_of: Callable[..., Plan], mode: str) -> None:
    """Nobody looks through them for one that learns."""
    plan = plan_of(stages=1, steps=4, mode=mode)
    endless = dataclasses.replace(plan.itinerary, steps=2**31 - 2)
    rehearsal = Rehearsal(dataclasses.replace(plan, itinerary=endless))
    assert len(rehearsal.due()) == (1 if mode == "train" else 0)


def test_before_a_handover_a_snapshot_is_told_and_then_the_work_behind_it_is_sent(plan_of: Callable[..., Plan]) -> None:
    """A worker that was lost soon after it cost all that had been sent ahead."""
    rehearsal = Rehearsal(plan_of(stages=1, microbatches=2, steps=100, window=8))
    first = max(-(-lane.sent // len(lane.program)) for lane in rehearsal.job.lanes.values())
    snapshot, *work = rehearsal.tell(HandoverBegun(windows=4))
    assert isinstance(snapshot, Adjust)
    assert (snapshot.first_iteration, snapshot.adjustment.snapshot) == (first, 0)
    assert len(work) == len(rehearsal.job.lanes)
    assert all(isinstance(each, Dispatch) for each in work)
