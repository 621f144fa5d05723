"""F3: processes of a job that are stopped, for five seconds or for ever, and code of its own that never returns."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

from deck import Row
from jobs import JOBS, PACED, PAUSE_SECONDS, STEPS
from phases import phase_of, reach
from stage import Stage, until
from worker_faults import known_directory, workers_of

from weft.spec.job_spec import JobSpec

HANG_SECONDS = 2.0  # the job's own, instead of a minute
STOPPED_SECONDS = 5.0
NEVER_RETURNS = """
import threading
if not os.path.exists('stuck'):
    open('stuck', 'x').close()
    print('never returns', flush=True)
    threading.Event().wait()
"""


def hang(stage: Stage, chance: random.Random) -> Counter[str]:
    """Whichever it is, the job ends with the bits of the undisturbed one, and with nobody's help."""
    way = chance.choice((stop_for_ever, stop_for_a_while, stop_directory, never_return))
    return way(stage, chance)


def stop_for_ever(stage: Stage, chance: random.Random) -> Counter[str]:
    name, job = begun(stage, chance, HANG_SECONDS)
    held = workers_of(stage, job)
    if not held or phase_of(stage.daemon.client.show(job)) != "running":
        stage.check(job, name)
        return Counter()
    victim = chance.choice(held)
    os.kill(victim, signal.SIGSTOP)
    try:
        until(lambda: hung(stage, job) or stage.has_ended(job), f"{job} is noticed")
    finally:
        with suppress(ProcessLookupError):  # one that the job had no more need of
            os.kill(victim, signal.SIGCONT)
    stage.check(job, name)
    return Counter({"a worker, for ever": hung(stage, job)})


def stop_for_a_while(stage: Stage, chance: random.Random) -> Counter[str]:
    """For less than what makes a hang: nothing is replaced."""
    name, job = begun(stage, chance, 60.0)
    held = workers_of(stage, job)
    for victim in held[:1]:
        os.kill(victim, signal.SIGSTOP)
        time.sleep(STOPPED_SECONDS)
        os.kill(victim, signal.SIGCONT)
    stage.check(job, name)
    assert not hung(stage, job)
    return Counter({"a worker, for 5 s": len(held[:1])})


def stop_directory(stage: Stage, chance: random.Random) -> Counter[str]:
    """It is told to go on, or replaced."""
    name = chance.choice(list(JOBS))
    stage.undisturbed(name)
    until(lambda: known_directory(stage) is not None, "a directory")
    directory = stage.daemon.directory()
    directory.suspend()
    try:
        stage.check(stage.submit(name), name)
    finally:
        if directory.is_running():
            directory.resume()
    return Counter({"the directory": 1})


def never_return(stage: Stage, chance: random.Random) -> Counter[str]:
    name = chance.choice(("one stage", "pipeline"))
    stage.undisturbed(name)
    arguments = {"pause": PAUSE_SECONDS, "fault": NEVER_RETURNS, "fault_at": chance.randint(20, 2 * STEPS - 40)}
    strategy = JOBS[name].strategy
    spec = stage.daemon.spec(PACED, strategy=strategy, steps=STEPS, args=arguments, hang_seconds=HANG_SECONDS)
    job = stage.daemon.submit(spec)
    stage.check(job, name)
    assert hung(stage, job)
    return Counter({"code that never returns": 1})


def begun(stage: Stage, chance: random.Random, hang_seconds: float) -> tuple[str, str]:
    """(name, job) of one that runs, for a random time."""
    name = chance.choice([name for name in JOBS if JOBS[name].model is None])
    stage.undisturbed(name)
    tables = JOBS[name].spec(stage.daemon).to_wire()
    job = stage.daemon.submit(JobSpec.parse(tables | {"job": tables["job"] | {"hang_seconds": hang_seconds}}))
    reach(stage, job, "running", chance)
    return name, job


def hung(stage: Stage, job: str) -> int:
    """How often the job's log says that a hang was ended."""
    return str(stage.daemon.log_of(job)).count("recovering (hung)")


ROWS: Sequence[Row] = (
    Row(
        id="F3",
        what="SIGSTOP of a worker or the directory, code that never returns",
        asked=60,
        unit="hangs",
        longest_seconds=60.0,
        play=hang,
    ),
)
