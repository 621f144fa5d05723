"""The books of one attempt: what its lanes reported, summed up in every account. Kept when somebody looks.

    put ──bytes──▶ pending ──settle: at a tick, or when asked──▶ accounts, waits, recorder, times

A row costs the daemon half a microsecond where many come in a row, and more than twice that where a few come now and
then, on a core that a lane has just used. So reports wait, a second at most, until somebody wants to know.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.metrics.accounts.accounting import JobAccount
from weft.metrics.accounts.overlap import OverlapAccount
from weft.metrics.accounts.stops import Stops
from weft.metrics.accounts.task_times import TaskTimes
from weft.metrics.accounts.waits import WaitAccount
from weft.metrics.prometheus.declared import METRICS
from weft.metrics.prometheus.histogram import Observations
from weft.metrics.recording.recording import Recorder
from weft.plan.kinds import FIRST_STALL, KINDS, MODE_INDEX
from weft.plan.plan import Plan
from weft.plan.rows import packed_rows, unpack
from weft.scheduler.runs.reported_rows import ReportedRows
from weft.scheduler.runs.transfers import Transfers

_MICROBATCH_EDGES = next(metric.buckets for metric in METRICS if metric.name == "weft_microbatch_seconds")
_BACKWARD = MODE_INDEX["backward"]


class Books:
    """Every property is settled when it is read; AccountingError where rows contradict one another."""

    def __init__(self, plan: Plan, workers: Sequence[str]) -> None:
        """workers: by their position in the plan."""
        lanes = {
            f"{workers[lane.worker]}/{lane.name}": {KINDS[plan.graph.tasks[task].kind].mode for task in program}
            for lane, program in plan.graph.programs.items()
        }  # and what each can be busy with
        self.stops = Stops()
        self.transfers = Transfers(plan)
        self.peak_bytes: dict[str, int] = {}  # by worker: its greatest resident size, known once it is released
        self.device_peak_bytes: dict[str, int] = {}  # of GPU workers: the most that was allocated on the GPU
        self._rows = ReportedRows(plan)
        self._account = JobAccount()
        self._overlap = OverlapAccount(self._account, lanes)
        self._waits = WaitAccount()
        self._recorder = Recorder()
        self._microbatch_seconds = Observations(_MICROBATCH_EDGES)
        self._goes_on = frozenset(task.id for task in plan.graph.tasks if task.goes_on)
        self._begun: dict[str, int] = {}  # by lane, nanoseconds of the parts of the forward that it is in
        self._times = TaskTimes(plan.itinerary)
        self._pending: list[tuple[str, str, bytes]] = []

    def put(self, worker: str, lane: str, packed: bytes) -> None:
        """Rows as a lane reported them. Raises ValueError for some that cannot be."""
        self._rows.check(worker, lane, packed)
        self._pending.append((worker, lane, packed))

    def note_peak(self, worker: str, peak_bytes: int | None, device_peak_bytes: int | None) -> None:
        """Of a worker that has let go of the job; None where it never prepared it."""
        if peak_bytes is not None:
            self.peak_bytes[worker] = peak_bytes
        if device_peak_bytes is not None:
            self.device_peak_bytes[worker] = device_peak_bytes

    @property
    def account(self) -> JobAccount:
        self._settle()
        return self._account

    @property
    def overlap(self) -> OverlapAccount:
        self._settle()
        return self._overlap

    @property
    def waits(self) -> WaitAccount:
        self._settle()
        return self._waits

    @property
    def recorder(self) -> Recorder:
        self._settle()
        return self._recorder

    @property
    def microbatch_seconds(self) -> Observations:
        """Forwards and backwards."""
        self._settle()
        return self._microbatch_seconds

    @property
    def times(self) -> TaskTimes:
        self._settle()
        return self._times

    def _settle(self) -> None:
        pending, self._pending = self._pending, []
        for worker, lane, packed in pending:
            name, rows = f"{worker}/{lane}", list(unpack(packed))
            told = self.stops.cut(worker, rows)
            self._account.add(name, told)
            self._overlap.add(name, told)
            self._waits.add(name, told)
            self._recorder.add(name, packed if told is rows else packed_rows(told))
            add_time, count = self._times.add, self._microbatch_seconds.add
            for mode, task, iteration, _, start, end in rows:
                if mode < FIRST_STALL:
                    add_time(task, iteration, end - start)
                    if task in self._goes_on:
                        self._begun[name] = self._begun.get(name, 0) + end - start
                    elif mode <= _BACKWARD:
                        count((end - start + self._begun.pop(name, 0)) / 1e9)
