"""Recorded job: what `weft trace` and `weft plot` are asked about, by a job's id or by a recording's path."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.cli.exits import NO_SUCH_JOB, USAGE, leave
from weft.client.client import Client, RequestRefused
from weft.metrics.recording.recording import FILE, PROFILED_FILE, Recording, RecordingError
from weft.metrics.recording.step_log import FILE as STEP_LOG
from weft.metrics.recording.step_log import Step, StepLog, StepLogError, read_step_log
from weft.metrics.recording.window import Window, iterations_between, last_iterations
from weft.plan.itinerary import Itinerary
from weft.plan.worker_profile import ProfileError, WorkerProfile, profiles_in
from weft.transport.wire.frames import ErrorCode


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedJob:
    job: str
    directory: Path  # its run directory
    recording: Recording | None  # None where the daemon has none
    limit_seconds: float | None
    ended_at: float | None  # unix seconds; None while it runs
    client: Client | None  # of the daemon that knows it; None where it was given as a path

    @property
    def step_log_path(self) -> Path:
        return self.directory / STEP_LOG


def find_job(source: str) -> RecordedJob:
    """Leaves with a sentence where there is none, or its file is no recording."""
    path = file_of(source)
    if path is not None:
        recording = _load(path)
        return RecordedJob(
            job=recording.job,
            directory=path.parent,
            recording=recording,
            limit_seconds=recording.facts.get("limit_seconds"),
            ended_at=_modified_at(path),  # a recording is written at its job's end, and whenever one is asked for
            client=None,
        )
    client = Client()
    shown = client.show(source)
    return RecordedJob(
        job=shown["job"],
        directory=Path(shown["run_dir"]),
        recording=_recording_if_any(client, source),
        limit_seconds=shown["limit_seconds"],
        ended_at=shown["ended_at"],
        client=client,
    )


def find_recording(source: str) -> tuple[Recording, Path]:
    """The recording and its run directory. Leaves with a sentence where there is none."""
    path = file_of(source) or Client().record(source)
    return _load(path), path.parent


def profiles_of(recording: Recording, directory: Path) -> list[WorkerProfile]:
    """What torch.profiler saw of the recording's attempt. Leaves with a sentence where a file is no profile."""
    try:
        return profiles_in(directory, recording.job, recording.attempt)
    except (ProfileError, OSError) as error:
        leave(USAGE, str(error))


def with_profiled(recording: Recording, directory: Path, profiles: Sequence[WorkerProfile]) -> tuple[Recording, Window]:
    """The recording that has the profiled iterations, and these. Leaves with a sentence where none has."""
    if not profiles:
        leave(NO_SUCH_JOB, f"{recording.job} has no profile; ask for one with weft run --profile N, and see its log")
    first, last = min(each.first for each in profiles), max(each.last for each in profiles)
    kept = _load_if_there(directory / PROFILED_FILE)
    recordings = [recording, *([kept] if kept is not None else ())]
    windows = [
        (each, iterations_between(each, first, last)) for each in recordings if each.attempt == recording.attempt
    ]
    found = next(((each, window) for each, window in windows if window is not None), None)
    if found is None:
        leave(
            NO_SUCH_JOB,
            f"{recording.span_label(first, last)} of {recording.job} were profiled, and nothing of them is recorded",
        )
    return found


def window_of(recording: Recording, iterations: int | None) -> Window:
    """Leaves with a sentence where no iteration is complete."""
    window = last_iterations(recording, iterations)
    if window is None:
        why = "try again once it has run a few; with daemon.accounting = false there never is one"
        leave(NO_SUCH_JOB, f"{recording.job} has no complete iteration recorded; {why}")
    return window


def step_log(directory: Path) -> StepLog:
    """What has been written of it so far; an empty one where there is no file. Leaves where it is no step log."""
    try:
        return read_step_log(directory / STEP_LOG)
    except FileNotFoundError:
        return StepLog()
    except (StepLogError, OSError) as error:
        leave(USAGE, str(error))


def step_facts(recording: Recording, directory: Path) -> dict[int, Mapping[str, Any]]:
    """By iteration, what metrics.jsonl says of those that train."""
    steps = {step.step: step for step in step_log(directory).steps}
    found: dict[int, Mapping[str, Any]] = {}
    for iteration, number in step_numbers(recording).items():
        if number in steps:
            found[iteration] = _facts_of(steps[number])
    return found


def step_numbers(recording: Recording) -> dict[int, int]:
    """The number in metrics.jsonl of each recorded iteration that trains."""
    if "itinerary" not in recording.facts:
        return {}
    itinerary = Itinerary(**recording.facts["itinerary"])
    iterations = (itinerary.at(number) for number in recording.iteration_ends)
    return {iteration.index: iteration.step + 1 for iteration in iterations if iteration.training}


def until(recorded: RecordedJob) -> float:
    """Unix seconds up to which the job has run."""
    return time.time() if recorded.ended_at is None else recorded.ended_at


def file_of(source: str) -> Path | None:
    """None for what can only be a job's id."""
    if "/" not in source and not os.path.isfile(source):
        return None
    path = Path(os.path.realpath(source))  # a link that the user names is followed, one in a run directory is not
    return path / FILE if path.is_dir() else path


def _load(path: Path) -> Recording:
    recording = _load_if_there(path) if path.is_file() else None
    if recording is None:
        why = "is no file" if path.exists() else "is not there"
        leave(USAGE, f"{path} {why}; give a job's id, or the path of a recording.msgpack")
    return recording


def _load_if_there(path: Path) -> Recording | None:
    try:
        return Recording.load(path)
    except FileNotFoundError:
        return None
    except (RecordingError, OSError) as error:
        leave(USAGE, str(error))


def _modified_at(path: Path) -> float | None:
    """Unix seconds; None where it is gone meanwhile."""
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _recording_if_any(client: Client, job: str) -> Recording | None:
    try:
        return _load(client.record(job))
    except RequestRefused as refusal:
        if refusal.code != ErrorCode.NOTHING_RECORDED:
            raise
        return None


def _facts_of(step: Step) -> dict[str, Any]:
    known = {"loss": step.loss, "lr": step.lr, "grad_norm": step.grad_norm, "samples": step.samples}
    return {"step": step.step, "epoch": step.epoch, **{name: v for name, v in known.items() if v is not None}}
