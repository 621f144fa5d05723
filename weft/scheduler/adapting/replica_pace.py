"""Replica pace: how long each replica takes for its part of a batch, from the rows that its lanes stamped.

replica 0   ▕ F B F B F B F B ▏      span: from its first FORWARD to its last BACKWARD, bubbles and stalls included,
                                     but for what its first stage waits for parameters inside of a FORWARD
replica 1   ▕ F B F B ▏              unit seconds: span ÷ its samples (where replicas steal: ÷ its microbatches)
owners              ▕ S U S U ▏      fixed: the part of an iteration after every span that updates could fill
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from weft.plan.graph import Lane
from weft.plan.itinerary import Iteration
from weft.plan.kinds import KINDS, Kind
from weft.plan.plan import Plan
from weft.plan.rows import Row

MIN_ITERATIONS = 8  # of an interval: fewer say more about the machine's noise than about replicas
KEPT = 64  # iterations of an interval, the newest

Span = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaMeasurement:
    """Medians over the iterations of one interval."""

    unit_seconds: tuple[float | None, ...]  # of each replica for a sample; where it steals, for a microbatch
    iteration_seconds: float  # from end to end
    fixed_seconds: float  # the part of them that stays, whoever computes: updates that nothing hides


class ReplicaPace:
    """One attempt's replicas. Times are nanoseconds of one clock."""

    def __init__(self, plan: Plan) -> None:
        self._num_replicas = len(plan.replicas)
        self._batch_size = plan.itinerary.full_batch
        self._computing = {
            task.id: (task.holder.replica, task.microbatch)
            for task in plan.graph.tasks
            if KINDS[task.kind].computes and task.microbatch is not None
        }
        # Of a first stage's forward in parts, each but the first, and the one before it.
        self._going_on = {
            task.id: before.id for before, task in pairwise(plan.graph.tasks) if before.goes_on and before.stage == 0
        }
        self._ended: dict[int, int] = {}  # when each task that computes was over the last time
        self._updating = {task.id: task.lane for task in plan.graph.tasks if task.kind is Kind.UPDATE}
        self._spans: dict[int, dict[int, Span]] = {}
        self._updates: dict[int, dict[Lane, int]] = {}
        self._first = 0
        self._begin()

    def begin_at(self, iteration: int) -> None:
        """Shares change there: earlier iterations belong to no measurement any more."""
        self._first = iteration
        self._begin()

    def _begin(self) -> None:
        self._units: list[deque[float]] = [deque(maxlen=KEPT) for _ in range(self._num_replicas)]
        self._seconds: deque[float] = deque(maxlen=KEPT)
        self._fixed: deque[float] = deque(maxlen=KEPT)

    def add(self, rows: Iterable[Row], granted: Mapping[int, Sequence[int]] | None = None) -> None:
        """Rows of tasks that ran, in the order of their lane. granted: where replicas steal, by iteration, how many
        positions of each there are to count; the others pass at some other time."""
        for _, task, iteration, _, start, end in rows:
            if task in self._computing:
                replica, position = self._computing[task]
                if granted is not None and (iteration not in granted or position >= granted[iteration][replica]):
                    continue
                spans = self._spans.setdefault(iteration, {})
                first, last = spans.get(replica, (start, end))
                first += self._waited(task, start, end)
                spans[replica] = min(first, start), max(last, end)
            elif task in self._updating:
                lanes = self._updates.setdefault(iteration, {})
                lane = self._updating[task]
                lanes[lane] = lanes.get(lane, 0) + end - start

    def _waited(self, task: int, start: int, end: int) -> int:
        """For parameters, inside of a forward: no work of the replica's."""
        self._ended[task] = end
        return start - self._ended.get(self._going_on[task], start) if task in self._going_on else 0

    def finish(self, iteration: Iteration, units: Sequence[int], seconds: float | None) -> None:
        """The iteration is over; one that trains on a whole batch counts. units: of work that each replica had.
        seconds: from the end of the one before, None where that is not known."""
        spans, updates = self._spans.pop(iteration.index, {}), self._updates.pop(iteration.index, {})
        whole = iteration.training and iteration.size == self._batch_size
        if iteration.index < self._first or seconds is None or not whole:
            return
        longest = 0.0
        for replica, (start, end) in spans.items():
            if units[replica]:
                self._units[replica].append((end - start) / 1e9 / units[replica])
                longest = max(longest, (end - start) / 1e9)
        self._seconds.append(seconds)
        update = max(updates.values(), default=0) / 1e9
        self._fixed.append(max(0.0, min(update, seconds - longest)))

    def take(self, min_iterations: int = MIN_ITERATIONS) -> ReplicaMeasurement | None:
        """The medians since the last call that gave any; None before enough iterations are over."""
        if len(self._seconds) < min_iterations:
            return None
        measured = ReplicaMeasurement(
            unit_seconds=tuple(statistics.median(each) if each else None for each in self._units),
            iteration_seconds=statistics.median(self._seconds),
            fixed_seconds=statistics.median(self._fixed),
        )
        self._begin()
        return measured
