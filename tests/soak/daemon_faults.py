"""F4, F6, F13 and the fork server: the daemon goes, with jobs that are unfinished, and another comes in its place."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import psutil
from deck import Row
from jobs import JOBS
from stage import ORPHAN_SECONDS, SECONDS, Stage, until
from worker_faults import MOST_KILLS

from weft.client.client import DaemonUnreachable, RequestRefused
from weft.spec.job_spec import JobSpec

MOST_ENDS = 3  # of daemons, in one try
NUM_JOBS = 2  # that wait or run beside each other

End = Callable[[Any], None]


def kill_daemon(daemon: Any) -> None:
    daemon.kill()


def kill_everything(daemon: Any) -> None:
    for process in daemon.processes():
        with contextlib.suppress(psutil.NoSuchProcess):  # the kernel was faster
            process.kill()
    daemon.process.wait(SECONDS)


def kill_fork_server(daemon: Any) -> None:
    daemon.processes()
    servers = until(lambda: children_of(daemon), "a fork server")
    servers[0].kill()
    assert daemon.process.wait(SECONDS) == 1
    assert "the fork server died" in daemon.log()


def terminate(daemon: Any) -> None:
    assert daemon.stop() == 0


def children_of(daemon: Any) -> list[psutil.Process]:
    assert daemon.process.poll() is None, daemon.log()
    children: list[psutil.Process] = psutil.Process(daemon.process.pid).children()
    return children


def end_daemons(end: End, own_start: bool, stage: Stage, chance: random.Random) -> Counter[str]:
    """Two jobs; the daemon ends at random moments, once to three times, and starts again. All that was acknowledged is
    there once, complete, with the same bits.

    own_start: a later end may come while the daemon starts.
    """
    names = [chance.choice(list(JOBS)) for _ in range(NUM_JOBS)]
    longest = max(stage.undisturbed(name).seconds for name in names)
    jobs = {stage.submit(name): name for name in names}
    known = all_jobs(stage)
    daemon = stage.daemon
    fired: Counter[str] = Counter()
    for number in range(chance.randint(1, MOST_ENDS)):
        starting = bool(number) and own_start and chance.random() < 0.5
        if not starting:
            until(partial(answers, daemon), "its answer")
        time.sleep(chance.uniform(0.0, 1.5 if starting else longest))
        unfinished = starting or not all(stage.has_ended(job) for job in jobs)
        end(daemon)
        daemon.until_nothing_lives(ORPHAN_SECONDS)
        assert not daemon.names_in_shared_memory(), daemon.names_in_shared_memory()
        fired["while it starts" if starting else "while jobs run" if unfinished else "when they have ended"] += 1
        begin(daemon)
        stage.is_another()
    daemon.until_idle()
    for job, name in jobs.items():
        stage.check(job, name)
    assert all_jobs(stage).keys() == known.keys(), "jobs that were acknowledged"
    return fired


def all_jobs(stage: Stage) -> dict[str, str]:
    listed = [(job["job"], job["state"]) for job in stage.daemon.client.jobs()]
    assert len(dict(listed)) == len(listed), "a job is listed twice"
    return dict(listed)


def begin(daemon: Any) -> None:
    """Another process in the same directories. It may end before it answers."""
    with (daemon.home / "daemon.log").open("ab") as log:
        daemon.process = subprocess.Popen(
            daemon.command(), stdout=log, stderr=log, env=daemon.environment, start_new_session=True
        )


def go_on_after_a_kill(stage: Stage) -> None:
    """Of the daemon."""
    stage.daemon.kill()
    stage.daemon.until_nothing_lives(ORPHAN_SECONDS)
    begin(stage.daemon)
    until(partial(answers, stage.daemon), "its answer")
    stage.is_another()


def answers(daemon: Any) -> bool:
    assert daemon.process.poll() is None, f"the daemon died:\n{daemon.log()}"
    try:
        daemon.client.status()
    except (DaemonUnreachable, RequestRefused):
        return False
    return True


# --- the balance

NUM_BALANCED = 40
KINDS = ("completed", "completed", "completed", "failed", "cancelled")
SMALL = 8  # steps
ANY_SHARE = 0.25  # of those that complete are of any preset and model, which cost several times as much
WORKER_KILLS, DAEMON_KILLS = 6, 2
MOST_HITS = MOST_KILLS  # of one job by kills of its workers


def balance(stage: Stage, chance: random.Random) -> Counter[str]:
    """Small jobs are submitted while workers, clients and the daemon die: each has exactly one end, the right one."""
    daemon = stage.daemon
    wanted = {f"balanced-{chance.getrandbits(40)}-{number}": chance.choice(KINDS) for number in range(NUM_BALANCED)}
    daemon_kills = {chance.randrange(5, NUM_BALANCED) for _ in range(DAEMON_KILLS)}
    worker_kills = {chance.randrange(NUM_BALANCED) for _ in range(WORKER_KILLS)}
    before = all_jobs(stage)
    cancelled: dict[str, str] = {}
    hit: Counter[str] = Counter()
    for number, (job, kind) in enumerate(wanted.items()):
        spec = small_spec(stage, kind, chance)
        submit_dying(daemon, spec, job, chance)
        assert daemon.submit(spec, job=job) == job
        if kind == "cancelled":
            cancelled[job] = daemon.client.cancel(job)
        if number in worker_kills:
            kill_a_worker(daemon, chance, hit)
        if number in daemon_kills:
            time.sleep(chance.uniform(0.0, 0.5))
            go_on_after_a_kill(stage)
    daemon.until_idle()
    ends = {job: state for job, state in all_jobs(stage).items() if job not in before}
    expected = {job: cancelled.get(job, kind) for job, kind in wanted.items()}
    differ = {job: (ends.get(job), expected.get(job)) for job in ends.keys() | expected.keys()}
    assert ends == expected, {job: pair for job, pair in differ.items() if pair[0] != pair[1]}
    return Counter(ends.values())


def small_spec(stage: Stage, kind: str, chance: random.Random) -> Any:
    """Of those that complete some are any of the soak's jobs, cut short."""
    if kind == "completed" and chance.random() < ANY_SHARE:
        job = JOBS[chance.choice(list(JOBS))]
        tables = job.spec(stage.daemon).to_wire()
        shorter = {"steps": SMALL} if job.model is None else {"epochs": 1}
        return JobSpec.parse(tables | {"job": tables["job"] | shorter})
    source = "def workload():\n    raise ValueError('on purpose')\n" if kind == "failed" else None
    given = {"source": source} if source else {}
    steps = SMALL if kind == "completed" else 100_000_000
    return stage.daemon.spec(**given, strategy={"microbatches": 2}, steps=steps)


def submit_dying(daemon: Any, spec: Any, job: str, chance: random.Random) -> None:
    """A client that dies before it has its answer, now and then: the job is whole or absent."""
    if chance.random() < 0.5:
        with daemon.connected() as dying:
            dying.send({"id": 1, "verb": "submit", "spec": spec.to_wire(), "job": job})


def kill_a_worker(daemon: Any, chance: random.Random, hit: Counter[str]) -> None:
    """hit: how often each job has been; one that is hit again and again is given up, and should be."""
    workers = [worker for worker in daemon.client.status()["workers"] if worker["job"] and worker["pid"]]
    held = [worker for worker in workers if hit[worker["job"]] < MOST_HITS]
    if held:
        worker = chance.choice(held)
        hit[worker["job"]] += 1
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(worker["pid"], signal.SIGKILL)


ROWS: Sequence[Row] = (
    Row(
        id="F4",
        what="SIGKILL of the daemon, its own start included, and restart",
        asked=100,
        unit="kills",
        each=2,
        play=partial(end_daemons, kill_daemon, True),
    ),
    Row(
        id="F4",
        variant="fork-server",
        what="SIGKILL of the fork server, and restart",
        asked=50,
        unit="kills",
        each=2,
        play=partial(end_daemons, kill_fork_server, False),
    ),
    Row(
        id="F6",
        what="SIGKILL of everything at once, and restart",
        asked=20,
        unit="times",
        each=2,
        play=partial(end_daemons, kill_everything, True),
    ),
    Row(
        id="F13",
        what="SIGTERM with half a second to drain, and restart",
        asked=50,
        unit="signals",
        each=2,
        play=partial(end_daemons, terminate, False),
    ),
    Row(
        id="balance",
        what="small jobs while workers, clients and the daemon are killed: ends, of jobs submitted",
        asked=1000,
        unit="jobs",
        each=NUM_BALANCED,
        play=balance,
    ),
)
