"""Routes: which buckets devices update themselves, as measurements come in. A pure policy with a memory.

A measurement is noisy, and a bucket that turns takes its optimizer's state along; so a new division holds only where
two measurements in a row come to it:

    measured        {0}    {0 1}    {0}    {0 1}    {0 1}
    devices have    {0}    {0}      {0}    {0}      {0 1}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from weft.plan.buckets import Holder
from weft.plan.plan import Plan
from weft.scheduler.adapting.balance import measured_local
from weft.scheduler.adapting.route_pace import RouteMeasurement


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """local: the buckets that devices update. proposed: by the last measurement. seconds, born: the newest that is
    known of each task and bucket; what a way takes that no bucket goes any more is remembered."""

    local: frozenset[int]
    proposed: frozenset[int]
    seconds: Mapping[int, float] = field(default_factory=dict)
    born: Mapping[tuple[int, Holder], float] = field(default_factory=dict)

    @classmethod
    def starting(cls, plan: Plan) -> Routes:
        local = frozenset(plan.synchronisation.local if plan.synchronisation else ())
        return cls(local=local, proposed=local)


def adapt(plan: Plan, routes: Routes, measured: RouteMeasurement) -> Routes:
    """The next routes after a measurement."""
    seconds, born = {**routes.seconds, **measured.seconds}, {**routes.born, **measured.born}
    proposed = measured_local(plan, seconds, born)
    local = proposed if proposed == routes.proposed else routes.local
    return replace(routes, local=local, proposed=proposed, seconds=seconds, born=born)
