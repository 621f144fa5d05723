"""Contenders of the GPU benchmarks: a job of Weft, or a loop of peers/gpu_loop.py in a process of its own.

Each call is one whole run: it makes its model, warms up, takes some iterations and lets go of its memory, so that the
next one has the machine to itself. A job is cancelled once it has taken enough of them: a model of 16 GB is not saved
for a benchmark.
"""

from __future__ import annotations

import json
import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import psutil
from gpu_session import GIB, Session, answer
from party import party

from weft.client.client import Client, RequestRefused
from weft.metrics.recording.step_log import FILE
from weft.spec.job_spec import JobSpec

HERE = Path(__file__).resolve().parent
MANY_STEPS = 1_000_000  # of a job that is cancelled
POLL_SECONDS = 0.25
RUN_SECONDS = 300.0  # of one run, set-up included; a contender that takes longer has failed
LET_GO_SECONDS = 60.0
HOST_RESERVE_BYTES = 2 * GIB  # less is left: the kernel would soon kill whom it likes
STAND_IN_RESERVE_BYTES = GIB // 4


class TooLarge(Exception):
    """There is not enough memory for it, on the GPU or on the host."""


class Missing(Exception):
    """It cannot take part here: a package that is not installed, a device that it does not know."""


class Failed(Exception):
    """Anything else that kept it from measuring."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """seconds: of an iteration, the mean of those after warm-up. losses: of all. gpu_bytes: the most that torch
    allocated, None where nobody counts. shown: what the daemon told of a job. shares: the samples that each of its
    replicas had of the last batch, where there are several."""

    seconds: float
    losses: tuple[float, ...]
    gpu_bytes: int | None = None
    shown: Mapping[str, Any] = field(default_factory=dict)
    shares: tuple[float, ...] = ()

    @property
    def run_dir(self) -> Path:
        return Path(self.shown["run_dir"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Length:
    """Iterations of a run: at least `warm` and, of a job, those of the first `warm_seconds`; then those that count."""

    warm: int
    measured: int
    warm_seconds: float = 0.0

    def counting(self, steps: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]] | None:
        """Those of a step log's lines that count; None where there are not enough yet."""
        ends = list(accumulate(step["seconds"] or 0.0 for step in steps))
        first = max(self.warm, bisect_left(ends, self.warm_seconds))
        counting = steps[first : first + self.measured]
        return counting if len(counting) == self.measured else None


def job_spec(
    args: Mapping[str, Any], strategy: Mapping[str, Any], batch_size: int, entry: str = "gpu_gpt_job.py"
) -> JobSpec:
    return JobSpec.parse(
        {
            "job": {
                "entry": f"{entry}:workload",
                "args": dict(args),
                "steps": MANY_STEPS,
                "batch_size": batch_size,
                "seed": 1,
            },
            "strategy": dict(strategy),
            "directory": str(HERE),
        }
    )


# --- a loop of peers/gpu_loop.py


def run_peer(session: Session, loop: str, spec: JobSpec, length: Length) -> Run:
    """loop: "plain", "fsdp2" or "deepspeed". Errors: TooLarge, Missing, Failed."""
    config = {
        "loop": loop,
        "spec": spec.to_wire(),
        "device": session.device,
        "threads": session.cores,
        "warm": length.warm,
        "measured": length.measured,
    }
    with party("gpu_loop.py", [config], threads=session.cores) as (process,):
        try:
            line = answer(process, _patience(session))
        except TimeoutError as error:
            process.kill()
            raise Failed(str(error)) from None
    if not line:
        raise Failed(f"peers/gpu_loop.py said nothing and ended with exit code {process.wait(LET_GO_SECONDS)}")
    told = json.loads(line)
    if "reason" in told:
        kind = {"out-of-memory": TooLarge, "missing": Missing}.get(told["reason"], Failed)
        raise kind(told["error"])
    return Run(seconds=told["seconds"], losses=tuple(told["losses"]), gpu_bytes=told["gpu_bytes"])


# --- a job


def run_job(session: Session, client: Client, spec: JobSpec, length: Length) -> Run:
    """Errors: TooLarge, Failed."""
    job = client.submit(spec)["job"]
    try:
        steps, counting = _steps(session, client, job, length)
    finally:
        client.cancel(job)
        client.wait(job, timeout=LET_GO_SECONDS)
    shown = client.show(job)
    return Run(
        seconds=statistics.fmean(step["seconds"] for step in counting),
        losses=tuple(step["loss"] for step in steps),
        gpu_bytes=max((shown.get("device_peak_bytes") or {}).values(), default=None),
        shown=shown,
        shares=tuple(counting[-1].get("shares", ())),
    )


def _steps(
    session: Session, client: Client, job: str, length: Length
) -> tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]]:
    """The lines of the step log, and those that count, once there are enough of them. Errors: TooLarge, Failed."""
    log = Path(client.show(job)["run_dir"], FILE)
    ends = time.monotonic() + _patience(session)
    steps: list[dict[str, Any]] = []
    while time.monotonic() < ends:
        result, before = _result(client, job), len(steps)
        steps = _lines(log)
        if (counting := length.counting(steps)) is not None:
            return steps, counting
        if result is not None:
            raise failure(result)
        if len(steps) == before and client.show(job)["state"] == "recovering":
            raise Failed("a worker was killed; where memory was short, the kernel may have done it")
        if (reason := host_is_full(session)) is not None:
            raise TooLarge(reason)
    raise Failed(f"{job} has not taken enough iterations in time; its last: {len(steps)}")


def _result(client: Client, job: str) -> Mapping[str, Any] | None:
    """None while it runs."""
    try:
        return client.wait(job, timeout=POLL_SECONDS)
    except RequestRefused:  # timed out
        return None


def _lines(log: Path) -> list[dict[str, Any]]:
    try:
        text = log.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def failure(result: Mapping[str, Any]) -> Exception:
    error = str(result["error"])
    refused = result["reason"] == "invalid-plan" and "shared memory" in error
    if result["reason"] == "out-of-memory" or refused:
        return TooLarge(_last_line(error))
    return Failed(f"{result['state']}, {result['reason']}: {_last_line(error)}")


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1] if text.strip() else ""


def host_is_full(session: Session) -> str | None:
    """Why nothing more should be taken of the host's memory; None where there is enough."""
    memory = psutil.virtual_memory()
    left = session.host_bytes - (memory.total - memory.available)
    reserve = STAND_IN_RESERVE_BYTES if session.stand_in else HOST_RESERVE_BYTES
    return f"{left / GIB:.1f} GiB of the host's memory were left" if left < reserve else None


def _patience(session: Session) -> float:
    """A run that began in time may end a little late."""
    return min(RUN_SECONDS, max(session.seconds_left, LET_GO_SECONDS))


# --- contenders that take turns


def take_turns(
    session: Session, name: str, contenders: Mapping[str, Callable[[], Run]], turns: int, *, parts_left: int = 1
) -> dict[str, list[Run]]:
    """The runs of each contender, by turn, as many of each; those that could not run are noted and left out.

    The order turns round each time, as in `measure.interleave`. A turn begins if the longest one so far would still end
    in this part's time; in the first one, a contender does while there is any. parts_left: of the benchmark, this one
    among them, which have as much time each.
    """
    reserved = session.seconds_left * (1 - 1 / parts_left)
    if session.seconds_left < 0:
        session.note(f"{name}: nothing, for want of time")
        return {}
    runs: dict[str, list[Run]] = {contender: [] for contender in contenders}
    longest = 0.0
    for turn in range(turns):
        if turn and runs and session.seconds_left - reserved < longest:
            session.note(f"{name}: {turn} of {turns} turns, for want of time")
            break
        before = session.seconds_left
        for contender in sorted(runs, key=list(contenders).index, reverse=turn % 2 == 1):
            if turn == 0 and session.seconds_left < 0:
                session.note(f"{name}, {contender}: none, for want of time")
                del runs[contender]
            elif (run := attempt(session, f"{name}, {contender}", contenders[contender])) is None:
                del runs[contender]
            else:
                runs[contender].append(run)
        longest = max(longest, before - session.seconds_left)
    return runs


def attempt(session: Session, name: str, contender: Callable[[], Run]) -> Run | None:
    """Its run; None, and a note, where there is none."""
    try:
        run = contender()
    except (TooLarge, Missing) as error:
        session.note(f"{name}: none, {type(error).__name__}: {error}")
        return None
    except Failed as error:
        session.note(f"{name}: FAILED: {error}", failed=True)
        return None
    memory = "" if run.gpu_bytes is None else f", {run.gpu_bytes / GIB:.2f} GiB on the GPU"
    session.say(f"{name}: {1e3 * run.seconds:.1f} ms{memory}")
    return run


def seconds_of(runs: Sequence[Run]) -> list[float]:
    return [run.seconds for run in runs]
