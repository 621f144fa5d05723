"""Adaptive shares: which replica gets how much of a batch. A pure policy, from measured speed to a recommendation.

After HyScale-GNN's dynamic resource management: Lin and Prasanna, IPDPS 2023, section IV. Replicas that take the same
time for their parts of a batch wait for nobody, and they do where each has a part in proportion to its throughput.
Every measurement moves the shares a part of the way there:

    throughput   100 /s, 25 /s         target   0.8   0.2
    shares       0.5   0.5    ▶    0.65  0.35    ▶    0.725  0.275    ▶   ...   ▶    0.8   0.2

A replica that costs more in synchronisation than it takes off the others does not pay: its share becomes 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from weft.plan.division import least_samples, replica_sizes
from weft.plan.itinerary import Iteration
from weft.plan.plan import Plan
from weft.plan.rows import Row
from weft.plan.tables import Adjustment
from weft.scheduler.adapting.policy import Decision, IterationPolicy, Verdict
from weft.scheduler.adapting.replica_pace import ReplicaMeasurement, ReplicaPace

DAMPING = 0.5  # of the way to the target; measurements are noisy, and a share that swings costs more than one that lags
MAX_STEP = 0.2  # of a batch, in one measurement: arbitrary; a single wrong one must do no great harm
SETTLED = 0.05  # of a share, or one sample: nearer to its target none has to be, to judge what a replica brings
MARGIN = 1.02  # what an iteration with a replica may take beyond one without: below it the difference is noise
STRIKES = 2  # measurements in a row, since a share that is 0 stays 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """By replica."""

    weights: tuple[float, ...]  # parts of a batch, which add up to 1
    unit_seconds: tuple[float | None, ...]  # the newest that is known
    strikes: tuple[int, ...]  # measurements in a row in which it did not pay
    off: frozenset[int] = frozenset()  # those that get nothing any more

    @classmethod
    def starting(cls, weights: Sequence[float]) -> Shares:
        total = sum(weights)
        none = (None,) * len(weights)
        return cls(weights=tuple(w / total for w in weights), unit_seconds=none, strikes=(0,) * len(weights))


class AdaptiveShares(IterationPolicy[ReplicaMeasurement]):
    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._batch_size = plan.itinerary.full_batch
        counts = [replica.microbatches for replica in plan.replicas]
        self._least = least_samples(self._batch_size, counts, plan.share)
        self._pace = ReplicaPace(plan)
        self._shares = Shares.starting(plan.shares)

    @staticmethod
    def applies(plan: Plan) -> bool:
        return plan.share == "adaptive"

    def add(self, rows: Iterable[Row]) -> None:
        self._pace.add(rows)

    def finish(self, iteration: Iteration, samples: Sequence[int], seconds: float | None) -> None:
        self._pace.finish(iteration, samples, seconds)

    def take(self) -> ReplicaMeasurement | None:
        return self._pace.take()

    def decide(self, measured: ReplicaMeasurement, first_unsent: int) -> Decision:
        before = replica_sizes(self._batch_size, self._shares.weights, self._least)
        self._shares, verdict = adapt(self._shares, measured, self._batch_size, self._least)
        same = replica_sizes(self._batch_size, self._shares.weights, self._least) == before
        if same or first_unsent >= self._plan.itinerary.num_iterations:
            return Decision(first_unsent, None, verdict)
        self._pace.begin_at(first_unsent)
        return Decision(first_unsent, Adjustment(shares=self._shares.weights), verdict)


def adapt(
    shares: Shares, measured: ReplicaMeasurement, batch_size: int, least: int = 1
) -> tuple[Shares, Verdict | None]:
    """The next shares after a measurement, and the replica that they leave out for good, if there is one. least: the
    samples of a replica that has any."""
    known = tuple(
        new if new is not None else old for new, old in zip(measured.unit_seconds, shares.unit_seconds, strict=True)
    )
    shares = replace(shares, unit_seconds=known)
    if any(seconds is None for seconds, weight in zip(known, shares.weights, strict=True) if weight):
        return shares, None
    target = _target(shares)
    shares, verdict = _judge(shares, target, measured, batch_size, least)
    if verdict is not None:
        return _without(shares, verdict.replica), verdict
    return _without_empty(replace(shares, weights=_nearer(shares.weights, target)), measured, batch_size)


def _target(shares: Shares) -> tuple[float, ...]:
    """In proportion to throughput; a replica without a share keeps none."""
    throughput = [
        1 / seconds if weight and seconds else 0.0
        for weight, seconds in zip(shares.weights, shares.unit_seconds, strict=True)
    ]
    total = sum(throughput)
    return tuple(each / total for each in throughput) if total else shares.weights


def _nearer(weights: Sequence[float], target: Sequence[float]) -> tuple[float, ...]:
    moved = [
        old + max(-MAX_STEP, min(MAX_STEP, DAMPING * (new - old))) for old, new in zip(weights, target, strict=True)
    ]
    return tuple(weight / sum(moved) for weight in moved)


def _without_seconds(shares: Shares, replica: int, measured: ReplicaMeasurement, batch_size: int) -> float:
    """An iteration of the other replicas alone; infinite where there is none."""
    others = [
        1 / seconds
        for r, (weight, seconds) in enumerate(zip(shares.weights, shares.unit_seconds, strict=True))
        if r != replica and weight and seconds
    ]
    return batch_size / sum(others) + measured.fixed_seconds if others else math.inf


def _judge(
    shares: Shares, target: Sequence[float], measured: ReplicaMeasurement, batch_size: int, least: int
) -> tuple[Shares, Verdict | None]:
    """Looks at the slowest replica once shares have settled: before, an iteration shows what is wrong with them."""
    now, then = replica_sizes(batch_size, shares.weights, least), replica_sizes(batch_size, target, least)
    live = [r for r, weight in enumerate(shares.weights) if weight]
    slowest = max(live, key=lambda r: shares.unit_seconds[r] or 0.0)
    without = _without_seconds(shares, slowest, measured, batch_size)
    settled = all(abs(a - b) <= max(1.0, SETTLED * b) for a, b in zip(now, then, strict=True))
    struck = settled and measured.iteration_seconds > MARGIN * without
    strikes = tuple(shares.strikes[r] + 1 if r == slowest and struck else 0 for r in range(len(shares.weights)))
    shares = replace(shares, strikes=strikes)
    if strikes[slowest] < STRIKES:
        return shares, None
    return shares, Verdict(replica=slowest, with_seconds=measured.iteration_seconds, without_seconds=without)


def _without_empty(shares: Shares, measured: ReplicaMeasurement, batch_size: int) -> tuple[Shares, Verdict | None]:
    """A replica whose share is less than a sample would hold up all others with one: it took longer for it."""
    sizes = replica_sizes(batch_size, shares.weights)
    for replica, (weight, size) in enumerate(zip(shares.weights, sizes, strict=True)):
        if weight and not size:
            seconds = (shares.unit_seconds[replica] or 0.0) + measured.fixed_seconds
            without = _without_seconds(shares, replica, measured, batch_size)
            verdict = Verdict(replica=replica, with_seconds=seconds, without_seconds=without)
            return _without(shares, replica), verdict
    return shares, None


def _without(shares: Shares, replica: int) -> Shares:
    weights = [0.0 if r == replica else weight for r, weight in enumerate(shares.weights)]
    return replace(shares, weights=tuple(weight / sum(weights) for weight in weights), off=shares.off | {replica})
