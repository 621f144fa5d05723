"""Jobs that go on with another plan while they train, and what is killed before, while and after they do."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence

from daemon_faults import go_on_after_a_kill
from deck import Row
from jobs import REPLANNED
from phases import reach
from stage import Stage, until
from worker_faults import kill_directory, kill_one

MOMENTS = ("before", "during", "after")
WHAT = ("a worker", "the directory", "the daemon")
BEFORE_SECONDS, DURING_SECONDS, AFTER_SECONDS = 1.5, 0.5, 1.0  # a change takes some tenths of a second
TOLD, DONE = "another plan: ", "the other plan takes "  # in the job's log: it is to stop for it, it has gone on with it


def change_plans(stage: Stage, chance: random.Random) -> Counter[str]:
    """One job and one kill; it ends with the bits of the one that was left alone. It counts where the job has come to
    another plan, in whichever attempt."""
    name = chance.choice(list(REPLANNED))
    stage.undisturbed(name)
    job = stage.submit(name)
    come_to(stage, job, chance.choice(MOMENTS), chance)
    what, moment = chance.choice(WHAT), moment_of(stage, job)
    has_hit = moment is not None and kill(stage, job, what, chance)
    stage.check(job, name)
    return Counter({f"{what}, {moment}": 1} if has_hit and TOLD in stage.daemon.log_of(job) else {})


def come_to(stage: Stage, job: str, moment: str, chance: random.Random) -> None:
    """Or to its end."""
    if moment == "before":
        reach(stage, job, "running", chance)
        time.sleep(chance.uniform(0.0, BEFORE_SECONDS))
        return
    line, most = (TOLD, DURING_SECONDS) if moment == "during" else (DONE, AFTER_SECONDS)
    until(lambda: line in stage.daemon.log_of(job) or stage.is_at_rest(job), f"{line}in the log of {job}")
    time.sleep(chance.uniform(0.0, most))


def moment_of(stage: Stage, job: str) -> str | None:
    """In which it is, as its log has it; None once it has ended."""
    log = stage.daemon.log_of(job)
    if stage.is_at_rest(job):
        return None
    return "after" if DONE in log else "during" if TOLD in log else "before"


def kill(stage: Stage, job: str, what: str, chance: random.Random) -> bool:
    """Whether the job was still there."""
    if what == "a worker":
        return kill_one(stage, job, "", chance) != "too late"
    if what == "the directory":
        kill_directory(stage)
    else:
        go_on_after_a_kill(stage)
    return True


ROWS: Sequence[Row] = (
    Row(
        id="plans",
        what="SIGKILL of a worker, the directory or the daemon before, while and after a job changes its plan",
        asked=100,
        unit="kills",
        longest_seconds=60.0,
        play=change_plans,
    ),
)
