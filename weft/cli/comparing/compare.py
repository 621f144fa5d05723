"""Compare: one job under several presets, one after another, and a row of numbers for each.

Every trial has an embedded daemon of its own with as many workers as the trial needs: they have cores of their own
wherever `weft run` would give them theirs, and nothing that one trial leaves behind counts in the next one's numbers.
"""

from __future__ import annotations

import itertools
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from weft.cli.comparing.trial import Trial
from weft.client.client import DaemonUnreachable, RequestRefused
from weft.client.embedded import Daemon
from weft.client.foreground import run_in_foreground
from weft.machine.crew import CrewError, muster
from weft.machine.run_file import claim, unclaim
from weft.metrics.accounts.overlap import KINDS
from weft.spec.job_id import stem_of
from weft.spec.job_spec import SpecError
from weft.spec.settings import Settings, load_settings
from weft.spec.workers_needed import workers_needed
from weft.transport.wire.frames import ErrorCode, Message

VERSION = 1  # of the JSON; a key that is renamed, goes away or changes its meaning makes it another
CAUSES = ("data", "activation", "gradient", "sync", "update", "slot", "dispatch")
LOSS_TOLERANCE = 1e-4  # relative; arbitrary, far above what sums in another order make of a loss


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonOptions:
    """What the embedded daemons get."""

    workers: int | None = None  # None: as many as a trial needs
    threads: int | None = None  # None: as for `Daemon`
    stand_ins: int | None = None  # the same
    gpus: int = 0  # that can be used
    runs_dir: Path = Path("runs")

    @classmethod
    def of(cls, *, workers: int | None, threads: int | None, stand_ins: int | None, runs_dir: Path | None) -> Self:
        """The flags, and below them what WEFT_* and weft.toml say. Errors: SpecError, which names the source."""
        flags = {"workers": workers, "threads": threads, "stand_ins": stand_ins, "runs_dir": runs_dir}
        settings = load_settings(flags, os.environ, None)
        given = settings.model_fields_set
        return cls(
            workers=settings.workers if "workers" in given else None,
            threads=threads,
            stand_ins=settings.stand_ins if "stand_ins" in given else None,
            gpus=_num_gpus(settings),
            runs_dir=settings.runs_dir or Path("runs"),
        )

    def sized_for(self, trial: Trial) -> tuple[int, int]:
        """CPU workers and stand-ins of the daemon that runs the trial. Stand-ins where there are too few GPUs."""
        needed = workers_needed(trial.spec.strategy)
        devices = needed.get("gpu", 0)
        workers = max(1, needed.get("cpu", 0)) if self.workers is None else self.workers
        if self.workers is None and trial.spec.strategy.is_auto:
            workers = 0  # all that this machine has cores for: what is best among them is the question
        if self.stand_ins is not None:
            return workers, self.stand_ins
        return workers, devices if devices > self.gpus else 0

    def claimed_id(self, job: str) -> str:
        """The id, or one with a number where a comparison before or beside this one has such a run directory."""
        ids = itertools.chain([job], (f"{job}-{again}" for again in itertools.count(2)))
        return next(each for each in ids if self._takes(each))

    def _takes(self, job: str) -> bool:
        try:
            return claim(self.runs_dir / job, job)
        except OSError:  # the daemon says what is wrong with it
            return not os.path.lexists(self.runs_dir / job)

    def daemon_for(self, trial: Trial) -> Daemon:
        workers, stand_ins = self.sized_for(trial)
        return Daemon(
            workers=workers,
            threads=self.threads,
            stand_ins=stand_ins,
            loaders=trial.spec.strategy.loaders,
            runs_dir=self.runs_dir,
        )


def _num_gpus(settings: Settings) -> int:
    try:
        crew = muster(settings)
    except CrewError as error:
        raise SpecError(str(error)) from None
    return sum(member.kind == "gpu" and member.device != "stand-in" for member in crew.members)


def run_trials(trials: Sequence[Trial], options: DaemonOptions, rows: list[Message]) -> None:
    """Runs them in order. rows: gets each trial's row as it ends, so whoever is interrupted has those so far.

    A job that fails, cannot be planned, or takes its daemon with it, is a row like any other. Errors: RequestRefused,
    where a daemon does not take the job for another reason; KeyboardInterrupt, which has cancelled the running job.
    """
    for number, trial in enumerate(trials, start=1):
        _say(f"{number} of {len(trials)}: {trial.preset}")
        job = options.claimed_id(f"{stem_of(trial.spec.job.entry)}-{number}-{trial.preset}")
        try:
            with options.daemon_for(trial) as client:
                _, shown = run_in_foreground(client, trial.spec, job=job)
        except DaemonUnreachable as error:
            shown = {"job": job, "state": "failed", "reason": "daemon-lost", "error": str(error)}
        except RequestRefused as refusal:
            if refusal.code != ErrorCode.INVALID_SPEC:
                raise
            shown = {"job": job, "state": "failed", "reason": "invalid-plan", "error": refusal.message}
        finally:
            unclaim(options.runs_dir / job)  # of one that has not begun
        rows.append(row_of(trial, shown))


def tell_what_differs(trials: Sequence[Trial], options: DaemonOptions) -> None:
    """Says on stderr what is not as the job file has it, and which devices are not real ones."""
    for trial in trials:
        if trial.left_out:
            _say(f"{trial.preset}: goes without your {', '.join(trial.left_out)}; the preset's own row counts")
    stand_ins = max((options.sized_for(trial)[1] for trial in trials), default=0)
    if stand_ins and options.stand_ins is None:
        _say(f"there are too few GPUs: stand-ins compute on the CPU in place of GPUs, up to {stand_ins} at once")


def row_of(trial: Trial, shown: Message) -> Message:
    """A trial's numbers, from what `show` says of its job once it has ended; None for what is not known.

    Seconds of an iteration: `iteration_seconds` is the median, `overlap_seconds` the sum over workers divided by the
    training steps. Percent: of the compute lanes' time. Bytes: `peak_bytes` is the sum over workers.
    """
    seconds, limit, plan = shown.get("iteration_seconds"), shown.get("limit_seconds"), shown.get("plan") or {}
    return {
        "preset": trial.preset,
        "left_out": list(trial.left_out),
        "workers": needs_of(trial),
        **{key: shown.get(key) for key in ("job", "state", "reason", "error", "run_dir", "loss")},
        "steps": shown.get("step"),
        "iteration_seconds": seconds,
        "limit_seconds": limit,
        "limit_ratio": seconds / limit if seconds and limit else None,
        "stall_percent": stall_percent(shown.get("lanes") or {}),
        "overlap_seconds": overlap_seconds(shown.get("overlap") or {}, shown.get("step")),
        "peak_bytes": sum((shown.get("peak_bytes") or {}).values()) or None,
        "shared_bytes": plan.get("shared_bytes"),
        "compiled": plan.get("strategy", {}).get("compile"),
        "agrees": None,
    }


def stall_percent(lanes: Mapping[str, Mapping[str, float]]) -> dict[str, float] | None:
    """Percent of the compute lanes' time that each cause of stalls took; None where no lane computed."""
    computing = [seconds for lane, seconds in lanes.items() if lane.endswith("/compute")]
    total = sum(sum(seconds.values()) for seconds in computing)
    if not total:
        return None
    return {cause: 100 * sum(part.get(f"stall_{cause}", 0.0) for part in computing) / total for cause in CAUSES}


def overlap_seconds(
    overlap: Mapping[str, Mapping[str, Mapping[str, float]]], steps: int | None
) -> dict[str, dict[str, float]] | None:
    """Of each kind, the seconds hidden beside compute and those exposed, of all workers, for one training step."""
    if not steps:
        return None
    return {
        kind: {
            name: sum(kinds.get(kind, {}).get(name, 0.0) for kinds in overlap.values()) / steps
            for name in ("hidden", "exposed")
        }
        for kind in KINDS
    }


def set_agreement(trials: Sequence[Trial], rows: Sequence[Message]) -> None:
    """Sets `agrees` of each completed row: whether its loss is that of the first one, within LOSS_TOLERANCE.

    Trials with stale parameters train another thing: theirs stays None, and the first one is none of them.
    """
    comparable = [
        row
        for trial, row in zip(trials, rows, strict=False)  # fewer rows than trials after an interrupt
        if not trial.is_stale and row["state"] == "completed" and row["loss"] is not None
    ]
    for row in comparable:
        row["agrees"] = math.isclose(row["loss"], comparable[0]["loss"], rel_tol=LOSS_TOLERANCE)


def comparison(path: Path, trials: Sequence[Trial], rows: Sequence[Message]) -> dict[str, Any]:
    """What `weft compare --json` prints; docs/compare.md describes it."""
    return {"version": VERSION, "spec": str(path), "presets": [trial.preset for trial in trials], "rows": list(rows)}


def needs_of(trial: Trial) -> dict[str, int]:
    """Workers that compute, update or reduce, by kind."""
    return {kind: count for kind, count in workers_needed(trial.spec.strategy).items() if kind != "loader"}


def _say(text: str) -> None:
    print(f"weft: {text}", file=sys.stderr, flush=True)
