"""The hearing: what workers say, as events for the core and lines for the job's run.

    link ──message──▶ checked ──▶ is it of the job that the worker holds? ──▶ event, books, log
                         │                       │
                         │                       └─ no: late, or not true: dropped
                         └─ what no worker sends, at any of these places: WorkerGarbled, and nothing more is heard

One worker's saying is a boundary. A worker speaks of the job that it holds and of no other, so whatever it says can
cost that job at most: what cannot be understood ends the worker and fails its job, and a bug of ours that it brings to
light fails its job as `internal`. Nothing in here raises.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from weft.metrics.prometheus.exporter import Exporter
from weft.scheduler.core.core import Core
from weft.scheduler.core.events import (
    Adjust,
    Command,
    DirectoryMissed,
    Dispatch,
    Event,
    JobFaulted,
    ResultSaved,
    SnapshotGoesOn,
    SnapshotMissed,
    TaskDigested,
    TasksFinished,
    WorkerGarbled,
    WorkerJoined,
    WorkerLost,
    WorkerPrepared,
    WorkerReleased,
)
from weft.scheduler.core.job import Job, Phase
from weft.scheduler.core.outcomes import CORRUPTED, OUT_OF_MEMORY
from weft.scheduler.daemon.guard import Guard
from weft.scheduler.runs import judging
from weft.scheduler.runs.run import Run
from weft.scheduler.runs.run_directory import CODE
from weft.transport.wire.frames import Message
from weft.transport.wire.worker_messages import Garbled, checked

_LEAST = ("link_bytes_per_second", "device_bytes")  # of several devices the least counts
_EACH = ("device_bytes", "probe_seconds")  # that a job is planned with, of each


class DeviceFacts:
    """What workers have told of their devices, and what of it a job on several of them is planned with."""

    def __init__(self) -> None:
        self._told: dict[str, Mapping[str, float | None]] = {}

    def add(self, worker: str, message: Message) -> None:
        """message: by which it has joined."""
        self._told[worker] = {fact: message[fact] for fact in {*_LEAST, *_EACH}}

    def of(self, workers: Sequence[str]) -> dict[str, float | None]:
        """None for what none of these has told."""
        return {fact: self._least(fact, workers) for fact in _LEAST}

    def each(self, fact: str) -> dict[str, float]:
        """By worker, of those that have told."""
        return {worker: own for worker, told in self._told.items() if (own := told.get(fact)) is not None}

    def _least(self, fact: str, workers: Sequence[str]) -> float | None:
        told = [self._told[worker][fact] for worker in workers if worker in self._told]
        return min((each for each in told if each is not None), default=None)


class Hearing:
    """feed: one event to the core. perform: one of its commands. progress: of a worker's lanes, which it was asked for.
    plan: of an inspection that has come. fail: a job, for a bug of ours."""

    def __init__(
        self,
        core: Core,
        runs: Mapping[str, Run],
        exporter: Exporter,
        guard: Guard,
        *,
        feed: Callable[[Event], None],
        perform: Callable[[Command], None],
        progress: Callable[[str, Job, list[Message]], None],
        plan: Callable[[Message], None],
        fail: Callable[[str | None, Exception], None],
        device_facts: DeviceFacts,
    ) -> None:
        self._device_facts = device_facts
        self._core = core
        self._runs = runs
        self._exporter = exporter
        self._guard = guard
        self._feed = feed
        self._perform = perform
        self._progress = progress
        self._plan = plan
        self._fail = fail

    def said(self, worker: str, message: Message) -> None:
        """What came over its link."""
        job = self._core.workers[worker].job
        with self._guard.around(f"what {worker} said of {job}", partial(self._fail, job)):
            try:
                self._hear(worker, checked(message))
            except Garbled as error:
                self.garbled(worker, str(error))

    def garbled(self, worker: str, problem: str) -> None:
        """What came over its link cannot be understood."""
        self._feed(WorkerGarbled(worker=worker, message=problem))

    def stopped(self, worker: str, what: str, at: int) -> None:
        """Its process was stopped, or goes on, as its parent tells."""
        self._exporter.set("weft_worker_up", what == "continued", worker=worker)
        run = self._runs.get(self._core.workers[worker].job or "")
        if run is not None and run.attempt is not None:
            stops = run.attempt.books.stops
            (stops.stop if what == "stopped" else stops.resume)(worker, at)

    def lost(self, worker: str, exit_code: int | None, shortage: str = "") -> None:
        """shortage: what is known where the kernel has killed it for lack of memory."""
        self._exporter.set("weft_worker_up", 0, worker=worker)
        reason = OUT_OF_MEMORY if shortage else _reason_of_exit(exit_code)
        self._exporter.add("weft_worker_restarts_total", reason=reason)
        run = self._runs.get(self._core.workers[worker].job or "")
        printed = "" if run is None else run.last_lines.pop(worker, "")
        self._feed(WorkerLost(worker=worker, exit_code=exit_code, shortage=shortage, printed=printed))

    def _hear(self, worker: str, message: Message) -> None:
        arrived = time.monotonic()
        if message["type"] == "joined":
            self._joined(worker, message)
            return
        name, attempt = message["job"], message["attempt"]
        job, run = self._core.jobs.get(name), self._runs.get(name)
        if job is None or run is None or self._core.workers[worker].job != name or job.attempt != attempt:
            return  # late: the attempt has ended, or the worker has let go of it
        match message["type"]:
            case "report":
                self._report(worker, message, job, run, arrived)
            case "progress":
                try:
                    self._progress(worker, job, message["lanes"])
                except ValueError as error:
                    raise Garbled(str(error)) from None
            case "inspected":
                self._inspected(message, job, run)
            case "prepared":
                self._feed(WorkerPrepared(job=name, attempt=attempt, worker=worker))
            case "saved":
                self._feed(ResultSaved(job=name, attempt=attempt))
            case "epoch":
                if run.asked is None:
                    raise Garbled("epoch: it was not asked about one")
                told = {"told": message["values"], "changes": message["changes"]}
                self._feed(judging.answered(run, stops=message["stop"], **told))
            case "released":
                run.last_lines.pop(worker, None)
                if run.attempt is not None:
                    run.attempt.books.note_peak(worker, message["peak_bytes"], message["device_peak_bytes"])
                self._feed(WorkerReleased(worker=worker, job=name, attempt=attempt, clean=message["clean"]))
            case "fault":
                run.note_exception(message["exception"])
                fields = {key: message[key] for key in ("job", "attempt", "reason", "message", "exit_code")}
                if message["reason"] == CORRUPTED:
                    fields["message"] = f"{worker}: {message['message']}"
                self._feed(JobFaulted(**fields))
            case "directory-missed":
                self._feed(DirectoryMissed(job=name, attempt=attempt, message=message["message"]))
            case "digest":
                self._digest(worker, message, job)
            case "uncopied":
                self._feed(SnapshotMissed(job=name, attempt=attempt, iteration=message["iteration"]))
            case "copying":
                self._feed(SnapshotGoesOn(job=name, attempt=attempt, iteration=message["iteration"]))
            case "copied":
                if run.attempt is not None:
                    run.attempt.snapshots.copied_beside(message["seconds"])
            case "output":
                run.log_output(worker, message["text"])
            case "profiled":
                run.note_profile(worker, attempt, message["text"])
                run.changed.notify()
            case other:
                raise AssertionError(other)

    def _joined(self, worker: str, message: Message) -> None:
        if self._core.workers[worker].up:
            raise Garbled("it has joined already")
        self._exporter.set("weft_worker_up", 1, worker=worker)
        self._device_facts.add(worker, message)
        self._feed(WorkerJoined(worker=worker))

    def _inspected(self, message: Message, job: Job, run: Run) -> None:
        if job.phase is not Phase.PLANNING:
            return
        if run.inspected_attempt == job.attempt:
            raise Garbled("inspected: a second time")
        run.inspected_attempt = job.attempt
        self._note_code(message["code"], run)
        self._plan(message)

    @staticmethod
    def _note_code(found: Mapping[str, str], run: Run) -> None:
        """found: digests by file. What was known of a file before stands: the worker has compared them."""
        if found.keys() - run.code.keys():
            run.code = {**found, **run.code}
            run.files.keep(CODE, json.dumps(run.code, indent=1, sort_keys=True) + "\n")

    def _digest(self, worker: str, message: Message, job: Job) -> None:
        tasks = () if job.plan is None else job.plan.graph.tasks
        fields = {key: message[key] for key in ("job", "attempt", "iteration", "task", "replica", "digest")}
        if fields["task"] >= len(tasks) or job.workers[tasks[fields["task"]].lane.worker] != worker:
            raise Garbled(f"digest: task {fields['task']} is none of its own")
        self._feed(TaskDigested(**fields))

    def _report(self, worker: str, message: Message, job: Job, run: Run, arrived: float) -> None:
        count, lane = message["count"], message["lane"]
        self._check_report(worker, message, job)
        commands = self._core.handle(TasksFinished(job.name, job.attempt, worker, lane, count), arrived)
        dispatches = [command for command in commands if isinstance(command, (Adjust, Dispatch))]
        for dispatch in dispatches:  # before the books are kept: a lane may wait for it
            self._perform(dispatch)
        if dispatches:
            self._exporter.observe("weft_dispatch_latency_seconds", time.monotonic() - arrived)
        assert run.attempt is not None
        try:
            run.attempt.add_report(worker, lane, message["records"], message["values"])
        except ValueError as error:
            raise Garbled(f"report: {error}") from None
        finally:
            for command in commands:
                if not isinstance(command, (Adjust, Dispatch)):
                    self._perform(command)

    @staticmethod
    def _check_report(worker: str, message: Message, job: Job) -> None:
        """Of tasks that the lane was sent. What the core finds wrong with one that passes here is a bug of ours."""
        lane = job.lanes.get((worker, message["lane"]))
        if lane is None:
            raise Garbled(f"report: lane {message['lane']!r:.80} is none of its own")
        if message["count"] > lane.sent - lane.finished:
            raise Garbled(f"report: {message['count']} tasks, of {lane.sent - lane.finished} that it was sent")
        newest = (lane.sent - 1) // len(lane.program)
        for values in message["values"]:
            if values["iteration"] > newest:
                raise Garbled(f"report: values of iteration {values['iteration']}, of which it was sent nothing")


def _reason_of_exit(exit_code: int | None) -> str:
    return f"signal-{-exit_code}" if exit_code is not None and exit_code < 0 else "exit"
