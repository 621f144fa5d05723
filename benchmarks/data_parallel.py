"""Data parallelism: two replicas against DistributedDataParallel, and against one process with as many threads.

Three parties take turns, on the same two cores, for the same model, seed, batches and optimizer:

    weft         a job of preset "ddp" on a running daemon, two replicas of one thread; an iteration is the time from
                 the end of one step to the end of the next
    ddp          DistributedDataParallel over Gloo, two processes of one thread; peers/training_loop.py
    one process  the plain loop with two threads and nothing to synchronise; peers/training_loop.py

Before any time counts, the losses of the first steps are compared: all three train the same.
"""

from __future__ import annotations

import functools
import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from job_steps import rows_of
from measure import Result, interleave, main, ratio_result, value_result
from party import Party, ask, party
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported, if not in __all__

import weft.client.embedded
from weft.client.client import Client
from weft.spec.job_spec import JobSpec

HERE = Path(__file__).resolve().parent
NUM_CORES = 2
WARM_ITERATIONS = 10  # of every job; the first ones touch memory for the first time
SAME_STEPS = 5  # whose losses are compared
TOLERANCE = 1e-3  # relative: sums in another order, multiplied by a few steps of AdamW
STORE_SECONDS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """entry and args of the job; iterations of one turn; turns; vs_ddp: the goal."""

    name: str
    entry: str
    args: dict[str, int]
    batch_size: int
    iterations: int
    turns: int
    vs_ddp: str


CASES = (
    Case(
        name="mlp",
        entry="wide_mlp_job.py",
        args={"layers": 3, "width": 4096, "samples": 1024},
        batch_size=64,
        iterations=10,
        turns=7,
        vs_ddp=">= 1.5",
    ),
    Case(
        name="gpt",
        entry="gpt_job.py",
        args={"layers": 8, "dim": 256, "heads": 4, "context": 128, "vocabulary": 8192, "samples": 64},
        batch_size=16,
        iterations=6,
        turns=7,
        vs_ddp=">= 1.0",
    ),
    Case(
        name="small_gpt",
        entry="gpt_job.py",
        args={"layers": 4, "dim": 64, "heads": 1, "context": 32, "vocabulary": 512, "samples": 256},
        batch_size=16,
        iterations=200,
        turns=9,
        vs_ddp=">= 1.4",
    ),
)


def collect(quick: bool) -> list[Result]:
    with (
        tempfile.TemporaryDirectory(prefix="weft-bench-") as runs,  # it goes: each job of the MLP leaves 200 MB
        weft.client.embedded.Daemon(workers=NUM_CORES, threads=1, runs_dir=runs) as client,
    ):
        return [result for case in CASES for result in _measure(client, case, 2 if quick else case.turns)]


def _measure(client: Client, case: Case, turns: int) -> list[Result]:
    with ExitStack() as stack:
        ddp = stack.enter_context(_ddp(case))
        alone = stack.enter_context(_one_process(case))
        _check_same(case, _job(client, case, SAME_STEPS)["loss"], _losses(ddp), _losses(alone))
        ours, theirs, plain = interleave(
            turns,
            lambda: statistics.median(_job(client, case, WARM_ITERATIONS + case.iterations)["seconds"]),
            functools.partial(_seconds, ddp, case.iterations),
            functools.partial(_seconds, alone, case.iterations),
        )
    shape = ", ".join(f"{key} {value}" for key, value in case.args.items() if key != "samples")
    model = f"{case.entry} with {shape}, batch {case.batch_size}, AdamW"
    return [
        ratio_result(
            f"{case.name}_vs_ddp",
            theirs,
            ours,
            goal=case.vs_ddp,
            how=f"iteration of DistributedDataParallel over Gloo ÷ ours, same cores and allocator; {model}",
        ),
        ratio_result(
            f"{case.name}_vs_one_process",
            plain,
            ours,
            how=f"iteration of the plain loop in one process of {NUM_CORES} threads ÷ ours; {model}",
        ),
        value_result(case.name, ours, "ms", scale=1e3, how="ours of the two rows above"),
    ]


def _check_same(case: Case, *losses: Sequence[float]) -> None:
    """Raises AssertionError unless every party's first losses are ours."""
    for step in zip(*losses, strict=True):
        spread = max(step) - min(step)
        assert spread <= TOLERANCE * max(step), f"{case.name}: the parties do not train the same: {losses}"


# --- ours


def _job(client: Client, case: Case, steps: int) -> dict[str, list[float]]:
    """seconds (without those of warm-up, where there are more steps) and loss of each step, on the warm daemon."""
    rows = rows_of(client, client.submit(_spec(case, steps))["job"])
    return {
        "seconds": [row["seconds"] for row in rows[WARM_ITERATIONS:]],
        "loss": [row["loss"] for row in rows],
    }


def _spec(case: Case, steps: int) -> JobSpec:
    return JobSpec.parse(
        {
            "job": {
                "entry": f"{case.entry}:workload",
                "args": case.args,
                "steps": steps,
                "batch_size": case.batch_size,
                "seed": 1,
            },
            "strategy": {"preset": "ddp", "replicas": NUM_CORES},
            "directory": str(HERE),
        }
    )


# --- the peers


@contextmanager
def _ddp(case: Case) -> Iterator[Party]:
    """The store is ours, so that its port is free for certain; Gloo is kept on the loopback too."""
    patience = timedelta(seconds=STORE_SECONDS)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=patience)
    configs = [{"rank": rank, "port": store.port, "cores": [core]} for rank, core in enumerate(_cores())]
    with _peers(case, configs) as processes:
        yield processes


@contextmanager
def _one_process(case: Case) -> Iterator[Party]:
    with _peers(case, [{"rank": 0, "cores": _cores()}]) as processes:
        yield processes


def _cores() -> list[int]:
    cores = sorted(os.sched_getaffinity(0))
    return [cores[number % len(cores)] for number in range(NUM_CORES)]


@contextmanager
def _peers(case: Case, configs: list[dict[str, Any]]) -> Iterator[Party]:
    """One process for each config; they end when their input does."""
    spec = _spec(case, 1).to_wire()
    with party(
        "training_loop.py",
        [config | {"spec": spec, "num_ranks": len(configs)} for config in configs],
        threads=NUM_CORES // len(configs),
        environment={"GLOO_SOCKET_IFNAME": "lo"},
    ) as processes:
        yield processes


def _losses(processes: Party) -> list[float]:
    """Of the first steps, over the whole batch: every rank has as many samples of it."""
    answers = ask(processes, SAME_STEPS)
    return [statistics.mean(losses) for losses in zip(*(answer["losses"] for answer in answers), strict=True)]


def _seconds(processes: Party, iterations: int) -> float:
    """Median iteration of a turn, of the slower rank; the steps before it were its warm-up."""
    answers = ask(processes, iterations)
    slowest: list[float] = [max(each) for each in zip(*(answer["seconds"] for answer in answers), strict=True)]
    return statistics.median(slowest)


if __name__ == "__main__":
    main("data_parallel", collect)
