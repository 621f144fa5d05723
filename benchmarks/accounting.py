"""What it costs to know where the time goes, and how much of it stays unknown.

The small GPT of pipeline.py in two stages, on two daemons with two workers each that take turns: one stamps, reports
and accounts as it always does, the other has `accounting = false`. The job itself measures its iterations, by a clock
that its loss reads, since a daemon without accounts cannot tell. A turn's value is the mean over its iterations: what
reports cost now and then is in it.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from measure import Result, interleave, main, value_result
from pipeline import CASES, Case

import weft.client.embedded
from weft.client.client import Client
from weft.spec.job_spec import JobSpec

HERE = Path(__file__).resolve().parent
MICROBATCHES = 8
WARM_ITERATIONS = 50
STAMP = re.compile(r"^clock (\d+) ([0-9.]+)$", re.MULTILINE)


def collect(quick: bool) -> list[Result]:
    case = next(case for case in CASES if case.prefix == "small_")
    iterations = 200 if quick else 1000
    residuals: list[float] = []
    with ExitStack() as stack:
        accounted = stack.enter_context(_daemon("true"))
        unaccounted = stack.enter_context(_daemon("false"))
        with_accounts, without = interleave(
            3 if quick else 15,
            lambda: _iteration(accounted, case, iterations, residuals),
            lambda: _iteration(unaccounted, case, iterations, None),
        )
    shape = ", ".join(f"{key} {value}" for key, value in case.args.items() if key != "samples")
    overheads = [mine / theirs - 1 for mine, theirs in zip(with_accounts, without, strict=True)]
    how = f"gpt_job.py with {shape}, 2 stages, {MICROBATCHES} microbatches, 1f1b"
    return [
        value_result(
            "accounting_overhead",
            overheads,
            "of an iteration",
            goal="<= 0.01",
            how=f"mean iteration with stamps, reports and accounts ÷ without, less 1; {how}",
        ),
        value_result(
            "residual",
            residuals,
            "of wall time",
            goal="<= 0.01",
            how="wall time of the worst lane that is in no mode, of the same jobs",
        ),
        value_result("iteration", with_accounts, "ms", scale=1e3, how="with accounts"),
    ]


@contextmanager
def _daemon(accounting: str) -> Iterator[Client]:
    before = os.environ.get("WEFT_ACCOUNTING")
    os.environ["WEFT_ACCOUNTING"] = accounting
    try:
        with weft.client.embedded.Daemon(
            workers=2, threads=1, runs_dir=tempfile.mkdtemp(prefix="weft-bench-")
        ) as client:
            yield client
    finally:
        os.environ.pop("WEFT_ACCOUNTING")
        if before is not None:
            os.environ["WEFT_ACCOUNTING"] = before


def _iteration(client: Client, case: Case, iterations: int, residuals: list[float] | None) -> float:
    """Mean seconds of the iterations after warm-up, by the job's own clock."""
    steps = WARM_ITERATIONS + iterations
    job = {
        "entry": "accounting_job.py:workload",
        "args": {**case.args, "first": WARM_ITERATIONS * MICROBATCHES, "last": (steps - 1) * MICROBATCHES},
        "batch_size": 16,
        "steps": steps,
    }
    strategy = {"stages": 2, "microbatches": MICROBATCHES, "schedule": "1f1b"}
    spec = JobSpec.parse({"job": job, "strategy": strategy, "directory": str(HERE)})
    result = client.wait(client.submit(spec)["job"], timeout=600)
    assert result["state"] == "completed", result
    stamps = {int(call): float(at) for call, at in STAMP.findall("".join(client.log(result["job"])))}
    if residuals is not None:
        lanes = client.show(result["job"])["time"]["lanes"].values()
        residuals.append(max(lane["residual_seconds"] / lane["wall_seconds"] for lane in lanes))
    (begin, began), (end, ended) = sorted(stamps.items())
    return (ended - began) / ((end - begin) / MICROBATCHES)


if __name__ == "__main__":
    main("accounting", collect)
