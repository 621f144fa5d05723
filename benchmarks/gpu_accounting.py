"""How far our own accounts of a GPU's lanes are from torch.profiler's view of the same iterations.

A job trains a GPT by a strategy for GPUs and profiles some iterations. Then that time is accounted for twice: by the
rows that lanes have stamped from CUDA events, and by the kernels and copies that CUPTI has recorded of their streams
(`weft.metrics.recording.profile_account` says how the two are made comparable). Stall is that of the GPU's compute
lane, overlap all sync, transfer and update of its lanes that ran beside it. A difference is a part of the greater of
both, or of 5 % of the wall time where they are less: nobody asks whether a stall of 0.1 % was 0.11 %.

With --stand-in the rows are held against the profiler's operators. There a row has all that a task does in its thread:
before its first operator and after its last one too (the seeds of its random numbers, slots, hooks), and waits for
Python's lock, which its lanes share. On a GPU that is time of a stream only where the launcher is not ahead of it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_session import Session, main
from measure import Result, value_result

from weft.client.client import Client
from weft.metrics.recording.profile_account import Comparison, Pair, compare
from weft.metrics.recording.recording import Recording
from weft.plan.worker_profile import profiles_in
from weft.spec.job_spec import JobSpec

HERE = Path(__file__).resolve().parent
GPU, CPU = {"device": "gpu"}, {"device": "cpu"}
STRATEGIES: Mapping[str, Mapping[str, Any]] = {
    "local": {"replicas": [GPU], "update": "local", "microbatches": 2},
    "zero_offload": {"preset": "zero-offload"},
    "zero_offload_clipped": {"preset": "zero-offload", "clip_norm": 1.0},
    "hybrid_fine": {"preset": "hybrid-fine"},
}
GPU_GPT = {"layers": 12, "dim": 1024, "heads": 16, "context": 512, "vocabulary": 16384, "samples": 256}
STAND_IN_GPT = {"layers": 8, "dim": 256, "heads": 4, "context": 32, "vocabulary": 4096, "samples": 256}  # overlap.py's
BATCH_SIZE = 4  # small, so that copies weigh against computation
GOAL = "<= 0.05"
SMALLEST = 0.05  # of the wall time: what a difference is a part of, at least
FIRST, ITERATIONS, AFTER = 10, 10, 5
TURNS = 5
TURN_SECONDS = 90.0
MEANING = {
    "stall": "stall of the compute lane",
    "overlap": "sync, transfer and update of the GPU's lanes that ran beside compute",
}


@dataclass(slots=True)
class Found:
    """Of one strategy, by turn."""

    stall: list[Pair] = field(default_factory=list)
    overlap: list[Pair] = field(default_factory=list)
    walls: list[int] = field(default_factory=list)
    gaps: list[int] = field(default_factory=list)


def collect(session: Session) -> list[Result]:
    found = {name: Found() for name in session.only}
    order = list(session.only)
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as runs_dir, session.daemon(runs_dir) as client:
        for turn in range(1 if session.quick else TURNS):
            if turn and session.seconds_left < TURN_SECONDS:
                session.note(f"{turn} of {TURNS} turns, for want of time")
                break
            for name in order:
                _run(client, STRATEGIES[name], STAND_IN_GPT if session.stand_in else GPU_GPT, found[name])
            order.reverse()
    return [result for name in session.only for result in _results(name, found[name], stand_in=session.stand_in)]


def _run(client: Client, strategy: Mapping[str, Any], shape: Mapping[str, int], found: Found) -> None:
    spec = JobSpec.parse(
        {
            "job": {
                "entry": "gpt_job.py:workload",
                "args": dict(shape),
                "steps": FIRST + ITERATIONS + AFTER,
                "batch_size": BATCH_SIZE,
                "seed": 1,
            },
            "strategy": dict(strategy),
            "profile": {"first": FIRST, "iterations": ITERATIONS},
            "directory": str(HERE),
        }
    )
    result = client.wait(client.submit(spec)["job"], timeout=900)
    assert result["state"] == "completed", result
    recording = Recording.load(client.record(result["job"]))
    profiles = profiles_in(Path(result["run_dir"]), recording.job, recording.attempt)
    devices = [profile for profile in profiles if profile.worker.startswith("gpu")]
    assert devices, "".join(client.log(result["job"]))
    _add(compare(recording, devices), found)


def _add(compared: Comparison, found: Found) -> None:
    (computing,) = (lane for lane in compared.busy if lane.endswith("/compute"))
    found.stall.append(compared.stall([computing]))
    found.overlap.append(compared.overlap())
    found.walls.append(compared.wall_ns)
    found.gaps.append(compared.gaps_ns[computing])


def _results(name: str, found: Found, *, stand_in: bool) -> list[Result]:
    view = "operators of the compute thread" if stand_in else "kernels of the compute stream"
    of = f"{name.replace('_', ' ')}, {ITERATIONS} iterations"
    results = []
    for what, pairs in (("stall", found.stall), ("overlap", found.overlap)):
        apart = [pair.apart(SMALLEST * wall) for pair, wall in zip(pairs, found.walls, strict=True)]
        ours, theirs = (_shares([getattr(pair, whose) for pair in pairs], found.walls) for whose in ("ours", "theirs"))
        results += [
            value_result(
                f"{name}_{what}_vs_profiler",
                apart,
                "of the greater",
                goal=GOAL,
                how=f"how far the next two are apart; {of}",
            ),
            value_result(f"{name}_{what}", ours, "of wall time", how=f"{MEANING[what]}, by our rows; {of}"),
            value_result(
                f"{name}_{what}_profiled", theirs, "of wall time", how=f"the same by the profiler's {view}; {of}"
            ),
        ]
    gaps = _shares(found.gaps, found.walls)
    return [*results, value_result(f"{name}_gaps", gaps, "of wall time", how=f"between {view}, within tasks; {of}")]


def _shares(parts: Sequence[int], walls: Sequence[int]) -> list[float]:
    return [part / wall for part, wall in zip(parts, walls, strict=True)]


if __name__ == "__main__":
    main("gpu_accounting", collect, parts=tuple(STRATEGIES))
