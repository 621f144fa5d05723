"""After set-up no task calls the directory, pickles or allocates shared memory, in any worker of a job.

Where devices lend memory, set-up ends with the first tasks that write and read it. The job counts by itself: its code
runs in the workers and puts counters around what they would have to call. What the directory counts is read from it, by
a daemon whose key the test knows, while the job stands at its last step.
"""

from __future__ import annotations

import re
import runpy
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_REAL = runpy.run_path(str(Path(__file__).with_name("real_daemon.py")))
KnownKeyDaemon, PASS_GATE, SECONDS = (_REAL[name] for name in ("KnownKeyDaemon", "PASS_GATE", "SECONDS"))

COUNTING = """
import multiprocessing.reduction as reduction, os, pickle
import torch, weft

counts = dict(pickles=0, blocks=0)
calls = dict.fromkeys(("first stage", "last stage", "loader"), 0)  # the worker that inspects loads some samples, too
original_dumps, original_block = reduction.ForkingPickler.dumps, torch.UntypedStorage._new_shared

def dumps(*arguments, **options):
    counts["pickles"] += 1
    return original_dumps(*arguments, **options)

def new_shared(*arguments, **options):
    counts["blocks"] += 1
    return original_block(*arguments, **options)

reduction.ForkingPickler.dumps, torch.UntypedStorage._new_shared = dumps, new_shared

def say(where, at):
    calls[where] += 1
    if calls[where] in at:
        print(os.getpid(), where, "has pickled", counts["pickles"], "and allocated", counts["blocks"], flush=True)

class Told(torch.nn.Module):
    def __init__(self, at):
        super().__init__()
        self.at = at
        self.weight = torch.nn.Parameter(torch.ones(()))
    def forward(self, x):
        say("first stage", self.at)
        return x * self.weight

class Data(torch.utils.data.Dataset):
    def __init__(self, at):
        self.at = at
    def __len__(self):
        return 16
    def __getitem__(self, index):
        say("loader", self.at)
        return torch.full((4,), index / 16), torch.tensor([index / 16])

def workload(steps, gate):
    def loss(output, target):
        say("last stage", {30, 8 * steps})
        if calls["last stage"] == 8 * steps:
            pass_gate(gate, "of the end")
        return torch.nn.functional.mse_loss(output, target)

    model = torch.nn.Sequential(Told({30, 8 * steps}), torch.nn.Linear(4, 1))
    return weft.Workload(model=model, loss=loss, train=Data({100, 15 * steps}),
                         optimizer=lambda params: torch.optim.Adam(params, lr=0.01))
"""

STRATEGIES: dict[str, dict[str, Any]] = {
    "on the CPU": {"stages": 2, "microbatches": 8},
    "on devices": {"replicas": [{"device": "gpu", "stages": 2}], "microbatches": 8},  # lent, by the first tasks
}


def counts_of(daemon: Any, strategy: dict[str, Any], steps: int) -> tuple[int, list[tuple[str, str]]]:
    """(calls of the directory until the last step, what each worker said at an early step and at a late one)."""
    gate = daemon.gate()
    job = daemon.submit(
        daemon.spec(
            PASS_GATE + COUNTING,
            args={"steps": steps, "gate": str(gate)},
            strategy=strategy,
            batch_size=16,
            steps=steps,
        )
    )
    try:
        log = daemon.until_logged(job, "at the gate")
        calls = daemon.directory().num_calls()
    finally:
        gate.open()
    assert daemon.client.wait(job, SECONDS)["state"] == "completed"
    log = daemon.log_of(job)
    said = re.findall(r"(\d+) (\w+(?: stage)?) has pickled (\d+ and allocated \d+)", log)
    both = Counter((pid, where) for pid, where, _ in said)  # who inspects may say so early, and never again
    return calls[f"{job}@1"], [(where, what) for pid, where, what in said if both[pid, where] > 1]


@pytest.fixture(scope="module")
def known() -> Iterator[Any]:
    with KnownKeyDaemon(workers=2, stand_ins=2).serving() as running:
        yield running


@pytest.mark.days(2)
@pytest.mark.slow(seconds=2)
@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_a_task_calls_no_directory_pickles_nothing_and_allocates_no_shared_memory(
    known: Any, strategy: dict[str, Any]
) -> None:
    few_calls, few = counts_of(known, strategy, steps=10)
    many_calls, many = counts_of(known, strategy, steps=50)
    assert few_calls == many_calls > 0
    for said in (few, many):
        assert sorted(where for where, _ in said) == ["first stage"] * 2 + ["last stage"] * 2 + ["loader"] * 2
        assert len(set(said)) == 3, said  # each has said the same, early and late
        assert not any(counts.startswith("0 and") for _, counts in said), said  # set-up was counted
