"""From submit to the first finished iteration: on the warm workers of a running daemon, and under torchrun from cold.

ours     submit ─▶ [ledger] ─▶ known? ─▶ plan ─▶ prepare two stages ─▶ the first iteration's last stamp
theirs   torchrun ─▶ two interpreters, import torch, Gloo's rendezvous, optimizer ─▶ the stamp after the first step
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measure import Result, interleave, main, ratio_result, value_result

from weft.client.client import Client
from weft.client.embedded import Daemon
from weft.spec.job_spec import JobSection, JobSpec, Strategy

FOLDER = Path(__file__).resolve().parent
TRIES = 3  # of torchrun's processes one aborts now and then
BATCH_SIZE = 100  # as in peers/torchrun_mlp.py
SPEC = JobSpec(
    job=JobSection(entry="mlp_job.py:workload", steps=10, batch_size=BATCH_SIZE),
    strategy=Strategy(stages=2, microbatches=4),
    directory=str(FOLDER),
)


def collect(quick: bool) -> list[Result]:
    runs = 2 if quick else 9
    with tempfile.TemporaryDirectory() as home:
        os.environ |= {"WEFT_CACHE_DIR": f"{home}/cache", "WEFT_KEEP_INSPECTIONS": "true"}  # a known job
        with Daemon(workers=2, threads=1, runs_dir=f"{home}/runs") as client:
            warm_seconds(client)  # the workers' first job
            ours, theirs = interleave(runs, lambda: warm_seconds(client), torchrun_seconds)
    return [
        ratio_result(
            "vs_torchrun",
            theirs,
            ours,
            goal=">= 80",
            how="an MLP of 85,000 parameters, AdamW, batch 100, two processes of one thread. Ours: a job of 2 stages, "
            "4 microbatches, on a daemon that has run the same job before: the client's whole submit call plus "
            "first_iteration_seconds, which runs from the daemon's taking the job to the last stamp of iteration 0. "
            "Theirs: python -m torch.distributed.run --nproc-per-node 2 of a plain DistributedDataParallel script with "
            "Gloo, from the start of the command to the later of the two processes' stamps after their first step",
        ),
        value_result("warm_start", ours, "ms", scale=1e3, goal="<= 30", how="ours of the row above"),
        value_result("torchrun", theirs, "ms", scale=1e3, how="theirs"),
    ]


def warm_seconds(client: Client) -> float:
    """Submit and daemon overlap a little, so the sum is an upper bound."""
    started = time.monotonic()
    job = client.submit(SPEC)["job"]
    submitted = time.monotonic() - started
    result = client.wait(job)
    if result["state"] != "completed":
        raise SystemExit(f"{job} {result['state']}: {result['error']}")
    return submitted + result["first_iteration_seconds"]


def torchrun_seconds() -> float:
    script = str(FOLDER / "peers" / "torchrun_mlp.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    for _ in range(TRIES):
        started = time.monotonic_ns()
        finished = subprocess.run(command, capture_output=True, text=True)
        stamps = [int(stamp) for stamp in re.findall(r"first iteration (\d+)", finished.stdout)]
        if len(stamps) == 2:
            return (max(stamps) - started) / 1e9
    raise SystemExit(f"torchrun exited with {finished.returncode}: {finished.stderr}")


if __name__ == "__main__":
    main("warm_start", collect)
