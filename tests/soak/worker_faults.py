"""F1, F2, F5: processes of a job that are killed, or that the job's own code ends."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections import Counter
from collections.abc import Sequence
from functools import partial

import psutil
from deck import Row
from jobs import JOBS, PACED, PAUSE_SECONDS, STEPS, WITH_CHECKPOINTS
from phases import PHASES, phase_of, reach
from stage import SECONDS, Stage, until

MOST_KILLS = 2  # of one job: a third without any progress between them is no accident
NUM_KILLS = (1, MOST_KILLS, MOST_KILLS)  # a job's start and end cost more than a kill does


def kill_workers(stage: Stage, chance: random.Random) -> Counter[str]:
    """F1: one job, one to three of its workers, each in a phase drawn before."""
    name = chance.choice(list(JOBS))
    stage.undisturbed(name)
    job = stage.submit(name)
    fired: Counter[str] = Counter()
    for phase in phases_of(chance, chance.choice(NUM_KILLS)):
        fired[kill_one(stage, job, phase, chance)] += 1
    stage.check(job, name)
    return without_misfires(fired)


def phases_of(chance: random.Random, number: int) -> list[str]:
    """By chance, in an order in which a job can come to all of them: it is inspected once, and saved at its end."""
    return sorted(chance.choices(PHASES, k=number), key=lambda phase: (phase != "inspecting", phase == "saving"))


def without_misfires(fired: Counter[str]) -> Counter[str]:
    del fired["too late"]
    return fired


def kill_one(stage: Stage, job: str, aimed: str, chance: random.Random) -> str:
    """One of the workers that the job has; the phase in which the daemon says that it hit, or "too late".

    aimed: "" is now.
    """
    num_before = num_losses(stage, job)
    held: list[int] = []
    if aimed == "saving":  # which is short: whom to kill is settled before
        reach(stage, job, "running", chance)
        held = workers_of(stage, job)
    if aimed:
        reach(stage, job, aimed, chance)
    shown = stage.daemon.client.show(job)
    held = held if aimed == "saving" else workers_of(stage, job)
    if not held:
        return "too late"
    with contextlib.suppress(ProcessLookupError):
        os.kill(chance.choice(held), signal.SIGKILL)
    until(lambda: num_losses(stage, job) > num_before or stage.is_at_rest(job), f"{job} hears of it")
    if num_losses(stage, job) == num_before:
        return "too late"
    return aimed if aimed == "snapshotting" and phase_of(shown) == "running" else phase_of(shown)


def workers_of(stage: Stage, job: str) -> list[int]:
    return [each["pid"] for each in stage.daemon.client.status()["workers"] if each["job"] == job and each["pid"]]


def num_losses(stage: Stage, job: str) -> int:
    """As the job's log has them."""
    return str(stage.daemon.log_of(job)).count(" was killed")


def kill_directories(stage: Stage, chance: random.Random) -> Counter[str]:
    """F5: one job, and one to three times the directory's process, each in a phase drawn before."""
    name = chance.choice(list(JOBS))
    stage.undisturbed(name)
    job = stage.submit(name)
    fired: Counter[str] = Counter()
    for phase in phases_of(chance, chance.choice(NUM_KILLS)):
        reach(stage, job, phase, chance)
        hit = phase_of(stage.daemon.client.show(job))
        kill_directory(stage)
        fired[phase if hit == "running" else hit if hit in PHASES else "too late"] += 1
    stage.check(job, name)
    return without_misfires(fired)


def kill_directory(stage: Stage) -> None:
    directory = until(partial(known_directory, stage), "a directory")
    directory.kill()
    until(lambda: not directory.is_running(), "the end of the directory")


def known_directory(stage: Stage) -> psutil.Process | None:
    """None while another is on its way."""
    with contextlib.suppress(IndexError, psutil.NoSuchProcess):
        return stage.daemon.directory()
    return None


def kill_savers(stage: Stage, chance: random.Random) -> Counter[str]:
    """F1: the process that writes a checkpoint, which costs that checkpoint alone."""
    name = chance.choice(WITH_CHECKPOINTS)
    stage.undisturbed(name)
    job = stage.submit(name)
    found: list[psutil.Process] = []

    def is_seen() -> bool:
        found[:] = stage.daemon.savers()[:1]
        return bool(found) or stage.has_ended(job)

    until(is_seen, "a saver")
    for saver in found:
        saver.kill()
    stage.check(job, name)
    return Counter({"writing a checkpoint": 1} if found else {})


# --- what the job's own code does

FAULTS = {
    "raises": ("raise ValueError('on purpose')", ("user-error", 1), "ValueError: on purpose"),
    "_exit(17)": ("import os; os._exit(17)", ("worker-lost", 17), "exit code 17"),
    "abort": ("import os; os.abort()", ("worker-lost", 128 + signal.SIGABRT), "SIGABRT"),
    "segfault": ("import ctypes; ctypes.string_at(0)", ("worker-lost", 128 + signal.SIGSEGV), "SIGSEGV"),
}


def end_by_own_code(stage: Stage, chance: random.Random) -> Counter[str]:
    """F2: in the workload or in one call of the loss, beside another job that must not notice."""
    stage.undisturbed("one stage")
    kind = chance.choice(list(FAULTS))
    statement, (reason, code), told = FAULTS[kind]
    beside = stage.submit("one stage")
    arguments = {"pause": PAUSE_SECONDS, "fault": statement, "fault_at": chance.choice((0, 2, chance.randint(5, 200)))}
    spec = stage.daemon.spec(PACED, strategy={"microbatches": 2}, steps=STEPS, args=arguments)
    result = stage.daemon.client.wait(stage.daemon.submit(spec), SECONDS)
    log = stage.daemon.log_of(result["job"]) + str(result["error"])
    assert (result["state"], result["reason"], result["exit_code"]) == ("failed", reason, code), (arguments, log)
    assert told in log, (arguments, log)
    stage.check(beside, "one stage")
    assert "attempt 2" not in stage.daemon.log_of(beside)
    return Counter({kind: 1})


ROWS: Sequence[Row] = (
    Row(
        id="F1",
        what="SIGKILL of workers and loaders of a job",
        asked=500,
        unit="kills",
        each=2,
        play=kill_workers,
    ),
    Row(
        id="F1",
        variant="savers",
        what="SIGKILL of the process that writes a checkpoint",
        asked=20,
        unit="kills",
        play=kill_savers,
    ),
    Row(
        id="F2",
        what="the job's own code raises, exits, aborts, segfaults",
        asked=120,
        unit="jobs",
        play=end_by_own_code,
    ),
    Row(id="F5", what="SIGKILL of the directory", asked=50, unit="kills", each=2, play=kill_directories),
)
