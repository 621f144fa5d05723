"""What happens to a job while it is under way. None of it changes a bit of what comes of it.

Each gives the job whose result is to be looked at: another one where it goes on as that.
"""

from __future__ import annotations

import os
import random
import runpy
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from weft.client.client import RequestRefused
from weft.spec.admission import problem_of_spec
from weft.spec.field_errors import SpecError
from weft.spec.job_spec import JobSpec

HERE = Path(__file__).resolve().parent
_REAL = runpy.run_path(str(HERE / "real_daemon.py"))
until, SECONDS, TERMINAL = (_REAL[name] for name in ("until", "SECONDS", "TERMINAL"))

SLOW_SECONDS = 0.8  # that a job is slowed down by, in all and about
AFTER = (0.0, 0.1, 0.3, 0.5)  # seconds from the moment on when it trains
NUM_SAMPLES = 20  # that jobs by chance have, or one less
EVERYBODY = {"replicas": [{"device": "gpu", "stages": 2}, {"stages": 4}]}  # of the shared machine


def to_disturb(spec: JobSpec, chance: random.Random) -> JobSpec:
    """The same, slowed down; half of those that can go on from any iteration do so."""
    tables = spec.to_wire()
    steps = spec.job.epochs * max(1, NUM_SAMPLES // spec.job.batch_size)
    milliseconds = 1000 * SLOW_SECONDS / (steps * max(spec.strategy.microbatch_counts))
    file = os.path.relpath(spec.entry_file, HERE)
    tables["job"] |= {
        "entry": "slow_jobs.py:workload",
        "args": {"file": file, "args": dict(spec.job.args), "milliseconds": milliseconds},
    }
    slow = JobSpec.parse(tables | {"directory": str(HERE)})
    if chance.random() < 0.5:
        with suppress(SpecError):
            by_iteration = JobSpec.parse(slow.to_wire() | {"strategy": tables["strategy"] | {"recovery": "iteration"}})
            return slow if problem_of_spec(by_iteration) else by_iteration
    return slow


def begun(machine: Any, job: str, chance: random.Random) -> None:
    """It is inspected, or has trained for a while; or is over."""
    state = chance.choice(("planning", "running", "running", "running"))
    until(lambda: machine.client.show(job)["state"] in (state, "running", *TERMINAL), f"{job} is {state}")
    if state == "running":
        time.sleep(chance.choice(AFTER))  # no event: whatever it is at then is disturbed


def kill_a_worker(machine: Any, job: str, chance: random.Random) -> str:
    """The crew has another one soon."""
    if pids := list(machine.worker_pids(job).values()):
        with suppress(ProcessLookupError):
            os.kill(chance.choice(pids), signal.SIGKILL)
    return job


def kill_the_directory(machine: Any, job: str, chance: random.Random) -> str:
    with suppress(IndexError, psutil.NoSuchProcess):
        machine.directory().kill()
    return job


def pause(machine: Any, job: str, chance: random.Random) -> str:
    """It goes on at once."""
    with suppress(RequestRefused):  # it has ended, or keeps no snapshots
        if machine.client.pause(job) == "paused":
            assert machine.client.resume(job) == {"job": job, "created": False}
    return job


def preempt(machine: Any, job: str, chance: random.Random) -> str:
    urgent = machine.submit(machine.spec(strategy=EVERYBODY, steps=3), priority=1)
    result = machine.client.wait(urgent, timeout=SECONDS)
    assert result["state"] == "completed", result
    return job


def replace_the_daemon(machine: Any, job: str, chance: random.Random) -> str:
    assert machine.client.replace()["problem"] == ""
    return job


def cancel(machine: Any, job: str, chance: random.Random) -> str:
    """It goes on as another job, from its newest checkpoint, or from the beginning."""
    if machine.client.cancel(job) != "cancelled":
        return job
    goes_on = machine.client.resume if machine.client.show(job)["checkpoint"] else machine.client.restart
    return str(goes_on(job)["job"])


DISTURBANCES: Mapping[str, Callable[[Any, str, random.Random], str]] = {
    "a worker is killed": kill_a_worker,
    "the directory is killed": kill_the_directory,
    "it is paused": pause,
    "it is preempted": preempt,
    "the daemon is replaced": replace_the_daemon,
    "it is cancelled": cancel,
}


def disturb(machine: Any, job: str, chance: random.Random, how: str | None = None) -> str:
    """how: one of DISTURBANCES; by chance."""
    begun(machine, job, chance)
    return DISTURBANCES[how or chance.choice(tuple(DISTURBANCES))](machine, job, chance)
