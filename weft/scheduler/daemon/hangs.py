"""Hangs: the daemon's look at the jobs that hold workers, once a second, for one of which nothing comes to an end.

    tick ──▶ has anything ended since? ──no, for hang_seconds──▶ ask its workers ──progress──▶ find_hang ──▶ tell
                                                                   (the next tick)                             │
       log, metric, `weft show`, stacks of every worker in the run directory ◀────────────────────────────────┤
       on_hang = "restart": WorkerHung, and the job goes on as after any lost worker ◀─────────────────────────┘

A worker's control thread answers, which no code of the job runs in. Looks are added up, not the clock read: a daemon
that was stopped itself, or came late, has seen nothing of that time. A job that hangs again before it has come further
gets twice the time, so that what is only slow comes through in the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, get_args

from weft.machine.proc import STOPPED, TRACED, state_of
from weft.machine.stacks import stacks_of
from weft.metrics.accounts.task_times import STEPS
from weft.metrics.prometheus.exporter import Exporter
from weft.scheduler.adapting.lane_state import LaneState
from weft.scheduler.core import gates
from weft.scheduler.core.core import Core
from weft.scheduler.core.events import Event, WorkerHung
from weft.scheduler.core.hangs import FIRST, Hang, HangCause, SeenLane, SeenWorker, find_hang, stopped_worker, who_waits
from weft.scheduler.core.job import Job, Phase
from weft.scheduler.daemon.pool import Pool
from weft.scheduler.runs.run import Run
from weft.transport.wire.frames import Message

MAX_SECONDS: Final = 2.0  # that one look may add: they are a second apart, on a machine that keeps up
NOTED_SECONDS: Final = 15.0  # that what goes before training takes, and each time twice as long: arbitrary
SILENT_LOOKS: Final = 2  # that a worker has not answered; it takes a millisecond, and the daemon's next look
LOOKED_AT: Final = (Phase.PLANNING, Phase.PREPARING, Phase.RUNNING, Phase.SAVING)

Begin = Callable[[str, str, Coroutine[Any, Any, None]], None]  # a task about a job: what it does, the job, its work


@dataclass(slots=True)
class Watch:
    """What the looks at one job have come to."""

    mark: tuple[object, ...] = ()  # what changes whenever anything comes to an end
    quiet: float = 0.0  # seconds since it did
    noted: float = 0.0  # of these, when the log said last that it goes on
    answers: dict[str, list[Message]] = field(default_factory=dict)  # by worker: how far its lanes are, as they said
    unanswered: dict[str, int] = field(default_factory=dict)  # by worker: looks since it was asked
    seen: tuple[SeenWorker, ...] = ()  # at the last look
    is_told: bool = False
    furthest: int = -1  # iterations that were over at the last hang
    times: int = 0  # that it hung without coming further

    def patience(self, job: Job) -> int:
        """How many times the usual."""
        return 1 if job.iterations_done > self.furthest else 2**self.times

    def note(self, job: Job) -> None:
        """It hangs."""
        self.times = 1 if job.iterations_done > self.furthest else self.times + 1
        self.furthest = max(self.furthest, job.iterations_done)
        self.is_told = True


class Hangs:
    def __init__(
        self,
        core: Core,
        runs: Mapping[str, Run],
        pool: Pool,
        exporter: Exporter,
        begin: Begin,
        feed: Callable[[Event], None],
        watches: dict[str, Watch],
    ) -> None:
        self._core = core
        self._runs = runs
        self._pool = pool
        self._exporter = exporter
        self._begin = begin
        self._feed = feed
        self._watches = watches
        self._looked_at: float | None = None
        for cause in get_args(HangCause):  # what has been at 0 can be seen to grow
            exporter.add("weft_hangs_total", 0, cause=cause)

    def heard(self, worker: str, job: Job, lanes: list[Message]) -> None:
        """What a worker answers. Errors: ValueError for what cannot be."""
        if job.phase is not Phase.RUNNING or (watch := self._watches.get(job.name)) is None:
            return
        assert job.plan is not None
        if len(lanes) > len(job.lanes):
            raise ValueError(f"progress: of {len(lanes)} lanes")
        for told in lanes:
            lane = job.lanes.get((worker, told["lane"]))
            if lane is None or max(told.get("task") or 0, told["waits_for"] or 0) >= len(job.plan.graph.tasks):
                raise ValueError("progress: of what is no lane of its own, or no task")
            if told["done"] > told["taken"] or told["taken"] > lane.sent:
                raise ValueError(f"progress: {told['done']} of {told['taken']} tasks, of {lane.sent} that it was sent")
        watch.answers[worker] = lanes
        watch.unanswered.pop(worker, None)

    def look(self, now: float) -> None:
        """Once a second or so."""
        passed = 0.0 if self._looked_at is None else min(now - self._looked_at, MAX_SECONDS)
        self._looked_at = now
        for name in self._watches.keys() - self._core.jobs.keys():
            del self._watches[name]
        for job in list(self._core.jobs.values()):
            if (run := self._runs.get(job.name)) is None:
                continue
            if job.phase in LOOKED_AT:
                self._look_at(job, run, self._watches.setdefault(job.name, Watch()), passed)
            else:
                run.hang = None

    def _look_at(self, job: Job, run: Run, watch: Watch, passed: float) -> None:
        mark = job.attempt, job.phase, len(job.waiting_for), sum(lane.finished for lane in job.lanes.values())
        if mark != watch.mark:
            self._note_end(job, run, watch)
            watch.mark, watch.quiet, watch.noted = mark, 0.0, 0.0
            return
        watch.quiet += passed
        if watch.quiet >= max(NOTED_SECONDS, 2 * watch.noted) and (what := _what_goes_on(job)) is not None:
            watch.noted = watch.quiet
            run.files.log(f"{job.phase} has taken {watch.quiet:.0f} s so far: {what}")
        least = run.spec.job.hang_seconds * watch.patience(job)
        if watch.quiet < least or watch.is_told:
            return
        hang = self._hang_of(job, run, watch, least)
        if hang is not None:
            self._tell(job, run, watch, hang)
        elif job.phase is Phase.RUNNING:
            self._ask(job, watch)

    def _note_end(self, job: Job, run: Run, watch: Watch) -> None:
        """Something has come to an end again."""
        if watch.is_told and job.phase is Phase.RUNNING and watch.mark[0] == job.attempt:
            run.files.log("the job goes on by itself")
        watch.is_told, run.hang, watch.seen = False, None, ()
        watch.answers.clear()
        watch.unanswered.clear()

    def _ask(self, job: Job, watch: Watch) -> None:
        for worker in job.workers:
            watch.unanswered[worker] = watch.unanswered.get(worker, 0) + 1
            self._pool.send(worker, {"type": "look", "job": job.name, "attempt": job.attempt})

    # --- what there is to see

    def _hang_of(self, job: Job, run: Run, watch: Watch, least: float) -> Hang | None:
        if job.phase is not Phase.RUNNING:
            return self._hang_of_phase(job, watch, least)
        if job.gate == job.iterations_done:
            return self._hang_at_gate(job, run, watch, least)
        before, watch.seen = watch.seen, tuple(self._seen(job, watch, worker) for worker in job.workers)
        if any(worker.state == "answers" and worker.name not in watch.answers for worker in watch.seen):
            return None  # it has not been asked, or has only just been
        assert job.plan is not None
        hang = find_hang(watch.seen, job.plan, watch.quiet, least, lambda lane: _slowest(lane, run))
        if hang is not None and hang.cause == "nobody" and _places(before) != _places(watch.seen):
            return None  # what workers say is not of one moment
        return hang

    def _seen(self, job: Job, watch: Watch, worker: str) -> SeenWorker:
        state = state_of(self._pool.pid(worker) or 0)
        if state == STOPPED:
            return SeenWorker(name=worker, state="stopped", lanes=())
        if watch.unanswered.get(worker, 0) >= SILENT_LOOKS and state != TRACED:
            lanes = tuple(
                _seen_lane(lane, lane.finished, lane.sent, watch.quiet)
                for lane in job.lanes.values()
                if lane.worker == worker
            )
            return SeenWorker(name=worker, state="silent", lanes=lanes)
        lanes = tuple(_told_lane(job.lanes[worker, told["lane"]], told) for told in watch.answers.get(worker, ()))
        return SeenWorker(name=worker, state="answers", lanes=lanes)

    def _hang_of_phase(self, job: Job, watch: Watch, least: float) -> Hang | None:
        """Preparing and saving have no measure: what takes long there is told, and only a stopped worker replaced."""
        whom = {Phase.PLANNING: job.workers[job.inspector : job.inspector + 1], Phase.SAVING: job.workers[:1]}
        waits = whom.get(job.phase, sorted(job.waiting_for))
        return self._stopped(waits) or _too_long(f"{job.phase}", waits, watch, least)

    def _hang_at_gate(self, job: Job, run: Run, watch: Watch, least: float) -> Hang | None:
        """No lane has anything to do: a function of the user's is looking at what the epoch has come to, or it is ours
        to look."""
        if (stopped := self._stopped(job.workers)) is not None or run.asked is None:
            return stopped or _too_long("the end of an epoch", job.workers, watch, least)
        worker = gates.judging_worker(job)
        if watch.quiet < FIRST * least or state_of(self._pool.pid(worker) or 0) == TRACED:
            return None
        message = f"Workload.on_epoch has not returned on {worker} for {watch.quiet:.0f} s"
        return Hang(cause="task", worker=worker, message=message)

    def _stopped(self, workers: Sequence[str]) -> Hang | None:
        stopped = [worker for worker in workers if state_of(self._pool.pid(worker) or 0) == STOPPED]
        return stopped_worker(stopped[0]) if stopped else None

    # --- what is told, and done

    def _tell(self, job: Job, run: Run, watch: Watch, hang: Hang) -> None:
        watch.note(job)
        run.hang = f"it hangs: {hang.message}"
        run.files.log(f"the job hangs, and nothing of it has ended for {watch.quiet:.0f} s: {hang.message}")
        for line in who_waits(watch.seen, job.plan) if job.plan is not None else ():
            run.files.log(line)
        self._exporter.add("weft_hangs_total", cause=hang.cause)
        run.changed.notify()
        self._begin("stacks", job.name, self._act(job.name, job.attempt, job.workers, run, watch, hang))

    async def _act(self, job: str, attempt: int, workers: Sequence[str], run: Run, watch: Watch, hang: Hang) -> None:
        pids = {worker: pid for worker in workers if (pid := self._pool.pid(worker))}
        native = pids.keys() & {hang.worker} if hang.worker is not None else pids  # the others only wait for that one
        for worker, text in (await asyncio.to_thread(stacks_of, pids, native)).items():
            run.files.keep(f"stacks-{worker}.txt", text)
        run.files.log(f"stacks: {', '.join(f'stacks-{worker}.txt' for worker in pids)} in {run.files.path}")
        if hang.cause != "phase" and run.spec.job.on_hang == "restart" and watch.is_told:
            self._feed(WorkerHung(worker=hang.worker, job=job, attempt=attempt, message=hang.message))


def _what_goes_on(job: Job) -> str | None:
    """Before training: for whoever would ask."""
    if job.phase is Phase.PLANNING:
        return f"{job.workers[job.inspector]} tries the model, whole and cut into stages, and measures it"
    if job.phase is Phase.PREPARING:
        return f"{', '.join(sorted(job.waiting_for))} build the model and open the data"
    return None


def _too_long(what: str, waits: Sequence[str], watch: Watch, least: float) -> Hang | None:
    if watch.quiet < FIRST * least:
        return None
    message = f"{what} has taken {watch.quiet:.0f} s so far, and waits for {', '.join(waits)}"
    return Hang(cause="phase", worker=None, message=message)


def _told_lane(lane: LaneState, told: Message) -> SeenLane:
    """As the lane says, which may take its tasks in another order than its program's."""
    seen = _seen_lane(lane, told["done"], told["taken"], told["seconds"])
    return replace(seen, task=told.get("task", seen.task), waits_for=told["waits_for"])


def _seen_lane(lane: LaneState, done: int, taken: int, seconds: float) -> SeenLane:
    """done, taken: tasks of the endless program."""
    iteration, place = divmod(done, len(lane.program))
    task = lane.program[place] if done < taken else None
    return SeenLane(worker=lane.worker, name=lane.name, task=task, iteration=iteration, seconds=seconds, waits_for=None)


def _places(workers: Sequence[SeenWorker]) -> list[tuple[str, int | None, int, int | None]]:
    """Where the lanes are, whenever that was."""
    return [(str(lane), lane.task, lane.iteration, lane.waits_for) for worker in workers for lane in worker.lanes]


def _slowest(lane: SeenLane, run: Run) -> float | None:
    """Of the training tasks of its kind in that lane. None where they say nothing of this one: a validation's, and the
    first of an epoch, whose data may be opened anew, until others such are among those that are kept."""
    attempt = run.attempt
    if lane.task is None or attempt is None:
        return None
    graph, itinerary = attempt.plan.graph, attempt.plan.itinerary
    about, begun = itinerary.at(lane.iteration), itinerary.at(attempt.begins).step
    epochs = 2 * itinerary.steps_per_epoch
    if not about.training or (about.start == 0 and (about.step - begun <= epochs or epochs > STEPS)):
        return None
    task, times = graph.tasks[lane.task], attempt.books.times
    alike = (times.slowest(each) for each in graph.programs[task.lane] if graph.tasks[each].kind is task.kind)
    known = [taken for taken in alike if taken is not None]
    return max(known) / 1e9 if known else None
