"""What-if notes: what a prediction rests on and what it cannot know, in sentences. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final

from weft.metrics.recording.recording import Recording
from weft.plan.inspection import Inspection
from weft.plan.kinds import KINDS
from weft.plan.placement import COMPUTE, SYNC
from weft.scheduler.planning.costs import PlannedJob
from weft.scheduler.planning.plan_notes import doubt_of_batch
from weft.scheduler.whatif.changes import Changes
from weft.spec.workers_needed import workers_needed

FEW_ITERATIONS: Final = 8
UNMODELLED: Final = {
    "precision": "what it changes in a forward or backward was not measured: tasks take what they took",
    "compile": "what it changes in a forward or backward was not measured: tasks take what they took",
    "window": "reports and dispatches take what they took",
    "staleness_warmup": "the simulation is of the time after it",
    "skip_nonfinite": "no update is skipped in the simulation",
}


def notes_of(
    recording: Recording,
    inspection: Inspection,
    job: PlannedJob,
    changed: PlannedJob,
    changes: Changes,
    machine: Mapping[str, int] | None,
) -> tuple[str, ...]:
    notes: list[str] = []
    if len(recording.training) < FEW_ITERATIONS:
        notes.append(f"only {len(recording.training)} training iterations are recorded; medians of so few are rough")
    notes += _of_cores(changed)
    if changes.replans:
        notes += _of_workers(inspection, job, changed, machine)
        notes += _of_devices(job, changed)
        notes += _of_sizes(inspection, job, changed)
        notes += _of_axes(job, changed)
    if changed.plan.share == "adaptive":
        notes.append("shares adapt as the job runs; the simulation has those at the start, and the recorded task times")
    if changed.plan.share == "stealing":
        notes.append("who takes which microbatch is as in the simulation; in a real run chance decides ties")
    if changed.plan.graph.free:
        notes.append("which pass a stage begins is as in the simulation; in a real run it is what comes first")
    return tuple(notes)


def _of_cores(changed: PlannedJob) -> Iterator[str]:
    lanes: dict[int, set[str]] = {}
    for lane, program in changed.plan.graph.programs.items():
        if not all(KINDS[changed.plan.graph.tasks[task].kind].is_milestone for task in program):
            lanes.setdefault(lane.worker, set()).add(lane.name)
    if any({COMPUTE, SYNC} <= names for names in lanes.values()):
        yield (
            "sync lanes share their worker's core with its compute lane; simulated they run side by side, so what is "
            "hidden there may in truth lengthen the computation"
        )


def _of_workers(
    inspection: Inspection, job: PlannedJob, changed: PlannedJob, machine: Mapping[str, int] | None
) -> Iterator[str]:
    processors = inspection.host.processors
    own = "a core of its own" if processors is None else f"its part of {processors:g} processors"
    needed, before = workers_needed(changed.spec.strategy), Counter(job.plan.workers)
    for kind, count in needed.items():
        have = before[kind] if machine is None else machine.get(kind, 0)
        if count > have:
            whose = "the recorded job had" if machine is None else "the daemon has"
            yield (
                f"the changed job needs {count} {kind} workers and {whose} {have}; each is taken to have {own} and "
                "to be as fast as those recorded"
            )
    if sum(needed.values()) > len(job.plan.workers):
        yield "memory and caches that more workers share are not simulated: tasks take what they took with fewer"


def _of_devices(job: PlannedJob, changed: PlannedJob) -> Iterator[str]:
    known = {replica.device for replica in job.plan.replicas}
    for kind in sorted({replica.device for replica in changed.plan.replicas} - known):
        yield (
            f"nothing of the recorded job computed on a {kind} worker; one is taken to be as fast as a "
            f"{' or '.join(sorted(known))} worker"
        )


def _of_sizes(inspection: Inspection, job: PlannedJob, changed: PlannedJob) -> Iterator[str]:
    doubt = doubt_of_batch(changed.plan.itinerary)
    if doubt is not None and doubt != doubt_of_batch(job.plan.itinerary):
        yield doubt.removeprefix("warning: ")
    before, after = job.largest, changed.largest
    if before == after:
        return
    if not inspection.small_size:
        yield (
            "units were timed with one size of microbatch only, so their time is taken to grow with the samples; what "
            "each call costs, whatever its size, is missed"
        )
    if after > 2 * before:
        yield "much larger microbatches may fall out of the caches; their time is taken to grow evenly"


def _of_axes(job: PlannedJob, changed: PlannedJob) -> Iterator[str]:
    for axis, text in UNMODELLED.items():
        if getattr(job.spec.strategy, axis) != getattr(changed.spec.strategy, axis):
            yield f"strategy.{axis}: {text}"
