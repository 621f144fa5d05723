"""Overlap accounting: how much of a job's sync, transfer and update ran while compute ran, from the rows of its lanes.

    compute   ├── forward ──┤├──── backward ────┤···················├── forward ──
    sync                        ├sync┤├─update─┤ ├sync┤├──update──┤
                                └────hidden────┘ └─────exposed────┘

A worker's kinds are set against its own compute lane. A worker that computes nothing in the job (a host) has none: its
kinds are set against every compute lane of the job, and are hidden while any of them computes. What stands in a compute
lane itself is exposed, since nothing else ran there; the sums of accounting.py have it already, so a job that has all
its kinds there costs nothing here.

Lanes report at different times. An interval is therefore kept until every compute lane that it is set against has
reported as far, and computed time until every lane that it may hide has. Whole nanoseconds, so hidden + exposed is busy
to the last one, once `flush` has been called.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from weft.metrics.accounts.accounting import NANOSECONDS, JobAccount
from weft.plan.kinds import COMPUTE_MODES, MODES
from weft.plan.rows import Row

KINDS: Final = ("sync", "transfer", "update")
SETTLE_ABOVE: Final = 512  # intervals of a worker: often enough that no report waits for long
# Of a worker, and one report more: some 5 MB. Lanes that are a report apart (0.5 s) hold half of it. Beyond it the
# lanes that lag are not waited for, and what they would have hidden counts as exposed.
MAX_INTERVALS: Final = 32_768

_LAST_COMPUTE: Final = max(MODES.index(mode) for mode in COMPUTE_MODES)
_NOTHING: Final = (0,) * len(MODES)
_KIND_OF_MODE: Final = {MODES.index(kind): kind for kind in KINDS}

Interval = tuple[int, int, int]  # start_ns, end_ns, a mode's index in MODES
Nanoseconds = dict[str, dict[str, tuple[int, int]]]
OverlapSeconds = dict[str, dict[str, dict[str, float]]]


class OverlapAccount:
    """One job's hidden and exposed time, as `{worker: {kind: {"hidden": seconds, "exposed": seconds}}}`.

    lanes: the modes of the tasks of each lane; a lane is named `<worker>/<lane>`, as in `account`, which has every row
    before this one gets it. Each `take_` method has a baseline of its own.
    """

    def __init__(self, account: JobAccount, lanes: Mapping[str, Collection[str]]) -> None:
        self._account = account
        self._computing = [lane for lane, modes in lanes.items() if not set(modes).isdisjoint(COMPUTE_MODES)]
        beside: dict[str, list[str]] = {}
        for lane, modes in lanes.items():
            if lane not in self._computing and not set(modes).isdisjoint(KINDS):
                beside.setdefault(_worker_of(lane), []).append(lane)
        self._workers = {
            worker: WorkerOverlap(
                [lane for lane in self._computing if _worker_of(lane) == worker] or self._computing, own
            )
            for worker, own in beside.items()
        }
        self._computed_for: dict[str, list[WorkerOverlap]] = {}
        for worker in self._workers.values():
            for lane in worker.computing:
                self._computed_for.setdefault(lane, []).append(worker)
        self._taken: Nanoseconds = {}
        self._interval = (0, 0)

    def add(self, lane: str, rows: Sequence[Row]) -> None:
        """Accounts for rows as they lie in a report: modes by their index in MODES, in order, none overlapping."""
        if not rows or not self._workers:
            return
        if workers := self._computed_for.get(lane):
            intervals = _computed(rows)
            for worker in workers:
                worker.add_computed(lane, intervals, rows[-1][5])
        elif (beside := self._workers.get(_worker_of(lane))) is not None and lane in beside.beside:
            beside.add_beside(lane, rows)

    def flush(self) -> None:
        """The job has ended, no more rows come: whatever still waits for other lanes is accounted for."""
        for worker in self._workers.values():
            worker.flush()

    def seconds(self) -> OverlapSeconds:
        """Since the job began, as far as all lanes have reported; kinds of which there was nothing are absent."""
        return _seconds(self._nanoseconds())

    def take_seconds(self) -> OverlapSeconds:
        """What `seconds` has grown by since the last call, for counters; what did not grow is absent."""
        now, before = self._nanoseconds(), self._taken
        self._taken = now
        return _seconds(
            {
                worker: {
                    kind: (hidden - was[0], exposed - was[1])
                    for kind, (hidden, exposed) in kinds.items()
                    if (was := before.get(worker, {}).get(kind, (0, 0))) != (hidden, exposed)
                }
                for worker, kinds in now.items()
            }
        )

    def take_percent(self) -> float | None:
        """Hidden in percent of hidden and exposed, of all workers and kinds since the last call; None for nothing."""
        pairs = [pair for kinds in self._nanoseconds().values() for pair in kinds.values()]
        hidden, exposed = sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)
        grown = hidden - self._interval[0], exposed - self._interval[1]
        self._interval = hidden, exposed
        return 100 * grown[0] / sum(grown) if any(grown) else None

    def _nanoseconds(self) -> Nanoseconds:
        sums: Nanoseconds = {}
        for lane in self._computing:
            _add(sums, _worker_of(lane), self._account.mode_ns(lane), hidden=_NOTHING)
        for name, worker in self._workers.items():
            worker.settle()
            _add(sums, name, worker.busy_ns, hidden=worker.hidden_ns)
        return sums


class WorkerOverlap:
    """One worker's lanes beside compute, against the lanes `computing`. Sums are by a mode's index in MODES."""

    def __init__(self, computing: Collection[str], beside: Collection[str]) -> None:
        self.computing = {lane: _Waiting() for lane in computing}
        self.beside = {lane: _Waiting() for lane in beside}
        self.busy_ns = [0] * len(MODES)
        self.hidden_ns = [0] * len(MODES)
        self._computed = _Computed()

    def add_computed(self, lane: str, intervals: Iterable[Interval], reached_ns: int) -> None:
        self.computing[lane].add(intervals, reached_ns)
        self._keep_bounded()

    def add_beside(self, lane: str, rows: Sequence[Row]) -> None:
        self.beside[lane].add([(row[4], row[5], row[0]) for row in rows if row[0] in _KIND_OF_MODE], rows[-1][5])
        self._keep_bounded()

    def settle(self) -> None:
        """Accounts for what all compute lanes have reached, and drops the computed time that nobody asks for again."""
        self._settle_until(min((lane.reached_ns for lane in self.computing.values()), default=0))
        self._computed.drop(min(lane.needed_ns() for lane in self.beside.values()))

    def flush(self) -> None:
        """Accounts for everything; rows older than this come too late to be hidden or to hide anything."""
        end = max(lane.reached_ns for lane in (*self.computing.values(), *self.beside.values()))
        self._settle_until(end)
        self._computed.drop(end)

    def _keep_bounded(self) -> None:
        if self.num_intervals() > SETTLE_ABOVE:
            self.settle()
            if self.num_intervals() > MAX_INTERVALS:
                self.flush()

    def num_intervals(self) -> int:
        """That are kept for lanes that lag."""
        lanes = (*self.computing.values(), *self.beside.values())
        return sum(len(lane.intervals) for lane in lanes) + len(self._computed)

    def _settle_until(self, end: int) -> None:
        computed = self._computed
        computed.extend([lane.intervals for lane in self.computing.values()], end)
        for lane in self.beside.values():
            intervals = lane.intervals
            while intervals and intervals[0][1] <= end:
                start, stop, mode = intervals.popleft()
                self.busy_ns[mode] += stop - start
                self.hidden_ns[mode] += computed.before(stop) - computed.before(start)


class _Waiting:
    """What a lane has reported and others have not reached yet."""

    def __init__(self) -> None:
        self.intervals: deque[Interval] = deque()
        self.reached_ns = 0  # the end of its newest row

    def add(self, intervals: Iterable[Interval], reached_ns: int) -> None:
        self.intervals.extend(intervals)
        self.reached_ns = reached_ns

    def needed_ns(self) -> int:
        """The lane will ask for no time before this."""
        return self.intervals[0][0] if self.intervals else self.reached_ns


class _Computed:
    """When any of some lanes computed, as far as they have been followed: disjoint intervals, ascending."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._sums: list[int] = []  # computed before each, since the beginning: a span's is one subtraction
        self._dropped_ns = 0
        self._followed_ns = 0

    def __len__(self) -> int:
        return len(self._starts)

    def extend(self, lanes: Iterable[deque[Interval]], end: int) -> None:
        """Takes what lies before `end` out of the lanes' intervals; what was followed already is not changed."""
        spans = []
        for intervals in lanes:
            while intervals and intervals[0][0] < end:
                start, stop, mode = intervals.popleft()
                if stop > end:
                    intervals.appendleft((end, stop, mode))
                spans.append((max(start, self._followed_ns), min(stop, end)))
        for start, stop in sorted(spans):
            self._add(start, stop)
        self._followed_ns = max(self._followed_ns, end)

    def _add(self, start: int, stop: int) -> None:
        if self._ends and start <= self._ends[-1]:
            self._ends[-1] = max(self._ends[-1], stop)
        elif start < stop:
            self._sums.append(self.before(start))
            self._starts.append(start)
            self._ends.append(stop)

    def before(self, time: int) -> int:
        """Nanoseconds computed before `time`; for a time that has been dropped, those before the oldest one kept."""
        number = bisect_right(self._starts, time) - 1
        if number < 0:
            return self._dropped_ns
        return self._sums[number] + min(time, self._ends[number]) - self._starts[number]

    def drop(self, time: int) -> None:
        """Nobody will ask for a time before this one."""
        if count := bisect_right(self._ends, time):
            self._dropped_ns = self.before(self._ends[count - 1])
            del self._starts[:count], self._ends[:count], self._sums[:count]


def _computed(rows: Sequence[Row]) -> list[Interval]:
    """Forward and backward, those that follow each other without a gap as one."""
    intervals: list[Interval] = []
    first = last = rows[0][4]
    for mode, _, _, _, start, end in rows:
        if mode <= _LAST_COMPUTE:
            if start != last:
                if first < last:
                    intervals.append((first, last, _LAST_COMPUTE))
                first = start
            last = end
    if first < last:
        intervals.append((first, last, _LAST_COMPUTE))
    return intervals


def _add(sums: Nanoseconds, worker: str, busy: Sequence[int], *, hidden: Sequence[int]) -> None:
    """busy, hidden: of one lane or more of the worker, by a mode's index."""
    kinds = sums.setdefault(worker, {})
    for mode, kind in _KIND_OF_MODE.items():
        if busy[mode]:
            before = kinds.get(kind, (0, 0))
            kinds[kind] = (before[0] + hidden[mode], before[1] + busy[mode] - hidden[mode])


def _worker_of(lane: str) -> str:
    return lane.partition("/")[0]


def _seconds(sums: Nanoseconds) -> OverlapSeconds:
    return {
        worker: {
            kind: {"hidden": hidden / NANOSECONDS, "exposed": exposed / NANOSECONDS}
            for kind, (hidden, exposed) in kinds.items()
        }
        for worker, kinds in sums.items()
        if kinds
    }
