"""Why a job waits, as `weft show` tells it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from weft.scheduler.core.core import Core
from weft.scheduler.core.events import CancelRequested, DrainRequested, JobSubmitted, WorkerJoined, WorkerLost
from weft.scheduler.core.waiting import why

Submit = Callable[..., None]


@pytest.fixture
def core() -> Core:
    core = Core({f"{kind}-{number}": kind for kind in ("cpu", "loader") for number in range(2)})
    for worker in core.workers.values():
        core.handle(WorkerJoined(worker=worker.name), 0.0)
    return core


@pytest.fixture
def submit(core: Core) -> Submit:
    def submit(name: str, stages: int = 1, priority: int = 0) -> None:
        core.handle(JobSubmitted(job=name, needs={"cpu": stages, "loader": 1}, priority=priority), 0.0)

    return submit


def test_a_job_that_runs_does_not_wait(core: Core, submit: Submit) -> None:
    submit("a")
    assert why(core, "a") is None
    core.handle(CancelRequested(job="a"), 0.0)
    assert why(core, "a") is None, "it is ending"


def test_the_first_in_the_queue_is_told_what_it_lacks_and_who_has_it(core: Core, submit: Submit) -> None:
    submit("a")
    submit("wide", stages=2)
    assert why(core, "wide") == "it needs 2 cpu workers (1 free); a holds the others"


def test_every_kind_that_is_missing_is_named(core: Core, submit: Submit) -> None:
    submit("a")
    submit("b")
    submit("c")
    assert why(core, "c") == "it needs 1 cpu worker (0 free) and 1 loader worker (0 free); a, b hold the others"


def test_a_job_behind_one_that_comes_back_to_the_queue_is_told_which(core: Core, submit: Submit) -> None:
    """Its workers are free, and not its own before that one has its place."""
    submit("a")
    submit("urgent", stages=2, priority=1)  # a lets go for it
    core.handle(CancelRequested(job="urgent"), 0.0)
    submit("b")
    assert why(core, "b") == "it waits for what a needs, which lets go of its workers and goes on"


def test_a_job_behind_others_is_told_how_many_and_who_is_first(core: Core, submit: Submit) -> None:
    submit("running", stages=2)
    submit("x")
    submit("y")
    submit("z")
    submit("urgent", priority=9)
    assert why(core, "x") == "1 job stands before it, urgent first"
    assert why(core, "z") == "3 jobs stand before it, urgent first"
    assert why(core, "urgent") == "it needs 1 cpu worker (0 free); running holds the others"


def test_a_job_that_waits_for_workers_to_start_is_told_which(core: Core, submit: Submit) -> None:
    submit("a")
    core.handle(WorkerLost(worker="cpu-1", exit_code=1), 0.0)
    submit("b")
    assert why(core, "b") == "it waits for workers that are starting: cpu-1"


def test_a_job_in_a_daemon_that_drains_is_told_that_it_will_run_after_a_restart(core: Core, submit: Submit) -> None:
    submit("a", stages=2)
    submit("b")
    core.handle(DrainRequested(now=False), 0.0)
    assert why(core, "b") == "the daemon is shutting down and starts no more jobs; it will run after a restart"
    assert why(core, "a") is None
