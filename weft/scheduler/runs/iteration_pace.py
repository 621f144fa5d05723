"""Iteration pace: how long a training iteration takes, and the limit of its graph, from the same iterations. Pure.

    end to end  ┐
                ├─ of the newest SAMPLE steps, the same for both ─▶ median iteration ─┐
    task times  ┘                                             └───▶ speed limit ──────┴─▶ measured ÷ limit

Neither is of an attempt's first step, since nothing says when it began, nor of a validation, whose tasks take other
times. What is told as a limit is one: it is not told

- of fewer than LEAST steps: the median of a few times is as good as any of them;
- where the iterations were shorter than it, by more than rounding: what was passed is no limit. It happens where the
  graph has an edge later than it is (a gradient that is complete before its backward ends), where a limit is made of
  averages (stolen microbatches), and where tasks are uneven: a median of sums is not the sum of medians.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from weft.metrics.accounts.task_times import TaskTimes
from weft.plan.kinds import KINDS
from weft.plan.plan import Plan
from weft.scheduler.planning.limit import speed_limit

SAMPLE: Final = 127  # steps. With fewer a slow moment of the machine is in the median
LEAST: Final = 8  # steps; arbitrary: of eight, one that a program beside it has slowed is not in the median
MAX_TASKS: Final = 4096  # above it the search for the critical cycle would hold up the daemon
ROUNDING: Final = 0.005  # by which iterations may be shorter: the ratio, with two digits, is still 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    iteration_seconds: float | None = None  # the median training iteration; None before one is known
    limit_seconds: float | None = None  # of those iterations; None where nothing is known that would be a limit


@dataclass(frozen=True, slots=True)
class _Step:
    iteration: int
    step: int
    seconds: float


class IterationPace:
    """Of one attempt."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._steps: deque[_Step] = deque(maxlen=SAMPLE)

    @property
    def newest_seconds(self) -> float | None:
        return self._steps[-1].seconds if self._steps else None

    def add(self, iteration: int, step: int, seconds: float) -> None:
        """A training iteration, from the end of the one before it to its own."""
        self._steps.append(_Step(iteration, step, seconds))

    def newest(self, count: int) -> tuple[list[int], float] | None:
        """So many steps, and the median of what each of them took; None before there are as many."""
        if len(self._steps) < count:
            return None
        steps = list(self._steps)[-count:]
        return [each.step for each in steps], statistics.median(each.seconds for each in steps)

    def of(self, times: TaskTimes, local: Collection[int] = (), since: int = 0) -> Pace:
        """local: the buckets that devices update themselves, from iteration `since` on."""
        steps = [each for each in self._steps if each.iteration >= since and times.keeps(each.step)]
        if len(steps) < LEAST:
            return self._without_limit()
        measured = statistics.median(each.seconds for each in steps)
        limit = self._limit(times, local, [each.step for each in steps])
        if limit is None or measured < limit * (1 - ROUNDING):
            return self._without_limit()
        return Pace(iteration_seconds=measured, limit_seconds=limit)

    def _without_limit(self) -> Pace:
        """Of all that are known: no limit has to be of the same ones."""
        seconds = [each.seconds for each in self._steps]
        return Pace(iteration_seconds=statistics.median(seconds) if seconds else None)

    def _limit(self, times: TaskTimes, local: Collection[int], steps: Sequence[int]) -> float | None:
        graph = self._plan.graph
        if len(graph.tasks) > MAX_TASKS:
            return None
        may_pass = self._plan.share == "stealing"  # a position has a microbatch in some iterations, or in none
        no_learning = self._plan.itinerary.forward_only
        middle = statistics.fmean if may_pass else statistics.median
        seconds = [0.0] * len(graph.tasks)
        for task in graph.tasks:
            if task.passes(local) or KINDS[task.kind].seldom:
                continue
            if times.has(task.id):
                seconds[task.id] = middle(times.of(task.id, steps)) / 1e9
            elif not ((may_pass and KINDS[task.kind].of_position) or (no_learning and KINDS[task.kind].learns)):
                return None  # not all have run
        return speed_limit(graph.going(local), seconds).seconds or None
