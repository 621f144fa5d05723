"""A day of a user's: a job is paused over night, goes on under another daemon with fewer workers, and stops early."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

_STOPPING = runpy.run_path(str(Path(__file__).with_name("test_stopping.py")))
held_behind_a_snapshot, check_is_the_plain_loops = (
    _STOPPING[name] for name in ("held_behind_a_snapshot", "check_is_the_plain_loops")
)
train, until, is_saved, LATE, PIPELINE = (
    _STOPPING[name] for name in ("train", "until", "is_saved", "LATE", "PIPELINE")
)
pause = runpy.run_path(str(Path(__file__).with_name("test_pausing.py")))["pause"]


@pytest.mark.days(3)
@pytest.mark.slow(seconds=10)
def test_a_job_paused_on_two_workers_goes_on_with_one_and_stops_where_the_plain_loop_stops(
    own_daemon: Callable[..., Any],
) -> None:
    daemon = own_daemon(workers=2)
    best = {"checkpoint": {"every": "1 epoch", "keep": 1, "keep_best": "loss"}}
    with held_behind_a_snapshot(daemon, PIPELINE, LATE | best) as (job, spec, gate):
        pause(daemon, job, gate)
        assert daemon.stop() == 0
    daemon.options["workers"] = 1
    daemon.start()

    refused = daemon.weft("resume", job)
    assert refused.returncode == 2
    assert f"{job} stays paused: strategy.stages = 2 needs 2 CPU workers and this daemon has 1" in refused.stderr
    run_dir = daemon.client.show(job)["run_dir"]
    assert f"--resume {run_dir}" in refused.stderr

    wire = spec.to_wire()
    wire["job"] |= {"resume_from": run_dir}
    wire["strategy"] |= {"stages": 1}
    result = daemon.run(type(spec).parse(wire))
    assert result["state"] == "completed", daemon.log_of(result["job"])
    check_is_the_plain_loops(spec, result)
    until(lambda: is_saved(daemon, result["job"], train(spec).best), "the best model")
    assert daemon.client.cancel(job) == "cancelled"
