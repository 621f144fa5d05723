"""Processes that are killed, stopped or stuck at the worst of times: jobs go on or end, and nothing stays behind."""

from __future__ import annotations

import contextlib
import os
import platform
import random
import runpy
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from weft.scheduler.core.ending import CANCEL_SECONDS, RELEASE_SECONDS

_REAL = runpy.run_path(str(Path(__file__).with_name("real_daemon.py")))
RealDaemon, Gate, until, SECONDS = (_REAL[name] for name in ("RealDaemon", "Gate", "until", "SECONDS"))
LINE = _REAL["LINE"]

StartDaemon = Callable[..., Any]
TWO_STAGES = {"stages": 2, "microbatches": 4}
STEPS = 4  # of every job here: 2 epochs of 48 samples in batches of 24
LAST_LOSS = 4 * STEPS  # of training, by its number

# Held when its workload is asked for while the file `preparing` exists, which is there once it has been planned.
HELD_TWICE = LINE.replace('planning_gate="",', 'planning_gate="", preparing_gate="",').replace(
    'pass_gate(planning_gate, "of planning")',
    'pass_gate(preparing_gate, "of preparing")\n    pass_gate(planning_gate, "of planning")',
)
assert HELD_TWICE.count("preparing_gate") == 2


@pytest.fixture(scope="module")
def undisturbed(shared_daemon: RealDaemon) -> dict[str, torch.Tensor]:
    result = shared_daemon.run(shared_daemon.spec(strategy=TWO_STAGES))
    assert (result["state"], result["steps"]) == ("completed", STEPS)
    return load_file(result["model"])


def is_the_same(result: dict[str, Any], expected: dict[str, torch.Tensor]) -> bool:
    assert (result["state"], result["reason"], result["error"]) == ("completed", None, None)
    state = load_file(result["model"])
    return state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in expected)


# --- moments of a job's life at which it stands still until the gate is opened


@contextlib.contextmanager
def planning(daemon: RealDaemon) -> Iterator[tuple[str, Gate]]:
    gate = daemon.gate()
    job = daemon.submit(daemon.spec(args={"planning_gate": str(gate)}, strategy=TWO_STAGES))
    daemon.until_logged(job, "at the gate of planning")
    yield job, gate
    gate.open()


@contextlib.contextmanager
def preparing(daemon: RealDaemon) -> Iterator[tuple[str, Gate]]:
    first, later = daemon.gate(), daemon.home / "later"
    spec = daemon.spec(
        HELD_TWICE, args={"planning_gate": str(first), "preparing_gate": str(later)}, strategy=TWO_STAGES
    )
    job = daemon.submit(spec)
    daemon.until_logged(job, "at the gate of planning")
    gate = Gate(later)
    first.open()
    daemon.until_logged(job, "at the gate of preparing")
    yield job, gate
    gate.open()


@contextlib.contextmanager
def running(daemon: RealDaemon, gate_at: int = 9) -> Iterator[tuple[str, Gate]]:
    gate = daemon.gate()
    job = daemon.submit(daemon.spec(args={"gate": str(gate), "gate_at": gate_at}, strategy=TWO_STAGES))
    daemon.until_logged(job, "at the gate of training")
    yield job, gate
    gate.open()


@contextlib.contextmanager
def ending(daemon: RealDaemon) -> Iterator[tuple[str, Gate]]:
    """With the last loss to come, and the directory needed once more: for saving."""
    with running(daemon, LAST_LOSS) as (job, gate):
        yield job, gate


MOMENTS = {"planning": planning, "preparing": preparing, "running": running, "ending": ending}


# --- the directory


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["preparing", "ending"])
def test_a_directory_that_is_killed_while_workers_call_it_costs_a_job_time_alone(
    daemon: RealDaemon, moment: str, undisturbed: dict[str, torch.Tensor]
) -> None:
    """3 of 22 jobs failed as `user-error`: a worker that called it heard of its death before the daemon did."""
    with MOMENTS[moment](daemon) as (job, gate):
        directory = daemon.directory()
        directory.suspend()  # so that they wait for its answer when it is killed
        gate.open()
        until(lambda: calls_the_directory(daemon), "a worker that calls the directory")
        directory.kill()
        result = daemon.client.wait(job, SECONDS)
    assert is_the_same(result, undisturbed)
    log = daemon.log_of(job)
    # A saving worker's first call asks whether the directory is there; who stands in it goes on by the next directory.
    goes_on = moment == "ending" and "hand the job's memory on to the next" in log
    assert goes_on or "(attempt 2)" in log


def calls_the_directory(daemon: RealDaemon) -> bool:
    """Whether a worker waits for it: from the daemon it receives, and reads from no other socket."""
    return any(map(reads_from_a_socket, daemon.worker_pids().values()))


def reads_from_a_socket(pid: int) -> bool:
    """Whether a thread of a process waits in read(2) for one."""
    read = {"x86_64": "0", "aarch64": "63"}[platform.machine()]
    with contextlib.suppress(OSError):  # a thread that has ended, a descriptor that is closed
        for thread in Path(f"/proc/{pid}/task").iterdir():
            number, *arguments = (thread / "syscall").read_text().split()
            if number == read and os.readlink(f"/proc/{pid}/fd/{int(arguments[0], 16)}").startswith("socket:"):
                return True
    return False


def kill_the_directory_at_random(daemon: RealDaemon, num_jobs: int, seed: int, expected: Any) -> None:
    began = time.monotonic()
    daemon.run(daemon.spec(strategy=TWO_STAGES))
    lasts = time.monotonic() - began
    moments = random.Random(seed)
    print(f"seed {seed}: {num_jobs} jobs of {lasts:.2f} s")
    never = threading.Event()
    for _ in range(num_jobs):
        job = daemon.submit(daemon.spec(strategy=TWO_STAGES))
        never.wait(moments.uniform(0.0, lasts))
        with contextlib.suppress(psutil.NoSuchProcess, IndexError):  # the one before is not up again
            daemon.directory().kill()
        assert is_the_same(daemon.client.wait(job, SECONDS), expected), daemon.log_of(job)
    assert is_the_same(daemon.run(daemon.spec(strategy=TWO_STAGES)), expected), "by the last one, which stays"


@pytest.mark.slow
def test_a_directory_that_is_killed_at_any_moment_changes_no_result(
    daemon: RealDaemon, undisturbed: dict[str, torch.Tensor]
) -> None:
    kill_the_directory_at_random(daemon, 6, seed=11, expected=undisturbed)


@pytest.mark.soak
def test_sixty_directories_that_are_killed_change_no_result(
    daemon: RealDaemon, undisturbed: dict[str, torch.Tensor]
) -> None:
    kill_the_directory_at_random(daemon, 60, seed=60, expected=undisturbed)


@pytest.mark.days(3)
@pytest.mark.slow
def test_a_directory_that_cannot_start_is_tried_again_and_a_job_waits_for_it(own_daemon: StartDaemon) -> None:
    daemon = own_daemon()
    place = daemon.runtime / "directory.sock"
    first = daemon.directory()
    place.unlink()
    place.mkdir()
    first.kill()
    until(lambda: daemon.log().count("IsADirectoryError") > 2, "tries that fail")
    job = daemon.submit(daemon.spec(strategy=TWO_STAGES))
    place.rmdir()
    assert daemon.client.wait(job, SECONDS)["state"] == "completed"
    assert daemon.log().count("IsADirectoryError") < 12, "each try came later than the one before"


# --- a cancel that nobody in the job answers


def stop(name: str) -> Callable[[RealDaemon], None]:
    def suspend(daemon: RealDaemon) -> None:
        os.kill(daemon.worker_pids()[name], signal.SIGSTOP)

    return suspend


def stop_directory(daemon: RealDaemon) -> None:
    daemon.directory().suspend()


def leave_alone(daemon: RealDaemon) -> None:
    """Its own code does not return: nobody opens the gate."""


STUCK = {
    "first worker": stop("cpu-0"),
    "loader": stop("loader-0"),
    "directory": stop_directory,
    "its own code": leave_alone,
}


FEW = {("planning", "its own code"), ("preparing", "directory"), ("running", "loader"), ("running", "first worker")}


@pytest.mark.days(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "stuck"),
    [
        pytest.param(moment, stuck, marks=() if (moment, stuck) in FEW else pytest.mark.soak)
        for moment in MOMENTS
        for stuck in STUCK
    ],
)
def test_a_cancel_is_done_whatever_the_job_is_doing_and_the_workers_serve_the_next(
    own_daemons: Callable[[], RealDaemon], moment: str, stuck: str
) -> None:
    """With a worker stopped, or in code that never returns, it took the 10 s that a worker has to let go. How soon it
    is done the core's tests tell, by their own clock: here nobody was given those."""
    daemon = own_daemons()
    with MOMENTS[moment](daemon) as (job, gate):
        directory = daemon.directory()
        STUCK[stuck](daemon)
        if stuck == "directory":
            gate.open()  # they go on until they need it
        assert daemon.client.cancel(job) in ("cancelled", "completed")
        assert f"did not let go of {job} within {RELEASE_SECONDS:g} s" not in daemon.log()
        directory.resume()
    assert daemon.run(daemon.spec(strategy=TWO_STAGES))["state"] == "completed"


@pytest.fixture(scope="module")
def own_daemons() -> Iterator[Callable[[], RealDaemon]]:
    """One daemon for all of these: what they stop is gone when they end."""
    running = RealDaemon(workers=2)
    try:
        running.start()

        def idle() -> RealDaemon:
            running.until_idle()
            return running

        yield idle
        assert running.stop() == 0
        running.until_nothing_lives()
    finally:
        running.close()


@pytest.mark.slow
def test_a_cancel_does_not_wait_for_a_process_that_holds_the_interpreter(daemon: RealDaemon) -> None:
    """Its control thread cannot run, so it hears nothing."""
    source = LINE.replace("pass_gate(planning_gate", 'print("it holds on"); import ctypes; ctypes.PyDLL(None).pause()#')
    job = daemon.submit(daemon.spec(source))
    daemon.until_logged(job, "it holds on")
    assert daemon.client.cancel(job) == "cancelled"
    assert f"did not let go of {job} within {CANCEL_SECONDS:g} s" in daemon.log()


# --- what outlives whom


@pytest.mark.slow
def test_what_the_jobs_code_has_started_ends_with_its_worker(daemon: RealDaemon) -> None:
    """A process that it had forked kept the worker's socket open, which the daemon waited for to close, for ever."""
    source = LINE.replace(
        "pass_gate(planning_gate",
        'child = 0 if os.environ["WEFT_WORKER"] != "cpu-0" or os.path.exists("forked") else os.fork()\n'
        '    if child == 0 and not os.path.exists("forked") and os.environ["WEFT_WORKER"] == "cpu-0":\n'
        "        import signal\n"
        '        open("forked", "w").close()\n'
        "        signal.pause()\n"
        "    if child:\n"
        '        print("it has forked", child)\n'
        "    pass_gate(planning_gate",
    )
    gate = daemon.gate()
    job = daemon.submit(daemon.spec(source, args={"planning_gate": str(gate)}))
    log = daemon.until_logged(job, "at the gate of planning")
    child = int(log.partition("it has forked ")[2].split()[0])
    os.kill(daemon.worker_pids()["cpu-0"], signal.SIGKILL)
    daemon.until_logged(job, "recovering")
    until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == "zombie", "the end of its child")
    gate.open()
    assert daemon.client.wait(job, SECONDS)["state"] == "completed"


@pytest.mark.slow
def test_a_daemon_that_is_killed_while_its_fork_server_imports_leaves_no_process(tmp_path: Path) -> None:
    """The server read its socket only afterwards: one was there for 99 s after its daemon."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(
        "import signal\nopen(__file__ + '.begun', 'w').close()\nsignal.pause()\n"
    )
    daemon = RealDaemon(environment={"PYTHONPATH": str(tmp_path)}, workers=1)
    try:
        with pytest.raises(AssertionError):  # it is never idle
            daemon.start(seconds=0.0)
        until((tmp_path / "torch" / "__init__.py.begun").exists, "the fork server's import")
        daemon.kill()
        until(lambda: not processes_of(daemon), "the end of the fork server")
    finally:
        daemon.close()


def kill_a_daemon_as_it_starts(seconds: float) -> None:
    daemon = RealDaemon(workers=1)
    try:
        with contextlib.suppress(AssertionError):  # it is not idle yet
            daemon.start(seconds)
        daemon.kill()
        until(lambda: not processes_of(daemon), "the end of all that it had started")
    finally:
        daemon.close()


@pytest.mark.slow
def test_a_daemon_that_is_killed_as_it_starts_leaves_no_process() -> None:
    kill_a_daemon_as_it_starts(0.4)


@pytest.mark.soak
def test_thirty_daemons_that_are_killed_as_they_start_leave_no_process() -> None:
    moments = random.Random(30)
    for _ in range(30):
        kill_a_daemon_as_it_starts(moments.uniform(0.0, 4.0))


def processes_of(daemon: RealDaemon) -> list[psutil.Process]:
    """Whatever has its environment: also what it started a moment before it was killed."""
    mine = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.environ().get("WEFT_RUNTIME_DIR") == str(daemon.runtime):
                mine.append(process)
    return mine


# --- what job code prints


@pytest.mark.slow
@pytest.mark.parametrize(("share", "policy"), [("fixed", os.SCHED_BATCH), ("stealing", os.SCHED_OTHER)])
def test_a_loader_that_is_ahead_takes_no_core_from_who_computes(daemon: RealDaemon, share: str, policy: int) -> None:
    """Where replicas steal it is not ahead: it learns late which microbatch goes where."""
    result = daemon.run(daemon.spec(strategy={"replicas": 2, "microbatches": 2, "share": share}))
    assert result["state"] == "completed"
    policies = {worker: os.sched_getscheduler(pid) for worker, pid in daemon.worker_pids().items()}
    assert policies["loader-0"] == policy
    assert {own for worker, own in policies.items() if worker.startswith("cpu")} == {os.SCHED_OTHER}


def test_bytes_that_the_jobs_code_writes_are_in_its_log(daemon: RealDaemon) -> None:
    source = LINE.replace('print("this is", marker)', "import sys; sys.stdout.buffer.write(b'bytes of a job\\n')")
    result = daemon.run(daemon.spec(source))
    assert result["state"] == "completed"
    assert "bytes of a job" in daemon.log_of(result["job"])
