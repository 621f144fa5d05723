"""Kept plans: a job that comes again, of which the same was found out, has the plan that it had.

A plan follows from its spec, its inspection and the free memory, of which it goes by thresholds alone. So it is made
for a little less than is free, in steps, and one that got all that it asks for is the plan for any more.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgpack

from weft.machine.free_memory import FreeMemory
from weft.plan.inspection import Inspection
from weft.plan.plan import Plan
from weft.scheduler.planning.memory import why_not_snapshots
from weft.scheduler.planning.partition import PlanError
from weft.spec.job_spec import JobSpec

MAX_PLANS: Final = 16
MAX_TASKS: Final = 2000  # of one that is kept: a large one takes megabytes, and its job does not start in milliseconds
STEP_BITS: Final = 4  # free memory counts in steps of a sixteenth to an eighth of it


class KeptPlans:
    def __init__(self) -> None:
        self._plans: OrderedDict[bytes, Plan] = OrderedDict()  # the newest last

    def find(self, key: bytes) -> Plan | None:
        plan = self._plans.get(key)
        if plan is not None:
            self._plans.move_to_end(key)
        return plan

    def keep(self, key: bytes, plan: Plan) -> None:
        if len(plan.graph.tasks) <= MAX_TASKS:
            self._plans[key] = plan
            if len(self._plans) > MAX_PLANS:
                self._plans.popitem(last=False)


def key_of(spec: JobSpec, facts: Mapping[str, Any], free: FreeMemory) -> bytes:
    """facts: the wire form of the inspection."""
    least = least_of(free)
    parts = (spec.model_dump_json(), facts, least.shared, least.host)
    return hashlib.sha256(msgpack.packb(parts)).digest()


def plan_to_keep(make: Callable[..., Plan], spec: JobSpec, inspection: Inspection, free: FreeMemory) -> Plan | None:
    """make: make_plan. None where a job has less than it asks for, or takes what there is: that is of the moment."""
    if any(replica.working_window == "auto" for replica in spec.strategy.replica_list):
        return None
    least = least_of(free)
    try:
        plan = make(spec, inspection, shared_bytes_free=least.shared, host_bytes_free=least.host)
    except PlanError:
        return None
    wants_snapshots = why_not_snapshots(spec, inspection, 0, bytes_free=math.inf) is None
    return plan if plan.has_snapshots == wants_snapshots else None


def least_of(free: FreeMemory) -> FreeMemory:
    """What a plan that is kept is made for."""
    return FreeMemory(shared=_down(free.shared), host=_down(free.host))


def _down(num_bytes: int) -> int:
    shift = max(0, num_bytes.bit_length() - STEP_BITS)
    return num_bytes >> shift << shift
