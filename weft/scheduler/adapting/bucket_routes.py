"""Bucket routes of a job's run: who updates which bucket from when on, and how long the ways take.

Kept beside the core, which decides: see weft.scheduler.adapting.routes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from weft.plan.buckets import Route
from weft.plan.plan import Plan
from weft.plan.rows import Row
from weft.scheduler.adapting.route_pace import RouteMeasurement, RoutePace


class BucketRoutes:
    """One attempt's. local: the buckets that devices update themselves, of the newest division. since: its first
    iteration."""

    def __init__(self, plan: Plan, worker_names: Sequence[str]) -> None:
        sync = plan.synchronisation
        self.local: frozenset[int] = frozenset(sync.local if sync else ())
        self.since = 0
        self._itinerary = plan.itinerary
        self._either = [bucket for bucket in sync.buckets if bucket.route is Route.EITHER] if sync else []
        self._workers = {(stage.replica, stage.stage): worker_names[stage.worker] for stage in plan.stages}
        self._devices = {r for r, replica in enumerate(plan.replicas) if replica.device == "gpu"}
        self._pace = RoutePace(plan) if self._either else None

    @property
    def measures(self) -> bool:
        """Whether it wants the rows of tasks that ran."""
        return self._pace is not None

    def set(self, first: int, local: Iterable[int]) -> str:
        """What the core has decided; the sentence that people read."""
        self.local, self.since = frozenset(local), first
        if self._pace is not None:
            self._pace.begin_at(first, self.local)
        return f"updates from {self._itinerary.label(first)} on: {self.described()}"

    def described(self) -> str | None:
        """Which buckets the host updates and which of them each device; None where that cannot change."""
        if not self._either:
            return None
        by: dict[str, list[int]] = {}
        for bucket in self._either:
            names = [self._workers[holder] for holder in bucket.holders if holder[0] in self._devices]
            who = " and ".join(names) if bucket.index in self.local else "the host"
            by.setdefault(who, []).append(bucket.index)
        return "; ".join(
            f"bucket{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))} by {who}" for who, numbers in by.items()
        )

    def add(self, rows: Iterable[Row]) -> None:
        """Rows of tasks that ran."""
        if self._pace is not None:
            for _, task, iteration, _, start, end in rows:
                if task >= 0:
                    self._pace.add(task, iteration, start, end)

    def take(self) -> RouteMeasurement | None:
        """What the core has to know of the time since the last call; None where nothing new is known."""
        return None if self._pace is None else self._pace.take()
