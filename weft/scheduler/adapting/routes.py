"""Routes: which buckets devices update themselves, from what each step of a bucket's way takes. Pure.

compute   ▕ last BACKWARD      ▏          a bucket is born when whoever takes its gradient first begins with it: that is
d2h           ▕ DOWN b0 ▏                 when it is there, or later where the lane was busy, which says as much about
host                   ▕ SYNC, UPDATE b0 ▏    when the bucket can be back

A measurement is noisy, and a bucket that turns takes its optimizer's state along; so a new division holds only where
two measurements in a row come to it:

    measured        {0}    {0 1}    {0}    {0 1}    {0 1}
    devices have    {0}    {0}      {0}    {0}      {0 1}
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from weft.plan.buckets import Holder
from weft.plan.graph import Task
from weft.plan.kinds import Kind, Way
from weft.plan.plan import Plan
from weft.plan.rows import Row
from weft.plan.tables import Adjustment
from weft.scheduler.adapting.balance import measured_local
from weft.scheduler.adapting.policy import Decision, IterationPolicy

MIN_ITERATIONS = 8  # of an interval: fewer say more about the machine's noise than about lanes
KEPT = 64  # iterations of an interval, the newest


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteMeasurement:
    """Medians over the iterations of one interval."""

    seconds: Mapping[int, float]  # of each task that ran; an UPDATE's with its part of a VALIDATE that made it again
    born: Mapping[tuple[int, Holder], float]  # of a bucket and holder: from the start of the holder's last backward


class BalancedRoutes(IterationPolicy[RouteMeasurement]):
    """A bucket turns a training iteration after it is told: in that one its optimizer's state goes over."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        tasks = plan.graph.tasks
        ends = {holder: task.id for holder, task in plan.graph.last_backwards().items()}
        self._backwards = set(ends.values())
        self._timed = {task.id for task in tasks if task.bucket is not None}
        self._timed |= {task.id for task in tasks if task.kind is Kind.FORWARD and task.microbatch == 0}
        self._timed |= self._backwards
        updates = [task for task in tasks if task.kind is Kind.UPDATE]
        self._validated = {
            task.id: [each.id for each in updates if _updater(each) == _updater(task)]
            for task in tasks
            if task.kind is Kind.VALIDATE
        }
        self._timed |= self._validated.keys()
        self._takers = [(bucket, holder, task, ends[holder]) for bucket, holder, task in _takers(plan)]
        self._rows: dict[int, dict[int, tuple[int, int]]] = {}  # iteration -> task -> (start, end)
        assert plan.synchronisation is not None
        self._proposed = frozenset(plan.synchronisation.local)  # by the last measurement
        self._seconds: dict[int, float] = {}  # the newest that is known of each task, of ways not gone any more too
        self._born: dict[tuple[int, Holder], float] = {}  # the same of each bucket
        self._begin_at(0, self._proposed)

    @staticmethod
    def applies(plan: Plan) -> bool:
        return plan.has_ways

    def _begin_at(self, iteration: int, local: frozenset[int]) -> None:
        """Ways change there: earlier iterations belong to no measurement any more."""
        self._first, self._local = iteration, local
        self._passing = {task.id for task in self._plan.graph.tasks if task.passes(local)}
        self._rows.clear()

    def add(self, rows: Iterable[Row]) -> None:
        """A task that passes and yet has a row did nothing but end its owner's step."""
        for _, task, iteration, _, start, end in rows:
            if task not in self._timed or task in self._passing or iteration < self._first:
                continue
            if self._plan.itinerary.at(iteration).learns:
                self._rows.setdefault(iteration, {})[task] = (start, end)
                if len(self._rows) > KEPT:
                    del self._rows[min(self._rows)]

    def take(self) -> RouteMeasurement | None:
        whole = [rows for rows in self._rows.values() if self._backwards <= rows.keys()]
        if len(whole) < MIN_ITERATIONS:
            return None
        seconds, born = defaultdict(list), defaultdict(list)
        for rows in whole:
            for task, spent in self._spent(rows).items():
                seconds[task].append(spent)
            for bucket, holder, taker, backward in self._takers:
                if taker in rows:
                    born[bucket, holder].append(max(0, rows[taker][0] - rows[backward][0]) / 1e9)
        self._rows.clear()
        return RouteMeasurement(
            seconds={task: statistics.median(each) for task, each in seconds.items()},
            born={key: statistics.median(each) for key, each in born.items()},
        )

    def decide(self, measured: RouteMeasurement, first_unsent: int) -> Decision | None:
        first = self._first_to_turn(first_unsent)
        if first is None:
            return None
        self._seconds |= measured.seconds
        self._born |= measured.born
        before, self._proposed = self._proposed, measured_local(self._plan, self._seconds, self._born)
        if self._proposed != before or self._proposed == self._local:
            return None
        self._begin_at(first, self._proposed)
        return Decision(first, Adjustment(local=tuple(sorted(self._proposed))))

    def _first_to_turn(self, first_unsent: int) -> int | None:
        """The iteration behind the first training iteration of which no lane has been sent anything; None where nothing
        is updated after that."""
        itinerary = self._plan.itinerary
        for index in range(first_unsent, itinerary.num_iterations):
            iteration = itinerary.at(index)
            if iteration.learns:
                return index + 1 if iteration.step + 1 < itinerary.steps else None
        return None

    def _spent(self, rows: Mapping[int, tuple[int, int]]) -> dict[int, float]:
        """Seconds of the tasks of one iteration; what VALIDATE took belongs to the updates that it lets stand, as they
        were planned."""
        spent = {task: (end - start) / 1e9 for task, (start, end) in rows.items()}
        for validate, updates in self._validated.items():
            made = [task for task in updates if task in spent]
            planned = sum(self._plan.task_seconds[task] for task in made)
            for task in made if planned else ():
                spent[task] += spent.get(validate, 0.0) * self._plan.task_seconds[task] / planned
        return spent


def _updater(task: Task) -> tuple[int | None, int | None, int | None]:
    """Whose an UPDATE or VALIDATE is: an owner's, or a device's own."""
    return task.owner, task.replica, task.stage


def _takers(plan: Plan) -> Iterator[tuple[int, Holder, int]]:
    """By bucket and holder, the task that takes a gradient from the device on which it is born: DOWN, or the SYNC of
    its own lane."""
    assert plan.synchronisation is not None
    for task in plan.graph.tasks:
        if task.kind is Kind.DOWN:
            yield plan.synchronisation.bucket_of(task).index, task.holder, task.id
        elif task.kind is Kind.SYNC and task.way is Way.DEVICE:
            bucket = plan.synchronisation.bucket_of(task)
            yield bucket.index, bucket.holders[0], task.id
