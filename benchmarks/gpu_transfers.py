"""Transfers: how fast a running job's gradients come down and its parameters go up, against plain pinned copies.

    ours     a job of zero-offload: DOWN of each bucket on the stream d2h, UP on h2d, beside forward, backward and the
             host's updates. Seconds are those of the job's own records, bytes those of its buckets.
    theirs   the same sizes, copied between page-locked memory and the GPU in one stream for each direction, by a
             process that does nothing else                                                  peers/pinned_copies.py

The job is a GPT on few tokens with plain SGD, so that the link has most to do and UP begins while DOWN still goes on.
What a copy moved while the other direction ran, too, counts for both at once, what it moved alone for its own direction
(copy_overlap.py).
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from copy_overlap import Copy, Rates, rates
from gpu_contenders import Failed, Length, Run, TooLarge, job_spec, run_job
from gpu_models import TINY, Gpt
from gpu_session import Session, answer, main
from measure import Result, ratio_result, value_result
from party import party

from weft.client.client import Client
from weft.metrics.recording.recording import FILE, Recording
from weft.plan.kinds import MODES

MODEL = Gpt(layers=8, dim=2048, heads=16, context=128)  # 0.44 billion parameters: 1.7 GB each way in an iteration
WARM, MEASURED = 10, 30
TURNS = 5
REPEATS = 10
PEER_SECONDS = 120.0
GOAL = ">= 0.9"
DIRECTIONS = {"up": "parameters to the GPU", "down": "gradients from the GPU", "both": "both at once"}


def collect(session: Session) -> list[Result]:
    ours: list[Rates] = []
    theirs: list[dict[str, float]] = []
    sizes: list[int] = []
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as runs_dir, session.daemon(runs_dir) as client:
        for turn in range(1 if session.quick else TURNS):
            if turn and session.seconds_left < PEER_SECONDS:
                session.note(f"{turn} of {TURNS} turns, for want of time")
                break
            run = job(session, client)
            if run is None:
                return []
            sizes = bucket_sizes(run.run_dir)
            ours.append(rates_of(run.run_dir, sizes))
            theirs.append(pinned(session, sizes))
            session.say(f"turn {turn}: {ours[-1]}, pinned copies {theirs[-1]}")
    return results(session, ours, theirs, sizes)


def job(session: Session, client: Client) -> Run | None:
    model = TINY if session.stand_in else MODEL
    strategy = {"preset": "zero-offload", "precision": "bf16"} | ({"bucket_mib": 0.05} if session.stand_in else {})
    spec = job_spec(model.args(samples=8, optimizer="sgd"), strategy, batch_size=1)
    try:
        return run_job(session, client, spec, Length(warm=WARM, measured=MEASURED))
    except (TooLarge, Failed) as error:
        session.note(f"the job: {error}", failed=True)
        return None


def bucket_sizes(run_dir: Path) -> list[int]:
    """Bytes of each bucket of the plan."""
    plan = json.loads(Path(run_dir, "plan.json").read_text(encoding="utf-8"))
    return [bucket["bytes"] for bucket in plan["buckets"]]


def rates_of(run_dir: Path, sizes: Sequence[int]) -> Rates:
    """Of the copies after warm-up."""
    recording = Recording.load(Path(run_dir, FILE))
    downs, ups = (copies_of(recording, kind, sizes) for kind in ("down", "up"))
    return rates(downs, ups)


def copies_of(recording: Recording, kind: str, sizes: Sequence[int]) -> list[Copy]:
    tasks = {task.id: task for task in recording.tasks if task.kind == kind}
    return sorted(
        (
            Copy(start, end, sizes[tasks[task].bucket])
            for rows in recording.rows.values()
            for mode, task, iteration, _, start, end in rows
            if task in tasks and MODES[mode] == "transfer" and iteration >= WARM
        ),
        key=lambda copy: copy.start,
    )


def pinned(session: Session, sizes: Sequence[int]) -> dict[str, float]:
    config = {"device": session.device, "sizes": sizes, "repeats": REPEATS}
    with party("pinned_copies.py", [config]) as (process,):
        told: dict[str, float] = json.loads(answer(process, PEER_SECONDS))
    return told


def results(
    session: Session, ours: Sequence[Rates], theirs: Sequence[dict[str, float]], sizes: Sequence[int]
) -> list[Result]:
    buckets = f"{len(sizes)} buckets, the median one of {statistics.median(sizes) / 2**20:.3g} MiB"
    rows = []
    for direction, what in DIRECTIONS.items():
        pairs = [
            (mine, yours[direction])
            for rate, yours in zip(ours, theirs, strict=True)
            if (mine := getattr(rate, direction)) is not None
        ]
        if not pairs:
            session.note(f"{direction}: no copy ran so, in any turn")
            continue
        mine, yours = zip(*pairs, strict=True)
        how = f"bandwidth of {what} in a running job ÷ that of plain pinned copies; {buckets}"
        rows.append(ratio_result(f"{direction}_vs_pinned", mine, yours, goal=GOAL, how=how))
        rows.append(value_result(direction, mine, "GB/s", scale=1e-9, how=f"ours of {direction}_vs_pinned"))
        rows.append(value_result(f"{direction}_pinned", yours, "GB/s", scale=1e-9, how="theirs"))
    return rows


if __name__ == "__main__":
    main("gpu_transfers", collect, parts=())
