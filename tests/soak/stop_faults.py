"""Jobs that are paused or preempted at a random moment, some of them while a worker or the daemon is killed."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Sequence

from daemon_faults import go_on_after_a_kill
from deck import Row
from jobs import JOBS
from stage import AT_REST, SECONDS, Stage
from worker_faults import kill_one

from weft.client.client import RequestRefused

KEEP_NONE = {"without recovery", "parameter-server"}  # snapshots; such a job is not paused
STOPPABLE = [name for name in JOBS if name not in KEEP_NONE]
MOST_STOPS = 2


def stop_jobs(stage: Stage, chance: random.Random) -> Counter[str]:
    """One job, stopped once or twice; it ends with the bits of the one that never was."""
    name = chance.choice(STOPPABLE)
    lasts = stage.undisturbed(name).seconds
    job = stage.submit(name)
    fired: Counter[str] = Counter()
    for _ in range(chance.randint(1, MOST_STOPS)):
        time.sleep(chance.uniform(0.0, lasts))
        way = chance.choice((pause, pause_and_kill_worker, pause_and_kill_daemon, preempt))
        fired[way(stage, job, chance)] += 1
    stage.check(job, name)
    del fired["too late"]
    return fired


def pause(stage: Stage, job: str, chance: random.Random) -> str:
    if not paused(stage, job):
        return "too late"
    stage.daemon.client.resume(job)
    return "paused"


def pause_and_kill_worker(stage: Stage, job: str, chance: random.Random) -> str:
    """Beside each other: the kill may come before, while or after it stops."""
    asked = threading.Thread(target=paused, args=(stage, job))
    asked.start()
    hit = kill_one(stage, job, "running", chance) if chance.random() < 0.5 else kill_one(stage, job, "", chance)
    asked.join(SECONDS)
    if stage.state_of(job) != "paused":
        return "too late"
    stage.daemon.client.resume(job)
    return "paused" if hit == "too late" else "paused beside a kill"


def pause_and_kill_daemon(stage: Stage, job: str, chance: random.Random) -> str:
    if not paused(stage, job):
        return "too late"
    go_on_after_a_kill(stage)
    assert stage.state_of(job) == "paused"
    stage.daemon.client.resume(job)
    return "paused over a kill of the daemon"


def preempt(stage: Stage, job: str, chance: random.Random) -> str:
    """By a job that needs all the workers that there are."""
    if stage.has_ended(job):
        return "too late"
    daemon = stage.daemon
    urgent = daemon.submit(daemon.spec(strategy={"stages": 2}, steps=4), priority=1)
    assert daemon.client.wait(urgent, SECONDS)["state"] == "completed", daemon.log_of(urgent)
    return "preempted" if f"preempted by {urgent}" in daemon.log_of(job) else "too late"


def paused(stage: Stage, job: str) -> bool:
    """Whether it is, or has ended before."""
    try:
        state = stage.daemon.client.pause(job)
    except RequestRefused:  # it may just have ended
        if not stage.has_ended(job):
            raise
        return False
    assert state in AT_REST, (state, stage.daemon.log_of(job))
    return bool(state == "paused")


ROWS: Sequence[Row] = (
    Row(
        id="stops",
        what="jobs paused and preempted, some beside a kill",
        asked=100,
        unit="stops",
        play=stop_jobs,
    ),
)
