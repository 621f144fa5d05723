"""Improved: what the core is told of another plan for a job that runs. A value."""

from __future__ import annotations

from dataclasses import dataclass

from weft.plan.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanImproved:
    """By what its tasks have taken, the job would be faster with another plan for the same workers, and not a bit of
    its result would differ."""

    job: str
    attempt: int
    plan: Plan
    message: str  # what is different, and what that is expected to bring
