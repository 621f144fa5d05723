"""A worker of a running job is killed: how long until an iteration is over again, of ours and of torchrun's.

iterations   ... │ 41 │ 42 │ 4✗     prepare, put back     │ 38 │ 39 │ ... │ 43 │
                   ▲ newest snapshot: of 37               │    ▲ next iteration     ▲ as far as it was
                          lost: 42 − 37 = 5      kill ◀───┴────┘
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from party import END_SECONDS, PEERS

from weft.client.client import Client
from weft.metrics.recording.recording import Recording
from weft.plan.kinds import FIRST_STALL
from weft.plan.rows import Row
from weft.scheduler.daemon.fork_server import ALLOCATOR
from weft.scheduler.runs.snapshot_pace import COST_SHARE, LEAST_SECONDS
from weft.spec.job_spec import JobSpec

PATIENCE_SECONDS = 120.0  # for anything that is waited for
POLL_SECONDS = 0.02
LONGEST_SECONDS = 8.0  # between the first snapshot and a kill
TOLD_SECONDS = 0.2  # twice as long as a lane keeps its report to itself
# Else processes that are started again find the addresses of those before them: pytorch/pytorch issue 135712.
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
GOES_ON = re.compile(r"goes on after step (\d+) \(attempt 2\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Killed:
    next_seconds: float  # from the kill to the end of the next iteration
    back_seconds: float  # to the end of the first one that had not been over before
    iteration_seconds: float  # the median until the kill
    lost: int  # iterations that were done again
    between: float  # iterations from a snapshot to the next


@dataclass(slots=True)
class _Watched:
    """The snapshots of a running job, by what the daemon tells again and again."""

    client: Client
    job: str
    shown: dict[str, Any] = field(default_factory=dict)

    def look(self) -> bool:
        """Whether there is a snapshot, and more than one iteration."""
        self.shown = self.client.show(self.job)
        if self.shown["exit_code"] is not None:
            raise SystemExit(f"{self.job} has ended: {self.shown['error']}")
        return bool(self.shown["snapshot_step"] and self.shown["iteration_seconds"])

    @property
    def seconds_between(self) -> float:
        return max(LEAST_SECONDS, self.shown["snapshot_seconds"] / COST_SHARE)


def kill_ours(client: Client, spec: JobSpec, moments: random.Random) -> Killed:
    """Of a job that would go on for long. The worker, and the moment after the first snapshot, are random."""
    job = client.submit(spec)["job"]
    try:
        watched = _Watched(client, job)
        _until(watched.look, "a snapshot")
        kill_at = time.monotonic() + moments.uniform(0, min(watched.seconds_between, LONGEST_SECONDS))
        while time.monotonic() < kill_at:
            watched.look()
            time.sleep(POLL_SECONDS)
        run_dir, iteration_seconds = Path(watched.shown["run_dir"]), watched.shown["iteration_seconds"]
        workers = [each for each in client.status()["workers"] if each["job"] == job and each["kind"] == "cpu"]
        killed_ns = _kill(moments.choice(workers)["pid"])
        time.sleep(TOLD_SECONDS)
        done = len((run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
        saved = _goes_on_after(client, job)
        _until(lambda: client.show(job)["step"] > done + 1, "more iterations than before")
        ends = ends_from(saved, Recording.load(client.record(job)).rows.values())
        between = watched.seconds_between / iteration_seconds
        return killed_after(killed_ns, ends, first=saved, done=done, seconds=iteration_seconds, between=between)
    finally:
        client.cancel(job, discard=True)
        client.wait(job, PATIENCE_SECONDS)
        client.remove(job)


def _goes_on_after(client: Client, job: str) -> int:
    found: list[str] = []

    def is_told() -> bool:
        found.extend(GOES_ON.findall("".join(client.log(job))))
        return bool(found)

    _until(is_told, "another attempt that goes on")
    return int(found[0])


def ends_from(first: int, lanes: Iterable[list[Row]]) -> dict[int, int]:
    """When each iteration from `first` on was over, in all lanes that stamped something in it."""
    ends: dict[int, int] = {}
    for rows in lanes:
        for mode, task, iteration, _, _, end in rows:
            if mode < FIRST_STALL and task >= 0 and iteration >= first:
                ends[iteration] = max(end, ends.get(iteration, 0))
    return ends


def killed_after(
    killed_ns: int, ends: dict[int, int], *, first: int, done: int, seconds: float, between: float
) -> Killed:
    """first: the iteration that the next attempt began with. done: how many there had been before, from the first."""
    return Killed(
        next_seconds=(ends[first] - killed_ns) / 1e9,
        back_seconds=(ends[max(first, done)] - killed_ns) / 1e9,
        iteration_seconds=seconds,
        lost=done - first,
        between=between,
    )


# --- torchrun


def kill_torchruns(spec: JobSpec, every: int, seconds_between: float, folder: Path, moments: random.Random) -> Killed:
    """As `kill_ours`, after its first checkpoint. every: steps from one to the next; seconds_between: the same."""
    with _torchrun(spec, every, folder) as check_alive:
        _until(lambda: check_alive() or (folder / "checkpoint.pt").exists(), "a checkpoint")
        time.sleep(moments.uniform(0, min(seconds_between, LONGEST_SECONDS)))
        before = _stamped(folder)
        killed_ns = _kill(moments.choice(list(before)))
        time.sleep(TOLD_SECONDS)
        before = _stamped(folder)
        done = min(max(steps) for steps in before.values())

        def is_back() -> bool:
            check_alive()
            ranks = [steps for pid, steps in _stamped(folder).items() if pid not in before]
            return len(ranks) == len(before) and all(max(steps, default=0) > done + 1 for steps in ranks)

        _until(is_back, "more steps than before")
        ranks = [steps for pid, steps in _stamped(folder).items() if pid not in before]
        ends = {step - 1: max(steps[step] for steps in ranks) for step in min(ranks, key=len)}
        own = sorted(next(iter(before.values())).items())
        seconds = (own[-1][1] - own[0][1]) / 1e9 / (len(own) - 1)
        return killed_after(killed_ns, ends, first=min(ends), done=done, seconds=seconds, between=every)


@contextmanager
def _torchrun(spec: JobSpec, every: int, folder: Path) -> Iterator[Callable[[], None]]:
    """Two processes of one thread that are started again once one has died. What is
    yielded raises TimeoutError where torchrun has given up."""
    config = {"spec": spec.to_wire(), "folder": str(folder), "every": every}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "3", "--monitor-interval", "0.1", str(PEERS / "torchrun_restarts.py")]
    environment = {**os.environ, **ALLOCATOR, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **OWN_STORE}
    with open(folder / "output", "wb") as output:
        process = subprocess.Popen([*command, json.dumps(config)], env=environment, stdout=output, stderr=output)

    def check_alive() -> None:
        if process.poll() is not None:
            raise TimeoutError(f"it has ended with exit code {process.returncode}")

    try:
        yield check_alive
    except TimeoutError as error:
        text = (folder / "output").read_text(encoding="utf-8", errors="replace")
        raise SystemExit(f"torchrun: {error}; it said:\n{text[-2000:]}") from error
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """With its processes, each of which has a session of its own."""
    try:
        own = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        own = []
    process.terminate()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for each in own:
        with suppress(psutil.NoSuchProcess):
            each.kill()


def _stamped(folder: Path) -> dict[int, dict[int, int]]:
    """By process: when each of its steps was over. A line that is being written is left out."""
    found = {}
    for path in folder.glob("?-*"):
        whole = path.read_text(encoding="utf-8").rpartition("\n")[0]
        stamps = (line.split() for line in whole.splitlines())
        found[int(path.name.partition("-")[2])] = {int(step): int(at) for step, at in stamps}
    return {pid: steps for pid, steps in found.items() if steps}


def _kill(pid: int) -> int:
    """When it was killed, by CLOCK_MONOTONIC."""
    killed_ns = time.monotonic_ns()
    os.kill(pid, signal.SIGKILL)
    return killed_ns


def _until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come within {PATIENCE_SECONDS:.0f} s")
        time.sleep(POLL_SECONDS)
