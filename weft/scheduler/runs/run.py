"""A run: what the daemon keeps of a job that has not ended, over all its attempts.

    Run ──┬─ RunDirectory   its files
          └─ PlannedAttempt, the newest one ──┬─ Progress   numbers
                                              └─ Books      accounts

RUNS/digits-1/
  job.log              what happened, and the user's own output, in words
  metrics.jsonl        a line for each training step, a line for each validation
  plan.json            the resolved plan
  schedule.grid        the order of its stages, of a job whose schedule is made for it
  spec.json            what was submitted
  code.json            digests of the job's files of code, by which it is trained
  model.safetensors    the trained weights, there only when the job is completed
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict

from weft.metrics.recording.recording import PlannedSpan
from weft.metrics.recording.step_log import Logged
from weft.plan.course import Course
from weft.plan.itinerary import Iteration
from weft.plan.kinds import FIRST_STALL, MODE_INDEX
from weft.plan.plan import Plan
from weft.plan.rows import unpack
from weft.plan.schedules.planned import planned_grid
from weft.plan.tables import Adjustment
from weft.scheduler.adapting.policy import Policy, Verdict
from weft.scheduler.adapting.switching import Switching
from weft.scheduler.core.events import (
    CheckpointDue,
    JudgeEpoch,
    RecordReplay,
    ReplayDue,
    Snapshot,
    SnapshotDue,
    StopRequested,
)
from weft.scheduler.planning.choosing.better import Better, may_improve
from weft.scheduler.planning.choosing.corrected import told as corrected_times
from weft.scheduler.runs.books import Books
from weft.scheduler.runs.iteration_pace import Pace
from weft.scheduler.runs.progress import Progress, finite
from weft.scheduler.runs.run_directory import RunDirectory
from weft.scheduler.runs.snapshot_pace import LEAST_SECONDS, ReplayPace, SnapshotPace
from weft.spec.job_spec import JobSpec
from weft.spec.job_state import JobState
from weft.spec.schedule_text import GRID_FILE, MEASURED
from weft.spec.stopping import Rule, Training

CHOSEN = "strategy.json"  # of a job whose strategy was chosen: which
MAX_LAST_LINES, MAX_LAST_CHARS = 3, 400  # of a worker's output, for the report of its loss; arbitrary: the log has all
_SNAPSHOT = MODE_INDEX["snapshot"]


class _About(TypedDict):
    job: str
    attempt: int


class Changed:
    """Something to wait on that happens again and again: each `notify` ends every `wait` that has begun."""

    def __init__(self) -> None:
        self.num_times = 0  # that it has happened, for those who only look now and then
        self._next: asyncio.Future[None] | None = None

    def notify(self) -> None:
        self.num_times += 1
        if self._next is not None:
            self._next.set_result(None)
            self._next = None

    async def wait(self) -> None:
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._next)


class PlannedAttempt:
    """An attempt from its plan on; its numbers and accounts begin with it, since training does."""

    def __init__(
        self,
        job: str,
        number: int,
        plan: Plan,
        workers: tuple[str, ...],
        policies: Sequence[Policy[Any]] = (),
        *,
        begins: int = 0,
        before: Progress | None = None,
    ) -> None:
        """begins, before: see Progress."""
        self.job = job
        self.number = number
        self.plan = plan
        self.workers = workers  # by their position in the plan
        self.begins = begins
        self.progress = Progress(plan, begins, before)
        self.books = Books(plan, workers)
        self.course = Course(plan, begins)
        self.verdicts: list[str] = []  # in words, in the order in which they came
        self.planned: tuple[PlannedSpan, ...] | None = None  # simulated when somebody first looks
        self.unprofiled: set[str] | None = {workers[lane.worker] for lane in plan.graph.programs}  # None: all have been
        self.began = time.monotonic()  # to be prepared
        self.snapshots = SnapshotPace(self.began)
        self.snapshot: Snapshot | None = None  # the newest
        self._checkpoint_due = math.inf
        self.note_checkpoint()
        self._policies = policies
        self._samples: list[int] = []  # of each replica, in the newest iteration that is over

    def add_report(self, worker: str, lane: str, packed: bytes, values: list[dict[str, Any]]) -> None:
        """What a lane stamped, as its report has it, and measured. Raises ValueError for rows that cannot be."""
        self.books.put(worker, lane, packed)
        if self._policies:
            ran = [row for row in unpack(packed) if row[0] < FIRST_STALL]
            for policy in self._policies:
                policy.add(ran)
        self.progress.add(packed, values)

    def finish(self, iteration: Iteration) -> dict[str, Any]:
        """Every lane has finished it: its line of metrics.jsonl, if it has one."""
        seconds = self.progress.end(iteration.index)
        samples = self._samples = self.course.samples(iteration)
        for policy in self._policies:
            policy.finish(iteration, samples, seconds)
        self.books.transfers.finish(iteration, samples)
        return self.progress.finish(iteration, seconds, samples)

    def take_checkpoint_due(self, now: float) -> bool:
        """Whether one is to be made, by the clock; again after a while, where none was."""
        if now < self._checkpoint_due:
            return False
        self._checkpoint_due = now + LEAST_SECONDS
        return True

    def note_checkpoint(self) -> None:
        """One has been written, or could not be."""
        self._checkpoint_due = time.monotonic() + (self.plan.checkpoint_seconds or math.inf)

    @property
    def snapshot_step(self) -> int | None:
        """After which another attempt would go on."""
        return None if self.snapshot is None else self.plan.itinerary.at(self.snapshot.iteration).step + 1

    def note_snapshot(self, snapshot: Snapshot) -> None:
        """One has been made."""
        self.snapshot = snapshot
        if snapshot.to_disk and not self.plan.recovers:
            return
        account = self.books.account
        copied = (account.mode_ns(lane)[_SNAPSHOT] for lane in account.lane_seconds())
        self.snapshots.made(max(copied, default=0), time.monotonic())

    def shares(self) -> list[float]:
        """Where replicas steal, those of the newest iteration; else the newest that are set."""
        parts = (self._samples or self.plan.shares) if self.course.steals else self.course.shares.newest[1]
        return [part / sum(parts) for part in parts]

    def pace(self) -> Pace:
        """The median training iteration, and the graph's speed limit from the tasks of those same iterations."""
        since, local = self.course.local.newest
        return self.progress.pace.of(self.books.times, local, since)

    def take_news(self) -> dict[str, Any] | None:
        """What a follower shows, over the time since the last call; None if no step came since."""
        news, shares = self.progress.take_news(), self.books.account.take_interval()
        if news is None or shares is None:
            return None
        return news | {
            "data_percent": shares["data_percent"],
            "stall_percent": shares["stall_percent"],
            "overlap_percent": self.books.overlap.take_percent(),
        }


@dataclass(slots=True, kw_only=True)
class Run:
    job: str
    spec: JobSpec
    files: RunDirectory
    state: JobState = JobState.QUEUED
    submitted_at: float = 0.0
    started_at: float | None = None  # when it first had workers
    taken_ns: int = field(default_factory=time.monotonic_ns)
    first_iteration_seconds: float | None = None  # from there to the end of the first one, by its stamps
    exception: str | None = None  # the name of the user's that has ended the job
    inspected_attempt: int = 0  # the newest of which an inspection has come
    inspection: dict[str, Any] = field(default_factory=dict)
    code: dict[str, str] = field(default_factory=dict)  # digests, by file, of what its first worker loaded
    given: JobSpec | None = None  # where its strategy was chosen, the spec from which
    better: Better | None = None  # another plan, of which the core has been told
    switching: Switching = field(default_factory=Switching)
    attempt: PlannedAttempt | None = None  # the newest that has a plan
    planned: dict[str, Any] | None = None  # what has come of it, where it is only planned
    news: dict[str, Any] | None = None  # of its progress, the newest
    hang: str | None = None  # that nothing of it ends any more, and why, while that is so
    changed: Changed = field(default_factory=Changed)  # on its state, log or progress
    recording: asyncio.Lock = field(default_factory=asyncio.Lock)  # held by who writes the recording
    recorded: Logged = field(default_factory=Logged)
    last_lines: dict[str, str] = field(default_factory=dict)  # that the job's code printed, by worker, in this attempt
    stopped: str | None = None  # why it has ended before its last step
    training: Training = field(init=False)  # how it stands
    replays: ReplayPace | None = None  # of one whose strategy has them, once it trains
    epoch: dict[str, Any] = field(default_factory=dict)  # the newest that is over: what the job's function is told
    asked: JudgeEpoch | None = None  # while that function is asked

    def __post_init__(self) -> None:
        self.training = Training(Rule.of(self.spec))
        self.files.keep("spec.json", json.dumps(self.spec.to_wire(), indent=2) + "\n")

    def begin(
        self,
        plan: Plan,
        workers: tuple[str, ...],
        number: int = 1,
        policies: Sequence[Policy[Any]] = (),
        begins: int = 0,
    ) -> PlannedAttempt:
        """A new attempt, from iteration `begins` on. Where it begins again metrics.jsonl starts over, as its numbers
        do; where it goes on, what is made again is in there. policies: those of the job."""
        self.training.begin(begins)
        self.asked = None
        self._change_plan(plan)
        before = self.attempt.progress if begins and self.attempt is not None else None
        if begins == 0:
            self.files.start_over()
            self.recorded = Logged()
        self.files.keep("plan.json", json.dumps(plan.describe(workers), indent=1) + "\n")
        if self.spec.strategy.schedule == MEASURED and (grid := planned_grid(plan)) is not None:
            self.files.keep(GRID_FILE, grid)
        self.attempt = PlannedAttempt(self.job, number, plan, workers, policies, begins=begins, before=before)
        may = may_improve(self.spec, plan, is_chosen=self.given is not None)
        self.switching.begin(self.attempt.progress.step, may_change=may)
        return self.attempt

    def _change_plan(self, plan: Plan) -> None:
        """Where it is the better one; another one makes that an old thought."""
        better, self.better = self.better, None
        if better is not None and better.plan is plan:
            assert self.attempt is not None
            self.inspection |= corrected_times(better.inspection)
            self.switching.change(better.told, better.gain, self.attempt.progress.ended_ns)
            if self.given is not None:
                self.choose(better.spec)

    def choose(self, spec: JobSpec) -> None:
        """From then on the job's strategy is the one that was chosen, in other attempts and daemons, too."""
        self.spec = spec
        self.files.keep(CHOSEN, json.dumps(spec.strategy.model_dump(exclude_none=True), indent=2) + "\n")

    def start(self, now: float) -> None:
        """All workers are prepared."""
        assert self.attempt is not None
        self.training.start(now)
        self.switching.preparing_seconds = now - self.attempt.began

    def adjust(self, first: int, adjustment: Adjustment) -> None:
        """What workers are told of iteration `first` and those after it."""
        attempt = self.attempt
        assert attempt is not None
        attempt.course.adjust(first, adjustment)
        if adjustment.shares:
            parts = ", ".join(f"{100 * share:.1f} %" for share in adjustment.shares)
            self.files.log(f"shares from {attempt.plan.itinerary.label(first)} on: {parts}")
        if adjustment.local is not None:
            who = attempt.plan.updates(adjustment.local, attempt.workers)
            self.files.log(f"updates from {attempt.plan.itinerary.label(first)} on: {who}")

    def judge(self, verdict: Verdict, first: int) -> None:
        """A replica gets nothing from iteration `first` on."""
        assert self.attempt is not None
        self.attempt.verdicts.append(verdict.told(self.attempt.plan.itinerary.label(first)))
        self.files.log(self.attempt.verdicts[-1])

    def finish_iteration(self, index: int) -> Iteration:
        attempt = self.attempt
        assert attempt is not None
        iteration = attempt.plan.itinerary.at(index)
        line = attempt.finish(iteration)
        self._note_training(attempt, iteration, line)
        if self.first_iteration_seconds is None and attempt.progress.ended_ns is not None:
            self.first_iteration_seconds = (attempt.progress.ended_ns - self.taken_ns) / 1e9
        if index < self.recorded.iterations:
            return iteration
        self.recorded = replace(self.recorded, iterations=index + 1)
        if line:
            self.files.step(json.dumps(finite(line)) + "\n")
        if "validation" in line:
            means = "  ".join(f"{name} {value:.6g}" for name, value in line["validation"].items())
            self.files.log(f"epoch {iteration.epoch + 1}: step {line['step']}  validation {means}")
        return iteration

    def log_output(self, worker: str, text: str) -> None:
        """What the job's code printed there."""
        self.files.log_output(text)
        kept = (self.last_lines.get(worker, "") + text)[-MAX_LAST_CHARS:]
        self.last_lines[worker] = "".join(kept.splitlines(keepends=True)[-MAX_LAST_LINES:])
        self.changed.notify()

    def _note_training(self, attempt: PlannedAttempt, iteration: Iteration, line: Mapping[str, Any]) -> None:
        if iteration.training:
            first, now = iteration.start == 0, time.monotonic()
            self.training.step(line["loss"], attempt.progress.counted, begins_epoch=first, now=now)
        if attempt.course.snapshot_place(iteration) is not None:
            self.training.keep(iteration.index)

    def note_snapshot(self, snapshot: Snapshot) -> int:
        """The step after which another attempt would go on."""
        assert self.attempt is not None
        self.attempt.note_snapshot(snapshot)
        return self.attempt.snapshot_step or 0

    def note_replay(self, command: RecordReplay) -> None:
        """An iteration has been run again."""
        self.files.log(command.message)
        if self.replays is not None:
            self.replays.over(command.seconds, time.monotonic())

    def take_due(self, now: float) -> Iterator[ReplayDue | SnapshotDue | CheckpointDue | StopRequested]:
        """What it is time for, by the clock, after an iteration."""
        attempt = self.attempt
        assert attempt is not None
        about = _About(job=self.job, attempt=attempt.number)
        if self.spec.strategy.verify == "replay" and self.replays is None:
            self.replays = ReplayPace(now)
        if self.replays is not None and self.replays.take_due(now):  # it begins with a snapshot
            yield ReplayDue(**about)
        if attempt.snapshots.take_due(now):
            yield SnapshotDue(**about)
        if attempt.take_checkpoint_due(now):
            yield CheckpointDue(**about)
        if (reason := self.training.time_up()) is not None:
            yield StopRequested(**about, reason=reason)

    def note_exception(self, name: str) -> None:
        """What the user's code raised; the first counts, others follow from it."""
        self.exception = self.exception or name or None

    def note_profile(self, worker: str, attempt: int, text: str) -> None:
        """What has become of a worker's profile, in words."""
        self.files.log(f"{worker}: {text}")
        if self.attempt is not None and attempt == self.attempt.number and self.attempt.unprofiled is not None:
            self.attempt.unprofiled.discard(worker)

    def why_not_paused(self) -> str | None:
        """Why it cannot stop and go on from there, as far as is known."""
        if self.attempt is None or self.attempt.plan.has_snapshots:
            return None
        why = next((note for note in self.attempt.plan.notes if "snapshot" in note), "it keeps no snapshots")
        return f"{why}; let it run, or end it with `weft cancel {self.job}`"

    def take_profiled(self) -> bool:
        """Once in an attempt: all its workers have made their profile, and the profiled iterations are over."""
        profile, attempt = self.spec.profile, self.attempt
        if profile is None or attempt is None or attempt.unprofiled is None or attempt.unprofiled:
            return False
        if attempt.progress.finished_iterations < profile.first + profile.iterations:
            return False
        attempt.unprofiled = None
        return True
