"""How an attempt of a job ends where its work did not: the outcome for each cause, and how many accidents are none.

A process that was killed from outside is no fault of the job: the job starts again. The bounds are for the causes that
look like it and come back with every attempt.
"""

from __future__ import annotations

import dataclasses
import signal

from weft.scheduler.core import losses
from weft.scheduler.core.events import (
    Command,
    JobFaulted,
    KillWorker,
    RecordState,
    WorkerGarbled,
    WorkerHung,
    WorkerLost,
)
from weft.scheduler.core.job import Job, Outcome, Phase
from weft.transport.wire.frames import LINK_GONE_EXIT

MAX_LOSSES = 2  # of workers to SIGKILL while a job comes no further; the third is no accident
MAX_DIRECTORY_LOSSES = 10  # in one job; arbitrary: it runs none of the job's code, and may die of what others do
SIGKILL_EXIT = -9
_OF_NATIVE_CODE = frozenset(  # what the kernel, or abort(), sends to who has done something wrong
    -getattr(signal, name) for name in ("SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSEGV", "SIGSYS", "SIGTRAP")
)
LINK_REMEDY = "the job's code must leave Weft's descriptors alone, and end what it forks by os._exit"
OUT_OF_MEMORY, CORRUPTED = "out-of-memory", "corrupted"
_OF_STRATEGIES = frozenset({OUT_OF_MEMORY, "shared-memory", "invalid-plan"})
_OF_DEVICES = frozenset({"user-error", "invalid-workload", "internal", "worker-lost"})  # code may be for the host alone
MEMORY_REMEDY = "give smaller microbatches, more stages, or recompute = true"
OF_SENT_SIGNAL = (
    "the job's code has sent it, or has set a timer that did; or another program has (kill, earlyoom), and then the "
    "job can go on from its checkpoint: `weft resume JOB`, or `weft run SPEC --resume DIR`"
)
HUNG_REMEDY = "stacks-*.txt in the run directory have where it was; what only takes long needs more job.hang_seconds"
EXIT_HUNG = 1
EXIT_SOFTWARE = 70  # sysexits.h: the fault is ours, not the job's

CANCELLED = Outcome("cancelled", "cancelled", "cancelled on request", 143)
DISCARDED = dataclasses.replace(CANCELLED, keeps=False)
PAUSED = Outcome("paused", "paused", "paused on request")
WITHOUT_DIRECTORY = Outcome("queued", "directory-lost", "the directory process was lost between two attempts")
SHUTDOWN = Outcome("recovering", "shutdown", "the daemon is shutting down")


def preempted_by(job: Job) -> Outcome:
    """Its workers are wanted by another."""
    return Outcome("queued", "preempted", f"preempted by {job.name}, whose priority is {job.priority}")


def of_completed(job: Job) -> Outcome:
    """Sooner than planned or not."""
    if job.stopped is None or job.plan is None:
        return Outcome("completed", exit_code=0, keeps=False)
    message = f"stopped early after step {job.plan.itinerary.steps_done(job.ends)}: {job.stopped}"
    return Outcome("completed", message=message, exit_code=0, keeps=False)


def of_lost_worker(event: WorkerLost, job: Job) -> Outcome:
    """SIGKILL comes from outside (an operator, another program): try again. From the kernel, for lack of memory, it
    would come again; anything else the job's code did. Where the job is given up, its error has all that it lost."""
    outcome = _of_one(event, job)
    return dataclasses.replace(outcome, message=f"{outcome.message}{losses.told(job)}") if outcome.is_end else outcome


def _of_one(event: WorkerLost, job: Job) -> Outcome:
    code = event.exit_code
    if event.shortage:
        message = f"{event.worker} {event.shortage} (attempt {job.attempt}); {MEMORY_REMEDY}"
        return Outcome("failed", OUT_OF_MEMORY, message, 128 + signal.SIGKILL)
    if code == SIGKILL_EXIT and job.hung is not None:
        return _of_hung_worker(event.worker, job)
    if code == SIGKILL_EXIT and len(job.losses) <= MAX_LOSSES:
        message = f"{event.worker} was killed; the job {_again(job)}"
        return Outcome("recovering", "worker-lost", message)
    if code is not None and code < 0:
        when = f"while it ran this job (attempt {job.attempt})"
        message = f"{event.worker} {losses.how(event)} {when}; {_remedy(code)}"
        return Outcome("failed", "worker-lost", message, 128 - code)
    if code == LINK_GONE_EXIT:
        return Outcome("failed", "worker-lost", f"{event.worker} found its link closed or replaced; {LINK_REMEDY}", 1)
    message = f"the job's code ended {event.worker} with exit code {code}; it must raise an exception instead"
    return Outcome("failed", "worker-lost", message, code or 1)


def of_fault(event: JobFaulted, job: Job) -> Outcome:
    """An exception comes again with every attempt. Memory that has changed may not, and the attempt's is new; what the
    job goes on from was whole."""
    if event.reason != CORRUPTED:
        return Outcome("failed", event.reason, event.message, event.exit_code)
    losses.note_corruption(event, job)
    if len(job.losses) <= MAX_LOSSES:
        return Outcome("recovering", CORRUPTED, f"{event.message}; the job {_again(job)}")
    return Outcome("failed", CORRUPTED, f"{event.message}{losses.told(job)}", event.exit_code)


def or_on_one_worker(outcome: Outcome, job: Job) -> Outcome:
    """Of a job whose strategy nobody has asked for: where that may be what failed, it is to end as it would without."""
    reasons = _OF_STRATEGIES | _OF_DEVICES if "gpu" in job.needs else _OF_STRATEGIES
    if not outcome.is_end or job.instead is None or outcome.reason not in reasons:
        return outcome
    told = f"no [strategy]: the choice has failed; the job goes on on one CPU worker (attempt {job.attempt + 1})"
    return Outcome("recovering", outcome.reason, f"{outcome.message}\n{told}", falls_back=True)


def kill_hung(worker: str, event: WorkerHung, job: Job | None) -> list[Command]:
    """Nothing where it has ended meanwhile. Its loss, which follows, is told as what it is."""
    if job is None or job.attempt != event.attempt or job.phase is Phase.RELEASING or worker not in job.workers:
        return []
    job.hung = event.message
    return [KillWorker(worker=worker, cause=f"{event.job} hangs: {event.message}")]


def _of_hung_worker(worker: str, job: Job) -> Outcome:
    if len(job.losses) <= MAX_LOSSES:
        return Outcome("recovering", "hung", f"{worker} is replaced, and the job {_again(job)}")
    return Outcome("failed", "hung", f"{job.hung}; {HUNG_REMEDY}", EXIT_HUNG)


def of_hung_lanes(event: WorkerHung, job: Job) -> Outcome:
    """Each waits for another. Another attempt has a board of its own; how many may end so is bounded as for losses."""
    losses.note_hang(event, job)
    if len(job.losses) <= MAX_LOSSES:
        return Outcome("recovering", "hung", f"all lanes let go, and the job {_again(job)}")
    return Outcome("failed", "hung", f"{event.message}; {HUNG_REMEDY}{losses.told(job)}", EXIT_HUNG)


def of_garbled_worker(event: WorkerGarbled) -> Outcome:
    """The link is the daemon's and the worker's alone, but the job's code runs in the worker's process."""
    message = f"{event.worker} sent what no worker sends ({event.message}); {LINK_REMEDY}"
    return Outcome("failed", "worker-lost", message, 1)


def _again(job: Job) -> str:
    attempt = f"(attempt {job.attempt + 1})"
    if job.snapshot is None or job.plan is None:
        return f"starts again {attempt}"
    return f"goes on after {job.plan.itinerary.label(job.snapshot.iteration)} {attempt}"


def _remedy(code: int) -> str:
    if code == SIGKILL_EXIT:
        return f"where memory ran out, {MEMORY_REMEDY}"
    if code in _OF_NATIVE_CODE:
        return "native code that the job calls does so; workers.log in the daemon's state directory may say more"
    return OF_SENT_SIGNAL


def of_lost_directory(message: str, job: Job) -> Outcome:
    """message: what was lost, as whoever missed it tells."""
    if job.directory_losses <= MAX_DIRECTORY_LOSSES:
        return Outcome("recovering", "directory-lost", f"{message}; the job {_again(job)}")
    remedy = "see workers.log in the daemon's state directory"
    message = f"{message}, for the {job.directory_losses}th time in this job; {remedy}"
    return Outcome("failed", "directory-lost", message, EXIT_SOFTWARE)


def record_of(outcome: Outcome, job: Job) -> RecordState:
    """What the ledger and the job's log are to have of it."""
    return RecordState(
        job=job.name,
        state=outcome.state,
        attempt=job.attempt,
        reason=outcome.reason,
        message=outcome.message,
        exit_code=outcome.exit_code,
    )
