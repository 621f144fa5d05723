"""Jobs that end before their last step: after the very step and with the very bits of the plain loop that stops so."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from weft.reference.loop import train

_RECOVERY = runpy.run_path(str(Path(__file__).with_name("test_recovery.py")))
SOURCE, STEPS, SECONDS, PIPELINE = (_RECOVERY[name] for name in ("SOURCE", "STEPS", "SECONDS", "PIPELINE"))
held_behind_a_snapshot, lines_of, kill_worker, until = (
    _RECOVERY[name] for name in ("held_behind_a_snapshot", "lines_of", "kill_worker", "until")
)

# After the first epoch nothing counts as an improvement; 2 steps in an epoch.
PATIENCE, STOPPED = 3, 8
STOP = {"stop": {"metric": "loss", "min_delta": 1e3, "patience": PATIENCE}}
LATE = {"stop": {"metric": "loss", "min_delta": 1e3, "patience": 140}}  # behind the gate of a held job


def stopping(daemon: Any, sections: dict[str, Any], strategy: dict[str, Any], **job: Any) -> Any:
    spec = daemon.spec(SOURCE, strategy=strategy, **{"steps": STEPS, **job})
    return type(spec).parse(spec.to_wire() | sections)


def check_is_the_plain_loops(spec: Any, result: dict[str, Any], *, exact: bool = True) -> None:
    plain = train(spec)
    assert result["stopped"] == f"stopped early after step {len(plain.losses)}: {plain.stopped}"
    assert result["steps"] == len(plain.losses)
    ours = load_file(result["model"])
    assert ours.keys() == plain.state.keys()
    same = torch.equal if exact else torch.allclose
    assert [name for name in ours if not same(ours[name], plain.state[name])] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param({"microbatches": 2}, id="one stage, the whole job sent ahead"),
        pytest.param(PIPELINE, id="pipeline"),
        pytest.param({"microbatches": 2, "clip_norm": 1e6}, id="buckets"),
    ],
)
def test_a_job_stops_after_the_step_and_with_the_bits_of_the_plain_loop(daemon: Any, strategy: dict[str, Any]) -> None:
    spec = stopping(daemon, STOP, strategy)
    result = daemon.run(spec)
    assert (result["state"], result["reason"], result["exit_code"]) == ("completed", None, 0), result["error"]
    assert (result["steps"], f"for {PATIENCE} epochs" in result["stopped"]) == (STOPPED, True)
    check_is_the_plain_loops(spec, result)
    assert result["stopped"] in daemon.log_of(result["job"])
    steps = [line for line in lines_of(daemon, result["job"]) if "validation" not in line]
    assert len(steps) == STOPPED, "nothing behind it was trained"
    shown = daemon.weft("show", result["job"]).stdout
    assert f"early after step {STOPPED}" in shown


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["zero-offload", "cotrain"])
def test_what_devices_update_is_saved_where_a_job_stops(machine: Any, preset: str) -> None:
    spec = stopping(machine, STOP, {"preset": preset, "microbatches": 2})
    result = machine.run(spec)
    assert result["state"] == "completed", result["error"]
    check_is_the_plain_loops(spec, result, exact=False)


@pytest.mark.days(3)
@pytest.mark.slow(seconds=4)
def test_a_job_that_has_had_its_time_is_completed_and_says_so(daemon: Any) -> None:
    """It would train for hours; a microsecond is over with its first step."""
    spec = stopping(daemon, {"stop": {"max_time": "0.000001 s"}}, {"microbatches": 2}, steps=10**8)
    result = daemon.run(spec)
    assert (result["state"], result["reason"]) == ("completed", None), result["error"]
    steps = result["steps"]
    assert result["stopped"] == f"stopped early after step {steps}: 0.000001 s of training are over"
    undisturbed = daemon.run(stopping(daemon, {}, {"microbatches": 2}, steps=steps))
    ours, theirs = load_file(result["model"]), load_file(undisturbed["model"])
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.slow(seconds=3)
def test_a_job_that_was_killed_on_the_way_comes_to_the_same_decision(daemon: Any) -> None:
    """It remembers what came before its snapshot, and so does one that goes on from its checkpoint."""
    with held_behind_a_snapshot(daemon, PIPELINE, LATE) as (job, spec, gate):
        kill_worker(daemon, job, "cpu")
        daemon.until_logged(job, "goes on after step")
        assert daemon.client.cancel(job) == "cancelled"
        again = daemon.client.resume(job)["job"]
        gate.open()
        check_is_undisturbed_from(daemon, again, spec)


def check_is_undisturbed_from(daemon: Any, job: str, spec: Any) -> None:
    result, whole = daemon.client.wait(job, SECONDS), daemon.run(spec)
    assert (result["state"], result["stopped"]) == ("completed", whole["stopped"]), daemon.log_of(job)
    assert "for 140 epochs" in result["stopped"]
    ours, theirs = load_file(result["model"]), load_file(whole["model"])
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    lines = [json.dumps(line) for line in lines_of(daemon, job)]
    assert lines == [json.dumps(line) for line in lines_of(daemon, whole["job"])][-len(lines) :]


ON_EPOCH = """
def on_epoch(values):
    print("told", values["epoch"], values["step"], round(values["loss"], 12), sorted(values["validation"]), flush=True)
    if values["epoch"] == ANSWER_AT:
        return ANSWER
"""
WITH_ON_EPOCH = SOURCE.replace("return weft.Workload(", "return weft.Workload(on_epoch=on_epoch, ") + ON_EPOCH


def asking(daemon: Any, answer: str, *, at: int, **job: Any) -> Any:
    source = WITH_ON_EPOCH.replace("ANSWER_AT", str(at)).replace("ANSWER", answer)
    return daemon.spec(source, strategy=PIPELINE, **{"steps": 10, **job})


@pytest.mark.slow
def test_the_users_own_function_may_stop_a_job(daemon: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """It is told in a worker what it is told in the plain loop, once for each epoch."""
    spec = asking(daemon, "'stop'", at=2)
    result = daemon.run(spec)
    assert result["state"] == "completed", result["error"]
    assert result["stopped"] == "stopped early after step 6: Workload.on_epoch said so"
    told = [line.partition("told ")[2] for line in daemon.log_of(result["job"]).splitlines() if "told " in line]
    capfd.readouterr()
    check_is_the_plain_loops(spec, result)
    assert told == [line.removeprefix("told ") for line in capfd.readouterr().out.splitlines() if "told " in line]
    assert len(told) == 3
    assert told[0].endswith("['loss']")


@pytest.mark.slow
def test_it_is_told_of_the_last_epoch_and_what_it_raises_fails_the_job(daemon: Any) -> None:
    whole = daemon.run(asking(daemon, "'stop'", at=4))
    assert (whole["state"], whole["stopped"]) == ("completed", None)
    assert "told 4 10" in daemon.log_of(whole["job"])
    failed = daemon.run(asking(daemon, "1 / 0", at=1))
    assert (failed["state"], failed["reason"], failed["exception"]) == ("failed", "user-error", "ZeroDivisionError")
    assert "in Workload.on_epoch" in failed["error"]
    refused = daemon.run(asking(daemon, "'halt'", at=1))
    assert (refused["state"], refused["reason"]) == ("failed", "invalid-workload")
    assert "Workload.on_epoch returned 'halt'; it must return 'stop', None to go on, or a mapping" in refused["error"]


@pytest.mark.slow
def test_a_value_that_no_validation_reports_is_refused_before_anything_trains(daemon: Any) -> None:
    result = daemon.run(stopping(daemon, {"stop": {"metric": "accuracy"}}, {"microbatches": 2}))
    assert (result["state"], result["reason"], result["exit_code"]) == ("failed", "invalid-plan", 2)
    assert "stop.metric = 'accuracy': validations report loss; use one of these" in result["error"]


@pytest.mark.slow
def test_the_best_model_is_kept_beside_the_last(daemon: Any) -> None:
    """It is the best of those whose numbers the plain loop has, bit for bit."""
    best = {"checkpoint": {"every": "1 epoch", "keep": 1, "keep_best": "loss", "best": "min"}, **STOP}
    spec = stopping(daemon, best, PIPELINE)
    result = daemon.run(spec)
    assert result["state"] == "completed", result["error"]
    plain = train(spec)
    assert plain.best is not None
    until(lambda: is_saved(daemon, result["job"], plain.best), "the best")
    check_is_the_plain_loops(spec, result)
    shown = daemon.weft("show", result["job"]).stdout
    assert "best model" in shown


def is_saved(daemon: Any, job: str, state: dict[str, torch.Tensor]) -> bool:
    """The last checkpoint may be written when the job has ended."""
    path = daemon.client.show(job)["best"]
    ours = {} if path is None else load_file(path)
    return ours.keys() == state.keys() and all(torch.equal(ours[name], state[name]) for name in state)
