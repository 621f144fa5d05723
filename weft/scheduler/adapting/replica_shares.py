"""Replica shares of a job's run: what of each batch each replica had, how fast it was, and who gets nothing any more.

Kept beside the core, which decides: see weft.scheduler.adapting.shares and weft.scheduler.adapting.stealing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from weft.plan.division import divide, replica_sizes
from weft.plan.itinerary import Iteration
from weft.plan.plan import Plan
from weft.plan.rows import Row
from weft.plan.tables import ShareTable
from weft.scheduler.adapting.replica_pace import MIN_ITERATIONS, ReplicaPace
from weft.scheduler.adapting.shares import Measurement, Verdict


class ReplicaShares:
    """One attempt's. verdicts: in words, in the order in which they came."""

    def __init__(self, plan: Plan) -> None:
        self.verdicts: list[str] = []
        self.newest = tuple(share / sum(plan.shares) for share in plan.shares)
        self._plan = plan
        self._steals = plan.share == "stealing"
        self._full = min(plan.itinerary.batch_size, plan.itinerary.num_train)
        self._table = ShareTable(plan.shares)
        self._granted: dict[int, list[list[int]]] = {}  # iteration -> numbers of each replica's microbatches
        self._pace = None if plan.share == "fixed" else ReplicaPace(plan)

    @property
    def measures(self) -> bool:
        """Whether it wants the rows of tasks that ran."""
        return self._pace is not None

    # --- what the core has decided

    def set(self, first: int, shares: Sequence[float]) -> None:
        self._table.set(first, shares)
        self.newest = tuple(shares)
        if self._pace is not None:
            self._pace.begin_at(first)

    def grant(self, replica: int, grants: Sequence[tuple[int, int, int]]) -> None:
        for iteration, _, number in grants:
            if number >= 0:
                self._numbers(iteration)[replica].append(number)

    def judge(self, verdict: Verdict, first: int) -> str:
        """The sentence that people read."""
        begin = self._plan.itinerary.label(first)
        text = (
            f"replica {verdict.replica} does not pay: {1e3 * verdict.with_seconds:.1f} ms an iteration with it, "
            f"{1e3 * verdict.without_seconds:.1f} ms without; its share is 0 from {begin} on"
        )
        self.verdicts.append(text)
        return text

    # --- what has happened

    def add(self, rows: Iterable[Row]) -> None:
        """Rows of tasks that ran, in the order of their lane."""
        if self._pace is not None:
            for _, task, iteration, _, start, end in rows:
                if task >= 0:
                    self._pace.add(task, iteration, start, end, self._positions(iteration))

    def finish(self, iteration: Iteration, seconds: float | None) -> list[int]:
        """The samples that each replica had of an iteration that is over. seconds: since the end of the one before."""
        samples = self._samples(iteration)
        if self._pace is not None:
            counts = iteration.training and iteration.size == self._full
            units = [len(numbers) for numbers in self._numbers(iteration.index)] if self._steals else samples
            self._pace.finish(iteration.index, units if counts else [0] * len(samples), seconds)
        if self._steals:
            self.newest = tuple(each / iteration.size for each in samples)
            self._granted.pop(iteration.index, None)
        return samples

    def take(self) -> Measurement | None:
        """What the core has to know of the time since the last call; None where nothing new is known."""
        if self._pace is None:
            return None
        return self._pace.take(1 if self._steals else MIN_ITERATIONS)

    def _samples(self, iteration: Iteration) -> list[int]:
        if not self._steals:
            return replica_sizes(iteration.size, self._table.of(iteration.index))
        (parts,) = divide(iteration.size, [1.0], [self._plan.microbatches])
        return [sum(parts[number].size for number in numbers) for numbers in self._numbers(iteration.index)]

    def _numbers(self, iteration: int) -> list[list[int]]:
        return self._granted.setdefault(iteration, [[] for _ in self._plan.replicas])

    def _positions(self, iteration: int) -> list[int] | None:
        """How many of each replica's positions have a microbatch; None where all have."""
        return [len(numbers) for numbers in self._numbers(iteration)] if self._steals else None
