"""The core under random workers and clients: whatever comes in whatever order, its invariants hold and every job ends.

A small world answers the core's commands as a daemon and its workers would, late and in any order that a socket allows
(a worker's answers stay in order). A model of a few words for each job says which ends are possible.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from weft.plan.placement import LOAD
from weft.plan.plan import Plan
from weft.scheduler.core.core import Core
from weft.scheduler.core.ending import CANCEL_SECONDS, RELEASE_SECONDS
from weft.scheduler.core.events import (
    Adjust,
    CancelRequested,
    Command,
    DirectoryLost,
    DirectoryMissed,
    Dispatch,
    DrainRequested,
    DropArenas,
    Event,
    FallBack,
    HandMemoryOn,
    JobFaulted,
    JobPlanned,
    JobSubmitted,
    KillWorker,
    PauseRequested,
    PlanImproved,
    PlanJob,
    Prepare,
    RecordIteration,
    RecordReplay,
    RecordSnapshot,
    RecordState,
    Release,
    ReplayDue,
    ResultSaved,
    ResumeRequested,
    SaveResult,
    SaveSnapshot,
    Snapshot,
    SnapshotDue,
    SnapshotGoesOn,
    SnapshotMissed,
    SnapshotSaved,
    StartWorker,
    TaskDigested,
    TasksFinished,
    Ticked,
    WorkerJoined,
    WorkerLost,
    WorkerPrepared,
    WorkerReleased,
)
from weft.scheduler.core.job import Job, Phase
from weft.scheduler.core.outcomes import MAX_DIRECTORY_LOSSES, MAX_LOSSES
from weft.scheduler.core.queue import chosen_for, in_order, mended, preempted_by
from weft.spec.job_spec import JobSpec
from weft.spec.workers_needed import inspecting_worker, workers_needed

TERMINAL = {"completed", "failed", "cancelled"}
NEXT = {
    "": {"queued"},
    # From queued to queued: what a job kept while it waited for another worker has been let go of.
    "queued": {"planning", "cancelled", "failed", "running", "recovering", "paused", "queued"},
    "planning": {"running", "recovering", "queued", "paused"} | TERMINAL - {"completed"},
    "running": {"recovering", "queued", "paused"} | TERMINAL,
    "recovering": {"queued", "cancelled", "paused"},
    "paused": {"queued", "cancelled"},
}
HELD = {"planning", "running", "recovering"}  # states in which a job has an attempt
NUM_CPUS = 3  # and as many GPUs and loaders
STEPS = 5
EXIT_CODES = [-9, -11, -6, 17, 0]
KINDS = ("cpu", "gpu", "both")  # of replicas


def strategy_of(stages: int, kind: str) -> dict[str, Any]:
    """A pipeline of CPU workers; one of devices, with a host; or one of devices beside a CPU worker. Those of two
    stages have a copy of each iteration."""
    recovery = "iteration" if stages == 2 else "snapshot"
    if kind == "cpu":
        return {"stages": stages, "recovery": recovery}
    others = [{"device": "cpu"}] if kind == "both" else []
    replicas = [{"device": "gpu", "stages": stages}, *others]
    return {"replicas": replicas, "update": "cpu", "recovery": recovery}


ALONE = {"cpu": 1, "loader": 1}
MAPPED = (Phase.RUNNING, Phase.SAVING)  # the job's workers map all of its memory


@dataclass
class Worker:
    """One process. answers: what it will still say, in order. doomed: it was told to be killed."""

    alive: bool = False
    starting: bool = False
    answers: deque[Event] = field(default_factory=deque)
    lanes: dict[tuple[str, int, str], int] = field(default_factory=dict)  # (job, attempt, lane) -> tasks to do
    doomed: bool = False


@dataclass
class Model:
    """What a client knows of its job. kind: of KINDS. possible: the states in which it may end; the last one that is
    left is how it did."""

    stages: int
    kind: str
    is_chosen: bool = False  # nobody has asked for its strategy, and it has not come to be one worker's
    states: list[tuple[str, int]] = field(default_factory=list)
    iterations: dict[int, list[int]] = field(default_factory=dict)  # of each attempt
    possible: set[str] = field(default_factory=lambda: {"completed"})
    cancelled: bool = False
    releasing: bool = False
    recovers: bool = False
    snapshot: Snapshot | None = None  # the newest that is whole
    on_disk: Snapshot | None = None  # the newest checkpoint
    paused: bool = False  # it has been, once at least
    begins: dict[int, int] = field(default_factory=dict)  # the first iteration of each attempt
    furthest: int = 0
    halts: set[tuple[int, int]] = field(default_factory=set)  # (attempt, iteration) behind which it is told to stop
    beside: set[tuple[int, int]] = field(default_factory=set)  # the same of snapshots that go on beside the next one
    better: Plan | None = None  # the last that the core was told of, while it runs with another
    changes: bool = False  # it is on its way to go on with that
    losses: int = 0
    directory_losses: int = 0

    @property
    def ended(self) -> bool:
        return bool(self.states) and self.states[-1][0] in TERMINAL

    def lose_a_worker(self) -> None:
        """Those before it came further than ever are forgotten."""
        done = 1 + max((iteration for own in self.iterations.values() for iteration in own), default=-1)
        self.losses = 1 if done > self.furthest else self.losses + 1
        self.furthest = max(self.furthest, done)


class Play(RuleBasedStateMachine):
    def __init__(self, plan_of: Callable[..., Plan], spec_of: Callable[..., JobSpec]) -> None:
        super().__init__()
        self._plans = {
            (stages, kind, w): plan_of(**strategy_of(stages, kind), steps=STEPS, window=w)
            for stages in (1, 2, 3)
            for kind in KINDS
            for w in (1, 3, 7)
        }
        self._spec_of = spec_of
        kinds = {f"{kind}-{number}": kind for kind in ("cpu", "gpu", "loader") for number in range(NUM_CPUS)}
        self.core = Core(kinds)
        self.now = 0.0
        self.draining = False
        self.workers = {name: Worker() for name in kinds}
        self.models: dict[str, Model] = {}
        self.saving: list[SaveSnapshot] = []
        self.arenas: set[tuple[str, int | None]] = set()  # None: of snapshots
        self.late: list[Any] = []  # what lost workers had begun to say: a plan is made in a thread of the daemon

    # --- the world

    def tell(self, event: Event) -> None:
        for command in self.core.handle(event, self.now):
            self.perform(command)

    def perform(self, command: Command) -> None:
        match command:
            case StartWorker():
                worker = self.workers[command.worker]
                assert not worker.alive, f"{command.worker} was started twice"
                assert not worker.starting, f"{command.worker} was started twice"
                worker.starting = True
            case KillWorker():
                self.workers[command.worker].doomed = True
            case PlanJob():
                model = self.models[command.job]
                assert self.core.workers[command.worker].kind == ("cpu" if model.kind == "cpu" else "gpu")
                assert self.core.workers[command.worker].job == command.job
                model.changes = False  # what it was to go on from was lost
                assert model.snapshot is None or model.kind != "cpu" or model.paused, "it goes on with its plan"
                plan = self._plans[model.stages, model.kind, 1 + 2 * (command.attempt % 2)]
                planned = JobPlanned(job=command.job, attempt=command.attempt, plan=plan)
                self.answer(command.worker, replace(planned, instead=ALONE if model.is_chosen else None))
            case Prepare():
                model = self.models[command.job]
                assert command.snapshot == (model.snapshot or model.on_disk), "the newest that is whole, or none"
                assert not model.changes or command.plan is model.better
                model.begins[command.attempt] = 0 if command.snapshot is None else command.snapshot.iteration + 1
                assert command.arenas == command.attempt or (command.job, command.arenas) in self.arenas, "kept"
                self.arenas.add((command.job, command.arenas))
                prepared = WorkerPrepared(job=command.job, attempt=command.attempt, worker=command.worker)
                self.answer(command.worker, prepared)
            case Dispatch():
                assert command.work[0][0] >= self.models[command.job].begins[command.attempt]
                lanes = self.workers[command.worker].lanes
                key = command.job, command.attempt, command.lane
                lanes[key] = lanes.get(key, 0) + sum(len(tasks) for _, tasks in command.work)
            case SaveResult():
                self.answer(command.worker, ResultSaved(job=command.job, attempt=command.attempt))
            case HandMemoryOn():
                model = self.models[command.job]
                assert not model.releasing, "what is let go of nobody maps"
                assert model.states[-1][1] == command.attempt
            case Release():
                self.models[command.job].releasing = True
                released = WorkerReleased(worker=command.worker, job=command.job, attempt=command.attempt, clean=True)
                self.answer(command.worker, released)
            case Adjust() if command.adjustment.compared:
                assert command.first_iteration >= self.models[command.job].begins[command.attempt]
            case Adjust() if command.adjustment.halts:
                self.models[command.job].halts.add((command.attempt, command.first_iteration))
            case Adjust():
                assert command.adjustment.snapshot is not None
                assert self.core.jobs[command.job].plan is not None
                whole = self.models[command.job].snapshot
                assert whole is None or command.adjustment.snapshot != whole.place, "what is whole is not written over"
                self.arenas.add((command.job, None))
            case RecordSnapshot():
                model, iteration = self.models[command.job], command.snapshot.iteration
                if (command.attempt, iteration) in model.beside:
                    assert self.core.jobs[command.job].iterations_done > iteration + 1, "it is not whole yet"
                model.snapshot = command.snapshot
            case RecordReplay():
                if "nobody can say" in command.message:
                    self.models[command.job].possible = {"failed"}
            case SaveSnapshot():
                self.saving.append(command)
            case DropArenas(attempt=None):
                self.arenas.discard((command.job, None))
                self.models[command.job].snapshot = None
            case FallBack():
                model = self.models[command.job]
                assert model.is_chosen, "once at the most"
                model.stages, model.kind, model.is_chosen = 1, "cpu", False
            case DropArenas():
                self.arenas.discard((command.job, command.attempt))
                self.models[command.job].releasing = False
            case RecordState():
                self.record(command)
            case RecordIteration():
                self.models[command.job].iterations.setdefault(command.attempt, []).append(command.iteration)

    def answer(self, worker: str, event: Event) -> None:
        if self.workers[worker].alive:
            self.workers[worker].answers.append(event)

    def record(self, command: RecordState) -> None:
        model = self.models[command.job]
        before, attempt = model.states[-1] if model.states else ("", 1)
        assert command.state in NEXT.get(before, ()), f"{command.job}: {before} → {command.state}"
        assert command.attempt == attempt + (before in HELD and command.state in ("queued", "paused"))
        model.paused |= command.state == "paused"
        model.states.append((command.state, command.attempt))
        model.releasing &= command.state != "queued"
        model.recovers = command.state == "recovering"
        model.changes = command.reason == "replanned" or (model.changes and command.state == "planning")
        if command.state in TERMINAL:
            assert command.state in model.possible, f"{command.job} {command.state}, and only {model.possible} could be"
            assert (command.reason is None) == (command.state == "completed")
            if command.state == "completed":
                assert model.iterations[command.attempt] == list(range(model.begins[command.attempt], STEPS))

    def lose(self, name: str, exit_code: int | None) -> None:
        worker = self.workers[name]
        holder = self.core.workers[name].job
        if holder is not None and not self.models[holder].releasing:
            model = self.models[holder]
            model.lose_a_worker()
            if (exit_code != -9 or model.losses > MAX_LOSSES) and not self.falls_back(holder):
                model.possible = {"failed"}
        worker.alive = worker.starting = worker.doomed = False
        self.late += [event for event in worker.answers if not isinstance(event, WorkerReleased)]
        worker.answers.clear()
        worker.lanes.clear()
        self.tell(WorkerLost(worker=name, exit_code=exit_code))

    def falls_back(self, name: str) -> bool:
        """A job that fails now."""
        return self.models[name].is_chosen and "gpu" in self.core.jobs[name].needs

    def busy(self) -> list[str]:
        """Workers that have something to say, or to do."""
        return [name for name, worker in self.workers.items() if worker.answers or worker.lanes]

    def step(self, name: str, count: int) -> None:
        """The worker's next message: a report of its lane first, since its other answers wait for the lane to stop."""
        worker = self.workers[name]
        if worker.lanes and not (worker.answers and count % 2):
            key, left = next(iter(worker.lanes.items()))
            job, attempt, lane = key
            done = min(count, left)
            worker.lanes[key] = left - done
            if left == done:
                del worker.lanes[key]
            self.tell(TasksFinished(job, attempt, name, lane, done))
        elif worker.answers:
            event = worker.answers.popleft()
            if isinstance(event, WorkerReleased):
                worker.lanes.clear()
            if isinstance(event, JobPlanned):  # the disk is looked at last
                event = replace(event, checkpoint=self.models[event.job].on_disk)
            self.tell(event)

    # --- what may happen

    @initialize()
    def start(self) -> None:
        for command in self.core.start():
            self.perform(command)

    @rule(
        stages=st.integers(1, NUM_CPUS + 1),
        kind=st.sampled_from(KINDS),
        is_chosen=st.booleans(),
        priority=st.integers(-1, 1),
    )
    def submit(self, stages: int, kind: str, is_chosen: bool, priority: int) -> None:
        name = f"job-{len(self.models)}"
        possible = {"completed"} if stages <= NUM_CPUS else {"failed"}
        self.models[name] = Model(stages, kind, is_chosen, possible=possible)
        strategy = self._spec_of(**strategy_of(stages, kind)).strategy
        inspector = inspecting_worker(needs := workers_needed(strategy))
        begin = JobSubmitted(job=name, needs=needs, inspector=inspector, priority=priority)
        self.tell(replace(begin, instead=ALONE if is_chosen else None))
        if stages > NUM_CPUS:  # as the driver has it, of a job in the ledger
            self.tell(JobFaulted(job=name, attempt=1, reason="invalid-plan", message="too few", exit_code=2))

    @precondition(lambda self: self.models)
    @rule(data=st.data())
    def cancel(self, data: Any) -> None:
        name = data.draw(st.sampled_from(sorted(self.models)))
        model = self.models[name]
        job = self.core.jobs.get(name)
        if job is not None and (job.outcome is None or not job.outcome.is_end):
            model.possible, model.cancelled = {"cancelled"}, True
        self.tell(CancelRequested(job=name))

    @precondition(lambda self: self.models)
    @rule(data=st.data())
    def pause(self, data: Any) -> None:
        self.tell(PauseRequested(job=data.draw(st.sampled_from(sorted(self.models)))))

    @precondition(lambda self: self.models)
    @rule(data=st.data())
    def resume(self, data: Any) -> None:
        self.tell(ResumeRequested(job=data.draw(st.sampled_from(sorted(self.models)))))

    @precondition(lambda self: self.saving)
    @rule(works=st.booleans())
    def save(self, works: bool) -> None:
        command = self.saving.pop(0)
        model = self.models[command.job]
        path = "checkpoint" if works else None
        if works and not model.ended:
            model.on_disk = Snapshot(iteration=command.snapshot.iteration, path=path)
        self.tell(SnapshotSaved(job=command.job, path=path))

    @precondition(lambda self: any(worker.starting for worker in self.workers.values()))
    @rule(data=st.data())
    def join(self, data: Any) -> None:
        name = data.draw(st.sampled_from([name for name, worker in self.workers.items() if worker.starting]))
        self.workers[name].starting, self.workers[name].alive = False, True
        self.tell(WorkerJoined(worker=name))

    @precondition(lambda self: self.busy())
    @rule(data=st.data(), count=st.integers(1, 6))
    def hear(self, data: Any, count: int) -> None:
        self.step(data.draw(st.sampled_from(self.busy())), count)

    @precondition(lambda self: any(worker.answers for worker in self.workers.values()))
    @rule(data=st.data(), unclean=st.booleans())
    def hear_of_a_fault(self, data: Any, unclean: bool) -> None:
        """Instead of its next answer, a worker says that the user's code failed, or that it was left unclean."""
        name = data.draw(st.sampled_from([name for name, worker in self.workers.items() if worker.answers]))
        event: Any = self.workers[name].answers.popleft()
        if isinstance(event, WorkerReleased):
            self.workers[name].lanes.clear()
            self.tell(WorkerReleased(worker=name, job=event.job, attempt=event.attempt, clean=not unclean))
            return
        model = self.models[event.job]
        is_heard = not model.ended and model.states[-1][1] == event.attempt and not model.releasing
        if is_heard and not (self.falls_back(event.job) and self.core.jobs[event.job].phase is not Phase.PLANNING):
            model.possible = {"failed"}
        self.tell(JobFaulted(job=event.job, attempt=event.attempt, reason="user-error", message="", exit_code=1))

    @precondition(lambda self: self.busy_with_more_than_release())
    @rule(data=st.data())
    def hear_that_the_directory_was_missed(self, data: Any) -> None:
        """Instead of its next answer, a worker says that the directory did not have what it should."""
        name = data.draw(st.sampled_from(self.busy_with_more_than_release()))
        event: Any = self.workers[name].answers.popleft()
        model = self.models[event.job]
        if not model.ended and model.states[-1][1] == event.attempt and not model.releasing:
            self.lose_for(event.job)
        self.tell(DirectoryMissed(job=event.job, attempt=event.attempt, message="it is not there"))

    def busy_with_more_than_release(self) -> list[str]:
        return [
            name
            for name, worker in self.workers.items()
            if worker.answers and not isinstance(worker.answers[0], WorkerReleased)
        ]

    def lose_for(self, job: str) -> None:
        model = self.models[job]
        if self.core.jobs[job].phase not in MAPPED:
            model.snapshot = None
        model.directory_losses += 1
        if model.directory_losses > MAX_DIRECTORY_LOSSES:
            model.possible = {"failed"}

    @precondition(lambda self: self.late)
    @rule(data=st.data(), fault=st.booleans())
    def hear_of_a_lost_worker(self, data: Any, fault: bool) -> None:
        event = self.late.pop(data.draw(st.integers(0, len(self.late) - 1)))
        model = self.models[event.job]
        if not fault:
            self.tell(event)
            return
        if not model.ended and model.states[-1] != ("queued", event.attempt) and model.states[-1][1] == event.attempt:
            assert model.releasing, "its worker is gone"
        self.tell(JobFaulted(job=event.job, attempt=event.attempt, reason="user-error", message="", exit_code=1))

    @precondition(lambda self: any(worker.alive or worker.starting for worker in self.workers.values()))
    @rule(data=st.data(), exit_code=st.sampled_from(EXIT_CODES))
    def lose_a_worker(self, data: Any, exit_code: int) -> None:
        there = [name for name, worker in self.workers.items() if worker.alive or worker.starting]
        name = data.draw(st.sampled_from(there))
        self.lose(name, exit_code if self.workers[name].alive else None)

    @rule(seconds=st.sampled_from([0.0, CANCEL_SECONDS, RELEASE_SECONDS]))
    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.tell(Ticked())

    @precondition(lambda self: any(worker.doomed for worker in self.workers.values()))
    @rule()
    def kill(self) -> None:
        for name, worker in self.workers.items():
            if worker.doomed:
                self.lose(name, -9)

    @precondition(lambda self: any(job.phase is Phase.RUNNING for job in self.core.jobs.values()))
    @rule(data=st.data())
    def take_a_snapshot(self, data: Any) -> None:
        running = [job.name for job in self.core.jobs.values() if job.phase is Phase.RUNNING]
        name = data.draw(st.sampled_from(running))
        self.tell(SnapshotDue(job=name, attempt=self.core.jobs[name].attempt))

    @precondition(lambda self: any(job.copying for job in self.core.jobs.values()))
    @rule(data=st.data())
    def miss_a_part_of_a_snapshot(self, data: Any) -> None:
        name = data.draw(st.sampled_from([job.name for job in self.core.jobs.values() if job.copying]))
        job = self.core.jobs[name]
        missed = data.draw(st.sampled_from([each.iteration for each in job.copying]))
        self.tell(SnapshotMissed(job=name, attempt=job.attempt, iteration=missed))

    @precondition(lambda self: any(job.copying for job in self.core.jobs.values()))
    @rule(data=st.data())
    def go_on_with_a_snapshot(self, data: Any) -> None:
        """Behind an iteration with which the attempt ends none does."""
        name = data.draw(st.sampled_from([job.name for job in self.core.jobs.values() if job.copying]))
        job = self.core.jobs[name]
        iteration = data.draw(st.sampled_from([each.iteration for each in job.copying]))
        if (job.attempt, iteration) in self.models[name].halts:
            return
        self.models[name].beside.add((job.attempt, iteration))
        self.tell(SnapshotGoesOn(job=name, attempt=job.attempt, iteration=iteration))

    @rule(steps=st.integers(0, 40), window=st.sampled_from([1, 3, 7]))
    def find_better_plans(self, steps: int, window: int) -> None:
        """For every job that runs, as often as it does; with many steps jobs get to stop for them, and to go on."""
        for number in range(steps + 1):
            for job in [job for job in self.core.jobs.values() if job.phase is Phase.RUNNING]:
                model = self.models[job.name]
                better = self._plans[model.stages, model.kind, window]
                self.tell(PlanImproved(job=job.name, attempt=job.attempt, plan=better, message="it is faster"))
                if job.improved is better:
                    model.better = better
            if number < steps:
                self.join_all()
                for name in self.busy():
                    self.step(name, 1)

    @rule(data=st.data(), steps=st.integers(10, 100))
    def run_iterations_again(self, data: Any, steps: int) -> None:
        """For which much has to go right before; as often as their bits differ."""
        for _ in range(steps):
            self.join_all()
            for name in self.busy():
                self.step(name, 1)
            for job in [job for job in self.core.jobs.values() if job.phase is Phase.RUNNING]:
                about = {"job": job.name, "attempt": job.attempt}
                if job.replay is None:
                    self.tell(ReplayDue(**about))
                elif not job.replay.digests:
                    bits = data.draw(st.sampled_from([b"", b"1", b"2"]))
                    about |= {"iteration": job.replay.iteration, "task": 0, "replica": None}
                    self.tell(TaskDigested(**about, digest=bits))

    def join_all(self) -> None:
        for name in [name for name, worker in self.workers.items() if worker.starting]:
            self.workers[name].starting, self.workers[name].alive = False, True
            self.tell(WorkerJoined(worker=name))

    @rule(data=st.data(), exit_code=st.sampled_from([-9, -9, -9, -11]))
    def lose_a_worker_behind_a_snapshot(self, data: Any, exit_code: int) -> None:
        """For which much has to go right before: all that can goes on, until a job on CPUs has one."""
        for _ in range(40):
            self.join_all()
            for name in self.busy():
                self.step(name, 1)
            for job in list(self.core.jobs.values()):
                if job.phase is Phase.RUNNING and job.snapshot is None:
                    self.tell(SnapshotDue(job=job.name, attempt=job.attempt))
                elif job.phase is Phase.RUNNING and self.models[job.name].kind == "cpu":
                    self.lose(data.draw(st.sampled_from(job.workers)), exit_code)
                    return

    @rule()
    def lose_the_directory(self) -> None:
        mapped = {job.name for job in self.core.jobs.values() if job.phase in MAPPED}
        self.arenas = {arena for arena in self.arenas if arena[0] in mapped}
        for name, model in self.models.items():
            if name not in mapped:
                model.snapshot = None
        for job in self.core.jobs.values():
            if job.phase is Phase.PREPARING:
                self.lose_for(job.name)
        self.tell(DirectoryLost())

    @precondition(lambda self: len(self.models) > 2)
    @rule(now=st.booleans())
    def drain(self, now: bool) -> None:
        self.draining = True
        self.tell(DrainRequested(now=now))

    # --- what always holds

    @invariant()
    def a_job_holds_all_its_workers_or_none(self) -> None:
        for job in self.core.jobs.values():
            held = {worker.name for worker in self.core.workers.values() if worker.job == job.name}
            match job.phase:
                case Phase.QUEUED | Phase.PAUSED:
                    assert held == set(job.workers) == set()
                case Phase.RELEASING:
                    assert held == set(job.workers)
                    assert job.waiting_for <= held
                    assert job.waiting_for
                    assert held == job.waiting_for or job.keeps
                case Phase.MENDING:
                    assert held == set(job.workers)
                    assert held < set(job.positions)
                    assert held
                case _:
                    assert held == set(job.workers)
                    kinds = [self.core.workers[name].kind for name in job.workers]
                    assert {kind: kinds.count(kind) for kind in job.needs} == job.needs
                    assert all(self.core.workers[name].up for name in held)

    @invariant()
    def no_worker_is_in_two_jobs_or_in_one_that_has_ended(self) -> None:
        """The core's view of a worker is one job; no other job may list it among those that it waits for or runs on."""
        for worker in self.core.workers.values():
            assert worker.job is None or worker.job in self.core.jobs
            claims = [job.name for job in self.core.jobs.values() if worker.name in job.workers]
            assert claims == ([worker.job] if worker.job else [])

    @invariant()
    def no_lane_has_more_outstanding_than_its_window(self) -> None:
        for job in self.core.jobs.values():
            for lane in job.lanes.values():
                assert job.plan is not None
                assert 0 <= lane.finished <= lane.sent
                assert lane.sent <= lane.total or lane.name == LOAD, "what is loaded behind the end is let go of"
                assert lane.sent - lane.finished <= job.plan.window
                last = lane.total if job.replay is None else (job.replay.iteration + 1) * len(lane.program)
                if job.plan.copies_each:
                    last = min(last, (job.iterations_done + 2) * len(lane.program))
                if job.phase is Phase.RUNNING:
                    assert lane.sent > lane.finished or lane.sent >= last, "a lane that could work has work"

    @invariant()
    def a_job_is_known_to_the_core_until_its_end_is_recorded(self) -> None:
        assert {name for name, model in self.models.items() if not model.ended} == self.core.jobs.keys()
        for name, model in self.models.items():
            for attempt, iterations in model.iterations.items():
                begins = model.begins[attempt]
                assert iterations == list(range(begins, begins + len(iterations))), name

    @invariant()
    def the_first_in_the_queue_starts_as_soon_as_it_can(self) -> None:
        """A job that starts again keeps its place: while its workers let go, nobody takes those that have. One that
        waits for a worker in the place of a lost one has a place, too."""
        jobs = in_order(self.core.jobs.values())
        waiting = [job for job in jobs if job.phase in (Phase.QUEUED, Phase.MENDING)]
        returning = any(job.outcome is not None and job.outcome.is_another_try for job in jobs)
        if waiting and not self.draining and not returning:
            first, free = waiting[0], self.core.free()
            if first.phase is Phase.QUEUED:
                assert chosen_for(first, free) is None, first.story
                assert preempted_by(first, jobs, free) == [], first.story
            if all(job.stopping is None for job in jobs):  # nobody makes room for the first
                coming = [worker.name for worker in self.core.workers.values() if not worker.up]
                menders = [job for job in waiting if job.phase is Phase.MENDING]
                assert all(mended(job, free, coming) is None for job in menders), "it holds what others wait for"

    # --- and how it ends

    def paused(self) -> list[Job]:
        return [job for job in self.core.jobs.values() if job.phase is Phase.PAUSED]

    def teardown(self) -> None:
        """All workers come up and say all they have to say: then every job ends, or waits for the next daemon."""
        for _ in range(2000):
            for job in self.paused():
                self.tell(ResumeRequested(job=job.name))
            if any(worker.doomed for worker in self.workers.values()):
                self.kill()
            starting = [name for name, worker in self.workers.items() if worker.starting]
            for name in starting:
                self.workers[name].starting, self.workers[name].alive = False, True
                self.tell(WorkerJoined(worker=name))
            busy = self.busy()
            for name in busy:
                self.step(name, 2)
                self.no_worker_is_in_two_jobs_or_in_one_that_has_ended()
            if not busy and not starting and not self.paused():  # a killed worker may have been all that one waited for
                break
        else:
            raise AssertionError("the world does not come to rest")
        for job in self.core.jobs.values():
            assert self.draining, job.story
            assert job.phase is Phase.QUEUED
        assert not {(job, attempt) for job, attempt in self.arenas if job not in self.core.jobs}, "arenas that stay"
        for model in self.models.values():
            assert model.ended or self.draining
            assert sum(state in TERMINAL for state, _ in model.states) == model.ended


@pytest.mark.slow(seconds=6)
def test_whatever_happens_the_invariants_hold_and_every_job_ends(
    plan_of: Callable[..., Plan], spec_of: Callable[..., JobSpec]
) -> None:
    run_state_machine_as_test(
        lambda: Play(plan_of, spec_of),
        settings=settings(max_examples=60, stateful_step_count=60, deadline=None),
    )
