"""Route pace: how long each step of a bucket's way takes, from the rows that the lanes stamped. Pure.

compute   ▕ last BACKWARD      ▏          a bucket is born when whoever takes its gradient first begins with it: that is
d2h           ▕ DOWN b0 ▏                 when it is there, or later where the lane was busy, which says as much about
host                   ▕ SYNC, UPDATE b0 ▏    when the bucket can be back
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from weft.plan.buckets import Holder
from weft.plan.graph import Task
from weft.plan.kinds import Kind, Way
from weft.plan.plan import Plan

MIN_ITERATIONS = 8  # of an interval: fewer say more about the machine's noise than about lanes
KEPT = 64  # iterations of an interval, the newest


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteMeasurement:
    """Medians over the iterations of one interval. seconds: of each task that ran; an UPDATE's with its part of the
    VALIDATE that may have made it again. born: (bucket, holder) -> seconds from the start of the holder's last
    backward."""

    seconds: Mapping[int, float]
    born: Mapping[tuple[int, Holder], float]


class RoutePace:
    """One attempt's buckets. Times are nanoseconds of one clock."""

    def __init__(self, plan: Plan) -> None:
        self._itinerary = plan.itinerary
        self._tasks = tasks = plan.graph.tasks
        ends = {
            (replica, stage): last_backward(plan, (replica, stage)).id
            for replica, each in enumerate(plan.replicas)
            for stage in range(each.num_stages)
        }
        self._backwards = set(ends.values())
        self._timed = {task.id for task in tasks if task.bucket >= 0}
        self._timed |= {task.id for task in tasks if task.kind is Kind.FORWARD and task.microbatch == 0}
        self._timed |= self._backwards
        self._planned = plan.task_seconds
        updates = [task for task in tasks if task.kind is Kind.UPDATE and task.stage < 0]
        self._validated = {
            task.id: [each.id for each in updates if each.replica == task.replica]
            for task in tasks
            if task.kind is Kind.VALIDATE
        }
        self._timed |= self._validated.keys()
        self._takers = [(task.bucket, holder, task.id, ends[holder]) for task, holder in _takers(plan)]
        self._rows: dict[int, dict[int, tuple[int, int]]] = {}  # iteration -> task -> (start, end)
        self.begin_at(0, plan.synchronisation.local if plan.synchronisation else ())

    def begin_at(self, iteration: int, local: Collection[int]) -> None:
        """Ways change there: earlier iterations belong to no measurement any more."""
        self._first = iteration
        self._passing = {task.id for task in self._tasks if task.passes(local)}
        self._rows.clear()

    def add(self, task: int, iteration: int, start: int, end: int) -> None:
        """A task ran. One that passes and yet has a row did nothing but end its owner's step."""
        if task in self._passing:
            return
        if task in self._timed and iteration >= self._first and self._itinerary.at(iteration).learns:
            self._rows.setdefault(iteration, {})[task] = (start, end)
            if len(self._rows) > KEPT:
                del self._rows[min(self._rows)]

    def take(self) -> RouteMeasurement | None:
        """The medians since the last call that gave any; None before enough iterations are over."""
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

    def _spent(self, rows: Mapping[int, tuple[int, int]]) -> dict[int, float]:
        """Seconds of the tasks of one iteration; what VALIDATE took belongs to its owner's updates, as they were
        planned."""
        spent = {task: (end - start) / 1e9 for task, (start, end) in rows.items()}
        for validate, updates in self._validated.items():
            made = [task for task in updates if task in spent]
            planned = sum(self._planned[task] for task in made)
            for task in made if planned else ():
                spent[task] += spent.get(validate, 0.0) * self._planned[task] / planned
        return spent


def last_backward(plan: Plan, holder: Holder) -> Task:
    replica, stage = holder
    last = plan.replicas[replica].microbatches - 1
    return next(
        task
        for task in plan.graph.tasks
        if (task.kind, task.replica, task.stage, task.microbatch) == (Kind.BACKWARD, replica, stage, last)
    )


def _takers(plan: Plan) -> list[tuple[Task, Holder]]:
    """The tasks that take a gradient from the device on which it is born: DOWN, or the SYNC of its own lane."""
    assert plan.synchronisation is not None
    takers = []
    for task in plan.graph.tasks:
        if task.kind is Kind.DOWN:
            takers.append((task, (task.replica, task.stage)))
        elif task.kind is Kind.SYNC and task.way is Way.DEVICE:
            takers.append((task, plan.synchronisation.buckets[task.bucket].holders[0]))
    return takers
