"""What is told of snapshots, to the core and by it. Values."""

from __future__ import annotations

from dataclasses import dataclass

from weft.scheduler.core.job import Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotDue:
    """Enough time has passed since the last one for another one to cost little."""

    job: str
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointDue:
    """As much time has passed since the last one as the job's spec says."""

    job: str
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotGoesOn:
    """A worker of the attempt copies its part of a snapshot beside the next iteration, and has it, or has missed it,
    before it has finished that one. It says so before it has finished the snapshot's."""

    job: str
    attempt: int
    iteration: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotMissed:
    """A worker of the attempt found no memory for its part of a snapshot, or it is not to be used. It says so before
    it has finished the iteration, or that by which it would have been whole."""

    job: str
    attempt: int
    iteration: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotSaved:
    job: str
    path: str | None  # None: it is not on the disk


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordSnapshot:
    """Every lane has copied its part of it."""

    job: str
    attempt: int
    snapshot: Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveSnapshot:
    """Write it to the disk, beside whatever the job does. Answered by SnapshotSaved."""

    job: str
    snapshot: Snapshot
