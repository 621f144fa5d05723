"""Roles: what the host would bring beside a job's devices, and as what most. Pure; docs/roles.md tells it.

    alone        devices compute and update, the host loads and launches      what the others are compared with
    replica      the host computes a part of each batch
    updater      the host updates, all or what comes back in time
    loader       more processes load
    second job   another job like this one has the host meanwhile

Each is the fastest of a few strategies, planned and simulated as candidates are (`choice.py`). What it brings is a part
of an iteration of the devices alone: what the iteration gets shorter by, below 0 where it gets longer; of a second job,
how much of an iteration of its own it has done. Only what the inspection has measured is told: what the host takes for
a model that only GPUs compute nobody knows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from weft.plan.inspection import Inspection
from weft.plan.plan import Plan
from weft.quantities import duration
from weft.scheduler.planning.choosing.choice import AS_GOOD, Considered, MakePlan, best_of, simulated, trains_alike
from weft.scheduler.planning.choosing.titles import title_of
from weft.scheduler.planning.resized import resized
from weft.spec.candidates import beside_devices
from weft.spec.job_spec import JobSpec

REPLICA, UPDATER, LOADER, SECOND_JOB = "replica", "updater", "loader", "second job"
MAX_TASKS: Final = 512  # of a plan that waits for its roles before it runs: arbitrary, below a second
WORTH: Final = 1 - 1 / AS_GOOD  # of an iteration; less is beyond what the measured times are good for

_NOT_MEASURED: Final = "not measured for this strategy; `weft plan` measures it"
_CANNOT_BE: Final = "no strategy has it so on this daemon"
_NOT_ALIKE: Final = "what the model gives for a sample depends on the others of its microbatch, which would be others"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRole:
    """The host as one of the four."""

    role: str
    brings: float | None = None  # a part of an iteration of the devices alone; None as the next three: see `why_not`
    title: str | None = None  # of the fastest strategy that has it so
    strategy: Mapping[str, Any] | None = None  # its axes, as a spec gives them
    predicted_iteration_seconds: float | None = None  # of that strategy
    why_not: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    title: str  # of the devices alone
    predicted_iteration_seconds: float
    at_most: float | None  # what a replica could bring if nothing had to be exchanged; None where it was not measured
    roles: tuple[HostRole, ...]

    @property
    def best(self) -> str | None:
        """The one that makes this job faster by most; where none does, a second job. None: nothing is known."""
        known = {each.role: each.brings for each in self.roles if each.brings is not None}
        of_job = {role: brings for role, brings in known.items() if role != SECOND_JOB and brings > WORTH}
        if of_job:
            return max(of_job, key=lambda role: of_job[role])
        return SECOND_JOB if SECOND_JOB in known else None

    def line(self) -> str:
        """For the log."""
        known = [f"{_as(each.role)} {_percents(each.brings)}{self._bound(each)}" for each in self.roles if each.title]
        others = [each.role for each in self.roles if each.why_not == _NOT_MEASURED]
        worth = "" if self.best is None else f", worth most {_as(self.best)}"
        return (
            f"cpu: beside {self.title} ({duration(self.predicted_iteration_seconds)} an iteration){worth}: "
            + ", ".join(known)
            + (f"; `weft plan` measures the {' and the '.join(others)}" if others else "")
        )

    def _bound(self, role: HostRole) -> str:
        return f" (at most {_percents(self.at_most)})" if role.role == REPLICA and self.at_most is not None else ""

    def told(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self) | {"best": self.best}


def _as(role: str) -> str:
    return f"for a {role}" if role == SECOND_JOB else f"as {role}"


def _percents(part: float | None) -> str:
    return "" if part is None else f"{round(100 * part, 1) + 0.0:.1f} %"


def roles_of(spec: JobSpec, inspection: Inspection, make: MakePlan) -> Roles | None:
    """spec: with the strategy that was chosen. inspection: as it came, for many strategies or for this one. None of a
    job without devices, and where what these take alone was not measured or cannot be."""
    beside = beside_devices(spec, inspection.host, all_threads=inspection.threaded is not None)
    if beside is None:
        return None
    found = _tried((beside.alone,), spec, inspection, make)
    if not found or (alone := found[0]).seconds is None:
        return None

    def role(name: str, candidates: Sequence[JobSpec]) -> HostRole:
        if name != SECOND_JOB and not all(trains_alike(each, beside.alone, inspection) for each in candidates):
            return HostRole(role=name, why_not=_NOT_ALIKE)
        tried = _tried(candidates, spec, inspection, make)
        best = best_of([alone, *tried] if name == LOADER else tried)
        if best is None or best.seconds is None or alone.seconds is None:
            why_not = tried[0].why_not if tried else _NOT_MEASURED if candidates else _CANNOT_BE
            return HostRole(role=name, why_not=why_not)
        brings = alone.seconds / best.seconds if name == SECOND_JOB else 1 - best.seconds / alone.seconds
        return HostRole(
            role=name,
            brings=brings,
            title=best.title,
            strategy=best.spec.strategy.model_dump(exclude_defaults=True, exclude_none=True),
            predicted_iteration_seconds=best.seconds,
        )

    second_job = role(SECOND_JOB, beside.second_job)
    meanwhile = second_job.brings
    return Roles(
        title=alone.title,
        predicted_iteration_seconds=alone.seconds,
        at_most=None if meanwhile is None else meanwhile / (1 + meanwhile),
        roles=(
            role(REPLICA, beside.replica),
            role(UPDATER, beside.updater if spec.job.mode == "train" else ()),
            role(LOADER, beside.loader),
            second_job,
        ),
    )


def with_roles(plan: Plan, spec: JobSpec, inspection: Inspection, make: MakePlan) -> Plan:
    """Of a job that is about to run: what is known of the host's roles is a note of its plan. The others as above."""
    if len(plan.graph.tasks) > MAX_TASKS or (roles := roles_of(spec, inspection, make)) is None:
        return plan
    return replace(plan, notes=(*plan.notes, roles.line()))


def _tried(candidates: Sequence[JobSpec], spec: JobSpec, inspection: Inspection, make: MakePlan) -> list[Considered]:
    """Those that were measured. spec: of the job."""

    def planned(candidate: JobSpec, facts: Inspection, **options: Any) -> Plan:
        return make(candidate, facts if facts.timed_size else resized(facts, spec, candidate), **options)

    def untried(candidate: JobSpec) -> Considered:
        title = title_of(candidate.strategy, inspection.host)
        return Considered(spec=candidate, title=title, least_seconds=0.0)

    measured = [each for each in candidates if _is_measured(each, spec, inspection)]
    return [simulated(untried(each), inspection, planned) for each in measured]


def _is_measured(candidate: JobSpec, spec: JobSpec, inspection: Inspection) -> bool:
    """spec: of the job that was inspected."""
    strategy, own = candidate.strategy, spec.strategy
    kinds = {replica.device for replica in strategy.replica_list}
    both = bool(inspection.device_units)
    measured = {"cpu", "gpu"} if both else {"gpu"} & {replica.device for replica in own.replica_list} or {"cpu"}
    if not kinds <= measured:
        return False
    if spec.job.mode != "train":
        return True
    host_updates = both or own.update != "local" or any(own.staleness_list)
    device_updates = inspection.device_update_seconds is not None
    return (host_updates or strategy.update == "local") and (
        device_updates or strategy.update == "cpu" or "gpu" not in kinds
    )
