"""Checkpoints on the disk: written beside training, whole or absent, and gone on from under another plan with the same
bits."""

from __future__ import annotations

import json
import os
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from weft.client.client import RequestRefused
from weft.machine.checkpoint_files import FOLDER, checkpoints, newest_whole

_RECOVERY = runpy.run_path(str(Path(__file__).with_name("test_recovery.py")))
SOURCE, STEPS, SECONDS, PIPELINE = (_RECOVERY[name] for name in ("SOURCE", "STEPS", "SECONDS", "PIPELINE"))
held_behind_a_snapshot, lines_of, check_is_undisturbed, until = (
    _RECOVERY[name] for name in ("held_behind_a_snapshot", "lines_of", "check_is_undisturbed", "until")
)
_REPLACING = runpy.run_path(str(Path(__file__).with_name("test_replacing.py")))
OFTEN_SAVED, saver_in_the_midst = _REPLACING["SOURCE"], _REPLACING["saver_in_the_midst"]
StartDaemon = Callable[..., Any]
LONG_LOSS = 0.005  # seconds; a job of such is still there when its first checkpoint is


def ran(daemon: Any, strategy: dict[str, Any] | None = None, **job: Any) -> dict[str, Any]:
    result: dict[str, Any] = daemon.run(daemon.spec(SOURCE, strategy={"window": 16} | (strategy or {}), **job))
    assert result["state"] == "completed", result["error"]
    return result


def with_checkpoints(
    daemon: Any, every: str, strategy: dict[str, Any], *, loss_seconds: float = 0.0, **table: Any
) -> Any:
    """loss_seconds: that each call of the loss takes at least."""
    strategy, arguments = {"window": 16} | strategy, {"seconds": loss_seconds}
    spec = daemon.spec(SOURCE, strategy=strategy, steps=STEPS, args=arguments)
    return type(spec).parse(spec.to_wire() | {"checkpoint": {"every": every, **table}})


def ran_with_checkpoints(daemon: Any, every: str, strategy: dict[str, Any], **table: Any) -> dict[str, Any]:
    """With its last checkpoint, which may still be written when it has ended: the one before goes then."""
    result: dict[str, Any] = daemon.run(with_checkpoints(daemon, every, strategy, **table))
    assert result["state"] == "completed", result["error"]
    until(lambda: not daemon.savers(), "the last checkpoint")
    assert checkpoints(Path(result["run_dir"]))
    return result


def differing(ours: str, theirs: str) -> list[str]:
    one, other = load_file(ours), load_file(theirs)
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


@pytest.mark.days(2)
@pytest.mark.slow(seconds=2)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(PIPELINE, {"microbatches": 2}, id="two stages, then one"),
        pytest.param({"microbatches": 2}, PIPELINE | {"schedule": "gpipe"}, id="one stage, then two"),
        pytest.param({"microbatches": 2}, {"microbatches": 2, "clip_norm": 1e6}, id="no buckets, then buckets"),
        pytest.param({"microbatches": 2, "clip_norm": 1e6}, PIPELINE, id="buckets, then none"),
    ],
)
def test_a_job_goes_on_under_another_plan_with_the_same_bits(
    daemon: Any, before: dict[str, Any], after: dict[str, Any]
) -> None:
    whole = ran_with_checkpoints(daemon, "40 steps", before, keep=3)
    run = Path(whole["run_dir"])
    steps = [int(path.name.removeprefix("step-")) for path in checkpoints(run)]
    assert steps, "at least one"
    assert all(step % 40 == 0 for step in steps)
    assert os.readlink(run / "checkpoints" / "latest").startswith("step-")
    oldest = checkpoints(run)[0]
    on = ran(daemon, after, steps=STEPS, resume_from=str(oldest))
    assert differing(whole["model"], on["model"]) == []
    assert (on["loss"], on["validation"]) == (whole["loss"], whole["validation"])
    ours, theirs = ([line | {"grad_norm": None} for line in lines_of(daemon, each["job"])] for each in (on, whole))
    assert ours == theirs[-len(ours) :]
    assert ours[0]["step"] in (steps[0], steps[0] + 1), "the validation of the step, or the next step"


@pytest.mark.slow
def test_plain_torch_has_all_that_a_checkpoint_has_by_the_page_s_function(
    daemon: Any, load_checkpoint: Callable[..., None]
) -> None:
    result = ran_with_checkpoints(daemon, "40 steps", PIPELINE)
    path = checkpoints(Path(result["run_dir"]))[-1]
    saved, step = load_file(path / "model.safetensors"), int(path.name.removeprefix("step-"))
    layers = [nn.Linear(1, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 8), nn.Tanh()]
    model = nn.Sequential(*layers, nn.Linear(8, 1))
    optimizer, scheduler = optimizer_and_scheduler(model)
    load_checkpoint(path, model, optimizer, scheduler)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in model.state_dict().items())
    assert scheduler.last_epoch == step
    undisturbed, steps = optimizer_and_scheduler(model)
    for _ in range(step):
        undisturbed.step()  # of no gradients
        steps.step()
    for ours, theirs in zip(optimizer.param_groups, undisturbed.param_groups, strict=True):
        names = ("lr", "initial_lr", "betas", "weight_decay")
        assert [ours[name] for name in names] == [theirs[name] for name in names]
    model(torch.zeros(2, 1)).sum().backward()
    optimizer.step()
    assert {float(state["step"]) for state in optimizer.state.values()} == {step + 1.0}


def optimizer_and_scheduler(model: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Those of SOURCE."""
    groups = [{"params": [each], "weight_decay": 0.01 * number} for number, each in enumerate(model.parameters())]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    rates = [0.01 / (number + 1) for number in range(8)]
    return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, total_steps=100_000)


DOUBLE = """
import torch, weft
from torch import nn

def data():
    inputs = torch.randn(80, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return inputs, inputs.sum(1, keepdim=True).sin()

def model():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)).double()

def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)

def scheduler(optimizer, kind):
    if kind == "step":
        return torch.optim.lr_scheduler.StepLR(optimizer, 7, gamma=0.5)
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)

def workload(kind):
    return weft.Workload(
        model=model(), loss=nn.MSELoss(), train=data(), optimizer=optimizer, scheduler=lambda it: scheduler(it, kind))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["step", "cosine"])
def test_a_plain_loop_goes_on_from_a_checkpoint_to_the_weights_of_the_job(
    daemon: Any, load_checkpoint: Callable[..., None], kind: str
) -> None:
    """These schedulers compute a rate from the one before, and it was the one that the optimizer was made with."""
    spec = daemon.spec(DOUBLE, batch_size=8, seed=3, steps=40, args={"kind": kind})
    result = daemon.run(type(spec).parse(spec.to_wire() | {"checkpoint": {"every": "20 steps"}}))
    assert result["state"] == "completed", result["error"]
    until(lambda: not daemon.savers(), "the checkpoint")
    (path,) = checkpoints(Path(result["run_dir"]))
    assert path.name == "step-00000020"
    job: dict[str, Any] = {}
    exec(DOUBLE, job)
    model, (inputs, targets) = job["model"](), job["data"]()
    optimizer = job["optimizer"](model.parameters())
    scheduler = job["scheduler"](optimizer, kind)
    load_checkpoint(path, model, optimizer, scheduler)
    for epoch in (2, 3):
        for rows in torch.randperm(80, generator=torch.Generator().manual_seed(3 + epoch)).split(8):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs[rows]), targets[rows]).backward()
            optimizer.step()
            scheduler.step()
    trained = load_file(result["model"])
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, trained[name], rtol=0, atol=1e-12)


@pytest.mark.slow(seconds=4)
def test_a_cancelled_job_leaves_what_it_had_come_to_and_is_resumed(daemon: Any) -> None:
    with held_behind_a_snapshot(daemon, PIPELINE) as (job, spec, _):
        assert daemon.client.cancel(job) == "cancelled"
    resumed = daemon.client.resume(job)["job"]
    result = daemon.client.wait(resumed, SECONDS)
    assert result["state"] == "completed", result["error"]
    undisturbed = daemon.run(spec)
    assert differing(result["model"], undisturbed["model"]) == []
    first = lines_of(daemon, resumed)[0]["step"]
    assert first > 1
    assert lines_of(daemon, undisturbed["job"])[-1] == lines_of(daemon, resumed)[-1]
    assert "goes on from" in daemon.log_of(resumed)


@pytest.mark.slow(seconds=2)
def test_a_discarded_job_leaves_nothing(daemon: Any) -> None:
    with held_behind_a_snapshot(daemon, PIPELINE) as (job, _, _):
        assert daemon.client.cancel(job, discard=True) == "cancelled"
    assert " cancelled\n" in daemon.log_of(job), "the reason is the state, and told once"
    assert checkpoints(Path(daemon.client.show(job)["run_dir"])) == []
    with pytest.raises(RequestRefused, match=f"no checkpoint; run it from the beginning with `weft restart {job}`"):
        daemon.client.resume(job)


@pytest.mark.days(3)
@pytest.mark.slow(seconds=9)
@pytest.mark.pairs(end=("stop", "kill"))  # one a day
def test_a_job_goes_on_after_a_restart_of_the_daemon(
    own_daemon: StartDaemon, request: pytest.FixtureRequest, end: str
) -> None:
    """Stopped, the daemon writes what it had come to; killed, there is what was written before."""
    daemon = own_daemon(drain_seconds=0.1) if end == "stop" else request.getfixturevalue("restarting")
    with held_behind_a_snapshot(daemon, PIPELINE) as (job, spec, gate):
        if end == "kill":
            assert daemon.client.show(job)["checkpoint"] is None
            daemon.kill()
        else:
            assert daemon.stop() == 0
        daemon.until_nothing_lives()
        gate.open()
    daemon.start()
    result = daemon.client.wait(job, SECONDS)
    assert result["state"] == "completed", result["error"]
    assert ("goes on from" in daemon.log_of(job)) is (end == "stop")
    check_is_undisturbed(daemon, job, spec)


@pytest.mark.days(3)
@pytest.mark.slow(seconds=10)
def test_a_job_with_checkpoints_goes_on_after_the_daemon_was_killed(restarting: Any) -> None:
    spec = with_checkpoints(restarting, "20 steps", {"microbatches": 2}, loss_seconds=LONG_LOSS)
    job = restarting.submit(spec)
    until(lambda: restarting.client.show(job)["checkpoint"], "a checkpoint")
    restarting.kill()
    restarting.until_nothing_lives()
    restarting.start()
    result = restarting.client.wait(job, SECONDS)
    assert result["state"] == "completed", result["error"]
    assert "goes on from" in restarting.log_of(job)
    check_is_undisturbed(restarting, job, with_checkpoints(restarting, "20 steps", {"microbatches": 2}))


def damage(path: Path, how: str) -> None:
    match how:
        case "truncated":
            os.truncate(path, path.stat().st_size // 2)
        case "flipped":
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(bytes(data))
        case "gone":
            path.unlink()


@pytest.mark.slow
def test_a_damaged_checkpoint_is_refused_and_of_a_run_the_one_before_is_used(daemon: Any) -> None:
    result = ran_with_checkpoints(daemon, "40 steps", {"microbatches": 2}, keep=9)
    run = Path(result["run_dir"])
    shutil.copytree(checkpoints(run)[-1], run / "checkpoints" / "step-99999999")  # a newer one, as whole
    for file in sorted(os.listdir(checkpoints(run)[-1])):
        for how in ("truncated", "flipped", "gone"):
            copy = run.parent / f"{file}-{how}"
            shutil.copytree(run, copy, symlinks=True)
            damage(checkpoints(copy)[-1] / file, how)
            if file != "manifest.json" or how != "flipped":  # a bit of it may stand in a blank
                found, refused = newest_whole(copy)
                assert found is not None
                assert (found.path, len(refused)) == (checkpoints(copy)[-2], 1), (file, how)
                assert file in str(refused[0]) or "is no checkpoint" in str(refused[0])
            shutil.rmtree(copy)
    path = checkpoints(run)[-1]
    damage(path / "model.safetensors", "flipped")
    ended = daemon.run(daemon.spec(SOURCE, strategy={"microbatches": 2}, steps=STEPS, resume_from=str(path)))
    assert (ended["state"], ended["reason"]) == ("failed", "invalid-plan")
    assert "model.safetensors is damaged" in ended["error"]
    on = ran(daemon, {"microbatches": 2}, steps=STEPS, resume_from=str(run))  # whose newest is not whole
    assert differing(result["model"], on["model"]) == []


@pytest.mark.days(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"resume_from": "nowhere"}, "nowhere is no checkpoint, nor a run that has one"),
        ({"batch_size": 12}, "was trained with batch_size = 24, and this job has 12; use the same"),
        ({"seed": 4}, "was trained with seed = 3, and this job has 4"),
        ({"steps": 20}, "steps, and this job has 20 in all; give more steps or epochs"),
    ],
)
def test_what_cannot_be_gone_on_from_is_refused_with_the_remedy(daemon: Any, change: dict[str, Any], told: str) -> None:
    result = ran_with_checkpoints(daemon, "40 steps", {"microbatches": 2})
    job = {"steps": STEPS, "resume_from": str(Path(result["run_dir"], "checkpoints", "latest")), **change}
    ended = daemon.run(daemon.spec(SOURCE, strategy={"microbatches": 2}, **job))
    assert (ended["state"], ended["reason"], ended["exit_code"]) == ("failed", "invalid-plan", 2)
    assert told in ended["error"], ended["error"]


@pytest.mark.slow
def test_where_there_can_be_none_a_job_that_asks_for_them_is_refused(daemon: Any) -> None:
    spec = with_checkpoints(daemon, "1 epoch", {"replicas": 2, "staleness": 1})
    ended = daemon.run(spec)
    assert (ended["state"], ended["reason"]) == ("failed", "invalid-plan")
    assert "[checkpoint]: there can be none, since replicas compute with parameters of several ages" in ended["error"]


@pytest.mark.slow(seconds=9)
@pytest.mark.days(3)
def test_by_the_clock_too(daemon: Any) -> None:
    spec = with_checkpoints(daemon, "0.3 s", {"microbatches": 2}, loss_seconds=LONG_LOSS)
    result = daemon.run(spec)
    assert result["state"] == "completed", result["error"]
    until(lambda: checkpoints(Path(result["run_dir"])), "a checkpoint")
    manifest = json.loads((checkpoints(Path(result["run_dir"]))[-1] / "manifest.json").read_text())
    assert manifest["step"] > 0


@pytest.mark.days(3)
@pytest.mark.slow(seconds=10)
def test_what_a_killed_daemon_has_left_half_of_a_job_that_had_ended_goes_with_the_next_one(
    own_daemon: StartDaemon,
) -> None:
    """The last checkpoint of a job is written when that has ended. Its half stayed for good: the next daemon looked at
    the directories of jobs that it took up, and at no others."""
    daemon = own_daemon()
    with held_behind_a_snapshot(daemon, PIPELINE) as (job, _, _):
        assert daemon.client.cancel(job) == "cancelled"
    run = Path(daemon.client.show(job)["run_dir"])
    until(lambda: not daemon.savers(), "its checkpoint")
    (whole,) = checkpoints(run)
    daemon.kill()
    daemon.until_nothing_lives()
    left = run / "checkpoints" / ".step-00099999.1"  # as test_checkpoint_files finds it behind a saver that is killed
    shutil.copytree(whole, left)
    (left / "manifest.json").unlink()
    daemon.start()
    until(lambda: not left.exists(), "the end of what was left")
    assert checkpoints(run) == [whole]
    result = daemon.client.wait(daemon.client.resume(job)["job"], SECONDS)
    assert result["state"] == "completed", result["error"]


@pytest.mark.slow(seconds=5)
def test_a_saver_that_is_killed_costs_its_checkpoint_alone(daemon: Any) -> None:
    """That of a small model was over before it was killed, or between two looks: here it is stopped as it writes."""
    spec = daemon.spec(OFTEN_SAVED, strategy={"microbatches": 2}, steps=STEPS, args={"num_idle": 2_000_000})
    spec = type(spec).parse(spec.to_wire() | {"checkpoint": {"every": "10 steps", "keep": STEPS}})
    others = {daemon.directory().pid, *daemon.worker_pids().values()}
    job = daemon.submit(spec)
    run = Path(daemon.client.show(job)["run_dir"])
    saver, _ = until(lambda: saver_in_the_midst(daemon, others, run / FOLDER), "a saver")
    saver.kill()
    result = daemon.client.wait(job, SECONDS)
    assert result["state"] == "completed", result["error"]
    (lost,) = (line for line in daemon.log_of(job).splitlines() if "no checkpoint: " in line)
    assert lost.endswith("the process that wrote it ended with exit code -9")
    found, refused = newest_whole(run)
    assert found is not None
    assert refused == []
