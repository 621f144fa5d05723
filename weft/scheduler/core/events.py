"""Events (what happened, past tense) and commands (what to do, imperative) of the scheduler core. Frozen values.

Every event that concerns an attempt of a job carries the attempt's number; the core drops what belongs to an old one.
A command that takes time is answered by exactly one completion event, named beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weft.plan.plan import Plan
from weft.plan.tables import Adjustment
from weft.scheduler.adapting.policy import Verdict
from weft.scheduler.adapting.replica_pace import ReplicaMeasurement
from weft.scheduler.adapting.routes import RouteMeasurement
from weft.scheduler.core.copying.told import CheckpointDue as CheckpointDue
from weft.scheduler.core.copying.told import RecordSnapshot as RecordSnapshot
from weft.scheduler.core.copying.told import SaveSnapshot as SaveSnapshot
from weft.scheduler.core.copying.told import SnapshotDue as SnapshotDue
from weft.scheduler.core.copying.told import SnapshotGoesOn as SnapshotGoesOn
from weft.scheduler.core.copying.told import SnapshotMissed as SnapshotMissed
from weft.scheduler.core.copying.told import SnapshotSaved as SnapshotSaved
from weft.scheduler.core.handover import DirectoryLost as DirectoryLost
from weft.scheduler.core.handover import DirectoryMissed as DirectoryMissed
from weft.scheduler.core.handover import HandMemoryOn as HandMemoryOn
from weft.scheduler.core.handover import HandoverBegun as HandoverBegun
from weft.scheduler.core.job import Snapshot as Snapshot
from weft.scheduler.core.replanning.improved import PlanImproved as PlanImproved
from weft.scheduler.core.replaying.told import RecordReplay as RecordReplay
from weft.scheduler.core.replaying.told import ReplayDue as ReplayDue
from weft.scheduler.core.replaying.told import TaskDigested as TaskDigested

# --- events


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSubmitted:
    job: str
    needs: Mapping[str, int]  # kind of worker -> how many it holds while it runs; no more than the core has
    inspector: int = 0  # the position, among those that it holds, of the one that inspects it
    priority: int = 0
    attempt: int = 1  # above 1 where a daemon took the job over from the ledger
    paused: bool = False  # it waits until somebody resumes it
    instead: Mapping[str, int] | None = None  # as Job.instead


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerJoined:
    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLost:
    worker: str
    exit_code: int | None  # as of `os.waitstatus_to_exitcode`: negative for a signal; None if it never came up
    shortage: str = ""  # what is known where the kernel has killed it for lack of memory; else empty
    printed: str = ""  # the last lines of the job's code there


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerHung:
    worker: str | None  # for which nothing of the attempt comes to an end any more; None where lanes wait in a circle
    job: str
    attempt: int
    message: str  # what it is in, and for how long


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerGarbled:
    """What came over the worker's link no worker sends; nothing more is heard of it but its end."""

    worker: str
    message: str  # what came


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlanned:
    job: str
    attempt: int
    plan: Plan
    checkpoint: Snapshot | None = None  # what it goes on from, unless there is something newer
    instead: Mapping[str, int] | None = None  # as Job.instead


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPrepared:
    job: str
    attempt: int
    worker: str


@dataclass(frozen=True, slots=True)
class TasksFinished:
    """The next `count` dispatched tasks of the lane have run, in order."""

    job: str
    attempt: int
    worker: str
    lane: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobMeasured:
    """How fast the job has been of late: over an interval, or, where its replicas steal, in one iteration."""

    job: str
    attempt: int
    policy: int  # the place in the job's list of the one that measured it
    measured: ReplicaMeasurement | RouteMeasurement


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFaulted:
    """The user's code, the plan or something of ours failed in an attempt, as the reason says."""

    job: str
    attempt: int
    reason: str
    message: str
    exit_code: int  # that followers exit with


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultSaved:
    job: str
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReleased:
    """The worker has let go of the attempt."""

    worker: str
    job: str
    attempt: int
    clean: bool  # False where it must be replaced


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochJudged:
    job: str
    attempt: int
    iteration: int  # the last of the epoch, its validation included
    stop: str | None = None  # why training ends with it
    is_best: bool = False  # no validation before was better
    measured: float | None = None  # with which schedulers that take a measured value are stepped now
    changes: bytes = b""  # see Adjustment


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested:
    """Asked for until the attempt ends: a job may go on that was about to stop for something else."""

    job: str
    attempt: int
    reason: str  # why training is to end soon, as if an iteration had been the last


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelRequested:
    job: str
    discard: bool = False  # what it had come to is not wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseRequested:
    job: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeRequested:
    job: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRequested:
    now: bool  # what runs is stopped, too; such jobs stay unfinished in the ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticked:
    """Time has passed; deadlines are looked at."""


Rare = (  # after which a job may be able to start
    JobSubmitted
    | WorkerJoined
    | WorkerLost
    | WorkerGarbled
    | WorkerHung
    | JobPlanned
    | WorkerPrepared
    | JobFaulted
    | ResultSaved
    | WorkerReleased
    | DirectoryLost
    | DirectoryMissed
    | SnapshotGoesOn
    | SnapshotMissed
    | SnapshotSaved
    | PauseRequested
    | ResumeRequested
    | CancelRequested
    | DrainRequested
    | HandoverBegun
    | Ticked
)
Asked = (
    JobMeasured | SnapshotDue | CheckpointDue | StopRequested | EpochJudged | ReplayDue | TaskDigested | PlanImproved
)
Event = Rare | TasksFinished | Asked

# --- commands


@dataclass(frozen=True, slots=True, kw_only=True)
class StartWorker:
    """Answered by WorkerJoined or WorkerLost."""

    worker: str
    delay_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KillWorker:
    """Answered by WorkerLost."""

    worker: str
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SetTimer:
    """Answered by Ticked, no later than the seconds say."""

    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanJob:
    """Inspect the workload on the worker and plan it. Answered by JobPlanned or JobFaulted."""

    job: str
    attempt: int
    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepare:
    """Build the worker's part of the plan, or go on with what it kept. Answered by WorkerPrepared or JobFaulted."""

    job: str
    attempt: int
    arenas: int  # the attempt that has begun its blocks
    worker: str
    position: int
    plan: Plan
    snapshot: Snapshot | None = None  # what it goes on from


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Append tasks to a lane's queue."""

    job: str
    attempt: int
    worker: str
    lane: str
    work: tuple[tuple[int, tuple[int, ...]], ...]  # a run of (iteration, tasks of that iteration)


@dataclass(frozen=True, slots=True)
class Adjust:
    """Tell the workers, before they are sent what needs it; see `Course.adjust`."""

    job: str
    attempt: int
    workers: tuple[str, ...]
    first_iteration: int
    adjustment: Adjustment


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordVerdict:
    """A replica does not pay: its share is 0 from the iteration on."""

    job: str
    attempt: int
    verdict: Verdict
    first_iteration: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeEpoch:
    """Every lane has finished it. Answered by EpochJudged or JobFaulted."""

    job: str
    attempt: int
    iteration: int  # its last
    worker: str  # that may be asked about it


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveResult:
    """Write the trained weights from the worker. Answered by ResultSaved or JobFaulted."""

    job: str
    attempt: int
    arenas: int  # the attempt that has begun its blocks
    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Stop the attempt on the worker, whatever it is doing. Answered by WorkerReleased."""

    worker: str
    job: str
    attempt: int
    keeps: bool = False  # what it can use in the next attempt of the job, which comes soon


@dataclass(frozen=True, slots=True, kw_only=True)
class DropArenas:
    job: str
    attempt: int | None  # None: of no attempt, the job's snapshots


@dataclass(frozen=True, slots=True, kw_only=True)
class FallBack:
    """The job's strategy, which nobody has asked for, has failed: it is planned for one worker from now on."""

    job: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordState:
    """The job is in a new state."""

    job: str
    state: str
    attempt: int
    reason: str | None = None  # of a terminal state that is no success, and of recovering
    message: str | None = None
    exit_code: int | None = None


@dataclass(frozen=True, slots=True)
class RecordIteration:
    """Every lane has finished the iteration."""

    job: str
    attempt: int
    iteration: int


Command = (
    StartWorker
    | KillWorker
    | SetTimer
    | PlanJob
    | Prepare
    | Dispatch
    | Adjust
    | RecordVerdict
    | JudgeEpoch
    | SaveResult
    | Release
    | HandMemoryOn
    | DropArenas
    | FallBack
    | RecordState
    | RecordSnapshot
    | RecordReplay
    | SaveSnapshot
    | RecordIteration
)
