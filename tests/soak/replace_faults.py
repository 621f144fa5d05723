"""`weft daemon --replace`, in every phase of a job, now and then asked by two at once or beside a kill."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from daemon_faults import all_jobs, answers, begin
from deck import Row
from jobs import JOBS, WITH_CHECKPOINTS
from phases import PHASES, phase_of, reach
from stage import ORPHAN_SECONDS, SECONDS, Stage, until
from worker_faults import kill_one

from weft.client.client import Client, DaemonUnreachable, RequestRefused

WRITING = "writing a checkpoint"
LONGEST_SECONDS = 3.0  # that it takes, about, with others beside it
MOST = 2  # of one job; each takes about as long as a daemon's start
REPLAY = "is run again by other workers"  # of a job that verifies so, in an attempt of its own
ANOTHER = "somebody else is replacing it"  # what the second of two is told


def replace_daemons(stage: Stage, chance: random.Random) -> Counter[str]:
    """One job, to the same bits; where nothing was killed, in its first attempt, and without a word of a recovery."""
    phases = [chance.choice((*PHASES, WRITING)) for _ in range(chance.randint(1, MOST))]
    name = chance.choice(WITH_CHECKPOINTS if WRITING in phases else list(JOBS))
    stage.undisturbed(name)
    job, known = stage.submit(name), all_jobs(stage)
    fired: Counter[str] = Counter()
    for phase in phases:
        way = chance.choice((replace, replace, replace_twice, replace_beside_a_kill, replace_and_kill))
        fired[way(stage, job, phase, chance)] += 1
    stage.check(job, name)
    log = stage.daemon.log_of(job)
    again = [line for line in log.splitlines() if "recovering" in line or ("(attempt " in line and REPLAY not in line)]
    assert any("kill" in kind for kind in fired) or not again, log
    assert all_jobs(stage).keys() == known.keys(), "jobs that were acknowledged"
    return fired


def replace(stage: Stage, job: str, phase: str, chance: random.Random) -> str:
    hit = reached(stage, job, phase, chance)
    assert ask(stage) == ""
    return hit


def replace_twice(stage: Stage, job: str, phase: str, chance: random.Random) -> str:
    """At once: one of them or each after the other does it."""
    hit = reached(stage, job, phase, chance)
    with asking(stage) as first, asking(stage) as second:
        pass
    told = first + second
    refused = [each for each in told if each]
    assert len(told) == 2 > len(refused), told
    assert all(ANOTHER in each for each in refused), told
    return "by two at once" if refused else hit


def replace_beside_a_kill(stage: Stage, job: str, phase: str, chance: random.Random) -> str:
    """Of a worker of the job, a moment before or while the daemon is another."""
    hit = reached(stage, job, phase, chance)
    with asking(stage) as told:
        lost = kill_one(stage, job, "", chance)
    assert told == [""], told
    return hit if lost == "too late" else "beside a kill of a worker"


def replace_and_kill(stage: Stage, job: str, phase: str, chance: random.Random) -> str:
    """The daemon, at a random moment of its becoming another: what it leaves goes as after any end of it."""
    reached(stage, job, phase, chance)
    daemon = stage.daemon
    with asking(stage):
        time.sleep(chance.uniform(0.0, LONGEST_SECONDS))
        daemon.kill()
        daemon.until_nothing_lives(ORPHAN_SECONDS)
        assert not daemon.names_in_shared_memory(), daemon.names_in_shared_memory()
        begin(daemon)
        until(partial(answers, daemon), "its answer")
    stage.is_another()
    return "beside a kill of the daemon"


def reached(stage: Stage, job: str, phase: str, chance: random.Random) -> str:
    """The phase that the job is in, once it is in this one or has ended."""
    if phase == WRITING:
        until(lambda: stage.daemon.savers() or stage.has_ended(job), "a saver")
        if stage.daemon.savers():
            return WRITING
    else:
        reach(stage, job, phase, chance)
    hit = phase_of(stage.daemon.client.show(job))
    if hit not in PHASES:
        return "when it has ended"
    return phase if phase == "snapshotting" and hit == "running" else hit


@contextmanager
def asking(stage: Stage) -> Iterator[list[str]]:
    """What it was told is there once this is over."""
    told: list[str] = []
    thread = threading.Thread(target=lambda: told.append(ask(stage)))
    thread.start()
    yield told
    thread.join(SECONDS)


def ask(stage: Stage) -> str:
    """What is wrong; nothing where the next daemon has all that there was."""
    try:
        told = Client(stage.daemon.socket, timeout=SECONDS).replace()
    except (DaemonUnreachable, RequestRefused) as error:
        return str(error)
    return str(told["problem"])


ROWS: Sequence[Row] = (
    Row(
        id="replace",
        what="`weft daemon --replace`, some asked twice at once or beside a kill",
        asked=50,
        unit="replacements",
        play=replace_daemons,
    ),
)
