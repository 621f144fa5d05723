"""A job's series as Prometheus sees them: set from its run, kept for a few scrapes after its end, then gone.

    begin ──▶ publish, once a tick ──▶ end: the last values stand ──GRACE_SECONDS──▶ dropped
      ▲─────────── let_go ◀──┘   paused, stopped for another job, lost: it has no memory

A job's end would otherwise take what it did since the last scrape with it, and of a short job everything. Where there
are many series, those of jobs that have ended go earlier.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from weft.metrics.prometheus.declared import MAX_SERIES
from weft.metrics.prometheus.exporter import Exporter
from weft.plan.itinerary import Iteration
from weft.plan.kinds import is_compute_lane
from weft.scheduler.runs.books import Books
from weft.scheduler.runs.run import PlannedAttempt, Run
from weft.spec.job_state import WAITING_STATES

GRACE_SECONDS: Final = 60.0  # four scrapes at Prometheus's usual interval of 15 s: the last one, and some that fail
TICKS_PER_LIMIT: Final = 10  # the critical cycle takes milliseconds to find, on a core that a lane has use for


class JobMetrics:
    """Every series with the label `job`. now: seconds on any clock that never goes back."""

    def __init__(self, exporter: Exporter) -> None:
        self._exporter = exporter
        self._live: set[str] = set()  # jobs that have a plan and have not ended
        self._ended: dict[str, float] = {}  # job -> when it ended, in this order
        self._limited: set[str] = set()  # jobs whose limit is known
        self._without: dict[str, int] = {}  # of others, how often it was looked for
        self._num_ticks = 0

    def begin(self, attempt: PlannedAttempt, plan_changes: int = 0) -> None:
        """plan_changes: of the job, by now."""
        job, plan = attempt.job, attempt.plan
        if job in self._ended:  # one that was removed had the same id
            self._drop([job])
        self._live.add(job)
        self._exporter.set("weft_job_attempt", attempt.number, job=job)
        self._exporter.set("weft_job_plan_changes", plan_changes, job=job)
        self._exporter.set("weft_job_planned_steps", plan.itinerary.steps, job=job)
        self._exporter.set("weft_plan_predicted_iteration_seconds", plan.predicted_iteration_seconds, job=job)
        self._exporter.set("weft_shared_memory_bytes", plan.shared_bytes, job=job)
        self._publish_limit(attempt)
        for lane in plan.graph.programs:
            if is_compute_lane(lane.name):
                # From 0, before it happens: what a counter has when it is first seen is not in its rate.
                labels = {"job": job, "worker": attempt.workers[lane.worker], "lane": lane.name, "mode": "idle"}
                self._exporter.add("weft_lane_seconds_total", 0, **labels)

    def go_on(self, run: Run) -> None:
        """A job that an earlier Weft has begun in this daemon, whose series are new."""
        if run.attempt is None:
            return
        self.begin(run.attempt, len(run.switching.changes))
        self._exporter.set("weft_job_snapshot_step", run.attempt.snapshot_step or 0, job=run.job)
        if run.state in WAITING_STATES:
            self.let_go(run.job)

    def let_go(self, job: str) -> None:
        """Its attempt is over, and its memory is free; another attempt may come, at once or much later."""
        if job in self._live:
            self._exporter.set("weft_shared_memory_bytes", 0, job=job)

    def iteration(self, attempt: PlannedAttempt, iteration: Iteration) -> None:
        """It has just been finished."""
        if iteration.training:
            self._exporter.add("weft_job_samples_total", attempt.progress.samples, job=attempt.job)
            if (seconds := attempt.progress.pace.newest_seconds) is not None:
                self._exporter.observe("weft_iteration_seconds", seconds, job=attempt.job)

    def tick(self, attempts: Iterable[PlannedAttempt], now: float) -> None:
        """Once a second: brings what has changed of each running job, and drops what stood long enough."""
        self._num_ticks += 1
        for attempt in attempts:
            if attempt.job in self._live:
                self.publish(attempt)
                is_new = attempt.job not in self._limited and self._without.get(attempt.job, 0) < TICKS_PER_LIMIT
                if is_new or self._num_ticks % TICKS_PER_LIMIT == 0:
                    self._publish_limit(attempt)
        self._drop([job for job, ended_at in self._ended.items() if now - ended_at >= GRACE_SECONDS])
        self._make_room()

    def publish(self, attempt: PlannedAttempt) -> None:
        """What it has grown by since the last call."""
        exporter, job, progress, books = self._exporter, attempt.job, attempt.progress, attempt.books
        exporter.set("weft_job_step", progress.step, job=job)
        if progress.loss is not None:
            exporter.set("weft_job_loss", progress.loss, job=job)
        if progress.learning_rate is not None:
            exporter.set("weft_job_learning_rate", progress.learning_rate, job=job)
        self._publish_lanes(job, books)
        for kind, num_bytes in books.transfers.take_bytes().items():
            exporter.add("weft_transfer_bytes_total", num_bytes, job=job, kind=kind)
        exporter.merge("weft_microbatch_seconds", books.microbatch_seconds.take(), job=job)

    def end(self, attempt: PlannedAttempt, now: float) -> None:
        """The job has ended, and nothing more comes: its last values stand for a while."""
        job = attempt.job
        self.publish(attempt)
        self._publish_limit(attempt)
        self._limited.discard(job)
        self._without.pop(job, None)
        self._live.remove(job)
        self._exporter.set("weft_shared_memory_bytes", 0, job=job)
        self._ended[job] = now
        self._make_room()

    def _make_room(self) -> None:
        while self._ended and self._exporter.num_series > MAX_SERIES:
            self._drop([next(iter(self._ended))])

    def _drop(self, jobs: list[str]) -> None:
        for job in jobs:
            del self._ended[job]
            self._exporter.drop_job(job)

    def _publish_limit(self, attempt: PlannedAttempt) -> None:
        """Where it is not known, or no longer, there is no series: a number would be taken for one."""
        job, limit = attempt.job, attempt.pace().limit_seconds
        if limit is not None:
            self._exporter.set("weft_iteration_limit_seconds", limit, job=job)
            self._limited.add(job)
            return
        self._without[job] = self._without.get(job, 0) + 1
        if job in self._limited:
            self._exporter.drop_gauge("weft_iteration_limit_seconds", job=job)
            self._limited.remove(job)

    def _publish_lanes(self, job: str, books: Books) -> None:
        exporter = self._exporter
        for lane, modes in books.account.take_seconds().items():
            worker, _, name = lane.partition("/")
            for mode, seconds in modes.items():
                exporter.add("weft_lane_seconds_total", seconds, job=job, worker=worker, lane=name, mode=mode)
        residual = sum(books.account.residual_seconds(lane) for lane in books.account.lane_seconds())
        exporter.set("weft_lane_residual_seconds", residual, job=job)
        for worker, kinds in books.overlap.take_seconds().items():
            for kind, parts in kinds.items():
                labels = {"job": job, "worker": worker, "kind": kind}
                exporter.add("weft_overlap_seconds_total", parts["hidden"], **labels)
                exporter.add("weft_exposed_seconds_total", parts["exposed"], **labels)
