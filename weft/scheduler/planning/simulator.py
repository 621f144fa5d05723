"""Simulator: runs a plan through the real core in virtual time, with perfect workers and no overhead.

It answers the core's commands as a daemon and its workers would, keeps the board of finished iterations, and starts
each task when its lane is free and its inputs are there. What comes out is the predicted iteration time, the lanes'
timeline, or the proof that the plan cannot run.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from weft.plan.course import Course
from weft.plan.graph import Graph, Lane, Task
from weft.plan.kinds import KINDS, Kind
from weft.plan.plan import Plan
from weft.plan.rows import Row
from weft.plan.schedules.dynamic import PassOrder
from weft.scheduler.adapting.policy import Policy
from weft.scheduler.core.core import Core
from weft.scheduler.core.events import (
    Adjust,
    Command,
    Dispatch,
    Event,
    JobMeasured,
    JobPlanned,
    JobSubmitted,
    PlanJob,
    Prepare,
    RecordIteration,
    Release,
    ResultSaved,
    SaveResult,
    TasksFinished,
    WorkerJoined,
    WorkerPrepared,
    WorkerReleased,
)
from weft.scheduler.planning.limit import Milestones
from weft.spec.strategy import LEAST_BATCHES

WARMUP_ITERATIONS = 4  # the first ones fill the pipeline and the input slots
MEASURED_ITERATIONS = 4  # or a few more: whole rounds of the loaders, whose batches may come in bursts
_JOB = "simulated"


class SimulationError(RuntimeError):
    """The plan stops before its end. The text names the tasks that wait and what for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One task of one iteration on its lane, in seconds of virtual time."""

    task: int
    iteration: int
    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    iteration_seconds: float  # the mean of the iterations after warm-up
    seconds: float
    spans: dict[Lane, list[Span]]  # every task that ran


def simulate(
    plan: Plan,
    seconds: Sequence[float] | None = None,
    *,
    iterations: int | None = None,
    milestones: Milestones | None = None,
    wake_seconds: float = 0.0,
) -> Simulation:
    """Runs `iterations` (default: enough for a steady state) of the plan. Errors: SimulationError.

    milestones: those that are posted from inside another task; without them each comes in its lane's order, as the
    speed limit has it. wake_seconds: from the end of what a lane waited for to the start of its task.
    """
    round_of_loaders = plan.turns.takers
    measured = -(-MEASURED_ITERATIONS // round_of_loaders) * round_of_loaders
    count = iterations or WARMUP_ITERATIONS + measured
    itinerary = replace(plan.itinerary, num_train=1, num_validation=0, batch_size=1, steps=count)
    simulated = replace(plan, graph=_with_near_loads(plan), itinerary=itinerary, judged=False)
    return _Run(simulated, seconds or plan.task_seconds, milestones or {}, wake_seconds).to_end()


def _with_near_loads(plan: Plan) -> Graph:
    """Where batches are loaded so far ahead that all would be before the steady state, they are no further ahead than
    by default: a loader that keeps up does so then, too."""
    least = plan.turns.batches_ahead(LEAST_BATCHES)
    graph = plan.graph
    loads = {task.id for task in graph.tasks if task.kind is Kind.LOAD}
    far = {edge for edge in graph.edges if edge.distance > max(WARMUP_ITERATIONS, least) and edge.target in loads}
    if not far:
        return graph
    return replace(graph, edges=tuple(each._replace(distance=least) if each in far else each for each in graph.edges))


def _rows(span: Span) -> list[Row]:
    """What a lane would have stamped, of a task that did anything."""
    row = (0, span.task, span.iteration, -1, round(1e9 * span.start), round(1e9 * span.end))
    return [row] if span.end > span.start else []


class _Run:
    def __init__(self, plan: Plan, seconds: Sequence[float], milestones: Milestones, wake: float) -> None:
        self._plan = plan
        self._seconds = seconds
        self._milestones = milestones
        self._wake_seconds = wake
        self._waiting: set[Lane] = set()
        self._looked_for: dict[int, list[Lane]] = {}  # by task: lanes whose next one waits for it
        self._to_look_at: dict[
            Lane, None
        ] = {}  # lanes of which something has changed since they could not start, in order
        self._now = 0.0
        self._core = Core({f"{kind}-{position}": kind for position, kind in enumerate(plan.workers)})
        names = {lane: (f"{plan.workers[lane.worker]}-{lane.worker}", lane.name) for lane in plan.graph.programs}
        self._names = names
        self._lanes = {name: lane for lane, name in names.items()}
        self._queues: dict[Lane, deque[tuple[int, int]]] = {lane: deque() for lane in plan.graph.programs}
        self._busy: dict[Lane, bool] = dict.fromkeys(plan.graph.programs, False)
        self._finished: list[int] = [-1] * len(plan.graph.tasks)  # the board
        self._spans: dict[Lane, list[Span]] = {lane: [] for lane in plan.graph.programs}
        self._iteration_ends: list[float] = []
        self._happening: list[tuple[float, int, Lane | None, int, int]] = []  # heap of tasks that run; no lane: posted
        self._order = 0
        self._course = Course(plan)
        self._local = self._course.local.of(0)
        self._turns = plan.turns
        self._positions: dict[tuple[int | None, int | None], int] = {
            place: position for position, place in enumerate(plan.turns.order())
        }
        self._policies: list[tuple[int, Policy[Any]]] = []  # of the core's, those that are asked so often
        self._graph = plan.graph.going(self._local)
        self._orders = {
            lane: PassOrder((plan.graph.tasks[task] for task in plan.graph.programs[lane]), limit)
            for lane, limit in plan.graph.free.items()
        }

    def to_end(self) -> Simulation:
        self._core.start()
        for name in self._core.workers:
            self._feed(WorkerJoined(worker=name))
        self._feed(JobSubmitted(job=_JOB, needs=Counter(self._plan.workers)))
        while self._happening:
            self._now, _, lane, task, iteration = heapq.heappop(self._happening)
            self._finished[task] = iteration
            self._look_at(self._looked_for.pop(task, ()))
            if lane is None:
                self._start_ready()
                continue
            self._busy[lane] = False
            self._look_at((lane,))
            for _, policy in self._policies if not self._is_seldom(task) else ():
                policy.add(_rows(self._spans[lane][-1]))
            self._feed(TasksFinished(_JOB, 1, *self._names[lane], 1))
        if len(self._iteration_ends) < self._plan.itinerary.num_iterations:
            raise SimulationError(f"the plan stops at {self._now:.6g} s: {self._who_waits()}")
        ends = self._iteration_ends
        warm = min(WARMUP_ITERATIONS, len(ends) - 1)
        measured = (ends[-1] - ends[warm - 1]) / (len(ends) - warm) if warm else ends[-1] / len(ends)
        return Simulation(iteration_seconds=measured, seconds=self._now, spans=self._spans)

    def _feed(self, event: Event) -> None:
        commands = deque(self._core.handle(event, self._now))
        while commands:
            answer = self._perform(commands.popleft())
            if answer is not None:
                commands += self._core.handle(answer, self._now)
        self._start_ready()

    def _perform(self, command: Command) -> Event | None:
        match command:
            case PlanJob():
                return JobPlanned(job=_JOB, attempt=1, plan=self._plan)
            case Prepare():
                policies = enumerate(self._core.jobs[_JOB].policies)
                self._policies = [each for each in policies if each[1].after_each_iteration]
                return WorkerPrepared(job=_JOB, attempt=1, worker=command.worker)
            case Dispatch():
                lane = self._lanes[command.worker, command.lane]
                self._look_at((lane,))
                self._queues[lane].extend((iteration, task) for iteration, tasks in command.work for task in tasks)
            case Adjust():
                self._course.adjust(command.first_iteration, command.adjustment)
            case RecordIteration():
                self._iteration_ends.append(self._now)
                return self._measured(command.iteration)
            case SaveResult():
                return ResultSaved(job=_JOB, attempt=1)
            case Release():
                return WorkerReleased(worker=command.worker, job=_JOB, attempt=1, clean=True)
            case _:
                pass
        return None

    def _measured(self, iteration: int) -> Event | None:
        """How fast the job was in an iteration that is over, as the daemon would tell the core."""
        over, ends = self._course.iteration(iteration), self._iteration_ends
        for number, policy in self._policies:
            policy.finish(over, self._course.samples(over), self._now - ends[-2] if len(ends) > 1 else None)
            if (measured := policy.take()) is not None:
                return JobMeasured(job=_JOB, attempt=1, policy=number, measured=measured)
        return None

    def _look_at(self, lanes: Iterable[Lane]) -> None:
        self._to_look_at.update(dict.fromkeys(lanes))

    def _start_ready(self) -> None:
        lanes, self._to_look_at = self._to_look_at, {}
        for lane in lanes:
            queue = self._queues[lane]
            if not queue or self._busy[lane]:
                continue
            place = self._startable(lane, queue)
            if place is None:
                self._waiting.add(lane)
                continue
            iteration, task = queue[place]
            del queue[place]
            start = self._now + (self._wake_seconds if lane in self._waiting else 0.0)
            self._waiting.discard(lane)
            seconds = self._seconds_of(task, iteration)
            end = start + seconds
            self._busy[lane] = True
            if not self._is_seldom(task):
                self._spans[lane].append(Span(task=task, iteration=iteration, start=start, end=end))
            self._happens(end, lane, task, iteration)
            for milestone, part in self._milestones.get(task, {}).items():
                self._happens(start + part * seconds, None, milestone, iteration)

    def _startable(self, lane: Lane, queue: Sequence[tuple[int, int]]) -> int | None:
        """Where the lane's next task stands, if any can start; else the lane is looked at again when one may."""
        order = self._orders.get(lane)
        missing = []
        for place in order.places(queue) if order is not None else (0,):
            iteration, task = queue[place]
            if (source := self._missing(task, iteration)) is None:
                if order is not None:
                    order.begin(task)
                return place
            missing.append(source)
        for source in missing:
            self._looked_for.setdefault(source, []).append(lane)
        return None

    def _seconds_of(self, task: int, iteration: int) -> float:
        """Nothing for a position that has no microbatch, on the way that a bucket does not go, or where it is another
        loader's turn."""
        about = self._plan.graph.tasks[task]
        if about.kind is Kind.LOAD and not self._loads(about, iteration):
            return 0.0
        if about.passes(self._local):
            return 0.0
        if self._course.steals and KINDS[about.kind].of_position:
            assert about.microbatch is not None
            part = self._course.part(self._course.iteration(iteration), about.holder.replica, about.microbatch)
            if part.number < 0:
                return 0.0
        return self._seconds[task]

    def _is_seldom(self, task: int) -> bool:
        return KINDS[self._plan.graph.tasks[task].kind].seldom

    def _loads(self, task: Task, iteration: int) -> bool:
        position = self._positions[task.replica, task.microbatch]
        return self._turns.has(task.holder.stage, position, iteration)

    def _happens(self, when: float, lane: Lane | None, task: int, iteration: int) -> None:
        self._order += 1
        heapq.heappush(self._happening, (when, self._order, lane, task, iteration))

    def _missing(self, task: int, iteration: int) -> int | None:
        for edge in self._graph.inputs(task):
            if self._finished[edge.source] < iteration - edge.distance:
                return edge.source
        return None

    def _who_waits(self) -> str:
        lines = []
        for lane, queue in self._queues.items():
            if queue:
                iteration, task = queue[0]
                missing = self._missing(task, iteration)
                source = "nothing" if missing is None else str(self._plan.graph.tasks[missing])
                lines.append(f"{lane} is at {self._plan.graph.tasks[task]} and waits for {source}")
        return "; ".join(lines) or "no lane was given work"
