"""What the core knows: a job's phase with the table of its moves, snapshots, lanes, outcome; workers. No behaviour."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from weft.plan.plan import Plan
from weft.plan.tables import Adjustment
from weft.scheduler.adapting.lane_state import LaneState
from weft.scheduler.adapting.policy import Policy
from weft.scheduler.adapting.stealing import Stolen
from weft.scheduler.core.replaying.replay import Replay
from weft.spec.job_state import TERMINAL_STATES


class Phase(enum.StrEnum):
    QUEUED = "queued"
    PLANNING = "planning"
    PREPARING = "preparing"
    RUNNING = "running"
    SAVING = "saving"
    RELEASING = "releasing"
    MENDING = "mending"
    PAUSED = "paused"
    ENDED = "ended"


MOVES = {
    Phase.QUEUED: {Phase.PLANNING, Phase.PREPARING, Phase.PAUSED, Phase.ENDED},
    Phase.PLANNING: {Phase.PREPARING, Phase.RELEASING},
    Phase.PREPARING: {Phase.RUNNING, Phase.RELEASING},
    Phase.RUNNING: {Phase.SAVING, Phase.RELEASING},
    Phase.SAVING: {Phase.RELEASING},
    Phase.RELEASING: {Phase.ENDED, Phase.QUEUED, Phase.PAUSED, Phase.MENDING},
    Phase.MENDING: {Phase.PREPARING, Phase.RELEASING},
    Phase.PAUSED: {Phase.QUEUED, Phase.ENDED},
    Phase.ENDED: set(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A copy of what the job had come to, in memory that outlives its workers."""

    iteration: int  # after which it was
    place: int = 0
    tasks: tuple[str, ...] = ()  # by which its parts are found, see `Plan.snapshot_tasks`
    goes_on: bool = False  # in lanes that have it whole once the next iteration is over
    to_disk: bool = False  # it was made to become a checkpoint
    best: bool = False  # behind it a validation says whether it is the best; when it is saved: it is
    path: str | None = None  # it is a checkpoint, and in no memory
    adjusted: tuple[tuple[int, Adjustment], ...] = ()  # of a checkpoint: as Job.adjustments, by then


@dataclass(frozen=True, slots=True)
class Outcome:
    state: str  # of the job's end; or "recovering", "queued" or "paused": there will be another attempt
    reason: str | None = None
    message: str | None = None
    exit_code: int | None = None
    keeps: bool = True  # of an end: the newest snapshot goes to the disk
    falls_back: bool = False  # of another attempt: it is one worker's, see Job.instead

    @property
    def is_end(self) -> bool:
        return self.state in TERMINAL_STATES

    @property
    def is_another_try(self) -> bool:
        """The job goes to the queue, as soon as it has let go."""
        return self.state in ("recovering", "queued")


@dataclass(slots=True)
class Job:
    name: str
    needs: Mapping[str, int]  # kind of worker -> how many it holds while it runs
    inspector: int  # the position, among those, of the one that inspects
    priority: int
    sequence: int
    attempt: int
    phase: Phase = Phase.QUEUED
    workers: tuple[str, ...] = ()  # that it holds, by position in the plan; in MENDING, and before, without the lost
    positions: tuple[str, ...] = ()  # those that it has been given, by position, the lost ones too
    arenas: int = 0  # the attempt that has begun its blocks in the directory, with which later ones may go on
    keeps: frozenset[str] = frozenset()  # in RELEASING: workers that stop, and stay the job's for the next attempt
    is_mended: bool = False  # from MENDING on, until it has all workers again: its attempt has not begun
    waiting_for: set[str] = field(default_factory=set)  # workers that have yet to answer in this phase
    plan: Plan | None = None
    # By kind, the workers that it needs where a strategy fails that it does not give itself; None where none is other
    instead: Mapping[str, int] | None = None
    improved: Plan | None = None  # another one, from the moment when it is to stop for that until it goes on with it
    lanes: dict[tuple[str, str], LaneState] = field(default_factory=dict)
    num_behind: int = 0  # lanes that have not finished the first iteration that is not done
    policies: tuple[Policy[Any], ...] = ()  # what adjusts it as it runs, once it is planned
    adjustments: tuple[tuple[int, Adjustment], ...] = ()  # of shares and ways, with the iteration from which they hold
    stolen: Stolen = field(default_factory=Stolen)  # by attempts before
    replays: int = 0  # the first iteration that no attempt before has made, where this one goes on
    iterations_done: int = 0
    ends: int = 0  # the iterations after which it ends: all, unless it is to end sooner
    gate: int | None = None  # lanes are sent nothing of this iteration before the epoch that ends there is judged
    stopped: str | None = None  # why it ends sooner, once that is known
    outcome: Outcome | None = None
    stopping: Outcome | None = None  # what it stops for, at the end of an iteration
    deadline: float | None = None  # by when its workers have to let go
    patience: float = 0.0  # seconds, the shortest that they were given for it
    snapshot: Snapshot | None = None  # the newest that is whole: what another attempt goes on from
    copying: list[Snapshot] = field(default_factory=list)  # those that lanes have been told of, until they are whole
    best: Snapshot | None = None  # the best so far, while it waits for its turn to be written to the disk
    saving: list[Snapshot] = field(default_factory=list)  # that are being written to the disk, one after another
    on_disk: int = -1  # the iteration of the newest that is there
    saves_again: float | None = None  # when, of one that is paused and whose snapshot could not be saved
    copies: bool = False  # memory for snapshots may have been made
    losses: list[str] = field(default_factory=list)  # of workers, since it came further than ever; a report of each
    replay: Replay | None = None  # of an iteration, from its first run on until it stands
    furthest: int = 0  # iterations that it had done when it last lost one
    hung: str | None = None  # what hangs in this attempt, in words, once its worker is to be killed for it
    directory_losses: int = 0  # the same of the directory
    story: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Worker:
    name: str
    kind: str
    up: bool = False
    job: str | None = None
    failures: int = 0  # starts in a row that ended before a job was done with it; they lengthen the next delay
