"""What the core knows: a job's phase with the table of its moves, its lanes, its outcome; and workers. No behaviour."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from weft.plan.plan import Plan
from weft.scheduler.adapting.lane_state import LaneState
from weft.scheduler.adapting.policy import Policy


class Phase(enum.StrEnum):
    QUEUED = "queued"
    PLANNING = "planning"
    PREPARING = "preparing"
    RUNNING = "running"
    SAVING = "saving"
    RELEASING = "releasing"
    ENDED = "ended"


MOVES = {
    Phase.QUEUED: {Phase.PLANNING, Phase.ENDED},
    Phase.PLANNING: {Phase.PREPARING, Phase.RELEASING},
    Phase.PREPARING: {Phase.RUNNING, Phase.RELEASING},
    Phase.RUNNING: {Phase.SAVING, Phase.RELEASING},
    Phase.SAVING: {Phase.RELEASING},
    Phase.RELEASING: {Phase.ENDED, Phase.QUEUED},
    Phase.ENDED: set(),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    state: str  # "": not an end, try again
    reason: str | None = None
    message: str | None = None
    exit_code: int | None = None


@dataclass(slots=True)
class Job:
    name: str
    needs: Mapping[str, int]  # kind of worker -> how many it holds while it runs
    inspector: int  # the position, among those, of the one that inspects
    priority: int
    sequence: int
    attempt: int
    phase: Phase = Phase.QUEUED
    workers: tuple[str, ...] = ()  # that it holds, by position in the plan
    waiting_for: set[str] = field(default_factory=set)  # workers that have yet to answer in this phase
    plan: Plan | None = None
    lanes: dict[tuple[str, str], LaneState] = field(default_factory=dict)
    policies: tuple[Policy[Any], ...] = ()  # what adjusts it as it runs, once it is planned
    iterations_done: int = 0
    outcome: Outcome | None = None
    deadline: float | None = None
    losses: int = 0  # of workers, in all its attempts
    directory_losses: int = 0  # the same of the directory
    story: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Worker:
    name: str
    kind: str
    up: bool = False
    job: str | None = None
    failures: int = 0  # starts in a row that ended before a job was done with it; they lengthen the next delay
