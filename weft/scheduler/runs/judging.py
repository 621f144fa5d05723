"""Judging: what comes of an epoch that is over, by its validation and what the job's own function says. On a Run.

lanes stand at the gate ──▶ judge_epoch ──▶ EpochJudged                   where the job has no such function
                                       └──▶ the worker is asked ──▶ answered ──▶ EpochJudged
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from weft.scheduler.core.events import EpochJudged, JobFaulted, JudgeEpoch
from weft.scheduler.runs.progress import finite
from weft.scheduler.runs.run import Run
from weft.spec.stopping import ON_EPOCH, UnknownMetric, value_for_scheduler


def judge_epoch(run: Run, command: JudgeEpoch) -> EpochJudged | JobFaulted | None:
    """None where the job's own function is to be asked about it, by `Run.epoch`."""
    assert run.attempt is not None
    itinerary = run.attempt.plan.itinerary
    values = (run.attempt.progress.means or {}) if itinerary.num_validation else {}
    epoch, step = itinerary.at(command.iteration).epoch, itinerary.steps_done(command.iteration + 1)
    run.epoch = {"epoch": epoch, "step": step, "loss": run.training.now.mean_loss, "validation": values}
    if not run.attempt.plan.on_epoch:
        return _judged(run, command, stops=False, told={})
    run.asked = command
    return None


def answered(run: Run, *, stops: bool, told: Mapping[str, float | None], changes: bytes) -> EpochJudged | JobFaulted:
    """What comes of the epoch that the job's function was asked about. told: as EpochAnswer has it. changes: for all
    workers."""
    command, run.asked = run.asked, None
    assert command is not None
    _record(run, {name: value for name, value in told.items() if value is not None})
    return _judged(run, command, stops=stops, told=told, changes=changes)


def _record(run: Run, values: Mapping[str, float]) -> None:
    """Of an epoch that is made again, what it came to at first stays written."""
    assert run.attempt is not None
    run.attempt.progress.tell(values)
    epoch, step = run.epoch["epoch"], run.epoch["step"]
    if not values or epoch < run.recorded.epochs:
        return
    run.recorded = run.recorded.with_epoch(epoch)
    run.files.step(json.dumps(finite({"step": step, "epoch": epoch, "on_epoch": values})) + "\n")
    told = "  ".join(f"{name} {value:.6g}" for name, value in values.items())
    run.files.log(f"epoch {epoch + 1}: step {step}  {told}")


def _judged(
    run: Run, command: JudgeEpoch, *, stops: bool, told: Mapping[str, float | None], changes: bytes = b""
) -> EpochJudged | JobFaulted:
    assert run.attempt is not None
    plan, values = run.attempt.plan, {**run.epoch["validation"], **told}
    try:
        stop = run.training.validated(run.epoch["epoch"], values)
        measured = value_for_scheduler(plan.scheduler_metric, values)
    except UnknownMetric as error:
        return JobFaulted(
            job=command.job, attempt=command.attempt, reason="invalid-plan", message=str(error), exit_code=2
        )
    return EpochJudged(
        job=command.job,
        attempt=command.attempt,
        iteration=command.iteration,
        stop=stop or (ON_EPOCH if stops else None),
        is_best=plan.keeps_best and run.training.take_best(values),
        measured=measured,
        changes=changes,
    )
