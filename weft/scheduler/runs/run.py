"""One job's run as the daemon sees it: its live numbers, and what of them goes to its directory.

RUNS/digits-1/
  job.log              what happened, and the user's own output, in words
  metrics.jsonl        a line for each training step, a line for each validation
  plan.json            the resolved plan
  spec.json            what was submitted
  model.safetensors    the trained weights, there only when the job is completed

How these files are written is the business of weft/scheduler/runs/run_directory.py.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.metrics.accounts.history import History
from weft.metrics.accounts.progress import Progress
from weft.metrics.recording.recording import PlannedSpan
from weft.plan.course import Course
from weft.plan.itinerary import Iteration
from weft.plan.kinds import FIRST_STALL, KINDS
from weft.plan.plan import Plan
from weft.plan.rows import last_ends, unpack
from weft.plan.tables import Adjustment
from weft.scheduler.adapting.policy import Policy, Verdict
from weft.scheduler.runs.books import JobBooks
from weft.scheduler.runs.iteration_pace import IterationPace, Pace
from weft.scheduler.runs.reported_rows import ReportedRows
from weft.scheduler.runs.run_directory import LOG, RunDirectory
from weft.scheduler.runs.run_writer import WriteAtOnce, Writer
from weft.scheduler.runs.transfers import Transfers
from weft.spec.job_spec import JobSpec

MODEL = "model.safetensors"


@dataclass(slots=True)
class _Values:
    """What an iteration measured: means, of which each lane has its part of the sum, and facts."""

    means: dict[str, float] = field(default_factory=dict)
    facts: dict[str, float] = field(default_factory=dict)

    def add(self, fragment: dict[str, Any]) -> None:
        for name, value in fragment["means"].items():
            self.means[name] = self.means.get(name, 0.0) + value
        self.facts |= fragment["facts"]


class JobRun:
    """writer: of its files; without one they are written at once, in the caller's thread."""

    def __init__(self, job: str, directory: Path, spec: JobSpec, writer: Writer | None = None) -> None:
        self.job = job
        self.directory = directory
        self.spec = spec
        self.attempt = 1
        self.inspected_attempt = 0  # the newest of which an inspection has come
        self.inspection: dict[str, Any] = {}
        self.plan: Plan | None = None
        self.planned: tuple[PlannedSpan, ...] | None = None  # simulated when somebody first looks
        self.worker_names: tuple[str, ...] = ()
        self.course: Course  # of a job that has a plan
        self.verdicts: list[str] = []  # in words, in the order in which they came
        self._policies: Sequence[Policy[Any]] = ()
        self._samples: list[int] = []  # of each replica, in the newest iteration that is over
        self.books = JobBooks({})
        self.history = History()
        self.progress = Progress(0)
        self.transfers: Transfers  # of a job that has a plan
        self.finished_iterations = 0
        self.step = 0
        self.samples = 0
        self.loss: float | None = None
        self.learning_rate: float | None = None
        self.grad_norm: float | None = None
        self.validation: dict[str, float] | None = None
        self._pace: IterationPace | None = None  # of a job that has a plan
        self._rows: ReportedRows | None = None  # the same
        self.first_iteration_seconds: float | None = None  # from here to the end of the first one, by its stamps
        self.exception: str | None = None  # the name of the user's that has ended the job
        self.peak_bytes: dict[str, int] = {}  # by worker: its greatest resident size, known once it is released
        self.device_peak_bytes: dict[str, int] = {}  # of GPU workers: the most that was allocated on the GPU
        self._taken_ns = time.monotonic_ns()
        self.recording = asyncio.Lock()  # held by who writes the recording
        self._to_profile: set[str] | None = None  # workers that have not told of their profile yet; None: no question
        self.files = RunDirectory(job, directory, writer or WriteAtOnce())
        self.closed = False  # nothing more comes
        self._values: dict[int, _Values] = {}
        self._ends: dict[int, int] = {}
        self._last_end: tuple[int, int] | None = None  # iteration and the time at which it ended
        self._validating: dict[str, float] = {}
        self._weighed = 0.0  # of the validation that is on its way
        self.files.keep("spec.json", json.dumps(spec.to_wire(), indent=2) + "\n")

    @property
    def log_path(self) -> Path:
        return self.directory / LOG

    @property
    def model_path(self) -> Path:
        return self.directory / MODEL

    def log(self, text: str) -> None:
        """Appends lines, each with the time of day."""
        stamp = time.strftime("%H:%M:%S")
        self.files.log("".join(f"{stamp} {line}\n" for line in text.rstrip("\n").split("\n")))

    def log_output(self, text: str) -> None:
        """Appends what the user's code printed, as it is."""
        self.files.log(text)

    def begin(
        self, plan: Plan, worker_names: tuple[str, ...], attempt: int = 1, policies: Sequence[Policy[Any]] = ()
    ) -> None:
        """A new attempt: numbers and metrics.jsonl start over, since training does. policies: those of the job."""
        self.plan, self.worker_names, self.attempt, self.planned = plan, worker_names, attempt, None
        self.books = JobBooks(_modes_of_lanes(plan, worker_names), plan.itinerary)
        self._pace, self._rows = IterationPace(plan), ReportedRows(plan)
        self.progress = Progress(plan.itinerary.steps)
        self.history = History()
        self.course, self.verdicts = plan.course(), []
        self._policies, self._samples = policies, []
        self.transfers = Transfers(plan)
        self.finished_iterations = self.step = self.samples = 0
        self.loss = self.validation = self.learning_rate = self.grad_norm = None
        self.peak_bytes, self.device_peak_bytes = {}, {}
        self._values, self._ends, self._validating = {}, {}, {}
        self._weighed = 0.0
        self._last_end = None
        asked = self.spec.profile is not None
        self._to_profile = {worker_names[lane.worker] for lane in plan.graph.programs} if asked else None
        self.files.start_over()
        self.files.keep("plan.json", json.dumps(plan.describe(worker_names), indent=1) + "\n")

    def note_peak(self, worker: str, peak_bytes: int | None, device_peak_bytes: int | None) -> None:
        """The greatest resident size of a worker that has let go of the job; None where it never prepared it."""
        if peak_bytes is not None:
            self.peak_bytes[worker] = peak_bytes
        if device_peak_bytes is not None:
            self.device_peak_bytes[worker] = device_peak_bytes

    def note_exception(self, name: str) -> None:
        """What the user's code raised; the first counts, others follow from it."""
        self.exception = self.exception or name or None

    def note_profile(self, worker: str, attempt: int, text: str) -> None:
        """What has become of a worker's profile, in words."""
        self.log(f"{worker}: {text}")
        if attempt == self.attempt and self._to_profile is not None:
            self._to_profile.discard(worker)

    def take_profiled(self) -> bool:
        """Once in an attempt: all its workers have made their profile, and the profiled iterations are over."""
        profile = self.spec.profile
        if profile is None or self._to_profile is None or self._to_profile:
            return False
        if self.finished_iterations < profile.first + profile.iterations:
            return False
        self._to_profile = None
        return True

    def adjust(self, first: int, adjustment: Adjustment) -> None:
        """What workers are told of iteration `first` and those after it."""
        self.course.adjust(first, adjustment)
        assert self.plan is not None
        if adjustment.shares:
            parts = ", ".join(f"{100 * share:.1f} %" for share in adjustment.shares)
            self.log(f"shares from {self.plan.itinerary.label(first)} on: {parts}")
        if adjustment.local is not None:
            who = self.plan.updates(adjustment.local, self.worker_names)
            self.log(f"updates from {self.plan.itinerary.label(first)} on: {who}")

    def judge(self, verdict: Verdict, first: int) -> None:
        """A replica gets nothing from iteration `first` on."""
        assert self.plan is not None
        self.verdicts.append(verdict.told(self.plan.itinerary.label(first)))
        self.log(self.verdicts[-1])

    def add_report(self, worker: str, lane: str, packed: bytes, values: list[dict[str, Any]]) -> None:
        """What a lane stamped, as its report has it, and measured. Raises ValueError for rows that cannot be."""
        assert self._rows is not None
        self._rows.check(worker, lane, packed)
        self.books.put(worker, lane, packed)
        for iteration, end in last_ends(packed).items():
            if iteration >= self.finished_iterations:
                self._ends[iteration] = max(end, self._ends.get(iteration, 0))
        if self._policies:
            ran = [row for row in unpack(packed) if row[0] < FIRST_STALL]
            for policy in self._policies:
                policy.add(ran)
        for fragment in values:
            if fragment["iteration"] >= self.finished_iterations:  # what comes after its end is asked for by nobody
                self._values.setdefault(fragment["iteration"], _Values()).add(fragment)

    def finish_iteration(self, index: int) -> Iteration:
        """Every lane has finished the iteration: its numbers are complete."""
        assert self.plan is not None
        iteration = self.plan.itinerary.at(index)
        self.finished_iterations = index + 1
        values = self._values.pop(index, _Values())
        end = self._ends.pop(index, 0)
        seconds = None
        if self._last_end is not None and end:
            seconds = max(0, end - self._last_end[1]) / 1e9
        if end:
            self._last_end = (index, end)
            if self.first_iteration_seconds is None:
                self.first_iteration_seconds = (end - self._taken_ns) / 1e9
        samples = self._samples = self.course.samples(iteration)
        for policy in self._policies:
            policy.finish(iteration, samples, seconds)
        self.transfers.finish(iteration, samples)
        if iteration.training:
            self._finish_step(iteration, values, seconds, samples)
        else:
            self._finish_validation(iteration, values)
        return iteration

    def _finish_step(self, iteration: Iteration, values: _Values, seconds: float | None, shares: list[int]) -> None:
        self.step = iteration.step + 1
        self.samples += iteration.size
        self.loss = values.means.get("loss", 0.0)
        self.learning_rate = values.facts.get("lr")
        self.grad_norm = values.facts.get("grad_norm")
        if seconds is not None and self._pace is not None:
            self._pace.add(iteration.index, iteration.step, seconds)
        if self._last_end is not None:
            self.progress.add(self.step, self.samples, self._last_end[1] / 1e9)
        self.history.add_step(self.step, self.loss, iteration.size, seconds)
        self._write(
            step=self.step,
            epoch=iteration.epoch,
            loss=self.loss,
            lr=self.learning_rate,
            grad_norm=self.grad_norm,
            skipped=bool(values.facts.get("skipped")),
            samples=iteration.size,
            seconds=seconds,
            **({} if iteration.learns else {"measured": values.means}),
            **({"shares": shares} if len(shares) > 1 else {}),
        )

    def _finish_validation(self, iteration: Iteration, values: _Values) -> None:
        assert self.plan is not None
        weight = values.facts.get("weight")
        share = iteration.size / self.plan.itinerary.num_validation if weight is None else weight
        self._weighed += share
        for name, value in values.means.items():
            self._validating[name] = self._validating.get(name, 0.0) + value * share
        if iteration.last_of_validation:
            total = 1.0 if weight is None else self._weighed or 1.0
            self.validation = {name: value / total for name, value in self._validating.items()}
            self._validating, self._weighed = {}, 0.0
            self.history.add_validation(self.step, self.validation.get("loss"))
            self._write(step=self.step, epoch=iteration.epoch, validation=self.validation)
            means = "  ".join(f"{name} {value:.6g}" for name, value in self.validation.items())
            self.log(f"epoch {iteration.epoch + 1}: step {self.step}  validation {means}")

    def take_progress(self) -> dict[str, Any] | None:
        """What a follower shows, over the time since the last call; None if no step came since."""
        pace, shares = self.progress.take_interval(), self.books.account.take_interval()
        if pace is None or shares is None or self.plan is None:
            return None
        return {
            "step": self.step,
            "steps": self.plan.itinerary.steps,
            "epoch": (self.step - 1) // self.plan.itinerary.steps_per_epoch,
            "loss": self.loss,
            "lr": self.learning_rate,
            "grad_norm": self.grad_norm,
            "samples_per_second": pace.samples_per_second,
            "data_percent": shares["data_percent"],
            "stall_percent": shares["stall_percent"],
            "overlap_percent": self.books.overlap.take_percent(),
            "eta_seconds": pace.eta_seconds,
            "validation": self.validation,
        }

    def summary(self) -> dict[str, Any] | None:
        """The parts of the plan that fit a screen, what it was made from, and what has become of the shares."""
        if self.plan is None:
            return None
        keys = ("stages", "schedule", "microbatches", "recompute", "predicted_iteration_seconds", "limit_seconds")
        described = self.plan.describe(self.worker_names)
        return {
            **{key: described[key] for key in (*keys, "window", "shared_bytes", "notes")},
            "windows": self.plan.windows(self.worker_names),
            "strategy": self.spec.to_wire()["strategy"],
            "batch_size": self.plan.itinerary.batch_size,
            "num_train": self.plan.itinerary.num_train,
            "shares": self._shares(self.plan),
            "verdicts": list(self.verdicts),
            "updates": self.plan.updates(self.course.local.newest[1], self.worker_names),
        }

    def _shares(self, plan: Plan) -> list[float]:
        """Where replicas steal, those of the newest iteration; else the newest that are set."""
        parts = (self._samples or plan.shares) if self.course.steals else self.course.shares.newest[1]
        return [part / sum(parts) for part in parts]

    @property
    def newest_iteration_seconds(self) -> float | None:
        return self._pace.newest_seconds if self._pace else None

    def pace(self) -> Pace:
        """The median training iteration, and the graph's speed limit from the tasks of those same iterations."""
        if self._pace is None:
            return Pace()
        since, local = self.course.local.newest
        return self._pace.of(self.books.times, local, since)

    def flush(self) -> None:
        """Hands the lines that wait to the writer."""
        self.files.flush()

    async def written(self) -> None:
        """Returns when what has been logged so far, and flushed, stands in the files."""
        await self.files.written()

    def close(self) -> None:
        self.closed = True
        self.files.close()

    def _write(self, **fields: Any) -> None:
        self.files.step(json.dumps(_finite(fields)) + "\n")


def _modes_of_lanes(plan: Plan, worker_names: tuple[str, ...]) -> dict[str, set[str]]:
    """What each lane, by its name in the accounts, can be busy with."""
    return {
        f"{worker_names[lane.worker]}/{lane.name}": {KINDS[plan.graph.tasks[task].kind].mode for task in program}
        for lane, program in plan.graph.programs.items()
    }


def _finite(value: Any) -> Any:
    """The same with null for nan and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
