"""CPU share on and off: what a CPU replica beside the GPU brings, and that it never costs more than 2 %.

    gpu              one replica on the GPU, which updates its parameters itself
    hybrid-fine      a CPU replica beside it; shares of the batch follow the measured speeds, and a replica that costs
    hybrid-coarse    more than it brings is left out; each preset in its own way to sum and to update
    hyscale

Three models: an MLP whose gradients weigh much, tables of embeddings that weigh more, a GPT that computes. Contenders
take turns, a job each, on one daemon whose CPU worker has the threads; shares settle before any time counts.
"""

from __future__ import annotations

import functools
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpu_contenders import Length, Run, job_spec, run_job, seconds_of, take_turns
from gpu_models import SIZES, TINY
from gpu_session import Session, main
from measure import Result, value_result

from weft.client.client import Client

ALONE: Mapping[str, Any] = {"replicas": [{"device": "gpu"}], "update": "local"}
PRESETS = ("hybrid-fine", "hybrid-coarse", "hyscale")
RECOMMENDED = "hybrid-fine"  # docs/strategies.md
NEVER_SLOWER = ">= 0.98"
SETTLING = 110  # iterations: ten measurements and more, as in unequal.py
SETTLING_SECONDS = 6.0  # beside it: what is sent ahead to a lane, a quarter of a second, has the shares of before
MEASURED = 40
TURNS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A job's entry and arguments, and those of its stand-in."""

    entry: str
    args: Mapping[str, Any]
    tiny: Mapping[str, Any]
    batch_size: int
    tiny_batch: int = 16
    precision: str = "fp32"


CASES = {
    "mlp": Case(
        entry="wide_mlp_job.py",
        args={"layers": 3, "width": 4096, "samples": 4096},
        tiny={"layers": 3, "width": 64, "samples": 128},
        batch_size=1024,
    ),
    "embedding": Case(
        entry="embedding_job.py",
        args={"features": 8, "rows": 100_000, "samples": 32768},
        tiny={"features": 2, "rows": 200, "dim": 8, "width": 16, "samples": 128},
        batch_size=8192,
    ),
    "gpt": Case(
        entry="gpu_gpt_job.py",
        args=SIZES["0.1b"].args(samples=256),
        tiny=TINY.args(samples=64),
        batch_size=64,
        precision="bf16",
    ),
}


def collect(session: Session) -> list[Result]:
    rows, lowest = [], {}
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as runs_dir, session.daemon(runs_dir) as client:
        for number, name in enumerate(session.only):
            found = contenders(session, client, CASES[name])
            turns, parts_left = 1 if session.quick else TURNS, len(session.only) - number
            runs = take_turns(session, name, found, turns, parts_left=parts_left)
            gained = gains(runs)
            rows += case_results(session, name, runs, gained)
            lowest[name] = gained.get(RECOMMENDED, [])
    return [*rows, *never_slower(lowest)]


def contenders(session: Session, client: Client, case: Case) -> dict[str, Callable[[], Run]]:
    args, batch_size = (case.tiny, case.tiny_batch) if session.stand_in else (case.args, case.batch_size)
    length = Length(warm=SETTLING, measured=MEASURED, warm_seconds=SETTLING_SECONDS)
    if session.quick:
        length = Length(warm=20, measured=10)
    strategies = {"gpu": ALONE} | {preset: {"preset": preset} for preset in PRESETS}
    found: dict[str, Callable[[], Run]] = {}
    for name, strategy in strategies.items():
        spec = job_spec(args, {"precision": case.precision, **strategy}, batch_size, case.entry)
        found[name] = functools.partial(run_job, session, client, spec, length)
    return found


def gains(runs: Mapping[str, Sequence[Run]]) -> dict[str, list[float]]:
    """Samples per second of each preset over the GPU's alone, turn by turn; empty without the GPU alone."""
    if "gpu" not in runs:
        return {}
    alone = seconds_of(runs["gpu"])
    return {
        preset: [mine / ours for mine, ours in zip(alone, seconds_of(runs[preset]), strict=True)]
        for preset in PRESETS
        if preset in runs
    }


def case_results(
    session: Session, name: str, runs: Mapping[str, Sequence[Run]], gained: Mapping[str, Sequence[float]]
) -> list[Result]:
    case = CASES[name]
    what = f"{case.entry}, batch {case.batch_size}, {case.precision}; a CPU worker of {session.threads} threads"
    rows = []
    for preset, ratios in gained.items():
        row = f"{name}_{preset.replace('-', '_')}"
        how = f"samples/s of {preset} ÷ the GPU's alone; {what}"
        rows.append(value_result(f"{row}_vs_gpu", ratios, "x", how=how))
        shares = [run.shares[1] / sum(run.shares) for run in runs[preset] if len(run.shares) == 2]
        if shares:
            how = "of the batch, the CPU replica's part at the end"
            rows.append(value_result(f"{row}_cpu_share", shares, "%", scale=100, how=how))
    if "gpu" in runs:
        rows.append(value_result(f"{name}_gpu", seconds_of(runs["gpu"]), "ms", scale=1e3, how="the GPU's alone"))
    return rows


def never_slower(lowest: Mapping[str, Sequence[float]]) -> list[Result]:
    """Of the model for which the CPU brings least."""
    measured = {name: ratios for name, ratios in lowest.items() if ratios}
    if not measured:
        return []
    worst = min(measured, key=lambda name: statistics.median(measured[name]))
    how = f"samples/s of {RECOMMENDED} ÷ the GPU's alone, where it is least of {', '.join(measured)}: {worst}"
    return [value_result("hybrid_never_slower", measured[worst], "x", goal=NEVER_SLOWER, how=how)]


if __name__ == "__main__":
    main("gpu_hybrid", collect, parts=tuple(CASES))
