"""Spares: copies of prepared workers, one of which takes the place of a worker that is killed.

The jobs of test_recovery.py, with `spares = true`; their function writes down in which process it runs.
"""

from __future__ import annotations

import os
import runpy
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from weft.spec.job_spec import JobSpec

_SURVIVORS = runpy.run_path(str(Path(__file__).with_name("test_survivors.py")))
_RECOVERY, SOURCE = _SURVIVORS["_RECOVERY"], _SURVIVORS["SOURCE"]
processes_of = _SURVIVORS["processes_of"]
held_behind_a_snapshot, check_is_undisturbed, until, SECONDS, STRATEGIES, KnownKeyDaemon, held_blocks = (
    _RECOVERY[name]
    for name in (
        *("held_behind_a_snapshot", "check_is_undisturbed", "until", "SECONDS", "STRATEGIES", "KnownKeyDaemon"),
        "held_blocks",
    )
)
num_held_blocks = runpy.run_path(str(Path(__file__).with_name("real_daemon.py")))["num_held_blocks"]
PIPELINE = STRATEGIES["pipeline"] | {"spares": True}
LAST = "cpu-1"  # its stage, which has the loss, stands at the gate: others let go of nothing before it is opened
BEFORE_THE_WORKLOAD = "    torch.manual_seed(5)\n"
BUSY = {
    "a thread": "    import threading\n    threading.Thread(target=threading.Event().wait, daemon=True).start()\n",
    "a process": "    import subprocess\n    subprocess.Popen(['sleep', '600'])\n",
    "much memory": "    global kept\n    kept = torch.ones(100 << 20)\n",
}


def kill(daemon: Any, job: str, worker: str) -> psutil.Process | None:
    """Of the job. Its spare, if it has one."""
    process = psutil.Process(daemon.worker_pids(job)[worker])
    spare = next(iter(process.children()), None)
    process.kill()
    return spare


def until_runs(daemon: Any, job: str, attempt: int) -> None:
    """Or waits at a gate, in the attempt."""
    daemon.until_logged(job, f"(attempt {attempt})")
    until(lambda: daemon.client.show(job)["state"] in ("running", "completed"), "the next attempt")


@pytest.mark.slow(seconds=6)
@pytest.mark.pairs(3, strategy=("one stage", *(name for name in STRATEGIES if name != "one stage")))
def test_a_spare_goes_on_and_the_function_runs_nowhere(daemon: Any, strategy: str) -> None:
    with held_behind_a_snapshot(daemon, STRATEGIES[strategy] | {"spares": True}, source=SOURCE) as (job, spec, gate):
        ran = processes_of(spec)
        spare = kill(daemon, job, "cpu-0")
        assert spare is not None
        gate.open()
        until_runs(daemon, job, attempt=2)
        assert daemon.worker_pids(job).get("cpu-0", spare.pid) == spare.pid, "or it has ended already"
        after = processes_of(spec)[len(ran) :]
        check_is_undisturbed(daemon, job, spec)
    assert after == []
    assert "starts again" not in daemon.log_of(job)
    daemon.until_idle()
    assert daemon.worker_pids()["cpu-0"] == spare.pid, "it stays a worker"


@pytest.mark.days(2)
@pytest.mark.slow(seconds=5)
def test_a_worker_that_has_taken_anothers_place_is_prepared_anew_where_it_is_lost_too(daemon: Any) -> None:
    with held_behind_a_snapshot(daemon, PIPELINE, source=SOURCE) as (job, spec, gate):
        ran = processes_of(spec)
        assert kill(daemon, job, LAST) is not None
        until_runs(daemon, job, attempt=2)
        assert processes_of(spec) == ran
        assert kill(daemon, job, LAST) is None
        until_runs(daemon, job, attempt=3)
        assert len(processes_of(spec)) == len(ran) + 1
        assert psutil.Process(daemon.worker_pids(job)["cpu-0"]).children() != [], "the other one has its own"
        gate.open()
        check_is_undisturbed(daemon, job, spec)
    assert "starts again" not in daemon.log_of(job)


@pytest.mark.slow(seconds=4)
@pytest.mark.pairs(what=tuple(BUSY))  # one a day
def test_where_a_copy_would_lack_something_or_take_much_there_is_none(daemon: Any, what: str) -> None:
    source = SOURCE.replace(BEFORE_THE_WORKLOAD, BUSY[what] + BEFORE_THE_WORKLOAD, 1)
    with held_behind_a_snapshot(daemon, PIPELINE, source=source) as (job, spec, gate):
        ran = processes_of(spec)
        children = [psutil.Process(pid).children() for pid in daemon.worker_pids(job).values()]
        assert [each.name() for own in children for each in own if each.name() != "sleep"] == []
        kill(daemon, job, LAST)
        until_runs(daemon, job, attempt=2)
        assert len(processes_of(spec)) == len(ran) + 1
        gate.open()
        check_is_undisturbed(daemon, job, spec)


@pytest.mark.slow(seconds=4)
def test_memory_that_is_free_again_is_none_that_a_copy_would_take(daemon: Any) -> None:
    """The heap keeps it. A worker that had had a large job had no spare from then on."""
    once_much = "    [torch.ones(1 << 18) for _ in range(400)]\n"
    source = SOURCE.replace(BEFORE_THE_WORKLOAD, once_much + BEFORE_THE_WORKLOAD, 1)
    with held_behind_a_snapshot(daemon, PIPELINE, source=source) as (job, _, gate):
        workers = [psutil.Process(pid) for pid in daemon.worker_pids(job).values()]
        assert sorted(len(each.children()) for each in workers) == [0, 1, 1], "the loader has none"
        gate.open()


@pytest.mark.slow(seconds=5)
def test_behind_a_job_that_was_profiled_there_are_some(daemon: Any) -> None:
    """torch.profiler leaves a thread. Its workers were kept, and had no spare from then on."""
    spec = daemon.spec(strategy={"stages": 2}, steps=8)
    profiled = daemon.run(JobSpec.parse(spec.to_wire() | {"profile": {"first": 2, "iterations": 3}}))
    assert profiled["state"] == "completed", daemon.log_of(profiled["job"])
    daemon.until_idle()
    with held_behind_a_snapshot(daemon, PIPELINE, source=SOURCE) as (job, _, gate):
        assert kill(daemon, job, LAST) is not None
        gate.open()


@pytest.mark.slow(seconds=4)
@pytest.mark.pairs(first=("the spare", "the worker"))  # one a day
def test_a_spare_that_is_killed_too_costs_what_there_is_without(daemon: Any, first: str) -> None:
    with held_behind_a_snapshot(daemon, PIPELINE, source=SOURCE) as (job, spec, gate):
        ran = processes_of(spec)
        worker = psutil.Process(daemon.worker_pids(job)[LAST])
        (spare,) = worker.children()
        for each in (spare, worker) if first == "the spare" else (worker, spare):
            each.kill()
        until_runs(daemon, job, attempt=2)
        gate.open()
        check_is_undisturbed(daemon, job, spec)
    assert len(processes_of(spec)) > len(ran)
    assert not spare.is_running()


@pytest.fixture
def known() -> Iterator[Any]:
    with KnownKeyDaemon(workers=2).serving() as running:
        yield running


@pytest.mark.days(3)
@pytest.mark.slow(seconds=6)
def test_of_a_job_that_is_cancelled_before_it_goes_on_a_spare_keeps_nothing(known: Any) -> None:
    """It is there as a worker before the others have let go, and nothing else would tell it."""
    before = held_blocks(known)
    with held_behind_a_snapshot(known, PIPELINE, source=SOURCE) as (job, _, gate):
        assert known.client.show(job)["state"] == "running"
        spare = kill(known, job, "cpu-0")  # the other stage stands at the gate
        assert spare is not None
        until(lambda: known.worker_pids().get("cpu-0") == spare.pid, "the spare as the worker")
        until(lambda: known.client.show(job)["state"] == "recovering", "the loss")
        assert num_held_blocks(spare.pid) > 0, "nobody has told it anything"
        known.client.cancel(job, discard=True)
        gate.open()
        known.client.wait(job, SECONDS)
    known.until_idle()
    until(lambda: held_blocks(known) == before, "what it has mapped")
    assert spare.is_running(), "it is a worker as any other"
    assert known.run(known.spec(strategy={"stages": 2}))["state"] == "completed"


@pytest.mark.slow(seconds=5)
def test_a_job_that_is_given_up_leaves_no_spare(daemon: Any) -> None:
    begin = daemon.gate()  # at which each later attempt stands: one that comes further than ever begins to count anew
    begin.open()
    with held_behind_a_snapshot(daemon, PIPELINE, source=SOURCE, others={begin: 1}) as (job, _, gate):
        begin.close()
        spares = []
        for attempt in range(2, 5):
            spares.append(kill(daemon, job, LAST))
            if attempt < 4:
                until_runs(daemon, job, attempt)
        begin.open()
        gate.open()
        failed = daemon.client.wait(job, SECONDS)
        assert (failed["state"], failed["reason"]) == ("failed", "worker-lost")
    daemon.until_idle()
    workers = set(daemon.worker_pids().values())
    assert all(psutil.Process(pid).children() == [] for pid in workers)
    others = [each for each in daemon.fork_server().children() if each.pid not in workers]
    assert len(others) == 1, "the directory"
    assert [spare is None for spare in spares] == [False, True, True], "who takes a place while others wait has none"
    assert not any(spare.is_running() for spare in spares if spare is not None)


@pytest.mark.days(3)
@pytest.mark.slow(seconds=5)
@pytest.mark.pairs(whom=("the daemon", "the fork server"))  # one a day
def test_with_the_daemon_and_the_fork_server_spares_end_too(own_daemon: Callable[..., Any], whom: str) -> None:
    daemon = own_daemon()
    with held_behind_a_snapshot(daemon, PIPELINE, source=SOURCE) as (job, _, _):
        spares = [each for pid in daemon.worker_pids(job).values() for each in psutil.Process(pid).children()]
        kill(daemon, job, LAST)
        until_runs(daemon, job, attempt=2)
        victim = daemon.process.pid if whom == "the daemon" else daemon.fork_server().pid
        os.kill(victim, signal.SIGKILL)
        until(lambda: not any(each.is_running() for each in spares), "their end")
        daemon.process.wait(SECONDS)
    daemon.start()


@pytest.mark.days(3)
@pytest.mark.slow(seconds=6)
def test_a_daemon_that_has_taken_over_has_them_too(own_daemon: Callable[..., Any]) -> None:
    daemon = own_daemon()
    with held_behind_a_snapshot(daemon, PIPELINE, source=SOURCE) as (job, spec, gate):
        ran = processes_of(spec)
        assert daemon.client.replace()["problem"] == ""
        spare = kill(daemon, job, LAST)
        assert spare is not None
        until_runs(daemon, job, attempt=2)
        assert daemon.worker_pids(job)[LAST] == spare.pid
        gate.open()
        check_is_undisturbed(daemon, job, spec)
    assert processes_of(spec)[: len(ran)] == ran


@pytest.mark.slow(seconds=4)
def test_what_a_jobs_code_has_left_behind_is_reaped_when_it_ends(daemon: Any) -> None:
    """It is the fork server's child, as its worker's spare would be."""
    leaves = (
        "    import subprocess\n"
        "    subprocess.run(['setsid', '--fork', 'sh', '-c', 'echo $$ >> left; exec sleep 600'], check=True)\n"
    )
    spec = daemon.spec(SOURCE.replace(BEFORE_THE_WORKLOAD, leaves + BEFORE_THE_WORKLOAD, 1), steps=3)
    assert daemon.run(spec)["state"] == "completed"
    left = [psutil.Process(int(pid)) for pid in Path(spec.directory, "left").read_text().split()]
    assert left
    for each in left:
        each.kill()
    until(lambda: not any(each.is_running() for each in left), "none of them, not even as a zombie")
    assert daemon.run(daemon.spec())["state"] == "completed"
