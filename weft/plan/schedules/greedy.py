"""Greedy: an order that follows from what each pass takes, by list scheduling in virtual time. Pure.

Whoever is free first computes what is there, of several things the one for which others wait: a backward before a
forward, and the second part of a backward only where it would wait otherwise. Where all passes take as long and whole
backwards twice that:

    zero-bubble                                 greedy
    F0 F1  . B0 F2 B1 F3  . B2  .  . B3         F0 F1 F2 F3 B0 B1  . B2  . B3
     . F0 I0 F1 I1 W0 F2 I2 W1 F3 I3 W2 W3       . F0 B0 F1 I1 F2 I2 F3 I3 W1 W2 W3

The second stage begins its next iteration when the first one has gone back and forward once more, and by then greedy's
has nothing left to do. Nobody waits for the first microbatches' gradients while forwards are left to do, so their
backwards are whole: a part of its own costs something. An order keeps no more microbatches than a rule lets it, and
none is always better than a named one: several are made, by several rules, and `period` says what each comes to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

from weft.plan.kinds import Kind
from weft.plan.schedules.schedule import Pass, Schedule

Seconds = Callable[[Pass], float]  # what a pass takes; at least for those of a backward, whole and in parts

PATIENCE = (0.0, 0.5, 1.0)  # of the rules tried
WHOLES = 8  # numbers of whole backwards tried, at most
ITERATIONS = 6  # of which the last half are those of a steady state
FINALISTS = 12  # of the orders that are made; arbitrary
OFF = 1.05  # as a prediction is, half of the time
ALIKE = 1.01  # two periods no further apart than a prediction is wrong anyway; arbitrary


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderRule:
    limits: tuple[int, ...]  # by stage: microbatches in flight
    whole: int | None = None  # the first so many backwards; later ones, but in the first stage, are in two parts
    patience: float = 0.0  # of what a second part takes: a wait is worth so much of it


def greedy(num_stages: int, num_microbatches: int, seconds: Seconds, rule: OrderRule) -> Schedule:
    """A worker for each stage. rule.limits: at least 1 each."""
    return _List(num_stages, num_microbatches, seconds, rule).to_end()


def fastest(num_stages: int, num_microbatches: int, seconds: Seconds, *, splits: bool) -> Schedule:
    """Of what the rules make: what loses least where any one stage takes a little longer than was measured, too, since
    the shortest period may hang on which is the slowest; and of those that are alike what keeps the fewest
    microbatches."""
    rules = _rules(num_stages, num_microbatches, splits)
    made = dict.fromkeys(greedy(num_stages, num_microbatches, seconds, rule) for rule in rules)
    close = sorted(made, key=lambda schedule: period(schedule, seconds))[:FINALISTS]
    losses = dict.fromkeys(close, 0.0)
    for stage in range(-1, num_stages):
        periods = [period(schedule, _slower(stage, seconds)) for schedule in close]
        least = min(periods) or 1.0  # nothing, where no pass takes any time
        for schedule, own in zip(close, periods, strict=True):
            losses[schedule] += own / least / (num_stages + 1)
    alike = [schedule for schedule in close if losses[schedule] <= ALIKE * min(losses.values())]
    return min(alike, key=lambda schedule: (sum(map(schedule.in_flight, range(num_stages))), losses[schedule]))


def _slower(stage: int, seconds: Seconds) -> Seconds:
    """-1: none is."""
    return lambda each: seconds(each) * (OFF if each.stage == stage else 1.0)


def of_one_speed(num_stages: int, num_microbatches: int) -> Schedule:
    """Where all stages are alike, and a forward takes as long as each part of a backward."""
    return fastest(num_stages, num_microbatches, lambda each: 1 + (each.kind is Kind.BACKWARD), splits=True)


def _rules(num_stages: int, num_microbatches: int, splits: bool) -> Iterator[OrderRule]:
    """Limits: those of 1f1b and of last-stage, and twice as many as the most of 1f1b."""
    following = range(num_stages, 0, -1)
    wholes = range(0, num_microbatches, -(-num_microbatches // WHOLES)) if splits else [None]
    for limits in (list(following), [2 * n - 1 for n in following], [2 * num_stages] * num_stages):
        fitting = tuple(min(limit, num_microbatches) for limit in limits)
        for whole, patience in product(wholes, PATIENCE if splits else PATIENCE[:1]):
            yield OrderRule(limits=fitting, whole=whole, patience=patience)


def period(schedule: Schedule, seconds: Seconds) -> float:
    """What an iteration takes in the long run, if each worker goes on to the next one at once."""
    order = list(schedule.in_order())
    places = {each: place for place, (_, each) in enumerate(order)}
    steps = [(worker, [places[needed] for needed in schedule.needs(each)], seconds(each)) for worker, each in order]
    free, ends = [0.0] * len(schedule.programs), []
    for _ in range(ITERATIONS):
        ended: list[float] = []
        for worker, needs, takes in steps:
            free[worker] = max([free[worker], *(ended[needed] for needed in needs)]) + takes
            ended.append(free[worker])
        ends.append(max(free))
    warm = ITERATIONS // 2
    return (ends[-1] - ends[warm - 1]) / (ITERATIONS - warm)


class _List:
    def __init__(self, num_stages: int, num_microbatches: int, seconds: Seconds, rule: OrderRule) -> None:
        self._num_microbatches = num_microbatches
        self._seconds = seconds
        self._rule = rule
        self._ended: dict[Pass, float] = {}
        self._free = [0.0] * num_stages
        self._programs: list[list[Pass]] = [[] for _ in range(num_stages)]
        self._forwards = [0] * num_stages
        self._backs = [0] * num_stages  # whole ones, and first parts
        self._finished = [self._whole(stage) for stage in range(num_stages)]  # second parts, and those without

    def to_end(self) -> Schedule:
        stages = range(len(self._programs))
        following = {stage: self._next(stage) for stage in stages}
        while True:
            start, _, each = min(following.values())
            if math.isinf(start):
                return Schedule(tuple(map(tuple, self._programs)))
            self._free[each.stage] = self._ended[each] = start + self._seconds(each)
            self._programs[each.stage].append(each)
            self._count(each.kind)[each.stage] += 1
            for stage in {each.stage - 1, each.stage, each.stage + 1}.intersection(stages):
                following[stage] = self._next(stage)

    def _count(self, kind: Kind) -> list[int]:
        return {Kind.FORWARD: self._forwards, Kind.WEIGHT: self._finished}.get(kind, self._backs)

    def _whole(self, stage: int) -> int:
        """So many first microbatches' backwards."""
        return self._num_microbatches if stage == 0 or self._rule.whole is None else self._rule.whole

    def _back(self, stage: int, m: int) -> Pass:
        """What hands back."""
        return Pass(stage, Kind.BACKWARD if m < self._whole(stage) else Kind.INPUT, m)

    def _next(self, stage: int) -> tuple[float, int, Pass]:
        """(start, the number of stages before it, as a negative number, pass): of what is known by now."""
        free = self._free[stage]
        returns = self._back(stage, self._backs[stage])
        goes = Pass(stage, Kind.FORWARD, self._forwards[stage])
        arrivals = self._arrival(returns), self._arrival(goes)
        start = max(free, min(arrivals))
        late = Pass(stage, Kind.WEIGHT, self._finished[stage])
        waits = late.microbatch < self._backs[stage] and start > free
        if waits and free + self._rule.patience * self._seconds(late) <= start:
            return free, -stage, late
        return start, -stage, returns if arrivals[0] <= start else goes

    def _arrival(self, each: Pass) -> float:
        """When all that it needs has ended; infinity, where that is not known, or it may not be begun."""
        stage, kind, m = each
        if m == self._num_microbatches:
            return math.inf
        if kind is not Kind.FORWARD:
            own = self._ended.get(Pass(stage, Kind.FORWARD, m), math.inf)
            last = stage + 1 == len(self._programs)
            return own if last else max(own, self._ended.get(self._back(stage + 1, m), math.inf))
        if m - min(self._backs[stage], self._finished[stage]) >= self._rule.limits[stage]:
            return math.inf
        return self._ended.get(Pass(stage - 1, kind, m), math.inf) if stage else 0.0
