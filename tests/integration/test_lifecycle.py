"""Jobs from submit to end through the real command, and faults from outside: whatever is killed, the result stands."""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from weft.client.client import Client, DaemonUnreachable, RequestRefused
from weft.client.result import RESULT_KEYS
from weft.reference import loop as reference
from weft.spec.job_spec import JobSpec

_REAL = runpy.run_path(str(Path(__file__).with_name("real_daemon.py")))
RealDaemon, Gate, until, SECONDS = (_REAL[name] for name in ("RealDaemon", "Gate", "until", "SECONDS"))
LINE = _REAL["LINE"]

AT = 12  # calls of the loss before a held job stops, in training: an inspection makes up to 9 where there are parts
ENDLESS = {"steps": 100_000_000}

StartDaemon = Callable[..., Any]


@contextlib.contextmanager
def held(daemon: RealDaemon, **options: Any) -> Iterator[tuple[str, JobSpec, Gate]]:
    """A job that stands in the middle of its training until the gate is opened."""
    gate = daemon.gate()
    spec = daemon.spec(
        args={"gate": str(gate), "gate_at": AT}, **{"strategy": {"stages": 2, "microbatches": 4}} | options
    )
    job = daemon.submit(spec)
    try:
        daemon.until_logged(job, "at the gate of training")
        yield job, spec, gate
    finally:
        gate.open()


def has_the_plain_loops_result(result: dict[str, Any], spec: JobSpec) -> bool:
    expected = reference.train(spec)
    state = load_file(result["model"])
    assert result["state"] == "completed"
    assert (result["steps"], result["loss"]) == (len(expected.losses), expected.losses[-1])
    assert result["validation"] == expected.validations[-1]
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.state.items())
    return state.keys() == expected.state.keys()


# --- the verbs


@pytest.mark.slow
def test_submit_prints_the_id_alone_and_every_verb_knows_it_afterwards(daemon: RealDaemon) -> None:
    spec = daemon.spec_file(daemon.spec(strategy={"stages": 2}))
    submitted = daemon.weft("submit", spec)
    assert (submitted.returncode, submitted.stderr) == (0, "")
    job = submitted.stdout.strip()
    waited = daemon.weft("wait", job, "--json")
    assert waited.returncode == 0
    result = json.loads(waited.stdout)
    assert tuple(result) == RESULT_KEYS
    assert (result["job"], result["state"], result["steps"]) == (job, "completed", 4)
    assert Path(result["model"]).is_file()
    shown = json.loads(daemon.weft("show", job, "--json").stdout)
    assert [stage["worker"] for stage in shown["plan"]["stages"]] == ["cpu-0", "cpu-1"]
    assert job in daemon.weft("ps", "--all").stdout
    assert job not in daemon.weft("ps").stdout
    assert "this is unchanged" in daemon.weft("logs", job).stdout
    assert "completed" in daemon.weft("show", job).stdout
    assert daemon.weft("cancel", job).stdout == "completed\n"


@pytest.mark.slow
def test_submit_and_follow_ends_with_one_line_of_json_and_the_jobs_code(daemon: RealDaemon) -> None:
    done = daemon.weft("submit", "-f", "--json", daemon.spec_file(daemon.spec()))
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert json.loads(line)["state"] == "completed"
    assert "this is unchanged" in done.stderr


@pytest.mark.slow
def test_wait_gives_up_with_124_and_follow_ends_with_the_code_of_a_cancelled_job(daemon: RealDaemon) -> None:
    with held(daemon, **ENDLESS) as (job, _, gate), daemon.weft_running("logs", "-f", job) as follower:
        assert daemon.weft("wait", job, "--timeout", "0.1").returncode == 124
        assert follower.stdout is not None
        assert any("at the gate" in line for line in iter(follower.stdout.readline, ""))
        with daemon.weft_running("cancel", job) as cancelling:
            gate.open()  # the job goes on until the cancel is there
            assert cancelling.communicate(timeout=SECONDS)[0] == "cancelled\n"
        follower.communicate(timeout=SECONDS)
        assert follower.returncode == 143
    assert daemon.weft("wait", job).returncode == 143


@pytest.mark.slow
def test_ctrl_c_detaches_a_follower_and_leaves_the_job_alone(daemon: RealDaemon) -> None:
    with held(daemon) as (job, spec, gate):
        with daemon.weft_running("logs", "-f", job) as follower:
            assert follower.stdout is not None
            assert any("at the gate" in line for line in iter(follower.stdout.readline, ""))
            follower.send_signal(signal.SIGINT)
            _, errors = follower.communicate(timeout=SECONDS)
        assert follower.returncode == 130
        assert f"weft logs -f {job}" in errors
        gate.open()
        assert has_the_plain_loops_result(daemon.client.wait(job, SECONDS), spec)


@pytest.mark.slow
def test_a_submit_under_an_id_is_one_job_however_often_it_is_sent(daemon: RealDaemon) -> None:
    spec = daemon.spec_file(daemon.spec())
    first, again = (daemon.weft("submit", spec, "--id", "once", "--json") for _ in range(2))
    assert json.loads(first.stdout) == {"job": "once", "created": True}
    assert json.loads(again.stdout) == {"job": "once", "created": False}
    other = daemon.weft("submit", spec, "--id", "once", "--set", "job.seed=4")
    assert other.returncode == 2
    assert "another job's (job.seed is 3 there and 4 here)" in other.stderr
    daemon.client.wait("once", SECONDS)
    assert json.loads(daemon.weft("submit", spec, "--id", "once", "--json").stdout)["created"] is False


# --- several jobs


@pytest.mark.slow
def test_two_jobs_run_at_once_where_there_are_workers_for_both(daemon: RealDaemon) -> None:
    with held(daemon) as (first, first_spec, gate), held(daemon, strategy={"microbatches": 4}) as (second, spec, _):
        states = {job["job"]: job["state"] for job in daemon.client.jobs()}
        assert (states[first], states[second]) == ("running", "running")
        holders = {worker["job"] for worker in daemon.client.status()["workers"] if worker["kind"] == "cpu"}
        assert holders == {first, second}
        gate.open()
        assert has_the_plain_loops_result(daemon.client.wait(first, SECONDS), first_spec)
        assert daemon.client.show(second)["state"] == "running"
    assert has_the_plain_loops_result(daemon.client.wait(second, SECONDS), spec)


@pytest.mark.slow
def test_a_job_of_higher_priority_starts_before_those_submitted_earlier(daemon: RealDaemon) -> None:
    with held(daemon) as (first, _, gate):
        low, high, middle = (
            daemon.submit(daemon.spec(strategy={"stages": 2}), priority=priority) for priority in (-5, 5, None)
        )
        gate.open()
    shown = [daemon.client.wait(job, SECONDS) and daemon.client.show(job) for job in (first, high, middle, low)]
    starts = [job["started_at"] for job in shown]
    assert starts == sorted(starts)


@pytest.mark.slow
def test_show_says_why_a_job_waits(daemon: RealDaemon) -> None:
    with held(daemon) as (first, _, gate):
        second = daemon.submit(daemon.spec(strategy={"stages": 3}))
        third = daemon.submit(daemon.spec())
        assert f"it needs 3 cpu workers (1 free); {first} holds the others" in daemon.weft("show", second).stdout
        assert f"1 job stands before it, {second} first" in daemon.weft("show", third).stdout
        gate.open()
        for job in (second, third):
            assert daemon.client.wait(job, SECONDS)["state"] == "completed"
            assert daemon.client.show(job)["why"] is None


@pytest.mark.slow
def test_an_edited_job_file_takes_effect_at_once_in_the_workers_that_ran_it_before(daemon: RealDaemon) -> None:
    spec = daemon.spec()
    workers = daemon.worker_pids()
    for marker in ("unchanged", "edited", "edited again"):
        job = daemon.submit(spec)
        daemon.client.wait(job, SECONDS)
        assert f"this is {marker}" in daemon.log_of(job)
        source = spec.entry_file.read_text()
        spec.entry_file.write_text(
            source.replace('marker="unchanged"', 'marker="edited"').replace(
                'marker="edited"', 'marker="edited again"' if marker == "edited" else 'marker="edited"'
            )
        )
    daemon.until_idle()
    assert daemon.worker_pids() == workers


@pytest.mark.slow
def test_what_a_job_switches_in_torch_is_not_the_next_jobs(daemon: RealDaemon) -> None:
    """In a worker that stays: a GPU's context takes seconds, and many a job asks for deterministic algorithms."""
    begin = "def workload("
    assert LINE.count(begin) == 1
    tells = "import torch\nprint('deterministic', torch.are_deterministic_algorithms_enabled())\n"
    switching = tells + "torch.use_deterministic_algorithms(True)\n"
    before = daemon.worker_pids()
    logs = []
    for source in (switching, tells):
        job = daemon.run(daemon.spec(LINE.replace(begin, source + begin), epochs=1))
        assert job["state"] == "completed"
        logs.append(daemon.log_of(job["job"]))
    assert "deterministic True" in logs[0], "from its inspection to its end"
    assert "deterministic False" in logs[1]
    assert "deterministic True" not in logs[1]
    daemon.until_idle()
    assert daemon.worker_pids() == before


@pytest.mark.slow(seconds=5)
@pytest.mark.days(3)
def test_a_full_queue_is_told_with_75_and_takes_jobs_again_when_one_has_ended(own_daemon: StartDaemon) -> None:
    daemon = own_daemon(workers=1, environment={"WEFT_MAX_QUEUED": "1"})
    with held(daemon, strategy={"microbatches": 4}) as (job, spec, gate):
        refused = daemon.weft("submit", daemon.spec_file(daemon.spec()))
        assert refused.returncode == 75
        assert "max_queued" in refused.stderr
        assert daemon.client.submit(spec, job=job) == {"job": job, "created": False}
        gate.open()
        daemon.client.wait(job, SECONDS)
    assert daemon.weft("submit", "-f", daemon.spec_file(daemon.spec())).returncode == 0


# --- cancel


@pytest.mark.slow
def test_a_job_that_waits_is_cancelled_at_once(daemon: RealDaemon) -> None:
    with held(daemon) as (first, spec, gate):
        waiting = daemon.submit(daemon.spec(strategy={"stages": 3}))
        assert daemon.client.cancel(waiting) == "cancelled"
        assert daemon.client.show(waiting)["started_at"] is None
        gate.open()
        assert has_the_plain_loops_result(daemon.client.wait(first, SECONDS), spec)


@pytest.mark.slow
def test_a_job_that_is_being_planned_is_cancelled_once_its_code_returns(daemon: RealDaemon) -> None:
    gate = daemon.gate()
    job = daemon.submit(daemon.spec(args={"planning_gate": str(gate)}, strategy={"stages": 2}))
    daemon.until_logged(job, "at the gate of planning")
    assert daemon.client.show(job)["state"] == "planning"
    states: list[str] = []
    cancelling = threading.Thread(target=lambda: states.append(daemon.client.cancel(job)))
    cancelling.start()
    until(lambda: daemon.client.status()["workers"][1]["state"] == "free", "the other worker's release")
    gate.open()
    cancelling.join(SECONDS)
    assert states == ["cancelled"]


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 3])
def test_a_job_that_runs_is_cancelled_in_its_workers_which_go_on_with_the_next(daemon: RealDaemon, stages: int) -> None:
    workers = daemon.worker_pids()
    job = daemon.submit(daemon.spec(strategy={"stages": stages, "microbatches": 4}, **ENDLESS))
    assert any("progress" in event for event in daemon.client.follow(job))
    assert daemon.client.cancel(job) == "cancelled"
    daemon.until_idle()
    assert daemon.worker_pids() == workers or f"did not let go of {job} within" in daemon.log(), "on a busy machine"
    spec = daemon.spec(strategy={"stages": stages})
    assert has_the_plain_loops_result(daemon.run(spec), spec)


@pytest.mark.slow
def test_a_worker_that_does_not_let_go_of_a_cancelled_job_is_replaced(daemon: RealDaemon) -> None:
    with held(daemon, strategy={"microbatches": 4}) as (job, _, _):
        held_by = daemon.worker_pids()["cpu-0"]
        assert daemon.client.cancel(job) == "cancelled"  # the gate stays closed
        daemon.until_idle()
        assert daemon.worker_pids()["cpu-0"] != held_by


# --- what is killed


def kill_worker(name: str) -> Callable[[RealDaemon], None]:
    def kill(daemon: RealDaemon) -> None:
        os.kill(daemon.worker_pids()[name], signal.SIGKILL)

    return kill


VICTIMS = {
    "first stage": kill_worker("cpu-0"),
    "last stage": kill_worker("cpu-1"),
    "loader": kill_worker("loader-0"),
}


@pytest.mark.slow
@pytest.mark.parametrize("victim", VICTIMS)
def test_a_process_that_is_killed_in_the_middle_of_a_job_does_not_change_its_result(
    daemon: RealDaemon, victim: str
) -> None:
    with held(daemon) as (job, spec, gate):
        VICTIMS[victim](daemon)
        daemon.until_logged(job, "recovering")
        gate.open()
        result = daemon.client.wait(job, SECONDS)
    assert has_the_plain_loops_result(result, spec)
    assert "starts again" in daemon.log_of(job)


@pytest.mark.slow
def test_a_worker_that_is_killed_does_not_touch_the_job_beside_it(daemon: RealDaemon) -> None:
    with held(daemon) as (first, spec, gate), held(daemon, strategy={"microbatches": 4}) as (second, other, _):
        victim = next(worker for worker in daemon.client.status()["workers"] if worker["job"] == second)
        os.kill(victim["pid"], signal.SIGKILL)
        daemon.until_logged(second, "recovering")
        gate.open()
        assert has_the_plain_loops_result(daemon.client.wait(first, SECONDS), spec)
        assert "starts again" not in daemon.log_of(first)
    assert has_the_plain_loops_result(daemon.client.wait(second, SECONDS), other)


@pytest.mark.slow
def test_a_worker_that_is_killed_while_it_waits_is_replaced(daemon: RealDaemon) -> None:
    before = daemon.worker_pids()
    for name in ("cpu-1", "loader-2"):
        os.kill(before[name], signal.SIGKILL)
    until(
        lambda: not {None, before["cpu-1"], before["loader-2"]} & set(daemon.worker_pids().values()),
        "others in their place",
    )
    daemon.until_idle()
    after = daemon.worker_pids()
    assert {name for name in before if before[name] != after[name]} == {"cpu-1", "loader-2"}


@pytest.mark.days(2)
@pytest.mark.slow(seconds=6)
def test_a_killed_daemon_leaves_no_process_and_followers_outlive_it_to_the_same_result(restarting: RealDaemon) -> None:
    with held(restarting) as (job, spec, gate), restarting.weft_running("logs", "-f", job) as follower:
        assert follower.stdout is not None
        assert any("at the gate" in line for line in iter(follower.stdout.readline, ""))
        restarting.kill()
        restarting.until_nothing_lives()
        gate.open()
        restarting.start()
        rest, errors = follower.communicate(timeout=SECONDS)
        assert follower.returncode == 0, errors
        assert "the daemon has restarted; the job runs again (attempt 2)" in rest
        assert rest.count("completed") == 1
    assert has_the_plain_loops_result(restarting.client.wait(job), spec)


@pytest.mark.slow(seconds=7)
def test_sigterm_lets_running_jobs_end_and_keeps_the_others_for_the_next_daemon(restarting: RealDaemon) -> None:
    with held(restarting) as (job, spec, gate):
        waiting_spec = restarting.spec()
        waiting = restarting.submit(waiting_spec)
        restarting.signal(signal.SIGTERM)
        until(lambda: "shutting down" in (restarting.client.show(waiting)["why"] or ""), "the drain")
        with pytest.raises(RequestRefused, match="shutting down"):
            restarting.submit(waiting_spec)
        assert restarting.client.submit(waiting_spec, job=waiting) == {"job": waiting, "created": False}
        gate.open()
        assert restarting.process.wait(SECONDS) == 0
    restarting.until_nothing_lives()
    assert list(restarting.runtime.iterdir()) == []
    restarting.start()
    assert has_the_plain_loops_result(restarting.client.wait(job), spec)
    assert restarting.client.show(job)["exit_code"] == 0
    assert has_the_plain_loops_result(restarting.client.wait(waiting, SECONDS), waiting_spec)


@pytest.mark.slow(seconds=7)
@pytest.mark.days(3)
def test_a_second_sigterm_stops_running_jobs_which_run_again_after_a_restart(own_daemon: StartDaemon) -> None:
    daemon = own_daemon(drain_seconds=600)
    job = daemon.submit(daemon.spec(strategy={"stages": 2}, **ENDLESS))
    assert any("progress" in event for event in daemon.client.follow(job))
    daemon.signal(signal.SIGTERM)
    until(lambda: "draining: 1 jobs run" in daemon.log(), "the drain")
    daemon.signal(signal.SIGTERM)
    assert daemon.process.wait(SECONDS) == 0
    assert list(daemon.runtime.iterdir()) == []
    client = Client(daemon.socket)
    with pytest.raises(AssertionError):  # it is not idle: the job runs
        daemon.start(seconds=1.0)
    until(lambda: answers(client), "the daemon, on a busy machine")
    assert client.show(job)["state"] in ("queued", "planning", "running")
    assert client.cancel(job) == "cancelled"


@pytest.mark.slow(seconds=5)
@pytest.mark.days(3)
def test_a_terminal_that_closes_has_a_daemon_drain(own_daemon: StartDaemon) -> None:
    """The terminal and its shell send a SIGHUP each, and the second one is no second signal."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs these tests by nohup
    try:
        daemon = own_daemon()
    finally:
        signal.signal(signal.SIGHUP, before)
    with held(daemon) as (job, spec, gate):
        daemon.signal(signal.SIGHUP)
        until(lambda: "draining: 1 jobs run" in daemon.log(), "the drain")
        daemon.signal(signal.SIGHUP)
        assert daemon.client.show(job)["state"] == "running"
        gate.open()
        assert daemon.process.wait(SECONDS) == 0
    daemon.start()
    assert has_the_plain_loops_result(daemon.client.wait(job), spec)
    assert "(attempt 2)" not in daemon.log_of(job)


def answers(client: Client) -> bool:
    with contextlib.suppress(DaemonUnreachable):
        client.status()
        return True
    return False


@pytest.mark.slow(seconds=3)
def test_a_daemon_whose_fork_server_is_killed_ends_with_an_error_and_leaves_nothing(restarting: RealDaemon) -> None:
    with held(restarting):
        restarting.processes()
        restarting.fork_server().kill()
        assert restarting.process.wait(SECONDS) == 1
        assert "weft: the fork server died" in restarting.log()
        restarting.until_nothing_lives()
        assert list(restarting.runtime.iterdir()) == []


@pytest.mark.days(2)
@pytest.mark.slow(seconds=5)
def test_everything_killed_at_once_leaves_nothing_in_shared_memory_and_a_restart_is_clean(
    restarting: RealDaemon,
) -> None:
    with held(restarting) as (job, spec, gate):
        for process in restarting.processes():
            with contextlib.suppress(psutil.NoSuchProcess):  # the kernel was faster
                process.kill()
        restarting.process.wait(SECONDS)
        restarting.until_nothing_lives()
        assert not restarting.names_in_shared_memory()
        gate.open()
    restarting.start()
    assert has_the_plain_loops_result(restarting.client.wait(job, SECONDS), spec)
