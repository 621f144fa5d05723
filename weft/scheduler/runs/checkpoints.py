"""A job's checkpoints: what it goes on from."""

from __future__ import annotations

import contextlib
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.machine.checkpoint_files import (
    Checkpoint,
    CheckpointError,
    check_digests,
    checkpoints,
    newest_whole,
    read_manifest,
    resolved,
    set_refused_aside,
)
from weft.metrics.recording.step_log import FILE as METRICS
from weft.metrics.recording.step_log import Logged, StepLogError, logged_in, loss_after
from weft.plan.plan import Plan
from weft.plan.tables import Adjustment
from weft.scheduler.core.events import Snapshot
from weft.scheduler.planning.partition import PlanError
from weft.scheduler.runs.run import PlannedAttempt, Run
from weft.spec.job_spec import JobSpec
from weft.spec.stopping import Standing


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    checkpoint: Snapshot | None  # the job's own newest, or the one that its spec names
    standing: Standing = field(default_factory=Standing)  # of training, with it
    recorded: Logged = field(default_factory=Logged)  # in the step log
    refused: list[str]  # why newer ones are not used


def come_to(run_dir: Path) -> tuple[int, float | None] | None:
    """What a job has by its newest checkpoint, with which the next attempt begins: training steps that are done, and
    the loss of the last, None where that is not known. None where there is no checkpoint. Digests are not looked at."""
    for path in reversed(checkpoints(run_dir)):
        with contextlib.suppress(CheckpointError):
            step = read_manifest(path).step
            return step, loss_after(run_dir / METRICS, step)
    return None


def find_checkpoint(run: Run, plan: Plan) -> Found:
    """Reads all of its bytes. Errors: PlanError, where the one that the spec names cannot be used."""
    newest, refused = newest_whole(run.files.path)
    told = [str(error) for error in refused]
    try:
        set_refused_aside(run.files.path, newest)
    except OSError as error:
        told.append(f"it stays where it is: {error}")
    is_own = newest is not None
    if newest is None:
        newest = _named(run)
        if newest is not None:
            _check_is_of(newest, run, plan)
    if newest is None:
        return Found(checkpoint=None, refused=told)
    iteration = plan.itinerary.update_of(newest.step)
    adjusted = _adjusted_by(newest, iteration, plan, told) if is_own else ()  # another job may be another strategy's
    checkpoint = Snapshot(iteration=iteration, path=str(newest.path), adjusted=adjusted)
    try:
        recorded = logged_in(run.files.path / METRICS, plan.itinerary)
    except (OSError, StepLogError) as error:
        told.append(f"{error}; the log of steps goes on behind it")
        recorded = Logged()
    return Found(checkpoint=checkpoint, standing=_standing_of(newest, told), recorded=recorded, refused=told)


def _standing_of(checkpoint: Checkpoint, told: list[str]) -> Standing:
    try:
        return Standing.from_wire(checkpoint.standing)
    except ValueError as error:
        told.append(f"{checkpoint.path}: {error}; [stop] begins anew")
        return Standing()


def adjusted_behind(attempt: PlannedAttempt, iteration: int) -> dict[str, Any]:
    """The shares, and the buckets that devices update themselves, in the iterations behind one: of a job in which they
    change. Plain data."""
    plan, course, adjusted = attempt.plan, attempt.course, dict[str, Any]()
    if plan.share == "adaptive":
        adjusted["shares"] = list(course.shares.of(iteration + 1))
    if plan.has_ways:
        adjusted["local"] = sorted(course.local.of(iteration + 1))
    return adjusted


def _adjusted_by(
    checkpoint: Checkpoint, iteration: int, plan: Plan, told: list[str]
) -> tuple[tuple[int, Adjustment], ...]:
    """In place of what is no shares and no buckets, or nothing that the plan adjusts: nothing."""
    found, shares, local = [], checkpoint.adjusted.get("shares", []), checkpoint.adjusted.get("local", [])
    if not _are((int, float), shares) or not _are((int,), local) or (shares and not sum(shares) > 0):
        told.append(f"{checkpoint.path}: it does not say how the job was adjusted; it adapts anew")
        return ()
    if shares and plan.share == "adaptive":
        found.append(Adjustment(shares=tuple(shares)))
    if "local" in checkpoint.adjusted and plan.has_ways:
        found.append(Adjustment(local=tuple(local)))
    return tuple((iteration, adjustment) for adjustment in found)


def _are(kinds: tuple[type, ...], values: object) -> bool:
    """A list of such numbers, finite, none below 0."""
    return isinstance(values, list) and all(type(each) in kinds and 0 <= each < math.inf for each in values)


def _named(run: Run) -> Checkpoint | None:
    given = run.spec.job.resume_from
    if given is None:
        return None
    try:
        checkpoint = read_manifest(resolved(Path(run.spec.directory, given).resolve()))
        check_digests(checkpoint)
    except CheckpointError as error:
        raise PlanError(f"job.resume_from: {error}") from error
    return checkpoint


def _check_is_of(checkpoint: Checkpoint, run: Run, plan: Plan) -> None:
    """Its steps are those of this job."""
    for name, value in training_of(run.spec, plan).items():
        if checkpoint.training.get(name) != value:
            raise PlanError(
                f"job.resume_from: {checkpoint.path} was trained with {name} = {checkpoint.training.get(name)!r:.80}, "
                f"and this job has {value!r}; use the same, or begin with its weights (Workload.start)"
            )
    itinerary = plan.itinerary
    if checkpoint.step > itinerary.steps or itinerary.update_of(checkpoint.step) + 1 == itinerary.num_iterations:
        raise PlanError(
            f"job.resume_from: {checkpoint.path} has {checkpoint.step} steps, and this job has {itinerary.steps} "
            "in all; give more steps or epochs"
        )


def compiled_before(spec: JobSpec, run_dir: Path) -> bool | None:
    """Whether units were compiled in what the job goes on from: its own newest checkpoint, or the one that its spec
    names. None: from nothing, or it does not say; what is wrong with it is told when it is read."""
    given = spec.job.resume_from
    named = [] if given is None else [Path(os.path.realpath(Path(spec.directory, given)))]
    for path in (run_dir, *named):
        with contextlib.suppress(CheckpointError):
            compiled = read_manifest((checkpoints(path) or [path])[-1]).training.get("compile")
            return compiled if isinstance(compiled, bool) else None
    return None


def training_of(spec: JobSpec, plan: Plan) -> dict[str, Any]:
    """What decides which samples a step has. A stream without a length has as many as there are to be steps; where
    batches reach over the ends of passes, how many steps make an epoch decides nothing."""
    num_train: object = plan.itinerary.num_train
    if plan.endless:
        num_train = "as many as its steps need"
    elif plan.itinerary.per_pass:
        num_train = f"{plan.itinerary.per_pass}, pass after pass"
    return {"batch_size": spec.job.batch_size, "seed": spec.job.seed, "num_train": num_train}
