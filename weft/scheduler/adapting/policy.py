"""Policy: one way in which a running job is adjusted. Pure.

    daemon   rows ──add──▶ policy ──take──▶ measurement ──JobMeasured──▶ core
    core     a lane has come along ──come──▶ grants      measurement ──decide──▶ shares, routes, a verdict

Of what the daemon adds, decisions know measurements alone: what the core does follows from its events.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from weft.plan.graph import Lane
from weft.plan.itinerary import Iteration
from weft.plan.kinds import is_compute_lane
from weft.plan.plan import Plan
from weft.plan.rows import Row
from weft.plan.tables import Adjustment, Grant
from weft.scheduler.adapting.lane_state import LaneState

AHEAD_ITERATIONS = 4  # at least, sent ahead to each lane: what adapts is late by as many
AHEAD_SECONDS = 0.05  # of work, where iterations are short: a daemon without a core of its own answers late

Measurement = TypeVar("Measurement")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A replica does not pay: seconds of an iteration with it, as measured, and without it, as predicted."""

    replica: int
    with_seconds: float
    without_seconds: float

    def told(self, begin: str) -> str:
        """The sentence that people read. begin: of the first iteration of which the replica gets nothing."""
        return (
            f"replica {self.replica} does not pay: {1e3 * self.with_seconds:.1f} ms an iteration with it, "
            f"{1e3 * self.without_seconds:.1f} ms without; its share is 0 from {begin} on"
        )


class Decision(NamedTuple):
    first_iteration: int
    adjustment: Adjustment | None  # None where nothing changes for workers
    verdict: Verdict | None = None


class Policy(ABC, Generic[Measurement]):
    after_each_iteration = False  # the daemon asks for a measurement then, and not only once a second

    # --- the daemon's side

    @abstractmethod
    def add(self, rows: Iterable[Row]) -> None:
        """Rows of tasks that ran, in the order of their lane."""

    def finish(self, iteration: Iteration, samples: Sequence[int], seconds: float | None) -> None:
        """The iteration is over. samples: that each replica had of it. seconds: since the end of the one before."""

    @abstractmethod
    def take(self) -> Measurement | None:
        """Of the time since the last call that gave any; None before enough iterations are over."""

    # --- the core's side

    @abstractmethod
    def begin(self, lanes: Mapping[Lane, LaneState]) -> None:
        """The lanes of the plan, as they come along."""

    @abstractmethod
    def come(self, lane: LaneState) -> tuple[Sequence[Grant], Sequence[LaneState]]:
        """The lane begins, or has finished some more of its tasks: what is granted for that, and the other lanes that
        may be sent more now."""

    @abstractmethod
    def decide(self, measured: Measurement, first_unsent: int) -> Decision | None:
        """first_unsent: the first iteration of which no lane has been sent anything."""


class IterationPolicy(Policy[Measurement]):
    """Its changes hold from an iteration on of which nobody was sent anything. So that this is soon, lanes are sent few
    iterations ahead; and one that waits for nothing, of a way that no bucket goes, as few ahead of those that compute.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._ahead = AHEAD_ITERATIONS
        if plan.predicted_iteration_seconds:
            self._ahead = max(self._ahead, math.ceil(AHEAD_SECONDS / plan.predicted_iteration_seconds))

    def begin(self, lanes: Mapping[Lane, LaneState]) -> None:
        self._others = [lane for lane in lanes.values() if not is_compute_lane(lane.name)]
        self._done = max(lane.done for lane in lanes.values())  # iterations, of the lane that computes furthest ahead
        for lane in lanes.values():
            self._allow(lane, lane.done)

    def come(self, lane: LaneState) -> tuple[Sequence[Grant], Sequence[LaneState]]:
        if not is_compute_lane(lane.name):
            return (), ()
        done = lane.done
        self._allow(lane, done)
        if done <= self._done:
            return (), ()
        self._done = done
        for other in self._others:
            self._allow(other, done)
        return (), self._others

    def _allow(self, lane: LaneState, done: int) -> None:
        """Some iterations beyond those that are done."""
        lane.allowed = min(lane.total, (done + self._ahead) * len(lane.program))
