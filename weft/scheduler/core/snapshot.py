"""Snapshot: what a job goes on from. A value."""

from __future__ import annotations

from dataclasses import dataclass

from weft.plan.tables import Adjustment


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A copy of what the job had come to, in memory that outlives its workers."""

    iteration: int  # after which it was
    place: int = 0
    tasks: tuple[str, ...] = ()  # by which its parts are found, see `Plan.snapshot_tasks`
    to_disk: bool = False  # it was made to become a checkpoint
    best: bool = False  # behind it a validation says whether it is the best; when it is saved: it is
    path: str | None = None  # it is a checkpoint, and in no memory
    adjusted: tuple[tuple[int, Adjustment], ...] = ()  # of a checkpoint: as Job.adjustments, by then
