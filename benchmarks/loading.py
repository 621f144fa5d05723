"""Loading that keeps up: images per second with 1 and 2 loaders, against torch's DataLoader with as many workers.

A job that waits for its data: an item costs about 2 ms, a batch of them fifty times what is computed with it. Parties
take turns, with one thread each and the same allocator:

    weft         a job on a running daemon, one stage, one microbatch; images per second from the end of the warm-up to
                 the end of the job
    DataLoader   a plain loop over it in a process of its own; peers/dataloader_loop.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from job_steps import rows_of
from measure import Result, main, ratio_result, value_result
from party import Party, ask, party

import weft.client.embedded
from weft.client.client import Client
from weft.spec.job_spec import JobSpec

HERE = Path(__file__).resolve().parent
LOADERS = (1, 2)
BATCH_SIZE = 32
WARM_ITERATIONS = 10  # the DataLoader has batches ready before it is asked, Weft as many
ARGS = {"samples": 4096, "pixels": 192}


def collect(quick: bool) -> list[Result]:
    turns, steps = (2, 20) if quick else (7, 100)
    results = []
    runs_dir = tempfile.mkdtemp(prefix="weft-bench-")
    with weft.client.embedded.Daemon(workers=1, threads=1, loaders=max(LOADERS), runs_dir=runs_dir) as client:
        for loaders in LOADERS:
            results += _measure(client, loaders, turns, steps)
    return results


def _measure(client: Client, loaders: int, turns: int, steps: int) -> list[Result]:
    ours, theirs = [], []
    for turn in range(turns):
        for is_ours in (True, False) if turn % 2 else (False, True):
            if is_ours:
                ours.append(_weft(client, loaders, steps))
            else:
                with party("dataloader_loop.py", [{"spec": _spec(1, 1).to_wire(), "workers": loaders}]) as peers:
                    theirs.append(_dataloader(peers, steps))
    how = f"a stage, batches of {BATCH_SIZE}, items of {ARGS['pixels']} × {ARGS['pixels']} decoded pixels"
    return [
        ratio_result(
            f"loading_vs_dataloader_{loaders}",
            ours,
            theirs,
            goal=">= 1.0",
            how=f"images per second ÷ those of a plain loop over a DataLoader of {loaders} workers; {how}",
        ),
        value_result(f"images_per_second_{loaders}", ours, "1/s", how="ours of the row above"),
        value_result(f"images_per_second_dataloader_{loaders}", theirs, "1/s", how="theirs"),
    ]


def _weft(client: Client, loaders: int, steps: int) -> float:
    rows = rows_of(client, client.submit(_spec(loaders, WARM_ITERATIONS + steps))["job"])
    return BATCH_SIZE * steps / sum(row["seconds"] for row in rows[WARM_ITERATIONS:])


def _dataloader(peers: Party, steps: int) -> float:
    (answer,) = ask(peers, WARM_ITERATIONS + steps)
    seconds = answer["seconds"]
    return BATCH_SIZE * steps / sum(seconds[WARM_ITERATIONS:])


def _spec(loaders: int, steps: int) -> JobSpec:
    return JobSpec.parse(
        {
            "job": {"entry": "loading_job.py:workload", "args": ARGS, "steps": steps, "batch_size": BATCH_SIZE},
            "strategy": {"loaders": loaders},
            "directory": str(HERE),
        }
    )


if __name__ == "__main__":
    main("loading", collect)
