"""A file of a job that is edited while it trains: no worker loads the new version into a job of the old one.

It was, by whatever came to load it anew: the job was completed by a mix of both, without a word.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

_RECOVERY = runpy.run_path(str(Path(__file__).with_name("test_recovery.py")))
held_behind_a_snapshot, kill_worker, check_is_undisturbed, PIPELINE, SOURCE, SECONDS = (
    _RECOVERY[name]
    for name in ("held_behind_a_snapshot", "kill_worker", "check_is_undisturbed", "PIPELINE", "SOURCE", "SECONDS")
)
pause = runpy.run_path(str(Path(__file__).with_name("test_pausing.py")))["pause"]
StartDaemon = Callable[..., Any]
UNSPARED = PIPELINE | {"spares": False}


def disturb(daemon: Any, job: str, gate: Any, how: str) -> None:
    """So that workers load it anew."""
    match how:
        case "cpu" | "loader":
            kill_worker(daemon, job, how)
            daemon.until_logged(job, "recovering")
        case "pause":
            pause(daemon, job, gate)
            daemon.client.resume(job)
        case "preemption":
            urgent = daemon.client.submit(daemon.spec(strategy=PIPELINE, steps=3), priority=1)["job"]
            gate.open()
            assert daemon.client.wait(urgent, SECONDS)["state"] == "completed"
        case "restart":
            assert daemon.stop() == 0
            daemon.until_nothing_lives()
            daemon.start()
    gate.open()


@pytest.mark.slow(seconds=8)
@pytest.mark.pairs(2, how=("cpu", "loader", "pause", "preemption", "restart"))
def test_a_job_whose_code_is_edited_ends_where_a_worker_would_load_it_and_goes_on_once_it_is_put_back(
    own_daemon: StartDaemon, request: pytest.FixtureRequest, how: str
) -> None:
    daemon = own_daemon(drain_seconds=0.1) if how == "restart" else request.getfixturevalue("daemon")
    with held_behind_a_snapshot(daemon, UNSPARED) as (job, spec, gate):
        assert SOURCE.count("Tanh") == 2
        spec.entry_file.write_text(SOURCE.replace("Tanh", "Sigmoid"))
        disturb(daemon, job, gate, how)
        failed = daemon.client.wait(job, SECONDS)
    assert (failed["state"], failed["reason"], failed["exit_code"]) == ("failed", "code-changed", 2)
    assert failed["error"].startswith(f"{spec.entry_file} has changed since {job} first loaded it, ")
    assert daemon.client.show(job)["checkpoint"], "what it had come to"

    spec.entry_file.write_text(SOURCE)
    resumed = daemon.client.wait(daemon.client.resume(job)["job"], SECONDS)
    undisturbed = daemon.run(spec)
    assert resumed["state"] == undisturbed["state"] == "completed", resumed["error"]
    ours, theirs = load_file(resumed["model"]), load_file(undisturbed["model"])
    assert all(torch.equal(ours[name], theirs[name]) for name in ours.keys() | theirs.keys())


@pytest.mark.days(2)
@pytest.mark.slow(seconds=5)
def test_nobody_minds_an_edit_where_no_worker_loads_it_or_of_what_none_has_loaded(daemon: Any) -> None:
    with held_behind_a_snapshot(daemon, UNSPARED) as (job, spec, gate):
        Path(spec.directory, "notes.py").write_text("nobody = 'imports it'")
        kill_worker(daemon, job, "cpu")
        daemon.until_logged(job, "goes on after step")
        gate.open()
        check_is_undisturbed(daemon, job, spec)
    with held_behind_a_snapshot(daemon, UNSPARED) as (job, spec, gate):
        spec.entry_file.write_text(SOURCE.replace("Tanh", "Sigmoid"))
        gate.open()
        assert daemon.client.wait(job, SECONDS)["state"] == "completed"
