"""The books of one attempt: what its lanes reported, summed up in every account. Kept when somebody looks.

    put ──bytes──▶ pending ──settle: at a tick, or when asked──▶ accounts, waits, recorder, times

A row costs the daemon half a microsecond where many come in a row, and more than twice that where a few come now and
then, on a core that a lane has just used. So reports wait, a second at most, until somebody wants to know.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from weft.metrics.accounts.accounting import JobAccount
from weft.metrics.accounts.overlap import OverlapAccount
from weft.metrics.accounts.stops import Stops
from weft.metrics.accounts.waits import WaitAccount
from weft.metrics.prometheus.declared import METRICS
from weft.metrics.prometheus.histogram import Observations
from weft.metrics.recording.recording import Recorder
from weft.plan.itinerary import Itinerary
from weft.plan.kinds import FIRST_STALL, MODE_INDEX
from weft.plan.rows import packed_rows, unpack
from weft.scheduler.runs.task_times import TaskTimes

_MICROBATCH_EDGES = next(metric.buckets for metric in METRICS if metric.name == "weft_microbatch_seconds")
_BACKWARD = MODE_INDEX["backward"]


class JobBooks:
    """lanes: what each, as `<worker>/<lane>`, can be busy with. itinerary: of a job that has a plan. Every property is
    settled when it is read.

    Errors: AccountingError from any of them, where rows contradict one another.
    """

    def __init__(self, lanes: Mapping[str, Collection[str]], itinerary: Itinerary | None = None) -> None:
        self.stops = Stops()
        self._account = JobAccount()
        self._overlap = OverlapAccount(self._account, lanes)
        self._waits = WaitAccount()
        self._recorder = Recorder()
        self._microbatch_seconds = Observations(_MICROBATCH_EDGES)
        self._times = TaskTimes(itinerary)
        self._pending: list[tuple[str, str, bytes]] = []

    def put(self, worker: str, lane: str, packed: bytes) -> None:
        """Rows as a lane reported them."""
        self._pending.append((worker, lane, packed))

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
                    if mode <= _BACKWARD:
                        count((end - start) / 1e9)
