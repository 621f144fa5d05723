"""Jobs that stop at an iteration's end and go on: paused over a restart of the daemon, or preempted. No bit differs."""

from __future__ import annotations

import runpy
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from weft.client.client import RequestRefused

num_shared_mappings = runpy.run_path(str(Path(__file__).with_name("real_daemon.py")))["num_shared_mappings"]
_RECOVERY = runpy.run_path(str(Path(__file__).with_name("test_recovery.py")))
held_behind_a_snapshot, check_is_undisturbed = _RECOVERY["held_behind_a_snapshot"], _RECOVERY["check_is_undisturbed"]
until, SECONDS, FIRST_CALL = _RECOVERY["until"], _RECOVERY["SECONDS"], _RECOVERY["FIRST_CALL"]
scrape = runpy.run_path(str(Path(__file__).with_name("test_metrics.py")))["scrape"]
STRATEGIES, PIPELINE = _RECOVERY["STRATEGIES"], _RECOVERY["PIPELINE"]
StartDaemon = Callable[..., Any]


def pause(daemon: Any, job: str, gate: Any) -> None:
    """The gate holds it: it has been asked before it goes on."""
    states: list[str] = []
    asking = threading.Thread(target=lambda: states.append(daemon.client.pause(job)), daemon=True)
    asking.start()
    daemon.until_logged(job, "asked to pause")
    gate.open()
    asking.join(SECONDS)
    assert states == ["paused"], daemon.log_of(job)


@pytest.mark.days(2)
@pytest.mark.slow(seconds=9)
@pytest.mark.pairs(2, strategy=("pipeline", "clipped replicas"), restarts=(True, False))
def test_a_paused_job_frees_its_workers_and_memory_and_goes_on_with_the_same_bits(
    own_daemon: StartDaemon, strategy: str, restarts: bool
) -> None:
    daemon = own_daemon()
    directory = daemon.directory().pid
    mapped = num_shared_mappings(directory)
    with held_behind_a_snapshot(daemon, STRATEGIES[strategy]) as (job, spec, gate):
        pause(daemon, job, gate)
        before = standing(daemon.client.show(job))
        assert before["step"] > 0
        if restarts:  # the next one knows what this one has answered
            daemon.kill()
            daemon.start()
            assert standing(daemon.client.show(job)) == before
        else:
            shown = daemon.client.show(job)
            assert shown["step"] < shown["steps"]
            assert {worker["state"] for worker in daemon.client.status()["workers"]} <= {"free", "down"}
            until(lambda: num_shared_mappings(directory) == mapped, "its memory is free")
            assert scrape(daemon)["weft_shared_memory_bytes", (("job", job),)] == 0
        shown = daemon.client.show(job)
        assert (shown["state"], bool(shown["checkpoint"])) == ("paused", True)
        assert daemon.client.resume(job) == {"job": job, "created": False}
        check_is_undisturbed(daemon, job, spec)
        shown = daemon.client.show(job)
        assert shown["started_at"] == before["started_at"]
        assert (shown["time"]["attempt"], shown["time"]["began_after_step"]) == (2 + restarts, before["step"])
    assert "starts again" not in daemon.log_of(job)


def standing(shown: dict[str, Any]) -> dict[str, Any]:
    return {name: shown[name] for name in ("state", "step", "steps", "loss", "started_at")}


@pytest.mark.days(3)
@pytest.mark.slow(seconds=7)
def test_a_paused_job_that_is_cancelled_after_a_restart_tells_what_it_had_come_to(restarting: Any) -> None:
    with held_behind_a_snapshot(restarting, PIPELINE) as (job, _, gate):
        pause(restarting, job, gate)
        before = restarting.client.show(job)
        restarting.kill()
        restarting.start()
        assert restarting.client.cancel(job) == "cancelled"
        result = restarting.client.wait(job, SECONDS)
        assert (result["steps"], result["loss"]) == (before["step"], before["loss"])
        assert result["seconds"] > 0


@pytest.mark.days(3)
@pytest.mark.slow(seconds=8)
def test_a_paused_job_that_the_disk_does_not_take_says_so_and_is_saved_before_the_daemon_ends(restarting: Any) -> None:
    refusals: list[RequestRefused] = []

    def ask() -> None:
        with pytest.raises(RequestRefused, match="in memory alone") as refusal:
            restarting.client.pause(job)
        refusals.append(refusal.value)

    with held_behind_a_snapshot(restarting, PIPELINE) as (job, spec, gate):
        in_the_way = Path(restarting.client.show(job)["run_dir"], "checkpoints")
        in_the_way.touch()
        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        restarting.until_logged(job, "asked to pause")
        gate.open()
        asking.join(SECONDS)
        assert [refusal.code for refusal in refusals] == ["not-saved"], restarting.log_of(job)
        before = restarting.client.show(job)
        assert (before["state"], before["checkpoint"], "in memory alone" in before["why"]) == ("paused", None, True)
        in_the_way.unlink()
        assert restarting.stop() == 0
        restarting.until_nothing_lives()
        restarting.start()
        assert standing(restarting.client.show(job)) == standing(before)
        restarting.client.resume(job)
        check_is_undisturbed(restarting, job, spec)


@pytest.mark.days(3)
@pytest.mark.slow(seconds=8)
def test_a_paused_job_goes_on_where_the_queue_is_full_of_it(own_daemon: StartDaemon) -> None:
    daemon = own_daemon(workers=1, environment={"WEFT_MAX_QUEUED": "1"})
    with held_behind_a_snapshot(daemon, {"microbatches": 4}) as (job, spec, gate):
        pause(daemon, job, gate)
        with pytest.raises(RequestRefused, match="max_queued"):
            daemon.submit(spec)
        assert daemon.client.resume(job) == {"job": job, "created": False}
        check_is_undisturbed(daemon, job, spec)


@pytest.mark.slow(seconds=4)
def test_a_job_of_higher_priority_takes_the_workers_and_the_other_one_goes_on_with_the_same_bits(daemon: Any) -> None:
    with held_behind_a_snapshot(daemon, PIPELINE) as (job, spec, gate):
        urgent = daemon.client.submit(daemon.spec(strategy=PIPELINE, steps=3), priority=1)["job"]
        gate.open()
        assert daemon.client.wait(urgent, SECONDS)["state"] == "completed"
        check_is_undisturbed(daemon, job, spec)
    assert f"preempted by {urgent}" in daemon.log_of(job)


COUNTING = """
import torch, weft


class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.counts = torch.nn.ParameterList(torch.zeros(1 << 22) for _ in range(8))

    def forward(self, x):
        return x * sum(count.sum() for count in self.counts)


def workload():
    def optimizer(parameters):
        return torch.optim.SGD(parameters, 1.0)

    ones = torch.ones(96, 1)
    return weft.Workload(Counting(), (ones, ones), loss=lambda out, _: out.mean(), optimizer=optimizer)
"""


@pytest.mark.slow(seconds=8)
@pytest.mark.pairs(why=("paused", "preempted"))
def test_what_it_stops_with_is_copied_whole(daemon: Any, why: str) -> None:
    """Snapshots go on beside the next iteration. Behind this one none comes: workers left it half copied, and the job
    went on from parameters of which some were an older iteration's. Each step takes one from each."""
    steps = 120
    job = daemon.submit(daemon.spec(COUNTING, strategy={"microbatches": 1}, steps=steps))
    until(lambda: (daemon.client.show(job).get("step") or 0) >= 4, "some steps")
    if why == "paused":
        assert daemon.client.pause(job) == "paused"
        daemon.client.resume(job)
    else:
        urgent = daemon.submit(daemon.spec(strategy={"stages": 3}, steps=2), priority=1)
        assert daemon.client.wait(urgent, SECONDS)["state"] == "completed"
    ended = daemon.client.wait(job, SECONDS)
    assert ended["state"] == "completed", daemon.log_of(job)
    assert ("asked to pause" if why == "paused" else "preempted by") in daemon.log_of(job)
    for name, count in load_file(ended["model"]).items():
        assert count.unique().tolist() == [-steps], name


@pytest.mark.slow(seconds=10)
@pytest.mark.days(3)
def test_what_a_preempted_job_had_come_to_outlives_a_daemon_that_is_stopped(restarting: Any) -> None:
    """Once the more urgent one was over nothing ran any more, so the daemon ended, with the snapshot in its memory."""
    hold = restarting.gate()
    with held_behind_a_snapshot(restarting, PIPELINE) as (job, spec, gate):
        urgent = restarting.spec(strategy=PIPELINE, args={"planning_gate": str(hold)}, steps=3)
        urgent = restarting.client.submit(urgent, priority=1)["job"]
        gate.open()
        restarting.until_logged(urgent, "at the gate of planning")
        restarting.signal(signal.SIGTERM)
        hold.open()
        assert restarting.process.wait(SECONDS) == 0
        restarting.until_nothing_lives()
        restarting.start()
        check_is_undisturbed(restarting, job, spec)
    assert "goes on from " in restarting.log_of(job)


def test_a_job_that_keeps_no_snapshots_is_not_paused_and_says_why(daemon: Any) -> None:
    gate = daemon.gate()
    arguments = {"gate": str(gate), "gate_at": FIRST_CALL}
    job = daemon.submit(daemon.spec(strategy={"recovery": "off"}, args=arguments, steps=2 * FIRST_CALL))
    daemon.until_logged(job, "at the gate")
    refused = daemon.weft("pause", job)
    assert refused.returncode == 2
    assert f"{job} cannot be paused: it keeps no snapshots; let it run" in refused.stderr
    gate.open()
    assert daemon.client.wait(job, SECONDS)["state"] == "completed"


def test_a_job_that_waits_is_paused_at_once_and_cancelled_or_resumed(daemon: Any) -> None:
    gate = daemon.gate()
    first = daemon.submit(daemon.spec(strategy={"stages": 2}, args={"planning_gate": str(gate)}))
    daemon.until_logged(first, "at the gate")
    second, third = (daemon.submit(daemon.spec(strategy={"stages": 2}, steps=2)) for _ in range(2))
    for job in (second, third):
        assert daemon.weft("pause", job).stdout == "paused\n"
    gate.open()
    daemon.client.wait(first, SECONDS)
    assert daemon.weft("resume", second).stdout == f"{second}\n"
    assert daemon.client.wait(second, SECONDS)["state"] == "completed"
    assert daemon.weft("cancel", third).stdout == "cancelled\n"
